"""A case of a run folder to a file that another tool reads; what that file can't hold is said.

eagle, spec-bench   answer files for their speed.py: one question a line, repeats and cycles as choices
aiperf              profile_export.jsonl, and the summary beside it that `aiperf plot` wants too
genai-perf          profile_export.json, every request with its stream
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.analysis.cases import MeasuredCase
from specbench.errors import ExchangeError
from specbench.interchange.answer_lines import answer_lines
from specbench.interchange.perf_files import aiperf_records, aiperf_summary, genai_perf_export
from specbench.render.read import measured_cases
from specbench.store import RunStore, write_text

KINDS = ("spec-bench", "eagle", "aiperf", "genai-perf")


@dataclass
class Exported:
    """What was written, how many lines or requests, and what could not be."""

    paths: list[Path]
    count: int
    notes: list[str] = field(default_factory=list)


def export(
    store: RunStore, to: str, target: Path, *, arm: str | None = None, case: str | None = None
) -> Exported:
    """Write one arm's requests under one condition to *target*.

    Raises:
        ExchangeError: there are several, or none; the format can't hold them; *target* is there.
    """
    if to not in KINDS:
        raise ExchangeError("--to", None, f"no format {to!r}.", hint=f"Write {', '.join(KINDS)}.")
    cases = select(store, arm, case)
    notes: list[str] = []
    model = str(store.document["config"]["model"])
    return WRITERS[to](cases, model, target, notes)


def select(store: RunStore, arm: str | None, case: str | None) -> list[MeasuredCase]:
    """The repeats of one arm under one condition that *arm* and *case* (an id) come down to.

    Raises:
        ExchangeError: they come to several, or to none.
    """
    cases = list(measured_cases(store))  # refuses a run.json that is none
    ids = [planned["id"] for planned in store.document["cases"]]
    by_id = {
        (one["arm"], one["prompt_set"], one["max_tokens"], one["concurrency"], one.get("rate")): one
        for one in reversed(store.document["cases"])
    }
    if case is not None and case not in ids:
        raise ExchangeError(store.path, None, f"no case {case}.", hint=f"There are: {_few(ids)}.")
    if arm is not None and arm not in store.document["arms"]:
        there = _few(store.document["arms"])
        raise ExchangeError(store.path, None, f"no arm {arm}.", hint=f"There are: {there}.")
    wanted = next((one for one in store.document["cases"] if one["id"] == case), None)
    found: dict[tuple[object, ...], list[MeasuredCase]] = {}
    for one in cases:
        if (arm is None or one.arm == arm) and (wanted is None or _is_of(one, wanted)):
            found.setdefault((one.arm, *one.condition), []).append(one)
    if len(found) != 1:
        choices = [by_id[key]["id"] for key in found if key in by_id] or ids
        raise ExchangeError(
            store.path,
            None,
            f"has {len(found)} cases that could be meant.",
            hint=f"Name one with --arm or --case: {_few(choices)}.",
        )
    cases = next(iter(found.values()))
    if not any(record.ok for one in cases for record in one.records):
        raise ExchangeError(
            store.path, None, "holds no request of it, so there is nothing to write."
        )
    return cases


def _is_of(one: MeasuredCase, wanted: Mapping[str, Any]) -> bool:
    condition = (
        wanted["arm"],
        wanted["prompt_set"],
        wanted["max_tokens"],
        wanted["concurrency"],
        wanted.get("rate"),
    )
    return (one.arm, *one.condition) == condition


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return ", ".join(names[:12]) + more


# --- the formats ----------------------------------------------------------------------------------

Write = Callable[[Sequence[MeasuredCase], str, Path, list[str]], Exported]


def _answers(tool: str) -> Write:
    def write(
        cases: Sequence[MeasuredCase], model: str, target: Path, notes: list[str]
    ) -> Exported:
        lines = list(answer_lines(cases, model, tool, target, notes))
        return Exported([_write(target, _jsonl(lines))], len(lines), notes)

    return write


def _aiperf(cases: Sequence[MeasuredCase], model: str, target: Path, notes: list[str]) -> Exported:
    case = _only(cases, notes)
    lines = list(aiperf_records(case))
    beside = target.with_name(f"{target.name.removesuffix(target.suffix)}_aiperf.json")
    _refuse_overwriting(beside)
    paths = [_write(target, _jsonl(lines))]
    paths.append(_write(beside, json.dumps(aiperf_summary(case), indent=1) + "\n"))
    notes += ["texts are in none of its files", "times are of the sending process's own clock"]
    return Exported(paths, len(lines), notes)


def _genai_perf(
    cases: Sequence[MeasuredCase], model: str, target: Path, notes: list[str]
) -> Exported:
    case = _only(cases, notes)
    document = genai_perf_export(case, model, target, notes)
    count = len(document["experiments"][0]["requests"])
    notes.append("no acceptance is in its file")
    return Exported([_write(target, json.dumps(document) + "\n")], count, notes)


WRITERS: dict[str, Write] = {
    "spec-bench": _answers("Spec-Bench"),
    "eagle": _answers("EAGLE"),
    "aiperf": _aiperf,
    "genai-perf": _genai_perf,
}


def _only(cases: Sequence[MeasuredCase], notes: list[str]) -> MeasuredCase:
    """The first repeat: a file of requests has no place for which start of an engine answered."""
    if len(cases) > 1:
        notes.append(f"the first of {len(cases)} repeats; name another with --case")
    return cases[0]


def _jsonl(lines: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _refuse_overwriting(path: Path) -> None:
    if path.exists():
        raise ExchangeError(path, None, "is there already.", hint="Delete it or choose another -o.")


def _write(path: Path, text: str) -> Path:
    _refuse_overwriting(path)
    write_text(path, text)
    return path
