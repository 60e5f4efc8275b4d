"""Runs the load client against the null server, to know its error on this machine.

`specbench calibrate` shows it; `run` keeps a short one with what it measured.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing

from specbench.analysis.calibration import Calibration, ClientError, client_error, pair
from specbench.config import Load, Sampling
from specbench.load.direct import DirectClient
from specbench.load.null_server import NullServer, running
from specbench.records import Prompt, RequestRecord

TTFT_MS = 20.0
MOST_CHUNKS, FEWEST_CHUNKS = 256, 16
WARM_UP_CHUNKS = 16
QUICK_S = 0.4
STREAMS_PER_MS = 16  # at a quick calibration: more of them come less often each
TTFT_TARGET_MS, TPOT_TARGET = 0.2, 0.001


def calibrate(loads: Sequence[tuple[int, float]], *, seconds: float) -> Calibration:
    """The client's error under each of *loads*, pairs of (concurrency, ms between chunks).

    Takes about *seconds* for each, and as long as its requests where those take longer.

    Raises:
        LoadError: a request failed.
        EngineError: the null server did not start.
    """
    return Calibration.model_validate(_timed(loads, seconds))


def quick_calibration(concurrencies: Sequence[int] = (1,)) -> Calibration:
    """What fits into a second: the least and the greatest of *concurrencies*.

    Raises:
        LoadError, EngineError: as `calibrate`.
    """
    loads = [
        (c, max(1.0, c / STREAMS_PER_MS)) for c in sorted({min(concurrencies), max(concurrencies)})
    ]
    return calibrate(loads, seconds=QUICK_S)


def _timed(loads: Sequence[tuple[int, float]], seconds: float) -> dict[str, object]:
    began = time.perf_counter()
    with running() as server:
        errors = [_measure(server, concurrency, gap_ms, seconds) for concurrency, gap_ms in loads]
    return {"errors": errors, "wall_s": time.perf_counter() - began}


def _measure(server: NullServer, concurrency: int, gap_ms: float, seconds: float) -> ClientError:
    server.pace(ttft_ms=TTFT_MS, gap_ms=gap_ms)
    chunks = round((seconds * 1e3 / 4 - TTFT_MS) / gap_ms)
    chunks = max(FEWEST_CHUNKS, min(MOST_CHUNKS, chunks))
    rounds = max(2, round(seconds * 1e3 / (TTFT_MS + chunks * gap_ms)))
    client = DirectClient(
        url=server.url,
        served_model=server.model,
        api_key=None,
        sampling=Sampling(),
        load=Load(),
    )
    records: list[RequestRecord] = []
    prompts = list(_prompts(concurrency * rounds))
    with closing(client):
        client.send(
            list(_prompts(concurrency)),
            max_tokens=WARM_UP_CHUNKS,
            concurrency=concurrency,
            on_record=lambda _: None,
        )
        server.forget()
        cpu_ns = time.process_time_ns()
        client.send(prompts, max_tokens=chunks, concurrency=concurrency, on_record=records.append)
        cpu_ns = time.process_time_ns() - cpu_ns
    pairs = pair(records, server.log())
    return client_error(pairs, concurrency=concurrency, gap_ms=gap_ms, cpu_ns=cpu_ns)


def _prompts(count: int) -> Iterator[Prompt]:
    for number in range(count):
        text = f"Tell me about the number {number} and what comes after it."
        yield Prompt(id=str(number), turns=(text,))


def as_text(calibration: Calibration) -> str:
    """A table for the terminal, and what is out of line below it."""
    head = (
        "streams  gap ms (kept)  requests  TTFT ms (p95)    TPOT ms       %  latency ms  "
        "delay p95 ms  merged  CPU us/chunk\n"
    )
    return head + "".join(_line(error) for error in calibration.errors)


def _line(error: ClientError) -> str:
    tpot = (
        "      –       –"
        if error.tpot_ms is None
        else (f"{error.tpot_ms:+8.4f} {100 * (error.tpot_share or 0):+6.2f}%")
    )
    wide = (
        f"{error.concurrency:7d} {error.gap_ms:7.3g} ({error.served_gap_ms:5.3g})"
        f"{error.requests:10d}  {error.ttft_ms:+7.3f} ({error.ttft_p95_ms:5.3f})  {tpot}"
        f"{error.latency_ms:+12.3f}{error.delay_p95_ms:14.3f}{error.merged_share:8.1%}"
        f"{error.cpu_us_per_chunk:14.1f}"
    )
    notes = []
    if error.served_gap_ms > 1.05 * error.gap_ms:
        notes.append("the server itself did not keep its pace")
    if error.ttft_ms > TTFT_TARGET_MS:
        notes.append(f"TTFT is off by more than {TTFT_TARGET_MS:g} ms")
    if error.tpot_share is None or abs(error.tpot_share) > TPOT_TARGET:
        notes.append(f"TPOT is off by more than {TPOT_TARGET:.1%}")
    return wide + (f"  {'; '.join(notes)}" if notes else "") + "\n"
