"""A config with everything that it names looked up: prompts, models, the engine's command lines."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from specbench import demo, machine
from specbench.config import Config, PromptSetRef
from specbench.engines.installation import (
    Installation,
    absent_installation,
    check_names,
    find_installation,
    require_installation,
)
from specbench.engines.launch import Launch, plan_launch
from specbench.errors import ConfigError, PromptError, StoreError
from specbench.prompts.sets import PromptSet, load_prompt_set, prompt_set_sha256
from specbench.store import RunStore
from specbench.sweep import Plan, plan


@dataclass(frozen=True)
class Prepared:
    """A config with everything that it names looked up."""

    config: Config
    plan: Plan
    prompt_sets: Mapping[str, PromptSet]
    launches: Mapping[str, Launch]
    installation: Installation | None

    @property
    def requests(self) -> int:
        """How many requests the whole plan sends."""
        per_set = {
            name: sum(len(prompt.turns) for prompt in prompts.prompts)
            for name, prompts in self.prompt_sets.items()
        }
        return sum(per_set[case.prompt_set] for case in self.plan.cases)


def prepare(
    config: Config,
    *,
    config_path: Path | str,
    prompt_folders: Sequence[Path],
    say: Callable[[str], None] = lambda _: None,
    stored_prompts: Mapping[str, PromptSet] | None = None,
    dry: bool = False,
) -> Prepared:
    """Look up prompts, models and the engine; nothing is started.

    With *dry* nothing is fetched either, and a machine without a vLLM will do.

    Raises:
        ConfigError, PromptError, EngineError: what is missing and how to get it.
    """
    prompt_sets = dict(stored_prompts or _load_prompts(config, config_path, prompt_folders))
    the_plan = plan(config, list(prompt_sets))
    if config.engine.url or config.load.client == "replay":
        return Prepared(config, the_plan, prompt_sets, {}, None)
    if dry:
        installation = find_installation(config.engine.python) or absent_installation()
    else:
        installation = require_installation(config.engine)
    check_names(config_path, config, installation.names)
    resolve = partial(demo.resolve, say=say, build=not dry)
    model = resolve(config.model)
    launches = {}
    for arm in the_plan.arms:
        speculative = dict(arm.speculative_config) if arm.speculative_config else None
        if speculative and arm.draft:
            speculative["model"] = resolve(arm.draft)
        together = max(len(stage.arms) for stage in the_plan.stages)
        launches[arm.id] = plan_launch(
            config,
            installation,
            model=model,
            speculative_config=speculative,
            engines_together=together,
        )
    return Prepared(config, the_plan, prompt_sets, launches, installation)


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
    return replace(prompt_set, prompts=tuple(prompts), sha256=prompt_set_sha256(prompts))


def document(prepared: Prepared, *, config_path: Path | str, command: list[str]) -> dict[str, Any]:
    """What run.json says: enough to run it again and to know what was run."""
    return {
        "command": command,
        "config_path": str(config_path),
        "config": prepared.config.model_dump(mode="json"),
        "arms": [arm.id for arm in prepared.plan.arms],
        "methods": {a.id: {"method": a.method, "k": a.k} for a in prepared.plan.arms},
        "order": [[arm.id for arm in stage.arms] for stage in prepared.plan.stages],
        "cases": [vars(case) for case in prepared.plan.cases],
        "prompt_sets": {
            name: {
                "sha256": prompts.sha256,
                "prompts": len(prompts.prompts),
                "source": prompts.source,
            }
            for name, prompts in prepared.prompt_sets.items()
        },
        "machine": machine.facts(),
        "vllm": prepared.installation.version if prepared.installation else None,
    }


def stored(store: RunStore) -> tuple[Config, dict[str, PromptSet]]:
    """The config and the prompts of a run folder, to go on with it.

    Raises:
        StoreError: the kept prompts are not those that the run started with.
    """
    config = Config.model_validate(store.document["config"])
    sets = {}
    for name, kept in store.document["prompt_sets"].items():
        prompts = tuple(store.prompts(name))
        if prompt_set_sha256(prompts) != kept["sha256"]:
            raise StoreError(f"{store.path}/prompts/{name}.jsonl was changed after the run began.")
        sets[name] = PromptSet(
            name=name,
            prompts=prompts,
            sha256=kept["sha256"],
            source=kept["source"],
            path=store.path / "prompts" / f"{name}.jsonl",
        )
    return config, sets
