"""Time that did not pass for everybody: a machine that slept, a run that stood still, a clock that was set.

Times are CLOCK_MONOTONIC, which stands still while the machine sleeps (a closed laptop's lid), and goes
on while this process is stopped (Ctrl-Z) or is frozen with its container, or with a virtual machine
whose clock goes on. A request around one of these has times that no engine took: it is failed with
that reason, so that no figure holds it and `--resume` measures it again. Tools that stamp with the
time of day (perf_analyzer) are wrong around every step of that clock as well.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

ASLEEP_NS = 50_000_000  # a machine needs longer than that to sleep and wake up
STEP_NS = 5_000_000  # slewing (adjtime) moves both clocks alike; only setting the clock is a step
TORN_NS = 1_000_000  # clocks that are read further apart than this are read again
TRIES = 5
BEAT_S = 0.1  # between two looks while a tool is waited for
# A process that wakes so much later than it asked for did not wait for a core. Nothing tells it of that,
# unlike of SIGSTOP: `docker pause` uses the freezer of control groups.
FROZEN_NS = 2_000_000_000
READ_BY = {
    "monotonic_ns": time.CLOCK_MONOTONIC,
    "boot_ns": time.CLOCK_BOOTTIME,
    "day_ns": time.CLOCK_REALTIME,
}


class Clocks(NamedTuple):
    """The clocks at one moment, in ns: without sleep, with it, and the time of day."""

    monotonic_ns: int
    boot_ns: int
    day_ns: int


def read_clocks() -> Clocks:
    """All of them at once, or nearly."""
    for _ in range(TRIES):
        monotonic, boot, day = map(time.clock_gettime_ns, READ_BY.values())
        if time.clock_gettime_ns(time.CLOCK_MONOTONIC) - monotonic < TORN_NS:
            break
    return Clocks(monotonic, boot, day)


@dataclass(frozen=True)
class Jump:
    """Something happened to time between two readings: `what` it was, as the end of a sentence."""

    before: Clocks
    after: Clocks
    slept_ns: int = 0
    stepped_ns: int = 0
    frozen_ns: int = 0

    @property
    def spoils_durations(self) -> bool:
        """Whether it is in every time that went by meanwhile, and not in the time of day only."""
        return bool(self.slept_ns or self.frozen_ns)

    def told(self) -> str:
        """In words, as the `error` of a request."""
        if self.slept_ns:
            return f"the machine slept for {self.slept_ns / 1e9:.1f} s during this request"
        if self.frozen_ns:
            return frozen(self.frozen_ns)
        return f"the wall clock was set by {self.stepped_ns / 1e9:+.3f} s during this request"


def frozen(ns: int) -> str:
    """In words, as the `error` of a request."""
    return (
        f"specbench did not run for {ns / 1e9:.1f} s during this request "
        "(frozen with its container or virtual machine, or starved of the CPU)"
    )


def jump(before: Clocks, after: Clocks) -> Jump | None:
    """What happened between two readings; None where time just passed."""
    passed_ns = after.monotonic_ns - before.monotonic_ns
    slept_ns = after.boot_ns - before.boot_ns - passed_ns
    stepped_ns = after.day_ns - before.day_ns - (after.boot_ns - before.boot_ns)
    slept_ns = slept_ns if slept_ns > ASLEEP_NS else 0
    stepped_ns = stepped_ns if abs(stepped_ns) > STEP_NS else 0
    return Jump(before, after, slept_ns, stepped_ns) if slept_ns or stepped_ns else None


class ClockWatch:
    """Notes every jump between two looks; whoever waits for a tool does so by `wait`."""

    def __init__(self, read: Callable[[], Clocks] = read_clocks) -> None:
        self._read, self._last = read, read()
        self._offset_ns = self._last.monotonic_ns - self._last.day_ns
        self.jumps: list[Jump] = []

    def wait(self, sleep: Callable[[float], None] = time.sleep) -> None:
        """Sleep for BEAT_S, and look."""
        began_ns = self._read().monotonic_ns
        sleep(BEAT_S)
        self.look(late_ns=self._read().monotonic_ns - began_ns - round(BEAT_S * 1e9))

    def look(self, *, late_ns: int = 0) -> None:
        """Compare the clocks with those of the last look. A sleep before that ended *late_ns* too late."""
        now = self._read()
        found = jump(self._last, now)
        if late_ns > FROZEN_NS and not (found and found.slept_ns):
            found = replace(found or Jump(self._last, now), frozen_ns=late_ns)
        if found is not None:
            self.jumps.append(found)
        self._last = now

    def from_day_ns(self, day_ns: int) -> int:
        """A time of day on CLOCK_MONOTONIC, as the two stood to each other then."""
        offset_ns = self._offset_ns
        for one in self.jumps:
            if day_ns > max(one.before.day_ns, one.after.day_ns):
                offset_ns = one.after.monotonic_ns - one.after.day_ns
        return day_ns + offset_ns

    def around(self, sent_ns: int, end_ns: int, *, by_day: bool, steps: bool) -> Jump | None:
        """The jump that a request may have been in flight at.

        *by_day*: its times are of the time of day, not of CLOCK_MONOTONIC; *steps*: whether it is
        wrong around a step of the wall clock as well.
        """
        for one in self.jumps:
            if not (one.spoils_durations or steps):
                continue
            if by_day:
                # Set back, the clock shows the time between twice: either may be meant.
                first = min(one.before.day_ns, one.after.day_ns)
                last = max(one.before.day_ns, one.after.day_ns)
            else:
                first, last = one.before.monotonic_ns, one.after.monotonic_ns
            if sent_ns <= last and end_ns >= first:
                return one
        return None


class Stops:
    """Counts how often this process was stopped and went on: the kernel says so with SIGCONT.

    A terminal that is closed sends one as well, to a process that was not stopped (and, under nohup,
    goes on).
    """

    def __init__(self) -> None:
        self.count = 0
        self._listens = False
        self._has_terminal = False

    def listen(self) -> None:
        """From now on. Signals come to the main thread; elsewhere nothing is counted."""
        if not self._listens and threading.current_thread() is threading.main_thread():
            with suppress(ValueError):
                signal.signal(signal.SIGCONT, self._note)
                self._listens = True
                self._has_terminal = has_terminal()

    def _note(self, *_: object) -> None:
        if self._has_terminal and not has_terminal():
            self._has_terminal = False
        else:
            self.count += 1


def has_terminal() -> bool:
    """Whether this process has a controlling terminal that is open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


class Freezes:
    """Counts how often this process woke from a wait FROZEN_NS later than it had asked for."""

    def __init__(self) -> None:
        self.count = 0
        self.last_ns = 0

    def woke(self, late_ns: int) -> None:
        """Whoever waits for answers says after each wait how much too late that ended."""
        if late_ns > FROZEN_NS:
            self.count += 1
            self.last_ns = late_ns


STOPS = Stops()
FREEZES = Freezes()


class Moment(NamedTuple):
    """What a request's times are judged by: taken when it is sent."""

    clocks: Clocks
    stops: int
    freezes: int


def moment(read: Callable[[], Clocks] = read_clocks) -> Moment:
    """Now."""
    return Moment(read(), STOPS.count, FREEZES.count)


def happened_since(began: Moment, read: Callable[[], Clocks] = read_clocks) -> str | None:
    """Why a request that was sent at *began* has no times; None where it has.

    A step of the wall clock is no reason: it is not what our own client's times are.
    """
    if STOPS.count != began.stops:
        return "the run was stopped (SIGSTOP, Ctrl-Z) during this request"
    found = jump(began.clocks, read())
    if found is not None and found.slept_ns:
        return found.told()
    return frozen(FREEZES.last_ns) if FREEZES.count != began.freezes else None
