"""Would this model repository load, and would its numbers be comparable? Nothing is started.

Each finding names its file, the line and the key, and what to write instead. What Triton and its
vLLM backend do with a repository: github.com/triton-inference-server/vllm_backend, src/model.py.
"""

import json
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from specbench.errors import UserError
from specbench.triton import arguments, pbtxt
from specbench.triton.arguments import Said
from specbench.triton.places import Places
from specbench.triton.versions import Takes

# problem: would not load. warning: loads, and measures something else. note: worth knowing.
Level = Literal["problem", "warning", "note"]
PARAMETERS = ("REPORT_CUSTOM_METRICS", "ENABLE_VLLM_HEALTH_CHECK", "GPU_DEVICE_IDS")
KINDS = ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL")
BASE_WORDS = ("base", "vanilla", "baseline")


@dataclass(frozen=True)
class Finding:
    """One thing to know about a repository; *line* is the physical line, from 1."""

    level: Level
    model: str
    path: str
    message: str
    key: str | None = None
    line: int | None = None
    hint: str | None = None

    def as_line(self) -> str:
        """The finding for a person."""
        where = self.path + (f", line {self.line}" if self.line else "")
        what = f"{self.key}: {self.message}" if self.key else self.message
        return f"{self.level}: {where}: {what}" + (f" {self.hint}" if self.hint else "")


@dataclass(frozen=True)
class Checked:
    """What was found in a repository, for which vLLM."""

    folder: str
    vllm: str
    models: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def loads(self) -> bool:
        """Whether nothing was found that would keep a model from loading."""
        return not any(finding.level == "problem" for finding in self.findings)

    def document(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**asdict(self), "loads": self.loads}


def check(folder: Path, takes: Takes, places: Places) -> Checked:
    """Look at every model in *folder* as a vLLM that *takes* these arguments would.

    Raises:
        UserError: *folder* is no model repository.
    """
    models = _models(folder)
    findings: list[Finding] = []
    engines: dict[str, dict[str, Any]] = {}
    for model in models:
        findings += _model(model, takes, places, engines)
    findings += _unlike(folder, engines)
    return Checked(str(folder), takes.vllm, tuple(m.name for m in models), tuple(findings))


def _models(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder.", hint="Name a model repository.")
    if (folder / "config.pbtxt").is_file() or (folder / "1" / "model.json").is_file():
        raise UserError(f"{folder} is a model.", hint=f"Check its repository: {folder.parent}")
    models = sorted(path for path in folder.iterdir() if path.is_dir())
    if not models:
        raise UserError(f"{folder} holds no models.", hint="A model is a folder with config.pbtxt.")
    return models


def _model(
    model: Path, takes: Takes, places: Places, engines: dict[str, dict[str, Any]]
) -> Iterator[Finding]:
    """What is to say about one model; its engine arguments are put into *engines*."""
    path = model / "config.pbtxt"
    try:
        config = pbtxt.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        config = None
        message = "is missing: Triton does not know the backend."
        hint = 'It needs: backend: "vllm" and an instance_group of KIND_MODEL.'
        yield Finding("problem", model.name, str(path), message, hint=hint)
    except pbtxt.PbtxtError as error:
        message = f"not valid: {error}."
        yield Finding("problem", model.name, str(path), message, line=error.line)
        return
    except (OSError, UnicodeDecodeError) as error:
        yield Finding("problem", model.name, str(path), f"cannot be read: {error}.")
        return
    if config is not None and _is_of_another_backend(config):
        other = config.text("backend") or config.text("platform")
        message = f"of {other}, not of vllm: the model is not looked into."
        yield Finding("note", model.name, str(path), message, "backend")
        return
    said = yield from _engine_arguments(model, takes, places)
    if said is not None:
        engines[model.name] = said.values
    if config is not None:
        yield from _config(model, config, said or Said("", {}))


def _is_of_another_backend(config: pbtxt.Message) -> bool:
    named = config.text("backend")
    return named != "vllm" if named is not None else config.get("platform") is not None


def _config(model: Path, config: pbtxt.Message, said: Said) -> Iterator[Finding]:
    """What config.pbtxt itself says."""

    def found(level: Level, message: str, key: str, hint: str | None = None) -> Finding:
        path = str(model / "config.pbtxt")
        return Finding(level, model.name, path, message, key, config.line(key), hint)

    if config.get("backend") is None:
        yield found("problem", "is missing.", "backend", 'Write backend: "vllm".')
    name = config.text("name")
    if name not in (None, model.name):
        hint = f"Write {model.name}, or leave it out."
        yield found("problem", f"is {name}, and the folder {model.name}.", "name", hint)
    yield from _instances(config, found, said)
    yield from _parameters(config, found, said)


def _engine_arguments(
    model: Path, takes: Takes, places: Places
) -> Generator[Finding, None, Said | None]:
    """The findings in model.json; returns its content, or None where there is none to look into."""
    versions = sorted(int(p.name) for p in model.iterdir() if p.is_dir() and p.name.isdecimal())
    if not versions:
        path = model / "1" / "model.json"
        misplaced = (model / "model.json").is_file()
        hint = f"Move {model}/model.json there." if misplaced else "vLLM's arguments stand there."
        yield Finding("problem", model.name, str(path), "is missing.", hint=hint)
        return None
    path = model / str(versions[-1]) / "model.json"
    try:
        said = Said.read(path)
    except arguments.BadJsonError as error:
        yield Finding("problem", model.name, str(path), str(error), line=error.line)
        return None
    for level, key, message, advice in arguments.problems(said, takes, places):
        yield Finding(level, model.name, str(path), message, key, said.line(key), advice)
    speculates = said.values.keys() & arguments.SPECULATES
    if speculates and any(word in model.name.lower() for word in BASE_WORDS):
        first = min(speculates)
        message = "a base model that speculates: no speed-up can be told from it."
        hint = "Take its speculative keys out, or call it another name."
        yield Finding("warning", model.name, str(path), message, first, said.line(first), hint)
    lora = str(said.values.get("enable_lora", "")).lower() == "true"
    if lora and not path.with_name("multi_lora.json").is_file():
        message = "needs multi_lora.json beside model.json."
        yield Finding("problem", model.name, str(path), message, "enable_lora")
    return said


def _instances(config: pbtxt.Message, found: Any, said: Said) -> Iterator[Finding]:  # noqa: ANN401
    key, groups = "instance_group", config.messages("instance_group")
    hint = "Write instance_group [ { count: 1 kind: KIND_MODEL } ]."
    if not groups:
        yield found("warning", "has none: Triton starts an engine on every GPU.", key, hint)
    world = [said.count("tensor_parallel_size"), said.count("pipeline_parallel_size")]
    for group in groups:
        kind, count = group.text("kind") or "KIND_AUTO", group.text("count") or "1"
        if kind not in KINDS:
            yield found("problem", f"{kind} is no kind of instance.", key, hint)
        elif kind != "KIND_MODEL" and max(world) > 1:
            message = f"{kind} is for engines on one GPU; this one is on {world[0] * world[1]}."
            yield found("problem", message, key, hint)
        elif kind != "KIND_MODEL":
            yield found("warning", f"{kind}: vLLM's backend asks for KIND_MODEL.", key, hint)
        if count != "1":
            yield found("warning", f"{count} engines would share the work and a GPU.", key, hint)


def _parameters(config: pbtxt.Message, found: Any, said: Said) -> Iterator[Finding]:  # noqa: ANN401
    values: dict[str, str] = {}
    for entry in config.messages("parameters"):
        inner = entry.messages("value")
        values[entry.text("key") or ""] = (inner[-1].text("string_value") or "") if inner else ""
    for name in values:
        if name not in PARAMETERS and name.upper() in PARAMETERS:
            hint = f"Write {name.upper()}."
            yield found("warning", f"{name} is not read.", "parameters", hint)
    reports = values.get("REPORT_CUSTOM_METRICS", "").lower() == "true"
    if reports and said.values.get("disable_log_stats") is True:
        message = "REPORT_CUSTOM_METRICS reports nothing: model.json has disable_log_stats."
        yield found("warning", message, "parameters", "Take disable_log_stats out.")
    gpus = values.get("GPU_DEVICE_IDS", "")
    world = said.count("tensor_parallel_size") * said.count("pipeline_parallel_size")
    if gpus and world > 1 and len(gpus.split(",")) != world:
        message = f"GPU_DEVICE_IDS names {len(gpus.split(','))} GPUs; the engine is on {world}."
        yield found("problem", message, "parameters")


def _unlike(folder: Path, engines: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Models of one target whose arguments differ in more than their speculation."""
    first: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, values in engines.items():
        rest = {k: v for k, v in values.items() if k not in arguments.SPECULATES}
        target = str(values.get("model"))
        other, theirs = first.setdefault(target, (name, rest))
        for key in sorted(rest.keys() | theirs.keys()):
            if rest.get(key) != theirs.get(key):
                ours, there = (json.dumps(one.get(key, "unset")) for one in (rest, theirs))
                message = (
                    f"{ours} here and {there} in {other}: a ratio of the two is not of speculation."
                )
                yield Finding(
                    "warning", name, str(folder / name / "1" / "model.json"), message, key
                )
