"""Where the numbers come from: config, versions, hardware, and the commands to run it again."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from specbench.environment import SECRET
from specbench.records import EngineFacts
from specbench.render.columns import printable
from specbench.store import RunStore

WITHHELD = "(not shown)"


@dataclass(frozen=True)
class Start:
    """One start of an engine: its name, the command line, and what is known of it."""

    name: str
    command: str | None
    facts: str


@dataclass(frozen=True)
class Provenance:
    """All of it, as text. `again` are the commands, `config` the whole config as YAML."""

    again: list[str]
    config: str
    about: list[tuple[str, str]]
    prompt_sets: list[tuple[str, str, str, str]]
    starts: list[Start]


def provenance(store: RunStore) -> Provenance:
    """What a run folder says of how it came to be."""
    run = store.document
    return Provenance(
        again=[printable(shlex.join(_command(run)))],
        # In ASCII: what YAML escapes can be copied as it is, and hides nothing.
        config=yaml.safe_dump(_without_secrets(_without_nothing(run["config"])), sort_keys=False),
        about=[(name, printable(value)) for name, value in _about(store) if value],
        prompt_sets=[
            (
                printable(name),
                f"{about['prompts']}" + (f" of {of}" if (of := about.get("available")) else ""),
                about["sha256"],
                printable(str(about.get("source") or "")),
            )
            for name, about in run["prompt_sets"].items()
        ],
        starts=[_start(engine) for engine in store.engines()],
    )


def _command(run: Mapping[str, Any]) -> list[str]:
    """What was typed; `python -m specbench` is recorded under its file's name."""
    program, *rest = run.get("command") or ["specbench", "run"]
    return ["specbench" if program == "__main__.py" else program, *rest]


def _about(store: RunStore) -> Iterator[tuple[str, str]]:
    run, machine = store.document, store.document["machine"]
    config = run["config"]
    yield "run", run["id"]
    status = store.status()
    yield "status", f"{status['status']}, {status['at']}" if status else "unfinished"
    yield "target", config["model"]
    if origin := run.get("imported"):
        files = zip(origin["files"], origin["sha256"], strict=False)
        yield "imported from", ", ".join(f"{name} (sha256 {digest})" for name, digest in files)
        yield "measured by", f"{origin['from']}, not by specbench"
        return
    for one in config.get("speculation", ()):
        drafts = ", ".join(filter(None, (one["method"], one.get("model"))))
        yield "speculation", f"{drafts}; k = {', '.join(map(str, one.get('k') or ['auto']))}"
    yield "engine", f"vLLM {run['vllm']}" if run.get("vllm") else "a server that was already up"
    yield (
        "schedule",
        f"{run.get('schedule', config['schedule'])}"
        + (f" ({run['room']})" if run.get("room") else ""),
    )
    for gpu in machine.get("gpus", ()):
        yield "GPU", ", ".join(f"{name} {value}" for name, value in gpu.items() if name != "uuid")
    yield "CPU", f"{machine.get('cpu')}, {machine.get('cores')} cores"
    yield "memory", f"{machine.get('memory_gib')} GiB"
    yield "system", f"{machine.get('os')}, kernel {machine.get('kernel')}, {machine.get('libc')}"
    yield "specbench", f"{machine.get('specbench')}, commit {machine.get('commit') or 'unknown'}"
    yield "Python", str(machine.get("python") or "")
    yield from (machine.get("packages") or {}).items()


def _start(engine: EngineFacts) -> Start:
    shown = {name: WITHHELD if SECRET.search(name) else value for name, value in engine.env.items()}
    env = " ".join(f"{name}={shlex.quote(value)}" for name, value in shown.items())
    facts = [f"{engine.kind} {engine.version or ''}".strip(), f"started {engine.started_at}"]
    if engine.startup_s is not None:
        facts.append(f"ready after {engine.startup_s:.0f} s")
    if engine.kv_cache_tokens is not None:
        facts.append(f"KV cache for {engine.kv_cache_tokens:,} tokens")
    command = f"{env} {shlex.join(_argv(engine.argv))}".strip() if engine.argv else None
    return Start(
        name=printable(f"{engine.arm}, start {engine.start}"),
        command=None if command is None else printable(command),
        facts=printable(" · ".join([*facts, *engine.notes])),
    )


def _argv(argv: tuple[str, ...]) -> list[str]:
    """The command line without the value of a key."""
    shown = []
    for before, word in zip(("", *argv), argv, strict=False):
        name, given, _ = word.partition("=")
        if before.startswith("--") and SECRET.search(before):
            shown.append(WITHHELD)
        elif name.startswith("--") and given and SECRET.search(name):
            shown.append(f"{name}={WITHHELD}")
        else:
            shown.append(word)
    return shown


def _without_nothing(value: Any) -> Any:  # noqa: ANN401  (whatever JSON holds)
    """Without keys that say nothing: a config may leave them out."""
    if isinstance(value, Mapping):
        kept = {name: _without_nothing(inner) for name, inner in value.items()}
        return {name: inner for name, inner in kept.items() if inner not in (None, {}, [])}
    if isinstance(value, list):
        return [_without_nothing(inner) for inner in value]
    return value


def _without_secrets(config: dict[str, Any]) -> dict[str, Any]:
    env = config.get("engine", {}).get("env", {})
    for name in env:
        if SECRET.search(name):
            env[name] = WITHHELD
    return config
