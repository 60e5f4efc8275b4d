"""A short, fixed slice of benchmarks/fuzz.py, and what hypothesis makes of its structures."""

import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[1]


def _script(name: str) -> ModuleType:
    """A script of benchmarks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzz_inputs = _script("fuzz_inputs")
fuzz = _script("fuzz")
quick = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def judges() -> dict[str, tuple[Callable[..., Any], list[bytes]]]:
    return {name: make() for name, (make, _) in fuzz.TARGETS.items()}


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_damaged_input_is_read_or_refused_in_words(
    target: str, judges: dict[str, Any], tmp_path: Path
) -> None:
    """The first of what the campaign feeds; a number and seed 7 give an input again."""
    judge, seeds = judges[target]
    nasty = len(fuzz_inputs.nasty())
    for number in range(nasty, nasty + (40 if target in ("runs", "metrics") else 80)):
        place = tmp_path / str(number)
        place.mkdir()
        data = fuzz.input_of(7, target, number, seeds)
        if len(data) < 100_000:
            judge(data, place, random.Random(f"7/{target}/{number}"))


@pytest.mark.parametrize("target", ["yaml", "prompts", "sidecars", "imports", "sse", "http1"])
def test_what_people_really_had_wrong_is_read_or_refused_in_words(
    target: str, judges: dict[str, Any], tmp_path: Path
) -> None:
    judge, _ = judges[target]
    for number, data in enumerate(fuzz_inputs.nasty()):
        if len(data) < 20_000:
            place = tmp_path / str(number)
            place.mkdir()
            judge(data, place, random.Random(number))


KEYS = ["model", "prompts", "speculation", "method", "k", "engine", "args", "set", "sampling"]
KEYS += ["text", "turns", "id", "choices", "question_id", "new_tokens", "results", "metrics"]
KEYS += ["usage", "token_ids", "delta", "error", "load", "limit", "index", "layout"]
keys = st.sampled_from(KEYS) | st.text(max_size=3)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@quick
@given(value=st.dictionaries(keys, values, max_size=5))
@pytest.mark.parametrize("target", ["yaml", "prompts", "imports", "sidecars"])
def test_any_structure_is_read_or_refused_in_words(
    target: str, value: dict[str, Any], judges: dict[str, Any], tmp_path: Path
) -> None:
    judge, _ = judges[target]
    judge(json.dumps(value).encode() + b"\n", tmp_path, random.Random(0))


@quick
@given(value=values)
@pytest.mark.parametrize("target", ["sse", "triton"])
def test_any_event_is_a_record_or_a_problem(
    target: str, value: object, judges: dict[str, Any], tmp_path: Path
) -> None:
    judge, _ = judges[target]
    judge(b"data: " + json.dumps(value).encode() + b"\n\n", tmp_path, random.Random(0))


# --- the campaign itself must be able to fail -----------------------------------------------------


def outcome_of(judge: Callable[..., Any], tmp_path: Path) -> Any:  # noqa: ANN401  (the script's)
    outcome = fuzz.Outcome(inputs=1)
    fuzz._one(judge, b"x", tmp_path, "0/t/0", outcome)
    return outcome


def test_a_traceback_is_a_failure(tmp_path: Path) -> None:
    def judge(*_: object) -> None:
        raise KeyError("k")

    (failure,) = outcome_of(judge, tmp_path).failures
    assert failure.what.startswith("KeyError at test_fuzz.py")
    assert failure.data == b"x"


def test_a_slow_input_and_a_large_one_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "SLOW_S", 0.0)
    (failure,) = outcome_of(lambda *_: None, tmp_path).failures
    assert failure.what == "took 0.0 s"
    monkeypatch.setattr(fuzz, "SLOW_S", 60.0)
    monkeypatch.setattr(fuzz, "MOST_MB", 1)
    (failure,) = outcome_of(lambda *_: "refused", tmp_path).failures
    assert failure.what.endswith(" MB")


@pytest.mark.parametrize("said", ["somewhere: no", "c.yaml: " + "x" * 6000, "c.yaml:\nno"])
def test_a_poor_refusal_is_a_failure(said: str) -> None:
    with pytest.raises(fuzz.Poor):
        fuzz._refused(ValueError(said), Path("c.yaml"))


def test_a_seed_and_a_number_give_an_input_again() -> None:
    seeds = [b'{"a": 1}\n', b"b: 2\n"]
    again = [fuzz.input_of(3, "yaml", n, seeds) for n in (200, 201, 200)]
    assert again[0] == again[2]
    assert len({fuzz.input_of(3, "yaml", n, seeds) for n in range(200, 260)}) > 30
