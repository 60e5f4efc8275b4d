"""The process between specbench and a child: whatever happens to specbench, the child ends.

    python -I guard.py PATIENCE_S LINGER_S STATUS_FD SECRETS -- COMMAND...

Runs COMMAND in a session of its own and waits. When its standard input closes (specbench closed
it, or died, even by SIGKILL) or a TERM arrives, it ends COMMAND and everything COMMAND started:
TERM to the group, KILL after PATIENCE_S, then KILL to every descendant (once COMMAND itself has
ended, what it started may take LINGER_S more). Descendants that left the group or lost their parent
are found too, because the guard is their subreaper. Once nothing is left it puts asterisks over the
values of the environment variables SECRETS (names, with commas) in the log, which is its own standard
output, deletes what OpenMP left in shared memory, and exits with COMMAND's status. If the guard itself is killed, the kernel kills COMMAND.

Only the standard library, and no import of specbench: it must start in milliseconds, and
`prefork` loads it by path into an interpreter that has no specbench. Linux only: prctl, /proc.
"""

import ctypes
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
SHARED_MEMORY = "/dev/shm"
# A page for each process, which Intel's OpenMP deletes at a process's own exit and at no other end
# (llvm-project, openmp/runtime/src/kmp_runtime.cpp, __kmp_register_library_startup): engines are forked,
# and end by _exit or a signal.
OPENMP_PREFIX = "__KMP_REGISTERED_LIB_"  # then the process and the user


def main() -> int:
    """Guard the command of our own command line; its exit status."""
    patience_s, linger_s, status_fd = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    command = sys.argv[sys.argv.index("--") + 1 :]
    secrets = [os.environ[name] for name in sys.argv[4].split(",") if name in os.environ]

    def become() -> None:
        os.close(status_fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execvp(command[0], command)

    return watch(
        become,
        control_fd=0,
        status_fd=status_fd,
        patience_s=patience_s,
        linger_s=linger_s,
        at_end=lambda: cover("/proc/self/fd/1", secrets),
    )


def cover(log: str | os.PathLike[str], secrets: Iterable[str]) -> None:
    """Put asterisks over *secrets* in *log*, in place: a program may print its environment.

    The file keeps its length, so that one that still writes to it is not disturbed.
    """
    try:
        with open(log, "r+b") as file, mmap.mmap(file.fileno(), 0) as text:
            for secret in map(os.fsencode, secrets):
                at = text.find(secret) if secret else -1
                while at >= 0:
                    text[at : at + len(secret)] = b"*" * len(secret)
                    at = text.find(secret, at + len(secret))
    except (OSError, ValueError):  # it is not there, is empty, or is no file
        return


def forget_openmp(folder: str = SHARED_MEMORY) -> None:
    """Delete what OpenMP left in *folder* of processes of ours that are gone.

    Another container that shares the folder, but not its process numbers, may lose some of living
    ones: OpenMP looks them up at its own start and end only, and goes on without.
    """
    with suppress(OSError):
        for name in os.listdir(folder):
            pid, _, user = name.removeprefix(OPENMP_PREFIX).partition("_")
            if (
                name.startswith(OPENMP_PREFIX)
                and pid.isascii()
                and pid.isdecimal()
                and user == str(os.getuid())
                and not os.path.exists(f"/proc/{pid}")
            ):
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def become_subreaper() -> ctypes.CDLL:
    """Have every orphan below this process come to it; the C library. Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return libc


def watch(
    become: Callable[[], object],
    *,
    control_fd: int,
    status_fd: int,
    patience_s: float,
    linger_s: float = 0,
    at_end: Callable[[], object] = lambda: None,
) -> int:
    """Fork a child that calls *become*; return its status (128 + signal) when all of it is gone.

    "pid N" is written to *status_fd* at once and "exit STATUS" at the end, after *at_end* was called
    (also where nobody listens any more). End of file on *control_fd* ends the child.
    """
    libc = become_subreaper()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)

    guard_pid = os.getpid()
    # Until the child has its own session and default signals, a TERM to its group would be lost.
    settled_read, settled_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(settled_read)
        _child(become, libc, guard_pid, settled_write)
    os.close(settled_write)
    os.read(settled_read, 1)
    os.close(settled_read)
    with suppress(OSError):
        os.write(status_fd, f"pid {child}\n".encode())

    status: int | None = None
    while status is None:
        ready, _, _ = select.select([control_fd, wake_read], [], [], 5.0)
        asked = wake_read in ready and set(os.read(wake_read, 4096)) - {signal.SIGCHLD}
        if asked or (control_fd in ready and not _read(control_fd)):
            break
        status = reap(child)
    status = stop(child, status, patience_s, linger_s)
    at_end()
    forget_openmp()
    with suppress(OSError):
        os.write(status_fd, f"exit {status}\n".encode())
    return status


def _child(become: Callable[[], object], libc: ctypes.CDLL, guard_pid: int, settled: int) -> None:
    """The forked side: its own session, killed with the guard, then *become*. Never returns."""
    code = 1
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == guard_pid:  # else the guard died before the line above
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.close(settled)
            become()
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException as error:  # noqa: BLE001  (a fork must never return to its caller)
        os.write(2, f"{type(error).__name__}: {error}\n".encode())
        code = 127
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 4096)
    except OSError:
        return b""


def stop(child: int, status: int | None, patience_s: float, linger_s: float = 0) -> int:
    """TERM to the group, KILL after *patience_s*, then KILL whatever else descends from us.

    If the child ended by itself, what it leaves is waited for, *linger_s* at most.
    """
    deadline = time.monotonic() + patience_s
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGTERM)
    while status is None and time.monotonic() < deadline:
        time.sleep(0.02)
        status = reap(child)
    deadline = time.monotonic() + (linger_s if status is not None else 0)
    while time.monotonic() < deadline and descendants(os.getpid()):
        time.sleep(0.02)
        reap(child)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    deadline = time.monotonic() + 10
    # Looked for twice: of a process that ends meanwhile, a child may be read before it has another parent.
    while (left := descendants(os.getpid()) or descendants(os.getpid())) and (
        time.monotonic() < deadline
    ):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        ended = reap(child)  # if the status is known, too: what is left comes to specbench
        status = ended if status is None else status
    ended = reap(child)
    status = ended if status is None else status
    return 128 + signal.SIGKILL if status is None else status


def descendants(root: int) -> list[int]:
    """All living processes below *root*, from /proc; zombies are left out, but not what is below them.

    A process whose first thread has ended is shown as a zombie while its others live, or are about to
    be killed, and keeps its children until the last of them is gone.
    """
    children: dict[int, list[tuple[int, bool]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8") as stat:
                state, parent = stat.read().rpartition(")")[2].split()[:2]
                children.setdefault(int(parent), []).append((int(name), state != "Z"))
    found, queue = [], [root]
    while queue:
        for pid, lives in children.get(queue.pop(), []):
            queue.append(pid)
            if lives:
                found.append(pid)
    return found


def reap(child: int) -> int | None:
    """Collect everything of ours that has ended; *child*'s status if it was among that."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, code = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                exited = os.waitstatus_to_exitcode(code)
                status = exited if exited >= 0 else 128 - exited
    return status


if __name__ == "__main__":
    sys.exit(main())
