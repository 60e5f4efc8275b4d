"""`report --watch` and the k curves: what is shown beside a run, and when it stops."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from table_rows import plain_row
from typer.testing import CliRunner

from specbench.analysis.cases import MeasuredCase
from specbench.analysis.hygiene import Flag
from specbench.analysis.metrics import CaseMetrics
from specbench.analysis.rows import Row
from specbench.analysis.speedup import Ratio, Speedup
from specbench.cli import app
from specbench.errors import UserError
from specbench.records import Prompt, RequestRecord
from specbench.render.report import Findings, as_table
from specbench.render.sparkline import ASCII, BLOCKS, k_curves, sparkline
from specbench.render.watch import (
    EVERY_S,
    OWN_SHARE,
    QUIET_S,
    Done,
    is_written,
    progress,
    progress_lines,
    view,
    watch,
)
from specbench.store import RunStore

Build = Callable[..., RequestRecord]
PROMPTS = [Prompt(id=f"p{i}", turns=(f"question {i}",)) for i in range(4)]


# --- k curves ------------------------------------------------------------------------------------

MEASURED = CaseMetrics(4, 0, 4, 96, None, None, None, None, None, None)


def row(k: int, speedup: float | None, **more: Any) -> Row:  # noqa: ANN401
    ratio = None if speedup is None else Ratio(speedup, None, None, 4, 1, None)
    paired = Speedup(ratio, ratio, None, speedup, 4, 0) if ratio else None
    facts = {"metrics": MEASURED, "speedup": paired, "is_baseline": False}
    return plain_row(k, **(facts | more))


def curve(*speedups: float, **more: Any) -> list[Row]:  # noqa: ANN401
    return [row(k, speedup, **more) for k, speedup in enumerate(speedups, 1)]


HUMP = (1.1, 1.3, 1.42, 1.35, 1.15)


def test_a_curve_is_a_line_with_its_best_k() -> None:
    assert k_curves(curve(*HUMP)) == ["eagle  he  k 1..5  ▁▅█▆▂  best 3 (1.42x)"]


def test_a_terminal_without_blocks_gets_ascii() -> None:
    (line,) = k_curves(curve(*HUMP), plain=True)
    assert line == "eagle  he  k 1..5  _=#+.  best 3 (1.42x)"
    assert line.isascii()


def test_two_k_are_no_curve() -> None:
    assert k_curves(curve(1.1, 1.2)) == []
    assert k_curves([*curve(1.1, 1.2), row(3, None)]) == []


def test_each_method_and_condition_has_its_line_in_columns() -> None:
    rows = [
        *curve(*HUMP),
        *curve(*HUMP, prompt_set="mt_bench", max_tokens=512),
        *curve(*HUMP, label="draft_model"),
    ]
    assert k_curves(rows) == [
        "eagle        he 24 tokens         k 1..5  ▁▅█▆▂  best 3 (1.42x)",
        "eagle        mt_bench 512 tokens  k 1..5  ▁▅█▆▂  best 3 (1.42x)",
        "draft_model  he 24 tokens         k 1..5  ▁▅█▆▂  best 3 (1.42x)",
    ]


def test_k_that_were_left_out_are_not_claimed() -> None:
    rows = [row(1, 1.0), row(3, 1.2), row(7, 1.1)]
    assert k_curves(rows) == ["eagle  he  k 1,3,7  ▁█▅  best 3 (1.20x)"]


def test_a_flagged_k_is_best_only_where_all_are_flagged_and_then_in_doubt() -> None:
    flag = (Flag("missing", "4 of 80"),)
    rows = curve(1.1, 1.2, 1.3)
    assert k_curves([*rows[:2], replace(rows[2], flags=flag)])[0].endswith("best 2 (1.20x)")
    assert k_curves([replace(one, flags=flag) for one in rows])[0].endswith("best 3 (1.30x?)")


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.booleans())
def test_heights_follow_the_values(values: list[float], plain: bool) -> None:
    line, marks = sparkline(values, plain=plain), ASCII if plain else BLOCKS
    assert len(line) == len(values)
    heights = [marks.index(mark) for mark in line]
    if max(values) / min(values) < 1.02:
        assert set(heights) == {4}  # what differs by less than 2% is no shape
        return
    assert heights[values.index(min(values))] == 0
    assert heights[values.index(max(values))] == 7
    order = sorted(range(len(values)), key=lambda i: values[i])
    assert [heights[i] for i in order] == sorted(heights)


def test_the_report_has_the_curves_under_its_table() -> None:
    run: dict[str, Any] = {
        "id": "r",
        "config": {
            "model": "m",
            "schedule": "interleaved",
            "sampling": {"temperature": 0.0, "ignore_eos": False},
            "engine": {},
        },
        "machine": {"gpus": [], "cpu": "Some CPU", "cores": 2},
        "vllm": "0.32.0",
    }
    lines = as_table(run, Findings(curve(*HUMP)), width=80, colour=False).splitlines()
    assert "eagle  he  k 1..5  ▁▅█▆▂  best 3 (1.42x)" in lines
    assert max(map(len, lines)) <= 80


# --- how far -------------------------------------------------------------------------------------


def case(records: Sequence[RequestRecord], arm: str = "vanilla", **more: Any) -> MeasuredCase:  # noqa: ANN401
    plain = MeasuredCase(
        arm=arm,
        method=arm,
        k=0,
        prompt_set="he",
        max_tokens=24,
        concurrency=1,
        repeat=0,
        expected_requests=10,
        records=records,
        spans=[],
        status="unfinished",
    )
    return replace(plain, **more)


def took(record: Build, count: int, each_s: float, **more: Any) -> list[RequestRecord]:  # noqa: ANN401
    return [record(f"p{i}", chunks=(each_s * 1e3,), **more) for i in range(count)]


def test_progress_is_by_arm_and_the_rest_at_its_own_pace(record: Build) -> None:
    found = progress(
        [
            case(took(record, 4, 2)),
            case(took(record, 10, 3), status="ok"),
            case(took(record, 1, 5), "eagle"),
        ]
    )
    assert found == [Done("vanilla", 14, 20, 12.0), Done("eagle", 1, 10, 45.0)]
    assert progress_lines(found, open_end=False) == [
        "vanilla 14/20 · eagle 1/10",
        "requests left: about 57 s (starting engines not counted)",
    ]


def test_an_arm_that_has_not_begun_goes_at_the_pace_of_the_others(record: Build) -> None:
    found = progress([case(took(record, 5, 2)), case([], "eagle")])
    assert [one.left_s for one in found] == [10, 20]
    assert progress_lines(progress([case([])]), open_end=False)[1].startswith(
        "requests left: not known yet"
    )


def test_concurrency_and_rates_set_the_pace(record: Build) -> None:
    (four,) = progress([case(took(record, 2, 8), concurrency=4)])
    (rated,) = progress([case([], rate=0.5)])
    assert (four.left_s, rated.left_s) == (16, 20)


def test_failures_repeats_and_later_passes_are_no_progress(record: Build) -> None:
    records = [
        record("a", error="cut"),
        record("b", error="cut"),
        record("b"),
        record("c"),
        record("c", cycle=1),
    ]
    assert progress([case(records)])[0].done == 2


@pytest.mark.parametrize("status", ["failed", "partial"])
def test_a_case_that_broke_off_is_not_waited_for(record: Build, status: str) -> None:
    found = progress([case(took(record, 3, 2), status=status)])
    assert found[0].left_s == 0
    assert progress_lines(found, open_end=False) == ["vanilla 3/10"]


@pytest.mark.parametrize(
    ("left_s", "said"),
    [(3.4, "about 3 s"), (240, "about 4 min"), (7300, "about 2 h 2 min")],
)
def test_durations_read_like_durations(left_s: float, said: str) -> None:
    assert said in progress_lines([Done("a", 1, 2, left_s)], open_end=False)[1]


def test_under_precision_nobody_promises_an_end() -> None:
    assert "at least 60 s" in progress_lines([Done("a", 1, 2, 60)], open_end=True)[1]


def test_when_everything_is_done_nothing_is_left() -> None:
    assert progress_lines([Done("a", 2, 2, 0.0)], open_end=False) == ["a 2/2"]


# --- until when ----------------------------------------------------------------------------------

MadeRun = Callable[..., RunStore]


@pytest.fixture
def run(made_run: MadeRun) -> RunStore:
    """A run of vanilla and eagle at three k that is not done."""
    store = made_run(PROMPTS, say=lambda *_: "one two three four", arms={"eagle": (1, 2, 3)})
    (store.path / "done.json").unlink()
    (store.path / "cases" / "eagle-k3.c1" / "done.json").unlink()
    return store


def screen() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100)


def never(_: float) -> None:
    raise AssertionError("it should have stopped")


def test_the_view_holds_progress_table_and_curves(run: RunStore) -> None:
    text = view(run, by=None, baseline="vanilla", width=80, colour=False)
    assert "vanilla 4/4 · eagle-k1 4/4" in text
    assert re.search(r"^eagle +3 he", text, re.MULTILINE)
    assert re.search(r"k 1\.\.3  \S{3}  best \d", text)


def test_it_ends_when_the_run_is_done(run: RunStore) -> None:
    drawn: list[bool] = []

    def draw(store: RunStore) -> str:
        drawn.append(store.status() is not None)
        return "table"

    def finish(_: float) -> None:
        run.finish("ok")

    with run:
        said = watch(run.path, draw, screen(), sleep=finish)
    assert drawn == [False, True]
    assert said.endswith("is done: ok.")


def test_the_next_look_waits_by_what_the_last_one_cost(run: RunStore) -> None:
    cpu, slept = iter([0.0, 0.01, 1.0, 3.0, 5.0]), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            raise KeyboardInterrupt

    with run:
        said = watch(run.path, lambda _: "", screen(), sleep=sleep, cpu_clock=lambda: next(cpu))
    assert slept == [EVERY_S, pytest.approx(2 / OWN_SHARE)]
    assert said.startswith("The run goes on")


def test_a_run_that_nobody_goes_on_with_is_not_watched_for_ever(run: RunStore) -> None:
    later = time.time() + QUIET_S + 1
    said = watch(run.path, lambda _: "", screen(), sleep=never, clock=lambda: later)
    assert "nobody is going on with it" in said


def test_a_run_that_is_quiet_but_alive_is_watched_on(run: RunStore) -> None:
    later = time.time() + QUIET_S + 1

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    with run:
        said = watch(run.path, lambda _: "", screen(), sleep=stop, clock=lambda: later)
    assert said.startswith("The run goes on")


def test_a_run_is_written_while_its_lock_is_held(run: RunStore) -> None:
    assert not is_written(run.path)
    with run:
        assert is_written(run.path)
        with (run.path / "lock").open("w", encoding="utf-8") as other, pytest.raises(OSError):  # noqa: PT011
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # looking took no lock
    assert not is_written(run.path)


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more", [["--format", "csv"], ["-o", "x"], ["--strict"]], ids=["format", "output", "strict"]
)
def test_what_does_not_go_with_watching_is_refused(run: RunStore, more: list[str]) -> None:
    done = CliRunner().invoke(app, ["report", "--watch", str(run.path), *more])
    assert isinstance(done.exception, UserError)
    assert "--watch redraws the table" in str(done.exception)
    assert done.stdout == ""


def test_without_a_terminal_it_prints_once_and_says_so(run: RunStore) -> None:
    done = CliRunner().invoke(app, ["report", "--watch", str(run.path)])
    assert done.exit_code == 0
    assert done.stdout.startswith("method")
    assert "\x1b" not in done.stdout
    assert "--watch needs a terminal" in done.stderr


def test_ctrl_c_on_a_terminal_ends_it_cleanly(run: RunStore) -> None:
    ours, theirs = pty.openpty()
    with run:
        process = subprocess.Popen(
            [sys.executable, "-m", "specbench", "report", "--watch", str(run.path)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        seen = read_until(ours, b"best")
        process.send_signal(signal.SIGINT)
        seen += read_until(ours, None)
        code = process.wait(20)
    os.close(ours)
    assert code == 0
    assert b"The run goes on" in seen
    assert b"Traceback" not in seen
    assert seen.rindex(b"\x1b[?25h") > seen.index(b"\x1b[?25l")  # the cursor is back


def read_until(terminal: int, word: bytes | None) -> bytes:
    """What a process writes, up to *word* or to its end."""
    seen = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (word is None or word not in seen):
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # Linux's end of a terminal
                break
            seen += piece
    return seen
