"""Starts specbench for the kill campaign and knows whatever is left of it.

This process makes itself the subreaper of all that it starts: a process that loses its parent, goes
into a session of its own or changes its name and environment still descends from here. A variable
that specbench hands on to its children is looked for in all of /proc besides.
"""

import ctypes
import fcntl
import os
import pty
import random
import signal
import sys
import termios
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
TOKEN = "LC_SPECBENCH_FAULTS"  # specbench's children get LC_*; no locale has this name
KINDS = {  # of processes below specbench, by what is in their command lines
    "guard.py": "guard",
    "prefork.py": "prefork",
    "specbench.telemetry": "sampler",
    "null_server": "null server",
    "-c import time": "grandchild",
    "-I -c": "probe",
    "EngineCore": "engine core",
}

_ended: dict[int, int] = {}  # exit codes (negative: of signals) of processes that were reaped


def become_subreaper() -> None:
    """Have every orphan of ours come back to this process. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Collect all that has ended; `Running.poll` reads what was collected."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            _ended[found[0]] = os.waitstatus_to_exitcode(found[1])


def alive(token: str | None = None) -> list[psutil.Process]:
    """All living processes that descend from this one or have *token* in their environment."""
    reap()
    found = {p.pid: p for p in psutil.Process().children(recursive=True)}
    if token is not None:
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            with suppress(OSError, psutil.Error):
                if token.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found.setdefault(pid, psutil.Process(pid))
    living = []
    for process in found.values():
        with suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def command_of(process: psutil.Process) -> str:
    """Its command line, short; "(gone)" where it has ended meanwhile."""
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return f"{process.pid} (gone)"


@dataclass
class Running:
    """A specbench that was started: in a session of its own, on a terminal if *terminal* is one."""

    pid: int
    err: Path
    terminal: int | None = None
    began_s: float = field(default_factory=time.monotonic)

    def poll(self) -> int | None:
        """Its exit code, negative if a signal ended it; None while it runs."""
        self._drain()
        reap()
        return _ended.get(self.pid)

    def kill(self, number: int, *, group: bool = False) -> None:
        """Send a signal to it, or to its process group as a terminal does."""
        with suppress(ProcessLookupError):
            (os.killpg if group else os.kill)(self.pid, number)

    def close_terminal(self) -> None:
        """Close the window: the kernel sends HUP, and every write to it fails from now on."""
        if self.terminal is not None:
            os.close(self.terminal)
            self.terminal = None

    def _drain(self) -> None:
        """Read what it says on its terminal, or it would stand still once that is full."""
        if self.terminal is None:
            return
        with suppress(OSError), self.err.open("ab") as out:
            while piece := os.read(self.terminal, 65536):
                out.write(piece)


def start(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    err: Path,
    terminal: str | None = None,
    main: Callable[[], NoReturn] | None = None,
    ignored: Sequence[int] = (),
) -> Running:
    """Start `specbench ARGUMENTS`; what it says on stderr and stdout is added to *err*.

    A *terminal* is "all" (a pty is its stdin, stdout and stderr) or "but stderr". With *main* it is
    a fork of this process, which has imported specbench, that calls it. Signals *ignored* are, from
    the beginning, as under nohup.
    """
    master, slave = pty.openpty() if terminal else (None, None)
    settled_read, settled_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(settled_read)
        if master is not None:
            os.close(master)
        _become(arguments, cwd, env, err, slave, terminal, main, ignored, settled_write)
    _ended.pop(pid, None)  # another process had this number before
    os.close(settled_write)
    os.read(settled_read, 1)  # until it has its session and its terminal: what comes before is ours
    os.close(settled_read)
    if slave is not None:
        os.close(slave)
    if master is not None:
        os.set_blocking(master, False)
    return Running(pid, err, master)


def _become(
    arguments: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    err: Path,
    slave: int | None,
    terminal: str | None,
    main: Callable[[], NoReturn] | None,
    ignored: Sequence[int],
    settled: int,
) -> NoReturn:
    """The forked side. Never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # we may be under nohup
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
        os.setsid()
        out = os.open(err, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if slave is not None:
            fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY) if slave is None else slave, 0)
        os.dup2(out if slave is None else slave, 1)
        os.dup2(out if slave is None or terminal == "but stderr" else slave, 2)
        os.chdir(cwd)
        os.close(settled)
        if main is None:
            os.closerange(3, 256)
            os.execve(sys.executable, [sys.executable, *arguments], dict(env))
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["specbench", *arguments]
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  (what an interpreter does at its end)
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait_until_gone(running: Running, token: str, limit_s: float) -> list[psutil.Process]:
    """Wait until nothing of *running* is left; what is after *limit_s*."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if running.poll() is not None and not alive():
            return alive(token)
        time.sleep(0.01)
    return alive(token)


def end_all(processes: Sequence[psutil.Process]) -> None:
    """KILL what a campaign found left, so that the next attempt starts clean."""
    for process in processes:
        with suppress(psutil.Error):
            process.kill()
    deadline = time.monotonic() + 5
    while alive() and time.monotonic() < deadline:
        time.sleep(0.01)


def kill_one_below(running: Running, rng: random.Random) -> str | None:
    """KILL one process below *running*, whichever; what it was, None where there was none."""
    below = [one for one in alive() if one.pid != running.pid]
    if not below:
        return None
    victim = rng.choice(below)
    try:
        command = " ".join(victim.cmdline())
        victim.kill()
    except psutil.Error:
        return None
    return next((said for part, said in KINDS.items() if part in command), "engine")


def close_the_lid(seconds: float) -> None:
    """Nobody runs for a while, then all go on."""
    stopped = alive()
    for one in stopped:
        with suppress(psutil.Error):
            one.suspend()
    time.sleep(seconds)
    for one in stopped:
        with suppress(psutil.Error):
            one.resume()
