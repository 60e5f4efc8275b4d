"""The sampler: appends what the machine does to a file, until it is ended.

    python -m specbench.telemetry FILE --root PID [--gpus 0,1] [--shared]

Times are `time.perf_counter_ns`, which on Linux is CLOCK_MONOTONIC: one clock for all processes
between two boots, so that a sample can be laid beside a request. It runs at the lowest priority and
takes its time: the next sample waits until this one's CPU time is less than OWN_SHARE of a core.
A line is one write; nothing is synced, since a lost sample is no lost measurement.
"""

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specbench.telemetry import host
from specbench.telemetry.gpu import Gpus

GPU_INTERVAL_S, CPU_INTERVAL_S = 0.2, 1.0
SCAN_INTERVAL_S = 1.0  # /proc counts CPU time in ticks of 10 ms: a hundred of them
OWN_SHARE = 0.008  # of a core
ENDING = (signal.SIGTERM,)


def session(
    gpus: Gpus | None, problem: str | None, *, root: int, rapl: bool, interval_s: float
) -> dict[str, Any]:
    """The first line of a sampler: when and where it began, and on what."""
    return {
        "boot_id": _boot_id(),
        "at_ns": time.perf_counter_ns(),
        "wall_ns": time.time_ns(),
        "interval_s": interval_s,
        "root_pid": root,
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpus.facts() if gpus else [],
        "gpu_problem": problem,
        "has_rapl": rapl,
    }


def samples(
    gpus: Gpus | None,
    rapl: host.Rapl,
    load: host.Load | None,
    *,
    interval_s: float,
    clock: Callable[[], int] = time.perf_counter_ns,
    cpu_clock: Callable[[], int] = time.process_time_ns,
    wait: Callable[[float], object] = time.sleep,
) -> Iterator[dict[str, Any]]:
    """A sample each *interval_s*, and a last one once *wait* returns something; None is left out.

    Without *load* nobody is told apart: some of the work that is ours is not below our process.
    """
    cpus = sorted(os.sched_getaffinity(0))
    next_scan_ns, ended = 0, False
    while True:
        began_ns, spent_ns = clock(), cpu_clock()
        sample: dict[str, Any] = {"at_ns": began_ns, "rapl_j": rapl.joules()}
        if began_ns >= next_scan_ns or ended:
            next_scan_ns = began_ns + round(0.99 * SCAN_INTERVAL_S * 1e9)
            sample["cpu_mhz"] = host.clock_mhz(cpus)
            sample["load"] = load.scan(began_ns) if load else None
            sample["own_s"] = spent_ns / 1e9
        if gpus:
            sample["gpus"] = gpus.read(lambda: load.pids if load else (), clock)
        yield {name: value for name, value in sample.items() if value is not None}
        if ended:
            return
        cost_s = (cpu_clock() - spent_ns) / 1e9
        passed_s = (clock() - began_ns) / 1e9
        pause_s = max(interval_s - passed_s, cost_s / OWN_SHARE - passed_s, 0.001)
        ended = wait(pause_s) is not None


def main() -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(prog="specbench.telemetry", description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--root", type=int, required=True, help="whose tree of processes is ours")
    parser.add_argument("--gpus", help="as CUDA_VISIBLE_DEVICES")
    parser.add_argument("--shared", action="store_true", help="engines are not below --root")
    args = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # it is waited for between samples
    os.nice(19)
    gpus, problem = Gpus.open(args.gpus)
    rapl = host.Rapl()
    interval_s = GPU_INTERVAL_S if gpus else CPU_INTERVAL_S
    load = None if args.shared else host.Load(args.root, sorted(os.sched_getaffinity(0)))
    first = session(gpus, problem, root=args.root, rapl=rapl.is_readable, interval_s=interval_s)
    out = os.open(args.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    _write(out, {"session": first})
    made = samples(
        gpus, rapl, load, interval_s=interval_s, wait=lambda s: signal.sigtimedwait(ENDING, s)
    )
    for sample in made:
        _write(out, {"sample": sample})


def _write(out: int, line: dict[str, Any]) -> None:
    os.write(out, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


if __name__ == "__main__":
    main()
