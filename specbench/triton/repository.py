"""A config as a Triton model repository: one model an arm, with vLLM's engine arguments.

The arguments are those of `engines.launch`, as fields of `AsyncEngineArgs`: alike for all arms
apart from their speculation. What only vLLM's own API server takes is left out.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench import vllm_names
from specbench.config import Config
from specbench.engines.triton import model_files
from specbench.errors import ConfigError, UserError
from specbench.sweep import Arm, served_names
from specbench.triton.paths import Mounts, is_local
from specbench.triton.versions import FLAT, Takes, ever_taken, release

MODEL_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
PATH_ARGS = ("tokenizer", "hf_config_path", "generation_config")


@dataclass(frozen=True)
class Model:
    """One model of a repository: what stands in its model.json."""

    name: str
    arm: str
    arguments: Mapping[str, Any]

    def files(self) -> dict[str, str]:
        """Its files, by their path below the model's folder."""
        return model_files(self.arguments)


@dataclass(frozen=True)
class Repository:
    """The models of a config, and the folders that a container must see for them."""

    models: tuple[Model, ...]
    mounts: Mounts
    notes: tuple[str, ...] = ()


@dataclass
class _Writer:
    """What all arms share while their arguments are worked out."""

    config: Config
    config_path: Path | str
    takes: Takes
    resolve: Callable[[str], str]
    mounts: Mounts | None
    notes: list[str] = field(default_factory=list)

    def say(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def inside(self, ref: str, *, prefix: str = "") -> str:
        found = self.resolve(ref)
        return found if self.mounts is None else self.mounts.inside(found, prefix=prefix)

    def wrong(self, key: str, problem: str, hint: str | None = None) -> ConfigError:
        return ConfigError(self.config_path, key, problem, hint=hint)


def plan_repository(
    config: Config,
    arms: Sequence[Arm],
    takes: Takes,
    *,
    config_path: Path | str,
    names: Mapping[str, str] | None = None,
    resolve: Callable[[str], str] = lambda ref: ref,
    in_container: bool = True,
) -> Repository:
    """The repository of *config*'s *arms* for a vLLM that *takes* these arguments.

    *names* are model names by arm, label or method, over those in `engine.models`. *resolve*
    turns a model's name in the config into a path or hub id. Without *in_container* paths stay as
    they are.

    Raises:
        ConfigError: a key that this vLLM does not take.
        UserError: names that Triton does not take, or that two arms would share.
    """
    writer = _Writer(config, config_path, takes, resolve, Mounts() if in_container else None)
    common = _common(writer)
    named = model_names(arms, {**config.engine.models, **(names or {})})
    models = tuple(
        Model(named[arm.id], arm.id, {**common, **_speculation(writer, arm)}) for arm in arms
    )
    return Repository(models, writer.mounts or Mounts(), tuple(writer.notes))


def model_names(arms: Sequence[Arm], given: Mapping[str, str]) -> dict[str, str]:
    """The name of each arm's model: base_model, eagle_model; with several k, eagle_model_k3.

    Raises:
        UserError: a name that Triton does not take, of no arm, or of two arms.
    """
    known = {name for arm in arms for name in (arm.id, arm.label, arm.method)}
    for key in given:
        if key not in known:
            close = vllm_names.nearest(key, known) or ", ".join(sorted(known))
            raise UserError(
                f"{key} is to be called {given[key]}, and the config has no such arm.",
                hint=f"It has {close}.",
            )
    found: dict[str, str] = {}
    for arm_id, default in served_names(arms).items():
        arm = next(one for one in arms if one.id == arm_id)
        stem = given.get(arm.label) or given.get(arm.method)
        several = sum(one.label == arm.label for one in arms) > 1
        name = given.get(arm_id) or (f"{stem}_k{arm.k}" if stem and several else stem) or default
        if not MODEL_NAME.match(name):
            raise UserError(f"{name!r} is no name for a model: use letters, digits, _, - and dots.")
        if name in found.values():
            raise UserError(
                f"Two arms would be the model {name}.", hint=f"Give --name {arm_id}=NAME."
            )
        found[arm_id] = name
    return found


def _common(writer: _Writer) -> dict[str, Any]:
    """The arguments that every arm has."""
    engine, takes = writer.config.engine, writer.takes
    ours: dict[str, Any] = {"enable_prefix_caching": False}
    if release(takes.vllm) >= (0, 8):  # before, "vllm" was the default and the word a folder's name
        ours["generation_config"] = "vllm"
    arguments: dict[str, Any] = {"model": writer.inside(writer.config.model)}
    arguments |= {key: value for key, value in ours.items() if key in takes.engine_args}
    for key, value in engine.args.items():
        if key not in takes.engine_args and key not in ever_taken():
            writer.say(f"engine.args.{key} is an argument of vLLM's own API server: left out")
        elif key not in takes.engine_args:
            raise writer.wrong(
                f"engine.args.{key}",
                f"vLLM {takes.short} has no such argument.",
                hint="Leave it out, or write for another --triton.",
            )
        else:
            is_path = key in PATH_ARGS and isinstance(value, str) and is_local(value)
            arguments[key] = writer.inside(str(value)) if is_path else value
    return arguments | dict(engine.extra_args)


def _speculation(writer: _Writer, arm: Arm) -> dict[str, Any]:
    """What makes an arm's model speculate, as the vLLM at hand wants it."""
    if arm.speculative_config is None:
        return {}
    takes, index = writer.takes, _index(writer.config, arm)
    if arm.method not in takes.methods:
        raise writer.wrong(
            f"speculation.{index}.method",
            f"vLLM {takes.short} can't do {arm.method}.",
            hint="Leave it out, or write for another --triton.",
        )
    wanted = dict(arm.speculative_config)
    if arm.draft is not None:
        # Where the path alone tells a head from a draft model, it is mounted under such a path.
        prefix = "EAGLE-" if arm.method == "eagle" and takes.tells_eagle_by_its_path else ""
        found = writer.resolve(arm.draft)
        prefix = prefix if is_local(found) and "eagle-" not in Path(found).name.lower() else ""
        wanted["model"] = writer.inside(arm.draft, prefix=prefix)
        _note_about_head(writer, arm, found, wanted["model"])
    if takes.is_flat:
        return _flat(writer, arm, wanted, index)
    for key in wanted:
        # A key that only a newer release than the recorded ones knows is the user's, by `extra`.
        if key not in takes.speculation_keys and key not in writer.config.speculation[index].extra:
            raise writer.wrong(
                f"speculation.{index}.{key}",
                f"vLLM {takes.short} has no such key in speculative_config.",
                hint="Leave it out, or write for another --triton.",
            )
    return {"speculative_config": wanted}


def _flat(writer: _Writer, arm: Arm, wanted: dict[str, Any], index: int) -> dict[str, Any]:
    """`speculative_config` as the engine arguments that it was up to vLLM 0.8.1."""
    del wanted["method"]  # these releases take it from the draft's config
    if arm.method == "ngram":
        wanted["model"] = "[ngram]"
        if "prompt_lookup_max" not in wanted:
            raise writer.wrong(
                f"speculation.{index}.prompt_lookup_max",
                f"is missing; vLLM {writer.takes.short} has no default for it.",
                hint="Write prompt_lookup_max: 4.",
            )
    if arm.method == "eagle":
        wanted.setdefault("draft_tensor_parallel_size", 1)  # a head runs on one GPU there
    for key in wanted:
        if FLAT.get(key) not in writer.takes.engine_args:
            raise writer.wrong(
                f"speculation.{index}.{key}",
                f"vLLM {writer.takes.short} has no argument for it.",
                hint="Leave it out, or write for another --triton.",
            )
    flat = {FLAT[key]: wanted[key] for key in FLAT if key in wanted}
    if release(writer.takes.vllm) < (0, 6):  # it refuses to speculate without
        flat["use_v2_block_manager"] = True
    return flat


def _index(config: Config, arm: Arm) -> int:
    """Which entry of `speculation` *arm* is of."""
    labels = [(one.label, arm.k in one.k) for one in config.speculation]
    return labels.index((arm.label, True))


def _note_about_head(writer: _Writer, arm: Arm, found: str, inside: str) -> None:
    """What an old release needs of an EAGLE head."""
    takes = writer.takes
    if arm.method != "eagle":
        return
    if not takes.loads_eagle_repo_heads and model_type(Path(found)) != "eagle":
        writer.say(
            f"vLLM {takes.short} doesn't load an EAGLE repository's head: convert {arm.draft} with "
            f"`specbench models convert-eagle HEAD OUT --target {writer.config.model}` and name "
            "the result in the config"
        )
    elif takes.tells_eagle_by_its_path and "eagle-" not in inside.lower():
        writer.say(
            f'vLLM {takes.short} takes {inside} for a draft model: its path has no "eagle-"; '
            "download it into a folder that has"
        )


def model_type(folder: Path) -> str | None:
    """What the config.json in *folder* says it is; None where it says nothing."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(found["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
