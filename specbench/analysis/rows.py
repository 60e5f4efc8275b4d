"""A run's facts to the rows of its table: one row a case (repeats together), baseline first."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from specbench.analysis.cases import Condition, Joined, MeasuredCase, Requests
from specbench.analysis.cost import AGREEMENT, Choice, disagreement
from specbench.analysis.curves import Curve, curves
from specbench.analysis.hosts import hosts_of, on_one_host
from specbench.analysis.hygiene import CaseFacts, Flag, PairFacts, checks
from specbench.analysis.imported import imported_flags, stated_metrics, without_lacking
from specbench.analysis.metrics import CaseMetrics, Goodput, goodput, summarise, without
from specbench.analysis.outlines import Outlines, Pool, Request
from specbench.analysis.parity import Parity
from specbench.analysis.parity import compare as compare_outputs
from specbench.analysis.slices import WHOLE, By, Part, parts
from specbench.analysis.speedup import Key, Speedup, compare, pairs_of
from specbench.analysis.telemetry import Meanwhile
from specbench.analysis.tool_figures import Beside, beside_ours
from specbench.records import CounterSpan, EngineFacts, Imported

SCHEMA = 2  # of the JSON that `specbench report --format json` prints


@dataclass(frozen=True)
class Cost:
    """What speculation costs, and what its step times say. None where it is not known.

    `break_even` is the acceptance length at which the arm is as fast as vanilla, not known where
    drafts are looked up (`CostModel.mixed`); `expected_speedup` follows from measured step times and
    acceptance at this k, `predicted_speedup` from k = 1 and the largest k alone. `kv_cache_change` is
    a share, `memory_change_bytes` a difference, both against the baseline.
    """

    step_ms: float | None
    break_even: float | None
    expected_speedup: float | None
    predicted_speedup: float | None
    startup_s: float | None
    kv_cache_tokens: float | None
    kv_cache_change: float | None
    memory_change_bytes: float | None


@dataclass(frozen=True)
class Row:
    """One row: an arm under one condition, over all repeats and cycles (one part when split)."""

    arm: str
    label: str
    method: str
    k: int
    prompt_set: str
    part: str | None
    max_tokens: int | None
    concurrency: int
    repeats: int
    cycles: int
    metrics: CaseMetrics
    speedup: Speedup | None
    is_baseline: bool
    flags: tuple[Flag, ...]
    problem: str | None
    parity: Parity | None = None
    cost: Cost | None = None
    rate: float | None = None
    goodput: Goodput | None = None
    beside: tuple[Beside, ...] = ()
    imported: Imported | None = None
    meanwhile: Meanwhile | None = None
    hosts: tuple[str, ...] = ()
    status: str = "ok"
    failure: str | None = None

    @property
    def condition(self) -> Condition:
        """What it shares with the rows that it may be compared with."""
        return Condition(self.prompt_set, self.max_tokens, self.concurrency, self.rate)


def is_sound(row: Row) -> bool:
    """Whether nothing speaks against a row's figures."""
    return not row.flags and row.problem is None


def best_of(found: Iterable[Row]) -> Row | None:
    """The fastest of one method's rows under one condition: of those without a flag if there are any.

    None where no row has a speed-up. All that names a best k asks here.
    """
    timed = [(ratio.value, row) for row in found if row.speedup and (ratio := row.speedup.tpot)]
    sound = [pair for pair in timed if is_sound(pair[1])]
    return max(sound or timed, key=lambda pair: pair[0], default=(0.0, None))[1]


def choices(found: Iterable[Row]) -> dict[tuple[Condition, str], Choice]:
    """Of each condition and method the k that its rows call the best, for `curves`."""
    of_label: dict[tuple[Condition, str], list[Row]] = {}
    for row in found:
        if row.k and row.part is None and row.speedup and row.speedup.tpot:
            of_label.setdefault((row.condition, row.label), []).append(row)
    chosen = {}
    for place, of_k in of_label.items():
        best = best_of(of_k)
        assert best is not None  # each has a speed-up
        assert best.speedup is not None
        assert best.speedup.tpot is not None
        value, among = best.speedup.tpot.value, [row.k for row in of_k if is_sound(row)]
        chosen[place] = Choice(
            k=best.k if value > 1 else 0,
            speedup=max(1.0, value),
            among=frozenset(among or (row.k for row in of_k)),
            flagged=not among,
        )
    return chosen


def rows(
    cases: Iterable[MeasuredCase],
    *,
    baseline: str | None,
    by: By | None = None,
    greedy: bool = False,
) -> list[Row]:
    """The table of a run. Rows of one condition stand together, the baseline's first.

    With *by* each row is split into its parts (`slices`). Under *greedy* sampling outputs are
    compared with the baseline's too.
    """
    groups: dict[Condition, dict[str, list[MeasuredCase]]] = {}
    everything = list(cases)
    for case in everything:
        groups.setdefault(case.condition, {}).setdefault(case.arm, []).append(case)
    explained = {
        (curve.condition, curve.label): curve for curve in curves(everything, baseline=baseline)
    }
    found: list[Row] = []
    for condition, arms in groups.items():
        base = arms.get(baseline or "", [])
        ordered = sorted(arms, key=lambda arm: arm != baseline)
        records = Joined([case.records for of_arm in arms.values() for case in of_arm])
        for part in parts(by, records) if by else [WHOLE]:
            of_base = _requests(base, part)
            for arm in ordered:
                curve = explained.get((condition, arms[arm][0].label))
                found.append(_row(arms[arm], base, of_base, part, arm == baseline, greedy, curve))
    return found


def _row(
    repeats: Sequence[MeasuredCase],
    baseline: Sequence[MeasuredCase],
    requests_of_baseline: Sequence[Requests],
    part: Part,
    is_baseline: bool,
    greedy: bool,
    curve: Curve | None,
) -> Row:
    """Counters, checks and the cost of a step are of whole cases: a part has none of them."""
    whole = part.is_whole
    first = repeats[0]
    requests = requests_of_baseline if is_baseline else _requests(repeats, part)
    spans = Joined([case.spans for case in repeats]) if whole else []
    everything = [record for of_case in requests for record in of_case.values()]
    metrics = summarise(everything, spans, speculative=first.k > 0)
    if part.is_piece:  # its first chunk is no first token, and its time is no request's
        starts = sum(record.ok for record in everything)
        metrics = without(metrics, "ttft_ms", "latency_ms", "tokens_per_s", "requests_per_s")
        metrics = replace(metrics, output_tokens=metrics.output_tokens - starts)
    flags: list[Flag] = []
    origins = [case.imported for case in repeats if case.imported]
    if origins:
        metrics = without_lacking(metrics, origins[0])
        flags += imported_flags(origins)
        if not everything and whole:
            metrics = stated_metrics(origins[0])
    facts = _facts(repeats, everything, spans, metrics)
    if whole and (everything or not origins):
        flags += checks.flags(facts)
    speedup = same = None
    groups = {case.group for case in repeats}
    chosen = [at for at, case in enumerate(baseline) if case.group in groups]
    beside = [baseline[at] for at in chosen]
    if beside and not is_baseline:
        of_base = [requests_of_baseline[at] for at in chosen]
        everywhere, arm = _merged(of_base), _merged(requests)
        hosts = hosts_of(beside[0].engines), hosts_of(first.engines)
        base = on_one_host(everywhere, arm, *hosts)
        speedup = compare(
            base, arm, speculative=first.k > 0, set_size=first.set_size if whole else None
        )
        if origins and "ttft_ms" in origins[0].lacks:
            speedup = replace(speedup, ttft=None)
        same = compare_outputs(base, arm) if greedy else None
        if whole:
            pair = PairFacts(
                _facts_of(beside, of_base),
                facts,
                pairs_of(base, arm),
                speedup,
                apart=len(everywhere) - len(base),
            )
            flags += checks.pair_flags(pair)
    cost = _cost(first, curve, beside) if whole else None
    if cost and speedup and (found := _unexplained(cost, speedup)):
        flags.append(found)
    troubled = next((case for case in repeats if case.problem), None)
    reports = [report for case in repeats for report in case.tools]
    return Row(
        arm=first.arm,
        label=first.label,
        method=first.method,
        k=first.k,
        prompt_set=first.prompt_set,
        part=part.name,
        max_tokens=first.max_tokens,
        concurrency=first.concurrency,
        repeats=len({case.repeat for case in repeats}),
        cycles=1 + max((record.cycle for record in everything), default=0),
        metrics=metrics,
        speedup=speedup,
        is_baseline=is_baseline,
        flags=tuple(flags),
        problem=troubled.problem if troubled else None,
        status=_status(repeats),
        failure=troubled.failure if troubled else None,
        parity=same,
        cost=cost,
        imported=origins[0] if origins else None,
        meanwhile=facts.meanwhile if whole else None,
        hosts=tuple(sorted(set(hosts_of(facts.engines).values()))),
        rate=first.rate,
        goodput=goodput(everything, first.limits, open_loop=first.rate is not None)
        if first.limits and not part.is_piece
        else None,
        beside=beside_ours(reports, Joined([case.records for case in repeats])) if whole else (),
    )


def _status(repeats: Sequence[MeasuredCase]) -> str:
    """That of all repeats, else partial, or unfinished where one of them is."""
    found = {case.status for case in repeats}
    if len(found) == 1:
        return found.pop()
    return "unfinished" if "unfinished" in found else "partial"


def _cost(case: MeasuredCase, curve: Curve | None, baseline: Sequence[MeasuredCase]) -> Cost:
    """What the arm's engines took, and of its curve what is at its k."""
    model = curve.model if curve else None
    # At k = 1 and the largest the prediction is what was measured.
    between = curve is not None and 1 < case.k < max(curve.predicted, default=0)
    at = curve.predicted.get(case.k) if curve and between else None
    known = model is not None and case.k in model.step_ms
    return Cost(
        step_ms=model.step_ms[case.k] if model and known else None,
        break_even=model.break_even(case.k) if model and known else None,
        expected_speedup=model.speedup(case.k) if model and known else None,
        predicted_speedup=at.speedup if at else None,
        startup_s=_mean_of(case.engines, "startup_s"),
        kv_cache_tokens=_mean_of(case.engines, "kv_cache_tokens"),
        kv_cache_change=_change(case, baseline, "kv_cache_tokens"),
        memory_change_bytes=_difference(case, baseline),
    )


def _unexplained(cost: Cost, speedup: Speedup) -> Flag | None:
    """Step times and acceptance that do not add up to the speed-up, beyond its own interval."""
    if cost.expected_speedup is None or speedup.tpot is None:
        return None
    interval = speedup.tpot.this_set or speedup.tpot.like_these
    if interval is None:  # nobody knows how far apart noise takes them
        return None
    tolerance = max(AGREEMENT, interval.half_width)
    finding = disagreement(cost.expected_speedup, speedup.tpot.value, tolerance=tolerance)
    return Flag("cost-model", finding) if finding else None


def _mean_of(engines: Sequence[EngineFacts], name: str) -> float | None:
    values = [value for engine in engines if (value := getattr(engine, name)) is not None]
    return sum(values) / len(values) if values else None


def _change(case: MeasuredCase, baseline: Sequence[MeasuredCase], name: str) -> float | None:
    """By what share the arm has more (or less) than the baseline."""
    own, base = _mean_of(case.engines, name), _mean_of(_engines(baseline), name)
    return own / base - 1 if own and base else None


def _difference(case: MeasuredCase, baseline: Sequence[MeasuredCase]) -> float | None:
    """Bytes more than the baseline: on the device where the engine says, else of the host."""
    for name in ("weights_bytes", "memory_bytes"):
        own, base = _mean_of(case.engines, name), _mean_of(_engines(baseline), name)
        if own is not None and base is not None:
            return own - base
    return None


def _engines(cases: Sequence[MeasuredCase]) -> Sequence[EngineFacts]:
    return cases[0].engines if cases else ()


def _facts_of(cases: Sequence[MeasuredCase], requests: Sequence[Requests]) -> CaseFacts:
    records = [record for of_case in requests for record in of_case.values()]
    spans = Joined([case.spans for case in cases])
    metrics = summarise(records, spans, speculative=cases[0].k > 0)
    return _facts(cases, records, spans, metrics)


def _facts(
    cases: Sequence[MeasuredCase],
    records: Sequence[Request],
    spans: Sequence[CounterSpan],
    metrics: CaseMetrics,
) -> CaseFacts:
    """What the checks look at, of all repeats of an arm; of its engines those that answered."""
    first, answered = cases[0], {record.start for record in records}
    engines = [engine for engine in first.engines if engine.start in answered]
    return CaseFacts(
        method=first.method,
        k=first.k,
        expected_requests=sum(case.expected_requests for case in cases),
        records=records,
        spans=spans,
        metrics=metrics,
        max_tokens=first.max_tokens,
        concurrency=first.concurrency,
        sampling=first.sampling,
        prompts=first.prompts,
        engines=engines,
        calibration=first.calibration,
        meanwhile=first.timeline.during(records) if first.timeline else None,
        machine=engines[-1].machine if engines else {},  # a resumed run may be on another
    )


def _requests(cases: Sequence[MeasuredCase], part: Part) -> list[Requests]:
    """What of each case's requests is in *part*."""
    if part.is_whole:
        return [case.keyed() for case in cases]
    found = []
    for case in cases:
        kept = ((key, part.of(record)) for key, record in case.keyed().items())
        inside = ((key, record) for key, record in kept if record is not None)
        found.append(_in_outline(inside, case) if part.is_piece else dict(inside))
    return found


def _in_outline(pieces: Iterable[tuple[Key, Request]], case: MeasuredCase) -> Requests:
    """Pieces of a case's requests, which no file holds, without their lists."""
    pool = case.records.pool if isinstance(case.records, Outlines) else Pool()
    outlines = Outlines(pool, _unread)
    keys = []
    for key, piece in pieces:
        outlines.add(piece.whole(), 0)
        keys.append(key)
    return dict(zip(keys, outlines, strict=True))


def _unread(_: int) -> NoReturn:
    raise NotImplementedError("nothing is looked at of a piece but its times and counts")


def _merged(requests: Sequence[Requests]) -> Requests:
    """The requests of all cases that share no key: repeats of one arm in one group."""
    if len(requests) == 1:
        return requests[0]
    return {key: record for of_case in requests for key, record in of_case.items()}
