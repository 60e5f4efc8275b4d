"""Ctrl-C, TERM, HUP and a closed terminal at awkward moments: no traceback, the right exit code."""

import os
import pty
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from rich.console import Console

from specbench.render.progress import Lasting, RunProgress

KILL_SELF = "import os, signal, sys, time\n"


def python(code: str, **more: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILL_SELF + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload, no-any-return]


def test_ctrl_c_while_modules_are_imported_is_no_traceback() -> None:
    done = python(
        """
        class Impatient:
            def find_spec(self, name, *_):
                if name == "specbench.cli":
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Impatient())
        from specbench.__main__ import main
        main()
        """
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_the_first_signal_is_an_interrupt_and_what_comes_with_it_is_the_same(number: str) -> None:
    done = python(
        f"""
        from specbench.interrupts import leave, raise_interrupts
        raise_interrupts()
        try:
            os.kill(os.getpid(), signal.{number})
        except KeyboardInterrupt:
            os.kill(os.getpid(), signal.SIGHUP)  # the shell's, after the kernel's
            print("in order")
        leave(130)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "in order\n", "")


def test_an_interrupt_that_became_another_error_is_still_one() -> None:
    """As Python 3.11 makes a RuntimeError of one in `__set_name__`, where dataclasses are made."""
    done = python(
        """
        class Field:
            def __set_name__(self, *_):
                os.kill(os.getpid(), signal.SIGTERM)
        from specbench import cli, prepare
        def interrupted(*_, **__):
            class Made:
                field = Field()
        prepare.prepare = interrupted
        sys.argv = ["specbench", "run", "--config", "demo"]
        cli.main()
        """
    )
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def test_one_that_comes_behind_the_last_try_is_noted_and_not_raised() -> None:
    done = python(
        """
        from specbench.interrupts import leave, raise_interrupts, was_interrupted
        def outcome():
            return 3
        def inside():
            os.kill(os.getpid(), signal.SIGINT)
        raise_interrupts(within=outcome.__code__)
        code = outcome()
        os.kill(os.getpid(), signal.SIGHUP)
        print(was_interrupted())
        raise_interrupts(within=inside.__code__)
        try:
            inside()
        except KeyboardInterrupt:
            leave(code)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "True\n", "")


def test_an_impatient_second_one_leaves_at_once() -> None:
    done = python(
        """
        from specbench import interrupts
        interrupts.TOGETHER_S = 0.01
        interrupts.raise_interrupts()
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGINT)
            print("too late")
        """
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == (
        "\nspecbench: interrupted again; engines that are left are ended within seconds\n"
    )


def test_a_signal_that_was_ignored_from_the_start_stays_so() -> None:
    """Under nohup a closed terminal is no reason to stop."""
    done = python(
        """
        from specbench.interrupts import ignore_interrupts, raise_interrupts
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        raise_interrupts()
        os.kill(os.getpid(), signal.SIGHUP)
        ignore_interrupts()
        print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_ctrl_c_at_the_very_end_changes_nothing() -> None:
    done = python(
        """
        import atexit
        from specbench.interrupts import leave, raise_interrupts
        raise_interrupts()
        atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
        leave(3)
        """
    )
    assert (done.returncode, done.stderr) == (3, "")


def test_a_terminal_that_was_closed_does_not_change_the_exit_code() -> None:
    """Python itself would end with 120, because it cannot flush; 1 and a traceback before that."""
    code = """
    from specbench import cli
    from specbench.cli.terminal import say
    from specbench.interrupts import leave
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.read(0, 1)
    if sys.argv[1:] == ["say"]:
        say("nobody reads this")
        leave(3)
    sys.argv = ["specbench", "--version"]
    cli.main()
    """
    for argument, expected in (("say", 3), ("version", 130)):
        master, slave = pty.openpty()
        reading, writing = os.pipe()
        command = [sys.executable, "-c", KILL_SELF + textwrap.dedent(code), argument]
        process = subprocess.Popen(command, stdin=reading, stdout=slave, stderr=slave)
        os.close(slave)
        os.close(reading)
        os.close(master)
        os.write(writing, b"x")
        os.close(writing)
        assert process.wait(30) == expected


class Gone:
    """A stream to a terminal that was closed."""

    encoding = "utf-8"

    def write(self, _: str) -> int:
        raise OSError(5, "Input/output error")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")

    def isatty(self) -> bool:
        return True


def test_a_run_outlives_the_terminal_that_it_is_shown_on() -> None:
    console = Console(file=Lasting(Gone()), force_terminal=True)  # type: ignore[arg-type]
    with RunProgress(3, 0, console) as progress:
        progress.say("vanilla is up")
        progress.waiting("warming up")
    with pytest.raises(OSError, match="Input/output"):
        Console(file=Gone(), force_terminal=True).print("x")  # type: ignore[arg-type]


def test_a_run_folder_that_is_half_made_is_taken_again(tmp_path: Path) -> None:
    """Killed between making the folder and run.json: the same command works again."""
    from specbench.errors import StoreError
    from specbench.records import Prompt
    from specbench.store import RunStore

    folder = tmp_path / "one"
    (folder / "prompts").mkdir(parents=True)
    (folder / "lock").touch()
    (folder / ".run.json.7.draft").write_text("{", encoding="utf-8")
    prompts = {"p": [Prompt(id="1", turns=("Hello",))]}
    made = RunStore.create(tmp_path, "one", {"arms": []}, prompts)
    assert made.prompts("p") == prompts["p"]
    assert list(folder.glob(".*.draft")) == []
    with pytest.raises(StoreError, match="already holds a run"):
        RunStore.create(tmp_path, "one", {"arms": []})
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(StoreError, match="already holds a run"):
        RunStore.create(tmp_path, "mine", {"arms": []})


def test_the_cont_of_a_closed_terminal_is_no_stop() -> None:
    """The kernel sends it with HUP; under nohup a run goes on, and no request of it is wrong."""
    code = """
    import fcntl, termios
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    fcntl.ioctl(2, termios.TIOCSCTTY, 0)
    from specbench.load.clocks import STOPS, has_terminal
    STOPS.listen()
    seen = []
    ours = signal.getsignal(signal.SIGCONT)
    signal.signal(signal.SIGCONT, lambda *a: (seen.append(1), ours(*a)))
    print("ready", flush=True)
    deadline = time.monotonic() + 20
    while not seen and time.monotonic() < deadline:
        time.sleep(0.01)
    print(len(seen), STOPS.count, has_terminal())
    os.kill(os.getpid(), signal.SIGCONT)
    print(STOPS.count)
    """
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", KILL_SELF + textwrap.dedent(code)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=slave,
        start_new_session=True,
        text=True,
    )
    os.close(slave)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.close(master)
    assert process.communicate(timeout=30)[0] == "1 0 False\n1\n"


def test_an_interrupt_in_a_finalizer_is_not_printed_and_not_lost() -> None:
    """Python can only print what a finalizer raises; the program would go on as if nothing had come."""
    done = python(
        """
        from specbench.interrupts import leave, raise_interrupts
        class Fading:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0)
        raise_interrupts()
        try:
            fading = Fading()
            del fading
            print("it went on")
            time.sleep(5)
            print("it was lost")
        except KeyboardInterrupt:
            print("in order")
        leave(130)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "it went on\nin order\n", "")


def test_other_exceptions_of_finalizers_are_printed_as_before() -> None:
    done = python(
        """
        from specbench.interrupts import raise_interrupts
        class Failing:
            def __del__(self):
                raise ValueError("in a finalizer")
        raise_interrupts()
        raise_interrupts()
        failing = Failing()
        del failing
        """
    )
    assert done.stderr.count("ValueError: in a finalizer") == 1
