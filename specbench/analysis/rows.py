"""A run's facts to the rows of its table: one row a case (repeats together), baseline first."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from specbench.analysis import hygiene
from specbench.analysis.hygiene import CaseFacts, Flag
from specbench.analysis.metrics import CaseMetrics, last_attempts, summarise
from specbench.analysis.parity import Parity
from specbench.analysis.parity import compare as compare_outputs
from specbench.analysis.speedup import Key, Speedup, compare
from specbench.records import CounterSpan, RequestRecord

SCHEMA = 1  # of the JSON that `specbench report --format json` prints


@dataclass(frozen=True)
class MeasuredCase:
    """One case as the store holds it."""

    arm: str
    method: str
    k: int
    prompt_set: str
    max_tokens: int
    concurrency: int
    repeat: int
    expected_requests: int
    records: Sequence[RequestRecord]
    spans: Sequence[CounterSpan]
    status: str
    problem: str | None = None


@dataclass(frozen=True)
class Row:
    """One row: an arm under one condition, over all repeats (and one category when split)."""

    arm: str
    method: str
    k: int
    prompt_set: str
    category: str | None
    max_tokens: int
    concurrency: int
    repeats: int
    metrics: CaseMetrics
    speedup: Speedup | None
    is_baseline: bool
    flags: tuple[Flag, ...]
    problem: str | None
    parity: Parity | None = None


Condition = tuple[str, int, int]
Part = tuple[str | None, Callable[[RequestRecord], bool] | None]  # a category and what is in it
WHOLE: Part = (None, None)


def rows(
    cases: Iterable[MeasuredCase],
    *,
    baseline: str | None,
    by_category: bool = False,
    greedy: bool = False,
) -> list[Row]:
    """The table of a run. Rows of one condition stand together, the baseline's first.

    Under *greedy* sampling outputs are compared with the baseline's too.
    """
    groups: dict[Condition, dict[str, list[MeasuredCase]]] = {}
    for case in cases:
        condition = (case.prompt_set, case.max_tokens, case.concurrency)
        groups.setdefault(condition, {}).setdefault(case.arm, []).append(case)
    found: list[Row] = []
    for arms in groups.values():
        base = arms.get(baseline or "", [])
        ordered = sorted(arms, key=lambda arm: arm != baseline)
        for part in _categories(arms) if by_category else [WHOLE]:
            for arm in ordered:
                found.append(_row(arms[arm], base, part, arm == baseline, greedy))
    return found


def _categories(arms: Mapping[str, Sequence[MeasuredCase]]) -> list[Part]:
    """The categories in the order they were met; a single one is the whole."""
    seen = {r.category: None for cases in arms.values() for case in cases for r in case.records}
    if len(seen) <= 1:
        return [(category, None) for category in seen] or [WHOLE]
    return [(category, partial(_is_in, category)) for category in seen]


def _is_in(category: str | None, record: RequestRecord) -> bool:
    return record.category == category


def _row(
    repeats: Sequence[MeasuredCase],
    baseline: Sequence[MeasuredCase],
    part: Part,
    is_baseline: bool,
    greedy: bool,
) -> Row:
    """Counters and checks are of whole cases: a row of one category among several has neither."""
    category, chosen = part
    whole = chosen is None
    records = {case.repeat: _kept(case, chosen) for case in repeats}
    everything = [record for kept in records.values() for record in kept]
    spans = [span for case in repeats for span in case.spans] if whole else []
    metrics = summarise(everything, spans)
    first = repeats[0]
    flags: list[Flag] = []
    if whole:
        expected = sum(case.expected_requests for case in repeats)
        facts = CaseFacts(first.method, first.k, expected, everything, spans, metrics)
        flags += hygiene.flags(facts)
    speedup = same = None
    if baseline and not is_baseline:
        base = {case.repeat: _kept(case, chosen) for case in baseline}
        speedup = compare(_keyed(base), _keyed(records))
        same = compare_outputs(_keyed(base), _keyed(records)) if greedy else None
        base_metrics = summarise(r for kept in base.values() for r in kept)
        if whole and (flag := hygiene.unequal_lengths(base_metrics, metrics)):
            flags.append(flag)
    problems = [case.problem for case in repeats if case.problem]
    return Row(
        arm=first.arm,
        method=first.method,
        k=first.k,
        prompt_set=first.prompt_set,
        category=category,
        max_tokens=first.max_tokens,
        concurrency=first.concurrency,
        repeats=len(repeats),
        metrics=metrics,
        speedup=speedup,
        is_baseline=is_baseline,
        flags=tuple(flags),
        problem=problems[0] if problems else None,
        parity=same,
    )


def _kept(
    case: MeasuredCase, chosen: Callable[[RequestRecord], bool] | None
) -> list[RequestRecord]:
    return [r for r in last_attempts(case.records) if chosen is None or chosen(r)]


def _keyed(repeats: Mapping[int, Sequence[RequestRecord]]) -> dict[Key, RequestRecord]:
    return {(r.prompt_id, r.turn, repeat): r for repeat, kept in repeats.items() for r in kept}
