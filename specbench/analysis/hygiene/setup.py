"""How an engine was set up apart from its speculation, where, and what differs between two.

Works on facts alone, so that two rows of one run and two runs are compared by the same functions.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from specbench.analysis.hygiene import CaseFacts
from specbench.records import EngineFacts

# Arguments that are not part of the work: where it listens, and the speculation that is compared.
ADDRESS = {"host", "port", "served-model-name", "api-key"}
SPECULATION = {"speculative-config", "sc", "spec-method", "spec-model", "spec-tokens"}
OWN = ADDRESS | SPECULATION | {"per-request-spec-decode-metrics"}
FLAG = re.compile(r"--?[A-Za-z]")
OWN_VARIABLES = {"VLLM_API_KEY", "VLLM_PORT", "PYTHONPATH"}
SIMULATED = re.compile(r"SYNTHETIC_ACC|SIMULATE_ACC")  # vLLM's and SGLang's words for it
GPU = ("name", "memory.total", "power.limit", "clocks.max.sm", "driver_version")
MEMORY_GAP = 0.05  # two machines of one type report memory that differs a little


def synthetic_acceptance(facts: CaseFacts) -> str | None:
    """Drafts were accepted by a dice, for a test, not because the target agreed."""
    for engine in facts.engines:
        for name, value in [*_speculation(engine).items(), *engine.env.items()]:
            is_on = value not in (None, "", "0", "false", "False")
            if value == "synthetic" or (is_on and _is_simulation(name)):
                return f"acceptance is synthetic ({name}: {value}): no text was really accepted"
    return None


def _is_simulation(name: str) -> bool:
    return name.startswith("synthetic_acceptance") or bool(SIMULATED.search(name))


def _speculation(engine: EngineFacts) -> dict[str, Any]:
    """What the command line says of speculation: as one JSON value, or key by key after a dot."""
    found: dict[str, Any] = {}
    for name, value in arguments(engine.argv or ()).items():
        whole, _, key = name.partition(".")
        if whole in SPECULATION:
            inside = {key.replace("-", "_"): value} if key else _json(value)
            found |= inside if isinstance(inside, dict) else {}
    return found


def arguments(argv: Sequence[str]) -> dict[str, str]:
    """What stands behind `serve`: the model, and each flag's value in one spelling."""
    found: dict[str, list[str]] = {}
    name = "model"
    for token in argv[argv.index("serve") + 1 :] if "serve" in argv else argv:
        if FLAG.match(token):
            name, equals, value = token.lstrip("-").partition("=")
            name = name.replace("_", "-")
            found[name] = [value] if equals else []
        else:
            found.setdefault(name, []).append(token)
    return dict(_one_spelling(name, values) for name, values in found.items())


def _one_spelling(name: str, values: Sequence[str]) -> tuple[str, str]:
    if not values:
        return (name.removeprefix("no-"), "false") if name.startswith("no-") else (name, "true")
    text = " ".join(values)
    parsed = _json(text)
    return name, json.dumps(parsed, sort_keys=True) if isinstance(parsed, dict) else text


def _json(text: str) -> Any:  # noqa: ANN401
    try:
        return json.loads(text)
    except ValueError:
        return None


def setup_of(engine: EngineFacts) -> dict[str, str]:
    """Everything that should be alike in two engines, by name."""
    said = {"engine": engine.kind} | ({"version": engine.version} if engine.version else {})
    if engine.argv is None:  # a server that was up: it does not say how it was started
        return said
    for name, value in arguments(engine.argv).items():
        if name.partition(".")[0] not in OWN:
            said[name if name == "model" else f"--{name}"] = value
    return said | {k: v for k, v in engine.env.items() if k not in OWN_VARIABLES}


def engine_differences(one: Sequence[EngineFacts], other: Sequence[EngineFacts]) -> list[str]:
    """In what two sets of engine starts are unlike, in words; none where one is not known."""
    setups = [[setup_of(engine) for engine in side] for side in (one, other)]
    if not all(setups):
        return []
    everything = [setup for side in setups for setup in side]
    names = dict.fromkeys(name for setup in everything for name in setup)
    if any(engine.argv is None for engine in (*one, *other)):
        names = dict.fromkeys(("engine", "version"))
    if not all("version" in setup for setup in everything):
        names.pop("version", None)
    found = []
    for name in names:
        values = [sorted({setup.get(name, "not set") for setup in side}) for side in setups]
        if len({*values[0], *values[1]}) > 1:
            found.append(f"{name}: {' and '.join(values[0])} against {' and '.join(values[1])}")
    return found


def machine_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """In what two machines (machine.facts()) are unlike, in words; what one lacks is not judged."""
    pairs = {
        name: (one[name], other[name])
        for name in ("cpu", "cores", "gpus", "packages", "memory_gib")
        if one.get(name) is not None and other.get(name) is not None
    }
    if "gpus" in pairs:
        pairs["gpus"] = (_gpus(one["gpus"]), _gpus(other["gpus"]))
    memory = pairs.pop("memory_gib", (0, 0))
    if abs(memory[0] - memory[1]) > MEMORY_GAP * max(memory):
        pairs["memory GiB"] = memory
    versions = pairs.pop("packages", ({}, {}))
    for name in sorted({*versions[0], *versions[1]}):
        pairs[name] = (versions[0].get(name, "none"), versions[1].get(name, "none"))
    return [f"{name}: {a} against {b}" for name, (a, b) in pairs.items() if a != b]


def _gpus(gpus: Sequence[Mapping[str, str]]) -> str:
    each = Counter(", ".join(gpu.get(part, "?") for part in GPU) for gpu in gpus)
    return "; ".join(f"{count}x {gpu}" for gpu, count in sorted(each.items())) or "none"
