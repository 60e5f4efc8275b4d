"""`specbench report --watch`: the table of a run that is still going, redrawn in place.

It reads the run's folder and nothing else. What it takes of the CPU is taken from the measurement, so
that it runs at low priority and the next look waits until this one has cost less than OWN_SHARE of a
core.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.analysis.cases import MeasuredCase
from specbench.analysis.metrics import last_attempts
from specbench.analysis.rows import rows as make_rows
from specbench.analysis.slices import By
from specbench.render.columns import printable
from specbench.render.read import measured_cases
from specbench.render.report import table_alone
from specbench.render.sparkline import k_curves
from specbench.store import RunStore

if TYPE_CHECKING:
    from rich.console import Console

EVERY_S = 3.0
OWN_SHARE = 0.05  # of a core, on average: half of what flags a measurement
QUIET_S = 60.0  # without a writer and without a change: nobody goes on with the run
LOCKS = Path("/proc/locks")


@dataclass(frozen=True)
class Done:
    """How far an arm is, over all of its cases, in requests. `left_s` is None until one is known."""

    arm: str
    done: int
    planned: int
    left_s: float | None


def progress(cases: Sequence[MeasuredCase]) -> list[Done]:
    """Each arm's requests, first passes only: how many more `precision` asks for nobody knows.

    What a case that broke off lacks is not waited for: only a resumed run goes on with it.
    """
    paces = {id(case): _pace_s(case) for case in cases}
    known = [pace for pace in paces.values() if pace is not None]
    typical = sum(known) / len(known) if known else None
    found: dict[str, Done] = {}
    for case in cases:
        done = min(_done(case), case.expected_requests)
        pace = paces[id(case)] or typical
        left = case.expected_requests - done if case.status == "unfinished" else 0
        left_s = 0.0 if not left else None if pace is None else left * pace
        so_far = found.get(case.arm, Done(case.arm, 0, 0, 0.0))
        both = None if so_far.left_s is None or left_s is None else so_far.left_s + left_s
        planned = so_far.planned + case.expected_requests
        found[case.arm] = Done(case.arm, so_far.done + done, planned, both)
    return list(found.values())


def _done(case: MeasuredCase) -> int:
    return sum(record.ok and not record.cycle for record in last_attempts(case.records))


def _pace_s(case: MeasuredCase) -> float | None:
    """Seconds from one request's end to the next one's, as far as the case is measured."""
    if case.rate:
        return 1 / case.rate
    good = [record for record in case.records if record.ok]
    took_s = sum(record.end_ns - record.sent_ns for record in good) / 1e9
    return took_s / len(good) / case.concurrency if good else None


def progress_lines(found: Sequence[Done], *, open_end: bool) -> list[str]:
    """Done and planned per arm, and how long the rest takes; *open_end* under `precision`."""
    lines = [" · ".join(f"{one.arm} {one.done}/{one.planned}" for one in found)]
    lefts = [one.left_s for one in found]
    if any(left != 0 for left in lefts):
        known = [left for left in lefts if left is not None]
        about = "at least " if open_end else "about "
        said = about + _duration(sum(known)) if len(known) == len(lefts) else "not known yet"
        lines.append(f"requests left: {said} (starting engines not counted)")
    return [printable(line) for line in lines]


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def view(
    store: RunStore,
    *,
    by: By | None,
    baseline: str | None,
    width: int,
    colour: bool,
    plain: bool = False,
) -> str:
    """What is on the screen at one moment: progress, the table, the k curves."""
    cases = list(measured_cases(store))
    config = store.document["config"]
    found = make_rows(
        cases, baseline=baseline, by=by, greedy=config["sampling"]["temperature"] == 0
    )
    lines = progress_lines(progress(cases), open_end=bool(config.get("precision")))
    table, _, _ = table_alone(found, width=width, colour=colour)
    return "\n".join(
        [f"run {store.document['id']}", *lines, "", table, *k_curves(found, plain=plain)]
    )


def watch(
    folder: Path,
    draw: Callable[[RunStore], str],
    console: "Console",
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.time,
    cpu_clock: Callable[[], float] = time.process_time,
) -> str:
    """Redraw *draw* until the run ends, nobody goes on with it or Ctrl-C; why it ended, in words.

    Raises:
        StoreError: there is no run in *folder* any more, or it can't be read.
    """
    from rich.live import Live
    from rich.text import Text

    with Live(
        console=console,
        auto_refresh=False,
        vertical_overflow="crop",
        redirect_stdout=False,
        redirect_stderr=False,
    ) as live:
        try:
            while True:
                began = cpu_clock()
                store = RunStore.open(folder)
                status = store.status()
                live.update(Text.from_ansi(draw(store)), refresh=True)
                if status is not None:
                    return f"{folder} is done: {status['status']}."
                if not is_written(folder) and clock() - last_change(folder) > QUIET_S:
                    return f"{folder} is unfinished and nobody is going on with it."
                sleep(max(EVERY_S, (cpu_clock() - began) / OWN_SHARE))
        except KeyboardInterrupt:
            return f"The run goes on; look again with: specbench report {folder} --watch"


def is_written(folder: Path, locks: Path = LOCKS) -> bool:
    """Whether a process holds the run's lock. Taking it to find out could get in a run's way."""
    try:
        about = (folder / "lock").stat()
        held = locks.read_text(encoding="ascii")
    except OSError:
        return False
    device = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}"
    return any(f"{device}:{about.st_ino}" in line.split() for line in held.splitlines())


def last_change(folder: Path) -> float:
    """When anything in the run was written last, in seconds since 1970."""
    times = [0.0]
    for path in (*folder.glob("*"), *folder.glob("cases/*/*"), *folder.glob("engines/*/*")):
        with suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)
