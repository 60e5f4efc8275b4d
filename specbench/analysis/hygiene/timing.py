"""Checks of times: was the engine warm, was the machine steady?"""

from collections.abc import Callable, Sequence
from itertools import takewhile

import numpy as np

from specbench.analysis.calibration import cannot_follow
from specbench.analysis.hygiene import CaseFacts
from specbench.analysis.hygiene.acceptance import LOOK_UP_METHODS
from specbench.analysis.metrics import held_up, tpot_ms, ttft_ms
from specbench.analysis.outlines import Request

HELD_UP = 0.01  # of the requests: with more, latency and TTFT are those of the stalls
FEWEST = 8  # requests of an engine start; fewer do not tell an outlier
LOOKED_AT = 200  # requests at most: a cold start is long over then
OUTLIER = 2.0  # a first request that takes this many times as long as the others
OUTLIER_DEVIATIONS = 5.0
ALONE = 2.0  # and stands out this many times as far as any when the engine was warm
SLOWER = 1.2  # several first requests that take this many times as long as the later ones
SLOWER_DEVIATIONS = 4.0
SEVERAL = 3
SETTLED = 8  # requests after which an engine is warm (z-lab/dflash issue 135)
MATTERS = 0.01  # a share of the mean; what moves it by less is left alone
TO_DEVIATIONS = 1.4826  # median absolute deviation -> standard deviation, of a normal sample
LATE = 0.1  # of the mean time between two requests of an open loop


def stalled_reader(facts: CaseFacts) -> str | None:
    """Streams whose first chunk was read together with many later ones."""
    stalled = sum(held_up(record) for record in facts.good)
    if stalled <= HELD_UP * len(facts.good):
        return None
    return (
        f"the first token of {stalled} of {len(facts.good)} answers came together with later ones: "
        "client or server stood still, so they have no time per token and too long a TTFT"
    )


def cold_start(facts: CaseFacts) -> str | None:
    """The first measured request of an engine start is an outlier, or the first few are slow.

    At concurrency 1 only: in the first burst of several all wait for each other.
    """
    if facts.concurrency > 1:
        return None
    for start in sorted({record.start for record in facts.good}):
        records = [record for record in facts.good if record.start == start]
        records = sorted(records, key=lambda record: record.sent_ns)[:LOOKED_AT]
        if len(records) >= FEWEST and (found := _cold(records, facts.method)):
            return f"{found} (engine start {start}): not warm yet?"
    return None


def _cold(records: Sequence[Request], method: str) -> str | None:
    lengths = [record.prompt_tokens for record in records if record.prompt_tokens is not None]
    if len(lengths) < len(records):
        lengths = [0] * len(records)
    if ratio := _outlier_first([ttft_ms(record) for record in records], lengths):
        return f"the first request's first token took {ratio:.1f}x as long as the others'"
    gaps = [gap for record in records if (gap := _chunk_gap_ms(record)) is not None]
    if len(gaps) < len(records):
        return None
    if ratio := _outlier_first(gaps, [0] * len(gaps)):
        return f"the first request's chunks came {ratio:.1f}x as far apart as the others'"
    # Steps with a draft take longer than those without: looked-up drafts make prompts unlike.
    if method not in LOOK_UP_METHODS and (lead := _slow_lead(gaps)):
        count, ratio = lead
        return (
            f"the first {count} requests' chunks came {ratio:.2f}x as far apart as the later ones'"
        )
    return None


def late_sender(facts: CaseFacts) -> str | None:
    """Requests of an open loop went out so long after they were due that the rate was another one."""
    due = sorted((r.due_ns, r.sent_ns) for r in facts.records if r.due_ns is not None)
    if len(due) < 2:
        return None
    late_ms = sum(sent - when for when, sent in due) / len(due) / 1e6
    gap_ms = (due[-1][0] - due[0][0]) / (len(due) - 1) / 1e6
    if gap_ms <= 0 or late_ms <= LATE * gap_ms:
        return None
    return (
        f"requests went out {late_ms:.1f} ms after they were due on average, {late_ms / gap_ms:.0%} "
        "of the time between two: the client did not keep the rate"
    )


def client_behind(facts: CaseFacts) -> str | None:
    """The load client's own error on this machine spoils times as short as these."""
    tpots = [tpot for r in facts.good if (tpot := tpot_ms(r)) is not None]
    gaps = [gap for r in facts.good if (gap := _chunk_gap_ms(r)) is not None]
    if facts.calibration is None or not tpots or not gaps:
        return None
    means = float(np.mean(tpots)), float(np.mean(gaps))
    return cannot_follow(facts.calibration, *means, facts.concurrency)


def _chunk_gap_ms(record: Request) -> float | None:
    """Mean time between chunks: at concurrency 1 that of a step, whatever it accepted."""
    if record.chunks < 2:
        return None
    return (record.last_ns - record.first_ns) / 1e6 / (record.chunks - 1)


def _outlier_first(times: Sequence[float], lengths: Sequence[int]) -> float | None:
    """The first time over what the others' make of its prompt's length, if that is an outlier."""
    expected, fastest = _line(lengths[1:], times[1:]), min(times[1:])
    if fastest <= 0:
        return None
    ratios = [t / max(expected(n), fastest) for t, n in zip(times, lengths, strict=True)]
    first, settled = ratios[0], ratios[min(SETTLED, len(ratios) // 2) :]
    middle, deviation = _spread(ratios[1:])
    is_outlier = first >= OUTLIER and first > middle + OUTLIER_DEVIATIONS * deviation
    is_the_only_one = first - 1 > ALONE * (max(settled) - 1)
    matters = (first - 1) / len(ratios) >= MATTERS
    return first if is_outlier and is_the_only_one and matters else None


def _slow_lead(times: Sequence[float]) -> tuple[int, float] | None:
    """How many first times are slower than the settled ones, and how much, if that matters.

    A slow phase that goes on is no cold start.
    """
    if len(times) < 2 * SETTLED:
        return None
    middle, deviation = _spread(times[SETTLED:])
    limit = max(SLOWER * middle, middle + SLOWER_DEVIATIONS * deviation)
    lead = list(takewhile(lambda time: time > limit, times))
    excess = sum(lead) - len(lead) * middle
    if not SEVERAL <= len(lead) <= SETTLED or excess < MATTERS * middle * len(times):
        return None
    return len(lead), float(np.mean(lead)) / middle


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """Median and robust standard deviation."""
    middle = float(np.median(values))
    return middle, TO_DEVIATIONS * float(np.median(np.abs(np.asarray(values) - middle)))


def _line(x: Sequence[float], y: Sequence[float]) -> Callable[[float], float]:
    """The Theil-Sen line: the median of all slopes between two points, through the medians."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    one, other = np.triu_indices(len(xs), 1)
    apart = xs[other] != xs[one]
    slopes = (ys[other] - ys[one])[apart] / (xs[other] - xs[one])[apart]
    slope = float(np.median(slopes)) if slopes.size else 0.0
    level = float(np.median(ys - slope * xs))
    return lambda at: level + slope * at
