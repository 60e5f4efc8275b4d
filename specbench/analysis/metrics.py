"""Requests and counters to the numbers of one case. Pure: no files, no clocks.

Definitions (docs/measurement.md has the sources):
  latency      last chunk - sent; TTFT  first chunk - sent, both per request, mean over requests
  TPOT         (latency - TTFT) / (output tokens - those of the first chunk), per request, mean
               over requests
  tokens/s     output tokens / time with a request in flight, over the whole case; requests/s alike
  p50 p90 p99  of latency, TTFT and TPOT over requests, linear between two of them (numpy's default)
  steps        target forward passes after the first token: drafts + steps without a draft
  acceptance length  (steps + accepted) / steps: tokens per target step, bonus token included
  acceptance rate    accepted / drafted tokens
  p_i          share of drafts whose position i was accepted (unconditional)
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeVar

import numpy as np

from specbench.analysis.outlines import Drafts, Request
from specbench.records import CounterSpan, EngineCounters, SpecRequest

R = TypeVar("R", bound=Request)
MERGED_CHUNKS, MERGED_SHARE = 3, 0.1  # that a busy reader may well find beside the first
PERCENTS = (50, 90, 99)


def percentile_name(figure: str, percent: int) -> str:
    """What a percentile of *figure* is called: ttft_ms, 90 is ttft_p90_ms."""
    return f"{figure.removesuffix('_ms')}_p{percent}_ms"


PERCENTILES = tuple(
    percentile_name(figure, percent)
    for figure in ("ttft_ms", "tpot_ms", "latency_ms")
    for percent in PERCENTS
)


def latency_ms(record: Request) -> float:
    """Milliseconds from sending to the last chunk."""
    return (record.last_ns - record.sent_ns) / 1e6


def ttft_ms(record: Request) -> float:
    """Milliseconds from sending to the first chunk with output."""
    return (record.first_ns - record.sent_ns) / 1e6


def tpot_ms(record: Request) -> float | None:
    """Milliseconds per output token after the first; None for fewer than two chunks or tokens, and
    for a stream that was held up.

    When the first chunk carries several tokens they count as first: the time after it made the
    others only.
    """
    later = later_tokens(record)
    if not later or record.chunks < 2 or held_up(record):
        return None
    return (record.last_ns - record.first_ns) / 1e6 / later


def held_up(record: Request) -> bool:
    """Whether the first chunk was read together with many later ones.

    The client or the server stood still then, so that nobody knows when the first token came: not
    TTFT, nor the time that the others took.
    """
    return record.together > max(MERGED_CHUNKS, MERGED_SHARE * record.chunks)


def later_tokens(record: Request) -> int:
    """Output tokens after the first chunk; 0 where they are not known."""
    if record.output_tokens is None:
        return 0
    return max(0, record.output_tokens - max(1, record.first_tokens or 1))


def decode_steps(record: Request) -> int | None:
    """Target steps after the first chunk of a request with per-request metrics; None without.

    Nor where the first chunk holds several tokens: steps of later ones are in it then.
    """
    if record.spec is None or record.output_tokens is None:
        return None
    if record.output_tokens > 1 + later_tokens(record):
        return None
    spec = record.spec
    return spec.drafts + undrafted_steps(record.output_tokens, 1, spec.drafts, spec.accepted)


def tokens_per_step(record: Request) -> float | None:
    """Tokens that a request got for each target step after the first chunk; trimmed ones not."""
    steps = decode_steps(record)
    return later_tokens(record) / steps if steps else None


@dataclass(frozen=True)
class Acceptance:
    """Speculation in some requests. `source` is "requests" (per-request metrics), "counters", or
    "chunks": a streamed chunk is taken for a step, so which steps had a draft is not known, and
    `drafts` counts all of them.
    """

    source: str
    drafts: int
    draft_tokens: int
    accepted: int
    undrafted_steps: int
    per_position: tuple[int, ...] | None

    @property
    def steps(self) -> int:
        """Target steps after the first token of each request."""
        return self.drafts + self.undrafted_steps

    @property
    def length(self) -> float | None:
        """Tokens per target step, the bonus token included; None without a step."""
        return (self.steps + self.accepted) / self.steps if self.steps else None

    @property
    def length_per_draft(self) -> float | None:
        """vLLM's own figure: 1 + accepted / drafts. Leaves out steps without a draft."""
        known = self.drafts and self.source != "chunks"
        return 1 + self.accepted / self.drafts if known else None

    @property
    def coverage(self) -> float | None:
        """Share of target steps that had a draft; below 1 for methods that look drafts up."""
        return self.drafts / self.steps if self.steps and self.source != "chunks" else None

    @property
    def rate(self) -> float | None:
        """Accepted share of the drafted tokens."""
        return self.accepted / self.draft_tokens if self.draft_tokens else None

    @property
    def positions(self) -> tuple[float, ...] | None:
        """p_1..p_k; None where it was not counted per position."""
        if self.per_position is None or not self.drafts:
            return None
        return tuple(count / self.drafts for count in self.per_position)


def acceptance_of_requests(records: Sequence[Request]) -> Acceptance | None:
    """Acceptance from the per-request metrics; None unless every request has them."""
    if not records or any(record.spec is None for record in records):
        return None
    pairs = [(record, record.spec) for record in records if record.spec is not None]
    return Acceptance(
        source="requests",
        drafts=sum(spec.drafts for _, spec in pairs),
        draft_tokens=sum(spec.draft_tokens or 0 for _, spec in pairs),
        accepted=sum(spec.accepted for _, spec in pairs),
        undrafted_steps=sum(
            undrafted_steps(record.output_tokens or 0, 1, spec.drafts, spec.accepted)
            for record, spec in pairs
        ),
        per_position=_per_position([spec for _, spec in pairs]),
    )


def _per_position(specs: Sequence[SpecRequest | Drafts]) -> tuple[int, ...] | None:
    """How often each position was accepted; None unless every drafting request says so.

    A step that accepted n drafts accepted the positions 1 to n.
    """
    histograms = [spec.accepted_histogram or () for spec in specs if spec.drafts]
    if not all(histograms):
        return None
    deepest = max(map(len, histograms), default=1) - 1
    counts = [
        sum(sum(steps[position:]) for steps in histograms) for position in range(1, deepest + 1)
    ]
    return tuple(counts) or None


def undrafted_steps(output: int, requests: int, drafts: int, accepted: int) -> int:
    """Target steps without a draft, which vLLM counts nowhere: what the output needs beyond.

    From output = requests + drafts + accepted + undrafted - trimmed. The tokens trimmed at the
    end are not known, so this is a lower bound, short by at most k a request.
    """
    return max(0, output - requests - drafts - accepted)


def acceptance_of_counters(
    spent: EngineCounters | None, records: Sequence[Request]
) -> Acceptance | None:
    """Acceptance from the engine's counters around exactly *records*; None if it has none.

    Steps without a draft are inferred from the output's length, see `undrafted_steps`.
    """
    if spent is None or spent.drafts is None or spent.accepted is None:
        return None
    output = sum(record.output_tokens or 0 for record in records)
    return Acceptance(
        source="counters",
        drafts=spent.drafts,
        draft_tokens=spent.draft_tokens or 0,
        accepted=spent.accepted,
        undrafted_steps=undrafted_steps(output, len(records), spent.drafts, spent.accepted),
        per_position=spent.accepted_per_pos,
    )


def acceptance_of_chunks(records: Sequence[Request]) -> Acceptance | None:
    """Acceptance from tokens per streamed chunk, each taken for a step; None where they are unknown.

    For servers that count no drafts (Triton). A chunk that holds several steps makes it too high:
    hygiene looks for those. The first chunk is the prefill's.
    """
    if not records or any(record.first_tokens is None for record in records):
        return None
    later = sizes_of(records)
    later.pop(0, None)
    depth = max(later, default=1) - 1
    positions = tuple(
        sum(chunks for tokens, chunks in later.items() if tokens > place)
        for place in range(1, depth + 1)
    )
    return Acceptance(
        source="chunks",
        drafts=later.total(),
        draft_tokens=0,
        accepted=sum(tokens * chunks for tokens, chunks in later.items()) - later.total(),
        undrafted_steps=0,
        per_position=positions or None,
    )


def sizes_of(records: Iterable[Request]) -> Counter[int]:
    """How many chunks after the first hold how many tokens, of all requests that know it."""
    found: Counter[int] = Counter()
    for record in records:
        for tokens, chunks in record.later_sizes or ():
            found[tokens] += chunks
    return found


@dataclass(frozen=True)
class CaseMetrics:
    """The numbers of one case, or of a part of it. None where there is nothing to say."""

    requests: int
    failed: int
    prompts: int
    output_tokens: int
    latency_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    tokens_per_s: float | None
    acceptance: Acceptance | None
    counted: Acceptance | None
    requests_per_s: float | None = None
    percentiles: Mapping[str, float] = field(default_factory=dict)


def percentiles(figure: str, values: Sequence[float]) -> dict[str, float]:
    """The PERCENTS of *values* by name, linear between two of them.

    Of fewer than 1 / (1 - p) the p-th would stand for the largest alone, and is left out: p99 takes
    100 values, p90 takes 10.
    """
    enough = [percent for percent in PERCENTS if len(values) * (100 - percent) >= 100]
    found = np.percentile(values, enough).tolist() if enough else []
    return {percentile_name(figure, p): value for p, value in zip(enough, found, strict=True)}


def without(metrics: CaseMetrics, *figures: str) -> CaseMetrics:
    """*metrics* without these figures, nor their percentiles."""
    gone = {percentile_name(figure, percent) for figure in figures for percent in PERCENTS}
    left = {name: value for name, value in metrics.percentiles.items() if name not in gone}
    lacking: dict[str, Any] = dict.fromkeys(figures)
    return replace(metrics, percentiles=left, **lacking)


def summarise(
    records: Iterable[Request],
    spans: Sequence[CounterSpan] = (),
    *,
    speculative: bool = False,
) -> CaseMetrics:
    """The numbers of *records*; *spans* are the counters around all of them.

    Of a *speculative* arm that nobody counts, acceptance is read off the streamed chunks.
    """
    everything = list(records)
    good = [r for r in everything if r.ok]
    of_requests = acceptance_of_requests(good)
    of_counters = acceptance_of_counters(*counted(spans, good))
    times = {
        "latency_ms": [latency_ms(r) for r in good],
        "ttft_ms": [ttft_ms(r) for r in good],
        "tpot_ms": [t for r in good if (t := tpot_ms(r)) is not None],
    }
    output = sum(r.output_tokens or 0 for r in good)
    busy_s = busy_ns(good) / 1e9
    return CaseMetrics(
        requests=len(good),
        failed=len(everything) - len(good),
        prompts=len({r.prompt_id for r in good}),
        output_tokens=output,
        latency_ms=_mean(times["latency_ms"]),
        ttft_ms=_mean(times["ttft_ms"]),
        tpot_ms=_mean(times["tpot_ms"]),
        tokens_per_s=output / busy_s if busy_s > 0 and output else None,
        acceptance=of_requests
        or of_counters
        or (acceptance_of_chunks(good) if speculative else None),
        counted=of_counters,
        requests_per_s=len(good) / busy_s if busy_s > 0 else None,
        percentiles={
            name: value
            for figure, values in times.items()
            for name, value in percentiles(figure, values).items()
        },
    )


@dataclass(frozen=True)
class Goodput:
    """Requests that kept all limits: how many of how many, and per second of measured time."""

    good: int
    requests: int
    per_s: float | None


def goodput(records: Iterable[Request], limits: Mapping[str, float], *, open_loop: bool) -> Goodput:
    """Requests within *limits* (ttft_ms, tpot_ms, latency_ms), as GenAI-Perf's `--goodput` counts.

    A failed request is not good. The time is that with a request in flight, of an *open_loop* all
    from the first to the last: there waiting for the next arrival is part of the load.
    """
    measures = {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "latency_ms": latency_ms}
    everything = list(records)
    measured = [record for record in everything if record.ok]
    good = 0
    for record in measured:
        values = [(measures[name](record), limit) for name, limit in limits.items()]
        # A request of one token has no TPOT to break a limit with.
        good += all(value is None or value <= limit for value, limit in values)
    busy = busy_ns(measured)
    if open_loop and measured:
        busy = max(r.last_ns for r in measured) - min(r.sent_ns for r in measured)
    return Goodput(good, len(everything), good / (busy / 1e9) if busy > 0 else None)


def counted(
    spans: Sequence[CounterSpan], good: Sequence[Request]
) -> tuple[EngineCounters | None, list[Request]]:
    """What the engine counted, and the requests among *good* around which it did.

    A span counts only if every request inside is among *good*: a failed request, or one that was
    measured again after a resume, spoils the span that it lies in. A run that is killed between a
    request and its counters loses that one span.
    """
    if not spans:
        return None, list(good)
    by_key = {record.key: record for record in good}
    inside: list[Request] = []
    total: dict[str, Any] = {}
    requests, readable = 0, []
    for span in spans:
        if all(key in by_key for key in span.keys):
            inside += [by_key[key] for key in span.keys]
            readable.append(span.spent is not None)
            requests += span.requests
            _add(total, span.spent)
    inside = inside or list(good)
    known = bool(readable) and all(readable) and requests == len(inside)
    return EngineCounters.model_validate(total) if known else None, inside


def _add(total: dict[str, Any], spent: EngineCounters | None) -> None:
    """As EngineCounters adds, but in place: there may be a span for every request."""
    for name in EngineCounters.model_fields if spent else ():
        value, before = getattr(spent, name), total.get(name)
        if before is None:
            total[name] = value
        elif isinstance(value, tuple):
            total[name] = tuple(map(sum, zip_longest(before, value, fillvalue=0)))
        elif value is not None:
            total[name] = before + value


def busy_ns(records: Sequence[Request]) -> int:
    """Nanoseconds in which at least one of *records* was in flight (intervals united)."""
    starts, ends = (
        np.fromiter((getattr(r, name) for r in records), np.int64, len(records))
        for name in ("sent_ns", "last_ns")
    )
    total, until = 0, -math.inf
    for at in np.lexsort((ends, starts)):  # of numbers, not of pairs: there may be very many
        start, end = int(starts[at]), int(ends[at])
        if start > until:
            total, until = total + end - start, end
        elif end > until:
            total, until = total + int(end - until), end
    return total


def last_attempts(records: Iterable[R]) -> list[R]:
    """One record per (prompt, turn, cycle): the last good one, else the last.

    A resume may repeat some.
    """
    kept: dict[tuple[str, int, int], R] = {}
    for record in records:
        key = (record.prompt_id, record.turn, record.cycle)
        if is_later_attempt(record, kept.get(key)):
            kept[key] = record
    return list(kept.values())


def is_later_attempt(record: Request, before: Request | None) -> bool:
    """Whether *record* counts instead of the attempt *before* it: the last good one, else the last."""
    return before is None or record.ok or not before.ok


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
