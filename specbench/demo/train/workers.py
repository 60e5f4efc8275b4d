"""Child processes that share one stage: started together, watched, and never left behind."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from specbench.errors import SpecbenchError, ToolError

POLL_S = 0.5
PATIENCE_S = 10.0  # between asking a worker to end and killing it
TAIL_LINES = 5


@dataclass(frozen=True)
class Worker:
    """One child: what to print before its lines, what to run, and where its output goes."""

    name: str
    argv: tuple[str, ...]
    log: Path


@dataclass
class _Running:
    worker: Worker
    process: subprocess.Popen[bytes]
    output: TextIO  # the log, read as it grows

    def relay(self, say: Callable[[str], None]) -> None:
        """Say the lines that have come since the last time."""
        for line in self.output:
            say(f"[{self.worker.name}] {line.rstrip()}")


def run_together(
    workers: Sequence[Worker],
    *,
    say: Callable[[str], None] = print,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run *workers* side by side until all have ended, saying their lines as they come.

    ToolError as soon as one fails. Whatever ends this, an interrupt too, ends them all.
    """
    running: list[_Running] = []
    try:
        for worker in workers:
            running.append(_start(worker))
        while True:
            codes = [one.process.poll() for one in running]
            for one, code in zip(running, codes, strict=True):
                one.relay(say)
                if code:
                    raise _failure(one.worker, code)
            if all(code == 0 for code in codes):
                return
            sleep(POLL_S)
    finally:
        _stop([one.process for one in running])
        for one in running:
            one.output.close()


def _start(worker: Worker) -> _Running:
    worker.log.parent.mkdir(parents=True, exist_ok=True)
    with worker.log.open("wb") as log:
        process = subprocess.Popen(
            worker.argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # One thread each: OpenMP's barriers cost more than a second thread brings.
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops them
        )
    return _Running(worker, process, worker.log.open(encoding="utf-8", errors="replace"))


def _failure(worker: Worker, code: int) -> ToolError:
    lines = worker.log.read_text(encoding="utf-8", errors="replace").splitlines()
    tail = " | ".join(lines[-TAIL_LINES:])
    return ToolError(f"{worker.name} ended with {code}: {tail}", hint=f"See {worker.log}.")


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask each process group to end, wait a little, and kill what is left."""
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    for process in alive:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def exit_code(body: Callable[[], None]) -> int:
    """Run *body* as a command: its exit code, and one line on stderr for a known error."""
    try:
        body()
    except SpecbenchError as error:
        os.write(2, f"error: {error}\n".encode())
        return error.exit_code
    return 0
