"""A config with everything that it names looked up: prompts, models, the engine's command lines."""

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specbench import __version__, demo, machine, run_document
from specbench.config import Config, PromptSetRef
from specbench.engines.installation import (
    Installation,
    absent_installation,
    check_names,
    find_installation,
    require_installation,
)
from specbench.engines.launch import CPU_KV_CACHE_BYTES, Launch, plan_launch
from specbench.engines.memory import Room, cpu_kv_cache_bytes, engines_that_fit, too_heavy
from specbench.environment import SECRET
from specbench.errors import ConfigError, PromptError, StoreError
from specbench.load import perf_analyzer, tools
from specbench.load.tools import Installed
from specbench.prompts.sets import PromptSet, load_prompt_set, prompt_set_sha256
from specbench.records import Prompt
from specbench.store import RunStore
from specbench.sweep import Plan, arms_of, plan, served_names

PAIR = 2


@dataclass(frozen=True)
class Models:
    """What the engines load: the target's path or id, and each draft's by its name in the config."""

    target: str
    drafts: Mapping[str, str]


@dataclass(frozen=True)
class Prepared:
    """A config with everything that it names looked up.

    `room` says in words how many engines fit together, `notes` what else should be known before a
    start; `tool` is the load generator of its own that the config names. `cpu_kv_cache_bytes` is
    what each worker of a CPU engine gets where the config does not say. `seed_of` (arm, start,
    prompt) is the sampling seed of each request, where it is not the config's. With `fail_fast` the
    first case that fails ends the run.
    """

    config: Config
    plan: Plan
    prompt_sets: Mapping[str, PromptSet]
    launches: Mapping[str, Launch]
    installation: Installation | None
    models: Models | None = None
    room: str | None = None
    tool: Installed | None = None
    seed_of: Callable[[str, int, Prompt], int] | None = None
    fail_fast: bool = False
    cpu_kv_cache_bytes: int = CPU_KV_CACHE_BYTES
    notes: tuple[str, ...] = ()

    @property
    def requests(self) -> int:
        """How many requests the whole plan sends."""
        per_set = {
            name: sum(len(prompt.turns) for prompt in prompts.prompts)
            for name, prompts in self.prompt_sets.items()
        }
        return sum(per_set[case.prompt_set] for case in self.plan.cases)

    @property
    def model_names(self) -> dict[str, str]:
        """What each arm's model is called in a Triton."""
        return {**served_names(self.plan.arms), **self.config.engine.models}

    @property
    def vllm(self) -> str:
        """Which vLLM was found, and whose settings the engines get, in a sentence."""
        config, found = self.config, self.installation
        if config.load.client == "replay":
            return "a tape is replayed: no engine"
        if config.engine.url is not None:
            return f"no engine is started: {config.engine.url} is up"
        assert found is not None
        in_triton = config.engine.kind == "triton"
        if not found.is_there:
            here = f"no vLLM in {config.engine.python or 'this environment'}"
            return f"{here}: settings are those for {found}"
        whose = "settings for a CPU" if found.is_cpu else "settings for a GPU"
        if in_triton:
            return f"Triton runs a vLLM of its own; its models get {whose}, like {found} here"
        at = f" of {config.engine.python}" if config.engine.python else ""
        return f"{found}{at}: engines get {whose}"


@dataclass(frozen=True)
class Earlier:
    """What an earlier attempt at a run settled: the prompts, and what its plan hung on.

    `together` engines were up at once (None: to be found out); `chosen_k` is what `k: auto` came to.
    """

    prompt_sets: Mapping[str, PromptSet]
    together: int | None = None
    chosen_k: Mapping[str, Sequence[int]] = field(default_factory=dict)


def prepare(
    config: Config,
    *,
    config_path: Path | str,
    prompt_folders: Sequence[Path],
    say: Callable[[str], None] = lambda _: None,
    earlier: Earlier | None = None,
    dry: bool = False,
) -> Prepared:
    """Look up prompts, models and the engine; nothing is started.

    With *dry* nothing is fetched either, and a machine without a vLLM will do. What an *earlier*
    attempt at the same run settled is kept.

    Raises:
        ConfigError, PromptError, EngineError: what is missing and how to get it.
    """
    chosen = earlier.chosen_k if earlier else None
    prompt_sets = dict(
        earlier.prompt_sets if earlier else _load_prompts(config, config_path, prompt_folders)
    )
    tool = _tool(config, say, dry=dry)
    if config.engine.url or config.load.client == "replay":
        in_triton = config.engine.kind == "triton"
        the_plan = plan(config, list(prompt_sets), together=1 if in_triton else None, chosen=chosen)
        target = demo.resolve(config.model, say=say, build=not dry) if in_triton else config.model
        return Prepared(config, the_plan, prompt_sets, {}, None, Models(target, {}), tool=tool)
    if dry or config.engine.kind == "triton":  # whose vLLM is in its own environment
        installation = find_installation(config.engine.python) or absent_installation()
    else:
        installation = require_installation(config.engine)
    check_names(config_path, config, installation.names)
    resolve = partial(demo.resolve, say=say, build=not dry)
    drafts = {arm.draft: resolve(arm.draft) for arm in arms_of(config) if arm.draft}
    models = Models(resolve(config.model), drafts)
    fitting = partial(
        engines_that_fit,
        config,
        installation,
        target=models.target,
        drafts=tuple(drafts.values()),
    )
    room = fitting()
    together = earlier.together if earlier else None
    if together is None:
        together = _together(config, config_path, room, least=lambda: fitting(requests=1))
    the_plan = plan(config, list(prompt_sets), together=together, chosen=chosen)
    prepared = Prepared(
        config,
        the_plan,
        prompt_sets,
        {},
        installation,
        models,
        room.reason,
        tool,
        cpu_kv_cache_bytes=cpu_kv_cache_bytes(
            config,
            target=models.target,
            drafts=tuple(drafts.values()),
            engines_together=the_plan.together,
        ),
        notes=_short_of_memory(config, installation, models, the_plan, room)
        or _one_at_a_time(config, the_plan, room),
    )
    return replace(prepared, launches=_launches(prepared, the_plan.together))


def _tool(config: Config, say: Callable[[str], None], *, dry: bool) -> Installed | None:
    """The load generator that the config names, made if need be: before any engine is started.

    Raises:
        LoadError: it cannot run here, with the ways out.
    """
    if not config.load.is_tool:
        return None
    tool = tools.TOOLS[config.load.client]
    if dry:
        return tools.find(tool, config.load.command)
    found = tools.require(tool, config.load.command, say=say)
    if tool.name == "genai-perf" and found.folder is not None:
        perf_analyzer.require(say=say)
    if tool.name == "genai-perf" and config.engine.api_key_env:
        say(
            "note: GenAI-Perf takes the server's key on its command line, where everybody on this "
            "machine can read it; load.client=aiperf or direct do not"
        )
    return found


def _together(
    config: Config, config_path: Path | str, room: Room, *, least: Callable[[], Room]
) -> int:
    """How many engines are up together.

    Who asks for pairs has them also where the KV cache is short, and is told so. *least* is the
    room for engines with KV cache for one request, which vLLM does not start without.

    Raises:
        ConfigError: `schedule: interleaved`, and a pair does not fit.
    """
    in_triton = config.engine.kind == "triton"  # one model after the other, unless asked for
    if config.schedule == "blocks" or (in_triton and config.schedule != "interleaved"):
        return 1
    if room.engines is not None and room.engines >= PAIR:
        return room.engines
    if config.schedule == "auto" and config.precision is None:
        return 1
    if room.engines is None or (least().engines or 0) >= PAIR:
        return PAIR  # the user says that it fits; a pair is what takes least
    key = "schedule" if config.schedule == "interleaved" else "precision"
    raise ConfigError(
        config_path,
        key,
        f"needs the baseline and an arm up together, and they do not fit: {room.reason}",
        hint="Write `schedule: blocks` (and leave `precision` out), or give the engines less: a "
        "smaller engine.args.max_model_len or concurrency takes less KV cache.",
    )


def _short_of_memory(
    config: Config, installation: Installation, models: Models, the_plan: Plan, room: Room
) -> tuple[str, ...]:
    """A note about the first stage whose engines are too large; none where all fit or none knows."""
    checked = set()
    for number, stage in enumerate(the_plan.stages, 1):
        arms = ", ".join(sorted(arm.id for arm in stage.arms))
        if arms in checked:  # a further repeat
            continue
        checked.add(arms)
        drafts = [models.drafts[arm.draft] if arm.draft else None for arm in stage.arms]
        why = too_heavy(config, installation, target=models.target, drafts=drafts)
        if why is not None:
            return (f"the engines of stage {number} ({arms}) {why}",)
    is_short = room.engines is not None and room.engines < the_plan.together
    return (f"memory may be short: {room.reason}",) if is_short else ()


def _one_at_a_time(config: Config, the_plan: Plan, room: Room) -> tuple[str, ...]:
    """A note where `auto` is not interleaved only because nobody knows whether a pair fits."""
    is_asked_for = config.schedule != "auto" or config.engine.kind == "triton"
    if is_asked_for or room.engines is not None or the_plan.together > 1 or len(the_plan.arms) == 1:
        return ()
    note = (
        f"engines are up one at a time, because {room.reason}; what the machine does between them is "
        "in the speed-up. Once that is known (after this run, say) the same config has baseline and "
        "arms up together; `schedule: interleaved` asks for that now"
    )
    return (note,)


def _launches(prepared: Prepared, together: int) -> dict[str, Launch]:
    """The command line of every arm, the same apart from their speculation."""
    installation, models = prepared.installation, prepared.models
    assert installation is not None
    assert models is not None
    launches = {}
    for arm in prepared.plan.arms:
        speculative = dict(arm.speculative_config) if arm.speculative_config else None
        if speculative and arm.draft:
            speculative["model"] = models.drafts[arm.draft]
        launches[arm.id] = plan_launch(
            prepared.config,
            installation,
            model=models.target,
            speculative_config=speculative,
            engines_together=together,
            cpu_kv_cache_bytes=prepared.cpu_kv_cache_bytes,
        )
    return launches


def with_chosen_k(prepared: Prepared, chosen: Mapping[str, Sequence[int]]) -> Prepared:
    """*prepared* with the arms that `k: auto` came to, each beside the baseline, after all else."""
    before = prepared.plan
    extended = plan(
        prepared.config, list(prepared.prompt_sets), together=before.together, chosen=chosen
    )
    more = replace(prepared, plan=extended)
    if prepared.installation is None:
        return more
    return replace(more, launches=_launches(more, before.together))


def _load_prompts(
    config: Config, config_path: Path | str, folders: Sequence[Path]
) -> dict[str, PromptSet]:
    found: dict[str, PromptSet] = {}
    for i, ref in enumerate(config.prompts):
        prompt_set = _subset(load_prompt_set(ref.set, search=folders), ref)
        if prompt_set.name in found:
            raise ConfigError(config_path, f"prompts.{i}", f"{prompt_set.name} stands twice")
        found[prompt_set.name] = prompt_set
    return found


def _subset(prompt_set: PromptSet, ref: PromptSetRef) -> PromptSet:
    """The part of the set that the config asks for; its hash is that of the part."""
    prompts = list(prompt_set.prompts)
    if ref.limit is not None and ref.limit < len(prompts):
        chosen = list(range(ref.limit))
        if ref.seed is not None:
            chosen = sorted(random.Random(ref.seed).sample(range(len(prompts)), ref.limit))
        prompts = [prompts[i] for i in chosen]
    if ref.turns == "first":
        prompts = [p.model_copy(update={"turns": p.turns[:1]}) for p in prompts]
    if ref.style is not None:
        prompts = [p.model_copy(update={"style": ref.style}) for p in prompts]
    many = next((p for p in prompts if p.style == "completion" and len(p.turns) > 1), None)
    if many is not None:
        raise PromptError(
            prompt_set.name,
            None,
            f"prompt {many.id} has {len(many.turns)} turns; a completion has one",
            hint="Use `style: chat` or `turns: first`.",
        )
    return replace(
        prompt_set,
        prompts=tuple(prompts),
        sha256=prompt_set_sha256(prompts),
        available=len(prompt_set.prompts),
    )


def plan_document(the_plan: Plan) -> dict[str, Any]:
    """The plan's part of run.json, which `k: auto` adds to."""
    return {
        "schedule": the_plan.schedule,
        "arms": [arm.id for arm in the_plan.arms],
        "methods": {a.id: {"method": a.method, "k": a.k, "label": a.label} for a in the_plan.arms},
        "order": [[arm.id for arm in stage.arms] for stage in the_plan.stages],
        "cases": [vars(case) for case in the_plan.cases],
    }


def document(prepared: Prepared, *, config_path: Path | str, command: list[str]) -> dict[str, Any]:
    """What run.json says: enough to run it again and to know what was run."""
    return {
        "command": command,
        "config_path": str(config_path),
        **_without_secrets(prepared.config),
        **plan_document(prepared.plan),
        "room": prepared.room,
        "prompt_sets": {
            name: {
                "sha256": prompts.sha256,
                "prompts": len(prompts.prompts),
                "available": prompts.available,
                "source": prompts.source,
            }
            for name, prompts in prepared.prompt_sets.items()
        },
        "machine": machine.facts(),
        "vllm": _vllm_version(prepared),
        "load": _load_facts(prepared),
    }


def _without_secrets(config: Config) -> dict[str, Any]:
    """The config as it is kept, and the names of the variables whose values are not."""
    kept = config.model_dump(mode="json")
    env = kept["engine"]["env"]
    withheld = sorted(name for name in env if SECRET.search(name))
    kept["engine"]["env"] = {name: env[name] for name in env if name not in withheld}
    return {"config": kept, **({"withheld": withheld} if withheld else {})}


def _with_secrets(store: RunStore) -> Config:
    """The config that a run was started with; what was withheld is taken from our environment.

    Raises:
        StoreError: it is not there, or the config is none.
    """
    document = store.document
    env = {name: os.environ.get(name) for name in document.get("withheld", ())}
    if missing := [name for name, value in env.items() if value is None]:
        raise StoreError(
            f"{store.path} was started with {missing[0]} in engine.env, and secrets are not kept.",
            hint=f"Export {missing[0]} and go on.",
        )
    try:
        config = Config.model_validate(document["config"])
    except ValidationError as error:
        key = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
        raise StoreError(
            f"{store.path / 'run.json'}: `config.{key}` is none that this specbench takes.",
            hint="Go on with the specbench that wrote it.",
        ) from None
    engine = config.engine.model_copy(update={"env": {**config.engine.env, **env}})
    return config.model_copy(update={"engine": engine})


def _vllm_version(prepared: Prepared) -> str | None:
    """Of the vLLM that we start; Triton has one of its own, and says nothing of it."""
    starts = prepared.installation is not None and prepared.config.engine.kind == "vllm"
    return prepared.installation.version if starts and prepared.installation else None


def _load_facts(prepared: Prepared) -> dict[str, Any]:
    """Who sends the prompts."""
    client = prepared.config.load.client
    return {"client": client, "version": prepared.tool.version if prepared.tool else __version__}


def stored(store: RunStore) -> tuple[Config, Earlier]:
    """The config of a run folder and what was settled there, to go on with it.

    Raises:
        StoreError: the kept prompts are not those that the run started with, or there never was one.
    """
    if store.document.get("imported"):
        raise StoreError(f"{store.path} was imported: specbench did not run it, nor can it go on.")
    run_document.check(store.path / "run.json", store.document)
    config = _with_secrets(store)
    sets = {}
    for name, kept in store.document["prompt_sets"].items():
        prompts = tuple(store.prompts(name))
        if prompt_set_sha256(prompts) != kept["sha256"]:
            raise StoreError(f"{store.path}/prompts/{name}.jsonl was changed after the run began.")
        sets[name] = PromptSet(
            name=name,
            prompts=prompts,
            sha256=kept["sha256"],
            source=kept.get("source") or "",
            path=store.path / "prompts" / f"{name}.jsonl",
            available=kept.get("available"),
        )
    together = max((len(arms) for arms in store.document.get("order", ())), default=1)
    return config, Earlier(sets, together, store.document.get("chosen_k", {}))
