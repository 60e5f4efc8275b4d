"""A tool's own figures beside ours: of the same requests, by the same names."""

from collections.abc import Callable

import pytest

from specbench.analysis.tool_figures import beside_ours
from specbench.records import RequestRecord, ToolReport

Build = Callable[..., RequestRecord]


def report(keys: list[str], **figures: float) -> ToolReport:
    return ToolReport(
        tool="genai-perf",
        version="0.0.16",
        argv=(),
        folder="genai-perf.0",
        start=0,
        keys=tuple(keys),
        wall_s=1,
        figures=figures,
    )


def test_ours_are_of_the_requests_that_it_measured(record: Build) -> None:
    records = [
        record("a", sent=0, chunks=(100, 200, 300)),
        record("b", sent=1000, chunks=(1200, 1400, 1600)),
        record("of another run", sent=0, chunks=(9000, 9999)),
    ]
    said = report(["a#0@0", "b#0@0"], ttft_ms=150, tpot_ms=152, latency_ms=460, requests=2)
    found = {one.figure: one for one in beside_ours([said], records)}
    assert found["ttft_ms"].ours == pytest.approx(150)
    assert found["tpot_ms"].ours == pytest.approx(150)
    assert found["latency_ms"].ours == pytest.approx(450)
    assert {name: one.agrees for name, one in found.items()} == {
        "ttft_ms": True,
        "tpot_ms": True,
        "latency_ms": False,
    }
    assert found["latency_ms"].difference == pytest.approx(460 / 450 - 1)


def test_runs_of_the_tool_count_by_their_requests(record: Build) -> None:
    records = [record(name, chunks=(ms, 2 * ms)) for name, ms in (("a", 10), ("b", 20), ("c", 90))]
    reports = [report(["a#0@0", "b#0@0"], ttft_ms=15), report(["c#0@0"], ttft_ms=90)]
    (found,) = beside_ours(reports, records)
    assert found.theirs == found.ours == pytest.approx(40)


def test_nothing_is_compared_where_a_request_is_missing(record: Build) -> None:
    assert beside_ours([report(["a#0@0", "gone#0@0"], ttft_ms=15)], [record("a")]) == ()
    failed = record("b", chunks=(), error="lost")
    assert beside_ours([report(["b#0@0"], ttft_ms=15)], [failed]) == ()
    assert beside_ours([], [record("a")]) == ()
