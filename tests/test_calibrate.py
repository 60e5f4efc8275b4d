"""The client's own error: the arithmetic on times made up, and one real calibration."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner

from specbench import calibrate
from specbench.analysis import calibration
from specbench.analysis.calibration import Calibration, ClientError, cannot_follow, client_error
from specbench.cli import app
from specbench.errors import LoadError, UserError
from specbench.records import RequestRecord

Build = Callable[..., RequestRecord]
MS = 1_000_000


@dataclass
class Served:
    prompt_sha256: str
    received_ns: int
    sent_ns: list[int]
    tokens: list[int]


def served(record: RequestRecord, received: float, sent: list[float]) -> Served:
    """The server's account, times in ms."""
    times = [round(ms * MS) for ms in sent]
    return Served(record.prompt_sha256, round(received * MS), times, [1] * len(sent))


def error_of(*pairs: tuple[RequestRecord, Served], cpu_ns: int = 0) -> ClientError:
    return client_error(pairs, concurrency=1, gap_ms=10, cpu_ns=cpu_ns)


def test_a_client_that_is_right_has_no_error(record: Build) -> None:
    """All is as late as the first: the way there and back is no error of the durations."""
    one = record(sent=0, chunks=[20.5, 30.5, 40.5])
    error = error_of((one, served(one, 0.5, [20.5, 30.5, 40.5])))
    assert error.ttft_ms == pytest.approx(0.5)  # what the request was on its way
    assert error.tpot_ms == pytest.approx(0, abs=1e-9)
    assert error.served_gap_ms == pytest.approx(10)


def test_each_figure_is_the_clients_less_the_servers(record: Build) -> None:
    one = record(sent=0, chunks=[21, 31.5, 43], tokens=3)
    error = error_of((one, served(one, 0.5, [20.5, 30.5, 40.5])), cpu_ns=90_000)
    assert error.ttft_ms == pytest.approx(21 - 20)
    assert error.latency_ms == pytest.approx(43 - 40)
    assert error.tpot_ms == pytest.approx(22 / 2 - 20 / 2)
    assert error.tpot_share == pytest.approx(0.1)
    assert error.delay_ms == pytest.approx((0.5 + 1 + 2.5) / 3)
    assert error.cpu_us_per_chunk == pytest.approx(30)
    assert error.merged_share == 0


def test_chunks_of_one_read_are_merged(record: Build) -> None:
    chunks = [20, 30, 30, 50, 50]
    one = record(chunks=chunks)
    error = error_of((one, served(one, 0, [20, 25, 30, 40, 50])))
    assert error.merged_share == pytest.approx(2 / 4)
    assert error.held_up == 0


def test_a_request_that_was_held_up_has_no_time_per_token(record: Build) -> None:
    held = record(chunks=[60] * 9 + [70])
    error = error_of((held, served(held, 0, [10.0 * i for i in range(10)])))
    assert error.held_up == 1
    assert error.tpot_ms is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r, s: ([r], []), "recorded 1 requests, the null server 0"),
        (lambda r, s: ([r, r], [s, s]), r"\(1 different ones\)"),
        (lambda r, s: ([r.model_copy(update={"error": "cut"})], [s]), "failed: cut"),
        (lambda r, s: ([r.model_copy(update={"prompt_sha256": "x"})], [s]), "of request a"),
        (lambda r, s: ([r.model_copy(update={"chunk_ns": (1,)})], [s]), "of request a"),
    ],
)
def test_accounts_that_do_not_match_are_refused(
    record: Build, change: Callable[..., tuple[list[RequestRecord], list[Served]]], message: str
) -> None:
    one = record()
    records, log = change(one, served(one, 0, [100, 200]))
    with pytest.raises(LoadError, match=message):
        calibration.pair(records, log)


def test_a_record_meets_its_own_request(record: Build) -> None:
    a, b = record("a"), record("b")
    accounts = [served(b, 0, [1, 2]), served(a, 0, [1, 2])]
    pairs = calibration.pair([a, b], accounts)
    assert [(r.prompt_id, s.prompt_sha256) for r, s in pairs] == [
        ("a", a.prompt_sha256),
        ("b", b.prompt_sha256),
    ]


# --- what it says of a measurement ---------------------------------------------------------------


def known(**more: float | None) -> ClientError:
    facts: dict[str, float | int | None] = dict.fromkeys(ClientError.model_fields, 0)
    facts |= {"concurrency": 1, "gap_ms": 1.0, "tpot_ms": 0.0, "cpu_us_per_chunk": 40}
    return ClientError.model_validate(facts | more)


def finding(*errors: ClientError, tpot: float, gap: float, concurrency: int = 1) -> str | None:
    return cannot_follow(
        Calibration(errors=errors, wall_s=1),
        tpot_ms=tpot,
        chunk_gap_ms=gap,
        concurrency=concurrency,
    )


def test_a_small_error_is_no_finding() -> None:
    assert finding(known(tpot_ms=0.009), tpot=1, gap=1) is None


def test_an_error_above_one_percent_is_said() -> None:
    found = finding(known(tpot_ms=0.02), tpot=1, gap=1)
    assert found == (
        "the client's own error is +2.0% of the time per token "
        "(calibrated at concurrency 1 and 1 ms between chunks)"
    )
    assert finding(known(tpot_ms=-0.02), tpot=1, gap=1) is not None
    assert finding(known(tpot_ms=0.02), tpot=30, gap=30) is None


def test_a_client_that_is_busy_cannot_follow() -> None:
    found = finding(known(), tpot=1, gap=1, concurrency=20)
    assert found is not None
    assert "20 streams of one each 1 ms it is busy 80% of the time" in found
    assert finding(known(), tpot=1, gap=1, concurrency=16) is None


def test_the_load_that_asks_at_least_as_much_is_looked_at() -> None:
    alone, many = known(tpot_ms=0.5), known(concurrency=64, tpot_ms=0.0, cpu_us_per_chunk=5)
    slow = known(gap_ms=20, tpot_ms=0.5)
    assert finding(alone, many, slow, tpot=10, gap=10, concurrency=8) is None
    assert finding(alone, many, slow, tpot=10, gap=10) is not None


def test_without_a_calibration_nothing_is_said() -> None:
    assert finding(tpot=1, gap=1) is None


# --- for real ------------------------------------------------------------------------------------


def test_a_real_calibration_is_complete_and_no_client_is_before_its_server() -> None:
    found = calibrate.calibrate([(1, 2.0), (4, 2.0)], seconds=0.1)
    assert [(error.concurrency, error.requests) for error in found.errors] == [(1, 2), (4, 8)]
    for error in found.errors:
        assert error.chunks == 16 * error.requests
        assert error.delay_ms > 0
        assert error.ttft_ms > 0
        assert error.served_gap_ms > 0
        assert error.cpu_us_per_chunk > 0
    lines = calibrate.as_text(found).splitlines()
    assert len(lines) == 3


def test_the_command_shows_a_line_for_each_load_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def calibrated(loads: list[tuple[int, float]], *, seconds: float) -> Calibration:
        asked.extend([loads, seconds])
        errors = tuple(known(concurrency=c, gap_ms=g, served_gap_ms=g) for c, g in loads)
        return Calibration(errors=errors, wall_s=1)

    monkeypatch.setattr(calibrate, "calibrate", calibrated)
    flags = ["calibrate", "--concurrency", "1,8", "--gap-ms", "0.5,2", "--seconds", "0.5"]
    shown = CliRunner().invoke(app, flags)
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) == 1 + 4
    assert asked == [[(1, 0.5), (1, 2.0), (8, 0.5), (8, 2.0)], 0.5]
    as_json = CliRunner().invoke(app, [*flags, "--json"]).stdout
    assert Calibration.model_validate_json(as_json).errors[3].gap_ms == 2.0


@pytest.mark.parametrize("text", ["", "1,", "0", "many", "nan", "1e9"])
def test_a_load_that_is_no_number_is_refused(text: str) -> None:
    done = CliRunner().invoke(app, ["calibrate", "--concurrency", text])
    assert isinstance(done.exception, UserError)
    assert "--concurrency" in str(done.exception)


def test_the_table_says_what_is_out_of_line() -> None:
    late = known(ttft_ms=0.3, served_gap_ms=2.0, tpot_ms=0.002, tpot_share=0.002)
    line = calibrate.as_text(Calibration(errors=(late,), wall_s=1)).splitlines()[1]
    assert "did not keep its pace" in line
    assert "TTFT is off" in line
    assert "TPOT is off" in line


def test_a_quick_calibration_looks_at_the_least_and_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []

    def calibrated(loads: list[tuple[int, float]], *, seconds: float) -> Calibration:
        asked.extend(loads)
        return Calibration(errors=(), wall_s=seconds)

    monkeypatch.setattr(calibrate, "calibrate", calibrated)
    calibrate.quick_calibration((8, 1, 64))
    calibrate.quick_calibration()
    assert asked == [(1, 1.0), (64, 4.0), (1, 1.0)]
