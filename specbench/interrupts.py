"""Ctrl-C, TERM and HUP: the first one ends a command in order, one that comes later at once.

Python's own answer to Ctrl-C is a KeyboardInterrupt, whose traceback a user sees where nobody
catches it: while modules are imported (until `raise_interrupts` a Ctrl-C ends the process, __main__.py),
in the last lines of a program, in its second Ctrl-C.
A signal that was ignored when the command was started (nohup) stays ignored.
"""

import contextlib
import errno
import os
import signal
import sys
import termios
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_INTERRUPTED = 130
_first_s: float | None = None  # when the first signal came
TOGETHER_S = 0.5  # a closed terminal is told twice, by the kernel and by the shell
AGAIN_S = 0.01  # after an interrupt that came where Python cannot raise
SHOW_CURSOR = b"\x1b[?25h"


def raise_interrupts(within: CodeType | None = None) -> None:
    """The first signal is a KeyboardInterrupt, whichever it is; one much later leaves at once.

    Nothing is lost then: what is measured is on disk, and guards end the engines without us. Outside
    of the function whose code is *within* it is only noted (`was_interrupted`), because no `try` has room for
    one that comes between its last line and the call of `leave`.
    """
    global _first_s
    _first_s = None

    def interrupt(_: int, frame: FrameType | None) -> None:
        global _first_s
        if _first_s is None:
            _first_s = time.monotonic()
            if within is None or _is_inside(frame, within):
                raise KeyboardInterrupt
        elif time.monotonic() - _first_s > TOGETHER_S:
            _leave_at_once()

    def again(_: int, frame: FrameType | None) -> None:
        if within is None or _is_inside(frame, within):
            raise KeyboardInterrupt

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    signal.signal(signal.SIGALRM, again)
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)


class _Unraisable:
    """What Python calls with an exception that it can only print, as one in a finalizer.

    A KeyboardInterrupt among them is not printed but comes again a moment later, or it would be lost.
    """

    def __init__(self, otherwise: Callable[["sys.UnraisableHookArgs"], object]) -> None:
        self._otherwise = otherwise

    def __call__(self, about: "sys.UnraisableHookArgs") -> None:
        """See sys.unraisablehook."""
        if about.exc_type is KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            self._otherwise(about)


def _is_inside(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def was_interrupted() -> bool:
    """Whether a signal came since `raise_interrupts`, whatever became of its KeyboardInterrupt.

    Python itself makes a RuntimeError of one that comes while a class is made (3.11), and a library
    may make one of its own of it.
    """
    return _first_s is not None


def ignore_interrupts() -> None:
    """The command is over; what comes now must not become the traceback of an interpreter's end.

    Not SIG_IGN, which a process that is started from now on would inherit.
    """
    for number in (*ENDING, signal.SIGALRM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def terminal_is_gone() -> bool:
    """Whether our terminal was closed: what is written to it fails from then on."""
    for descriptor in (0, 1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                return True
    return False


def _leave_at_once() -> NoReturn:
    with contextlib.suppress(OSError):
        said = b"\nspecbench: interrupted again; engines that are left are ended within seconds\n"
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + said)
    os._exit(EXIT_INTERRUPTED)


def leave(code: int) -> NoReturn:
    """End the process with *code*, also where its terminal is gone and nothing can be written.

    Raises:
        SystemExit: always.
    """
    ignore_interrupts()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # or Python tries again, says so and ends with 120
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
