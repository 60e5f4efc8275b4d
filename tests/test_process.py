"""A child never outlives its reason: not on leaving, not on our death, not when it is stubborn."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

from specbench.engines import guard
from specbench.engines.process import Child, allowed_environment, log_tail
from specbench.errors import EngineError

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
# A child that ignores TERM and starts a grandchild in a session of its own.
STUBBORN = [
    sys.executable,
    "-c",
    textwrap.dedent(
        """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                 start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(600)
        """
    ),
]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for(condition: object, timeout_s: float = 10) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def child(argv: list[str], folder: Path, **more: float) -> Child:
    return Child(argv, log=folder / "log", cwd=folder, **more)  # type: ignore[arg-type]


def test_leaving_the_block_ends_the_child(tmp_path: Path) -> None:
    with child(SLEEP, tmp_path) as running:
        assert alive(running.pid)
        assert running.poll() is None
    assert not alive(running.pid)


def test_a_child_that_ignores_term_and_its_far_grandchild_die(tmp_path: Path) -> None:
    with child(STUBBORN, tmp_path, patience_s=0.3) as running:
        wait_for(lambda: (tmp_path / "log").read_text(encoding="utf-8").strip().isdigit())
        grandchild = int((tmp_path / "log").read_text(encoding="utf-8"))
        assert grandchild in running.pids()
    assert not alive(running.pid)
    assert not alive(grandchild)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_child_dies_with_us_whatever_kills_us(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""
import time
from pathlib import Path
from specbench.engines.process import Child
with Child({STUBBORN!r}, log=Path("log"), cwd=Path("."), patience_s=0.3) as running:
    print(running.pid, flush=True)
    time.sleep(600)
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    wait_for(lambda: (tmp_path / "log").read_text(encoding="utf-8").strip().isdigit())
    grandchild = int((tmp_path / "log").read_text(encoding="utf-8"))
    owner.send_signal(number)
    owner.wait(10)
    owner.stdout.close()
    wait_for(lambda: not alive(pid) and not alive(grandchild))


def test_the_children_of_a_process_whose_first_thread_ended_are_found() -> None:
    """As an engine with many threads is while it is killed: it looks like a zombie, and has children."""
    code = """
    import ctypes, subprocess, threading, time
    threading.Thread(target=time.sleep, args=(600,)).start()
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    ctypes.CDLL(None).pthread_exit(None)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        stat = Path(f"/proc/{parent.pid}/stat")
        while stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        found = guard.descendants(os.getpid())
        parent.kill()
        os.kill(child, signal.SIGKILL)
    with suppress(ChildProcessError):  # it is ours only if orphans come to this process
        os.waitpid(child, 0)
    assert child in found
    assert parent.pid not in found


def test_openmp_files_of_processes_that_are_gone_are_deleted(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    user = os.getuid()
    kept = {
        f"__KMP_REGISTERED_LIB_{os.getpid()}_{user}",  # it lives
        f"__KMP_REGISTERED_LIB_{gone.pid}_{user + 1}",  # somebody else's
        f"__KMP_REGISTERED_LIB_{gone.pid}",
        f"psm_{gone.pid}_{user}",
    }
    for name in (*kept, f"__KMP_REGISTERED_LIB_{gone.pid}_{user}"):
        (tmp_path / name).touch()
    guard.forget_openmp(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == kept
    guard.forget_openmp(str(tmp_path / "none"))


def test_the_child_dies_with_its_guard(tmp_path: Path) -> None:
    with child(SLEEP, tmp_path) as running:
        parent = int(Path(f"/proc/{running.pid}/stat").read_text(encoding="utf-8").split()[3])
        os.kill(parent, signal.SIGKILL)
        wait_for(lambda: not alive(running.pid))
        assert running.poll() == 128 + signal.SIGKILL


def test_a_far_grandchild_dies_although_the_guard_was_killed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    with child(STUBBORN, tmp_path) as running, child(SLEEP, elsewhere) as other:
        wait_for(lambda: (tmp_path / "log").read_text(encoding="utf-8").strip().isdigit())
        grandchild = int((tmp_path / "log").read_text(encoding="utf-8"))
        parent = int(Path(f"/proc/{running.pid}/stat").read_text(encoding="utf-8").split()[3])
        os.kill(parent, signal.SIGKILL)
        wait_for(lambda: running.poll() is not None)
        wait_for(lambda: not alive(grandchild))
        assert other.poll() is None


@pytest.mark.parametrize(("code", "status"), [("exit(0)", 0), ("exit(3)", 3)])
def test_poll_gives_the_exit_status(tmp_path: Path, code: str, status: int) -> None:
    with child([sys.executable, "-c", code], tmp_path) as running:
        wait_for(lambda: running.poll() is not None)
        assert running.poll() == status


def test_a_child_killed_by_a_signal_says_so(tmp_path: Path) -> None:
    with child(SLEEP, tmp_path) as running:
        os.kill(running.pid, signal.SIGSEGV)
        wait_for(lambda: running.poll() is not None)
        assert running.poll() == 128 + signal.SIGSEGV


def test_a_program_that_is_not_there_is_an_engine_error(tmp_path: Path) -> None:
    running = child(["/nowhere/vllm"], tmp_path)
    with running:
        wait_for(lambda: running.poll() is not None)
        assert running.poll() == 127
        assert "No such file" in running.failed("it failed").tail
        assert isinstance(running.failed("it failed"), EngineError)


def test_a_childs_orphans_are_reaped_while_it_runs(tmp_path: Path) -> None:
    code = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        if os.fork() == 0:
            os._exit(0)  # an orphan, handed to the guard
        os._exit(0)
for _ in range(5):
    os.wait()
print("done", flush=True)
time.sleep(600)
"""
    with child([sys.executable, "-c", code], tmp_path) as running:
        wait_for(lambda: "done" in (tmp_path / "log").read_text(encoding="utf-8"))
        guard = int(Path(f"/proc/{running.pid}/stat").read_text(encoding="utf-8").split()[3])
        children = Path(f"/proc/{guard}/task/{guard}/children")
        wait_for(lambda: children.read_text(encoding="utf-8").split() == [str(running.pid)])


def test_a_child_that_ended_leaves_no_zombie_to_us(tmp_path: Path) -> None:
    """Its guard reaps all that the child left: a sweep has many engines, and each has processes."""
    code = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print('up', flush=True)"
    with child([sys.executable, "-c", code], tmp_path) as running:
        wait_for(lambda: running.poll() is not None)
    ours = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text(encoding="utf-8")
    left = [Path(f"/proc/{pid}/stat").read_text(encoding="utf-8") for pid in ours.split()]
    assert [stat for stat in left if "(sleep)" in stat] == []


def test_secrets_of_the_shell_do_not_reach_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    passed = allowed_environment()
    assert "canary" not in passed.values()
    assert passed["VLLM_LOGGING_LEVEL"] == "INFO"


def test_a_logs_tail_has_no_control_characters(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\x1b[31mred\x1b[0m\n\x07bell\x00\n" + b"last line\n")
    assert log_tail(log) == "red\nbell\nlast line"
    assert log_tail(log, lines=1) == "last line"
    assert log_tail(tmp_path / "none") == ""


def test_children_asked_to_stop_end_side_by_side(tmp_path: Path) -> None:
    with child(STUBBORN, tmp_path, patience_s=1) as one, child(SLEEP, tmp_path) as other:
        started = time.monotonic()
        one.ask_to_stop()
        other.ask_to_stop()
        wait_for(lambda: one.poll() is not None and other.poll() is not None)
        assert time.monotonic() - started < 5
    assert not alive(one.pid)
    assert not alive(other.pid)


def test_a_stop_right_after_the_start_is_not_lost(tmp_path: Path) -> None:
    """A TERM that reached the child before it had its own session would cost all its patience."""
    started = time.monotonic()
    for _ in range(10):
        with child(SLEEP, tmp_path, patience_s=30):
            pass
    assert time.monotonic() - started < 25
