"""Is the GPU free? Names who holds its memory; ends only what an earlier night of this job left behind.

    python tools/gpu_clean.py --results RUNS [--wait SECONDS] [--ours-only]

Ours are processes that carry this job's mark in their environment (SPECBENCH_NIGHTLY, as it is set for
this process), and the sessions of engines that the run folders under RUNS recorded: the same leader, and
begun while that engine started. Whatever else holds memory is named and left alone: exit 1.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

MARK = "SPECBENCH_NIGHTLY"
IDLE_MIB = 1024  # that drivers and display servers hold of an idle GPU at most
PATIENCE_S = 10.0  # between asking a process to end and ending it
SLACK_S = 60.0  # around an engine's recorded start
POLL_S = 5.0


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU, as nvidia-smi names it."""

    pid: int
    mib: str
    name: str

    def told(self) -> str:
        """The process in a line, with its owner and start where they can be seen."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            begun = datetime.fromtimestamp(process.create_time()).astimezone()
            who = f"{process.username()}, since {begun:%Y-%m-%d %H:%M}"
            return f"pid {self.pid} ({self.name}, {who}) holds {self.mib} MiB"
        return f"pid {self.pid} ({self.name}, not visible from here) holds {self.mib} MiB"


@dataclass(frozen=True)
class Engine:
    """An engine that a run folder recorded: its pid led a session; times in s since the epoch."""

    pid: int
    earliest: float
    latest: float


def query(*what: str) -> list[list[str]]:
    """Rows of nvidia-smi's answer.

    Raises:
        SystemExit: nvidia-smi failed; nobody knows then who holds the GPU.
    """
    command = ["nvidia-smi", *what, "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise SystemExit(f"gpu_clean: nvidia-smi exited with {done.returncode}: {said}")
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line]


def holders() -> list[Holder]:
    """The processes on any GPU."""
    rows = query("--query-compute-apps=pid,used_memory,name")
    return [Holder(int(pid), mib, ",".join(name)) for pid, mib, *name in rows]


def used_by_nobody_seen() -> Iterator[str]:
    """GPUs in use though no process is listed: those of another container are not."""
    for index, mib in query("--query-gpu=index,memory.used"):
        if mib.isdigit() and int(mib) > IDLE_MIB:
            yield f"GPU {index}: {mib} MiB are in use by processes that cannot be seen from here"


def recorded(results: Path) -> list[Engine]:
    """The engines of every run under *results*, finished or not."""
    found = []
    for path in results.glob("*/engines/*/engine.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(path.read_text(encoding="utf-8"))
            began = datetime.fromisoformat(said["started_at"]).timestamp()
            ready = began + float(said.get("startup_s") or 0)
            found.append(Engine(int(said["pid"]), began - SLACK_S, ready + SLACK_S))
    return found


def is_ours(process: psutil.Process, mark: str | None, engines: Sequence[Engine]) -> bool:
    """Whether this job started *process*, earlier. A title that vLLM sets may hide its environment."""
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    if process.pid in own:
        return False
    with suppress(psutil.Error):
        if mark and process.environ().get(MARK) == mark:
            return True
    with suppress(psutil.Error, OSError):
        session, begun = os.getsid(process.pid), process.create_time()
        return any(e.pid == session and e.earliest <= begun <= e.latest for e in engines)
    return False


def end(processes: Sequence[psutil.Process]) -> None:
    """Ask, wait, end. psutil checks that a pid still is the process that was looked at."""
    for process in processes:
        with suppress(psutil.Error):
            process.terminate()
    _, left = psutil.wait_procs(processes, timeout=PATIENCE_S)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=PATIENCE_S)


def end_ours(results: Path, say: Callable[[str], None]) -> None:
    """End what an earlier night left on the GPU."""
    engines, mark = recorded(results), os.environ.get(MARK)
    left_over = []
    for holder in holders():
        with suppress(psutil.Error):
            process = psutil.Process(holder.pid)
            if is_ours(process, mark, engines):
                say(f"left by an earlier night, ended: {holder.told()}")
                left_over.append(process)
    end(left_over)


def main(arguments: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """0: free. 1: others hold memory, and are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("results"))
    parser.add_argument("--wait", type=float, default=0.0, help="seconds for others to finish")
    parser.add_argument("--ours-only", action="store_true", help="end ours, judge nobody")
    given = parser.parse_args(arguments)
    if shutil.which("nvidia-smi") is None:
        say("no nvidia-smi here: no GPU to look after")
        return 0
    end_ours(given.results, say)
    if given.ours_only:
        return 0
    deadline = time.monotonic() + given.wait
    while True:
        others = [holder.told() for holder in holders()] or list(used_by_nobody_seen())
        if not others:
            say("the GPU is free")
            return 0
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    for line in others:
        say(line)
    say("The GPU is not free: nothing measured on it now would be true. These are left alone.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
