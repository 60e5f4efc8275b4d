"""Kill anything, any time: is a process left, a request lost, or one measured twice?

    python benchmarks/faults.py replayed --kills 2000 --seconds 1500 --seed 1 --jobs 2
    python benchmarks/faults.py fake --kills 300 --seconds 1500 --seed 1 --jobs 2
    python benchmarks/faults.py real --kills 200 --seconds 4800 --seed 1      (vLLM on the CPU)

Runs are started, killed at a random moment of their length, resumed, killed again, until they end by
themselves; then they are held against a run that nobody disturbed. What happens: INT (half of them
to the whole process group, as a terminal does), TERM, HUP, KILL; `pty`: the terminal is closed. A
quarter of them gets a second signal within 1.5 s. `nohup`: the terminal is closed, and the run must go on.
Where there are engines, also `child`: KILL to one process below specbench (an engine, as the OOM
killer does; a guard; the sampler; what imported vLLM), and `lid`: all are stopped for up to 2 s. There
two fifths of the moments are within 5 s of the first request, two fifths in the first third of a run,
which is the engines' start, and the others anywhere.

Nine of ten replayed attempts are forks of a process that has imported specbench; the others, and all
with engines, are started whole. Prints the seed, a markdown table and what failed; exit 1 then.

Witnesses of finished requests: the files just before the kill (all kinds); the stand-in engines' own
notes of each answer that they sent (fake); the engines' own counter of finished requests (real).
"""

import argparse
import importlib
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import faults_place as places
import faults_process as processes
from faults_campaign import Campaign
from faults_tally import Tally, as_markdown

# What a command imports on its way, for the forks; `run` and `report` do so when they are called.
PRELOAD = ("cli", "run", "prepare", "render.progress", "render.report", "analysis.rows")


def campaign(kind: str, kills: int, seconds: float, seed: int, job: int) -> Tally:
    """All of one job, in a process of its own."""
    processes.become_subreaper()
    signal.signal(signal.SIGTERM, _leave)
    for name in PRELOAD:
        importlib.import_module(f"specbench.{name}")
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as made:
        place = places.make(kind, Path(made))
        try:
            return Campaign(place, random.Random(f"{seed} {kind} {job}")).run(kills, seconds)
        finally:
            processes.end_all(processes.alive())


def _leave(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(143)


def main() -> int:
    """Print the table; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("replayed", "fake", "real"))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    print(f"seed {asked.seed}, {asked.jobs} jobs\n", flush=True)
    began_s, tally = time.monotonic(), Tally()
    share = -(-asked.kills // asked.jobs)
    jobs = [(asked.kind, share, asked.seconds, asked.seed, job) for job in range(asked.jobs)]
    with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
        for found in pool.starmap(campaign, jobs):
            tally.add(found)
    print(as_markdown(asked.kind, tally))
    print(f"\n{time.monotonic() - began_s:.0f} s")
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
