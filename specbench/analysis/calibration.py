"""The load client's own error: what it measured of a server that knows, less what that server did.

A difference of two times by two clocks would say nothing; each figure here is a difference of two
durations, each taken by one side (TTFT, latency), or of chunk times where both clocks are the same
one (delay). Pure: no processes, no clocks.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specbench.analysis.metrics import held_up, latency_ms, tpot_ms, ttft_ms
from specbench.errors import LoadError
from specbench.records import Fact, RequestRecord

MATTERS = 0.01  # of the time per token
BUSY = 0.7  # of one core; what is above leaves chunks waiting


class Served(Protocol):
    """One request as the server timed it (load.null_server.Served); ns of its own clock.

    `sent_ns` and `tokens` have an entry for each chunk; `prompt_sha256` is RequestRecord's.
    """

    prompt_sha256: str
    received_ns: int
    sent_ns: list[int]
    tokens: list[int]


class ClientError(Fact):
    """The client's times less the server's own under one load: `concurrency` streams, one chunk
    each `gap_ms`.

    Means over requests but for `…_median_…` and `…_p95_…` (the 95th percentile). `served_gap_ms` is what the server
    kept of its pace. `delay_…` is from a chunk's sending to its stamp; `merged_share` the share of
    chunks that carry the stamp of the one before, `held_up` the requests without a time per token
    (metrics.held_up). `cpu_us_per_chunk` is the client's, with making requests and records.
    """

    concurrency: int
    gap_ms: float
    requests: int
    chunks: int
    served_gap_ms: float
    ttft_ms: float
    ttft_median_ms: float
    ttft_p95_ms: float
    tpot_ms: float | None
    tpot_share: float | None
    latency_ms: float
    delay_ms: float
    delay_p95_ms: float
    merged_share: float
    held_up: int
    cpu_us_per_chunk: float


class Calibration(Fact):
    """The client's error under several loads, as it was on this machine just then."""

    errors: tuple[ClientError, ...]
    wall_s: float


def pair(
    records: Sequence[RequestRecord], log: Sequence[Served]
) -> list[tuple[RequestRecord, Served]]:
    """Each record with the server's account of the same request.

    Raises:
        LoadError: a request failed, or the two do not tell of the same requests and chunks.
    """
    served = {one.prompt_sha256: one for one in log}
    if len(served) != len(log) or len(log) != len(records):
        raise LoadError(
            f"The client recorded {len(records)} requests, the null server {len(log)} "
            f"({len(served)} different ones)."
        )
    pairs = []
    for record in records:
        if record.error is not None:
            raise LoadError(f"A request to the null server failed: {record.error}.")
        own = served.get(record.prompt_sha256)
        if own is None or len(own.sent_ns) != len(record.chunk_ns):
            raise LoadError(f"The null server's log does not tell of request {record.prompt_id}.")
        pairs.append((record, own))
    return pairs


def client_error(
    pairs: Sequence[tuple[RequestRecord, Served]],
    *,
    concurrency: int,
    gap_ms: float,
    cpu_ns: int,
) -> ClientError:
    """What *pairs* say of the client, which took *cpu_ns* of CPU time for them."""
    ttfts, tpots, latencies, own_tpots = [], [], [], []
    delays: list[int] = []
    merged = later = 0
    for record, own in pairs:
        ttfts.append(ttft_ms(record) - (own.sent_ns[0] - own.received_ns) / 1e6)
        latencies.append(latency_ms(record) - (own.sent_ns[-1] - own.received_ns) / 1e6)
        own_tpot = (own.sent_ns[-1] - own.sent_ns[0]) / 1e6 / max(1, sum(own.tokens[1:]))
        if (measured := tpot_ms(record)) is not None:
            tpots.append(measured - own_tpot)
            own_tpots.append(own_tpot)
        delays += [a - b for a, b in zip(record.chunk_ns, own.sent_ns, strict=True)]
        merged += len(record.chunk_ns) - len(set(record.chunk_ns))
        later += len(record.chunk_ns) - 1
    spans = [(own.sent_ns[-1] - own.sent_ns[0]) / 1e6 for _, own in pairs]
    chunks = later + len(pairs)
    return ClientError(
        concurrency=concurrency,
        gap_ms=gap_ms,
        requests=len(pairs),
        chunks=chunks,
        served_gap_ms=sum(spans) / max(1, later),
        ttft_ms=float(np.mean(ttfts)),
        ttft_median_ms=float(np.median(ttfts)),
        ttft_p95_ms=float(np.percentile(ttfts, 95)),
        tpot_ms=float(np.mean(tpots)) if tpots else None,
        tpot_share=float(np.mean(tpots) / np.mean(own_tpots)) if tpots else None,
        latency_ms=float(np.mean(latencies)),
        delay_ms=float(np.mean(delays)) / 1e6,
        delay_p95_ms=float(np.percentile(delays, 95)) / 1e6,
        merged_share=merged / max(1, later),
        held_up=sum(held_up(record) for record, _ in pairs),
        cpu_us_per_chunk=cpu_ns / 1e3 / chunks,
    )


def cannot_follow(
    calibration: Calibration, tpot_ms: float, chunk_gap_ms: float, concurrency: int
) -> str | None:
    """Why the client's own error spoils what it measured; None where it is too small to matter.

    *tpot_ms* and *chunk_gap_ms* are what was measured: a request's time per token and between
    chunks (more, where a chunk carries several tokens).
    """
    near = _nearest(calibration, chunk_gap_ms, concurrency)
    if near is None or chunk_gap_ms <= 0 or tpot_ms <= 0:
        return None
    at = f"at concurrency {near.concurrency} and {near.gap_ms:g} ms between chunks"
    busy = near.cpu_us_per_chunk * concurrency / (chunk_gap_ms * 1e3)
    if busy > BUSY:
        return (
            f"a chunk costs the client {near.cpu_us_per_chunk:.0f} us ({at}): with {concurrency} "
            f"streams of one each {chunk_gap_ms:.2g} ms it is busy {busy:.0%} of the time and "
            "stamps them late"
        )
    if near.tpot_ms is None:
        return f"{at} the client read so many chunks together that it has no time per token"
    if abs(near.tpot_ms) > MATTERS * tpot_ms:
        return (
            f"the client's own error is {near.tpot_ms / tpot_ms:+.1%} of the time per token "
            f"(calibrated {at})"
        )
    return None


def _nearest(calibration: Calibration, gap_ms: float, concurrency: int) -> ClientError | None:
    """The calibrated load that asks at least as much of the client, or else the most of it."""
    if not calibration.errors:
        return None

    def distance(error: ClientError) -> tuple[float, float]:
        more_streams = error.concurrency / concurrency
        faster = gap_ms / error.gap_ms
        return _beyond(more_streams), _beyond(faster)

    return min(calibration.errors, key=distance)


def _beyond(ratio: float) -> float:
    """How far from 1 a ratio is; below 1, where the load is less than was asked, far away."""
    return ratio if ratio >= 1 else 1e6 / ratio
