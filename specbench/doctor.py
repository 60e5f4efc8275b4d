"""What is here and what is missing, each with what to do about it: `specbench doctor`.

A check is a function that yields findings; it never raises and never waits for a network.
"""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil

from specbench import __version__, demo, fetch, machine
from specbench.engines import triton_probe
from specbench.engines.installation import find_installation, lacks, missing_libraries
from specbench.errors import EngineError, LoadError
from specbench.load import arrivals, perf_analyzer, tools
from specbench.telemetry.gpu import Gpus

Status = Literal["ok", "note", "problem"]
USUAL_METHODS = ("eagle", "eagle3", "draft_model", "ngram", "suffix", "medusa", "mtp", "dflash")
MIN_FREE_GIB = 5
BUSY_SHARE = 0.10  # of a core by others, above which a measurement is disturbed
NOISE_S = 5.0
NOISY_SPREAD = 0.05


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. A `note` can be lived with, a `problem` stops something."""

    about: str
    status: Status
    said: str
    advice: str | None = None


def python(_: Path) -> Iterator[Finding]:
    """This specbench and its interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("specbench", "ok", f"{__version__} on Python {version}")


def engine(_: Path) -> Iterator[Finding]:
    """The vLLM that `run` would start."""
    found = find_installation(None)
    if found is None:
        yield Finding(
            "engine",
            "problem",
            "there is no vLLM in this environment",
            "pip install 'specbench[cuda]' or 'specbench[cpu]', or engine.python or engine.url",
        )
        return
    if libraries := missing_libraries(found):
        yield Finding("engine", "problem", *lacks(libraries))
        return
    kind = "CPU" if found.is_cpu else "CUDA"
    usual = [method for method in USUAL_METHODS if method in found.names.methods]
    more = len(found.names.methods) - len(usual)
    yield Finding(
        "engine",
        "ok",
        f"vLLM {found.version}, {kind} build; methods: {', '.join(usual)} and {more} more",
    )


def gpu(_: Path) -> Iterator[Finding]:
    """The GPUs and who else is on them."""
    gpus = machine.facts()["gpus"]
    if not gpus:
        yield Finding(
            "GPU", "note", "none (nvidia-smi is not there or sees none): engines run on the CPU"
        )
        return
    for one in gpus:
        said = f"{one.get('name')}, driver {one.get('driver_version')}, {one.get('memory.total')}"
        yield Finding("GPU", "ok", said)
    yield _gpu_telemetry()
    for line in machine.gpu_processes():
        yield Finding(
            "GPU", "problem", f"another process is on it: {line}", "end it, or measure elsewhere"
        )


def _gpu_telemetry() -> Finding:
    """Whether runs will know power, clocks and heat, and what these are now."""
    gpus, problem = Gpus.open(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus is None:
        return Finding("GPU telemetry", "note", "runs have no power, clock and heat", problem)
    now = gpus.read(lambda: (), time.perf_counter_ns)
    said = "; ".join(
        f"GPU {one['index']}: {one['power_w']} W, {one['sm_mhz']} MHz, {one['temperature_c']} °C, "
        f"{(one['memory_bytes'] or 0) / 2**30:.1f} GiB in use"
        for one in now
    )
    return Finding("GPU telemetry", "ok", said)


def load_generators(_: Path) -> Iterator[Finding]:
    """GenAI-Perf, AIPerf and perf_analyzer: there, and really running."""
    yield Finding("load.client=direct", "ok", "specbench's own client")
    for tool in tools.TOOLS.values():
        about = f"load.client={tool.name}"
        try:
            found = tools.find(tool)
            if found is None:
                yield Finding(
                    about,
                    "note",
                    f"{tool.version} is not set up",
                    "the first run that asks for it does",
                )
            else:
                version = tools.check(found)
                yield Finding(about, "ok", f"{version} in {found.folder}")
        except LoadError as error:
            yield Finding(about, "problem", error.message, f"delete {tools.environment(tool)}")
    yield _perf_analyzer()


def _perf_analyzer() -> Finding:
    there = perf_analyzer.find()
    try:
        if there is not None:
            perf_analyzer.check(there)
            return Finding("perf_analyzer", "ok", f"{perf_analyzer.VERSION} in {there}")
    except LoadError as error:
        return Finding("perf_analyzer", "problem", error.message, error.hint)
    if perf_analyzer.runs_as_it_is():
        return Finding("perf_analyzer", "note", "is fetched by the first run of GenAI-Perf")
    return Finding("perf_analyzer", "note", perf_analyzer.why_not(), perf_analyzer.WAYS_OUT)


def models_and_data(datasets: Path) -> Iterator[Finding]:
    """The demo's models, converted prompt sets, and a token for gated models (never shown)."""
    made = demo.is_assembled()
    yield Finding(
        "demo models",
        "ok" if made else "note",
        "assembled" if made else "not assembled yet",
        None if made else "the first run of a demo config does it",
    )
    sets = sorted(path.stem for path in datasets.glob("*.jsonl"))
    yield Finding(
        "prompt sets",
        "ok" if sets else "note",
        f"{', '.join(sets)} in {datasets}/" if sets else f"none in {datasets}/",
        None if sets else "specbench convert humaneval",
    )
    token = os.environ.get("HF_TOKEN") or _stored_token()
    yield Finding(
        "hub token",
        "ok" if token else "note",
        "there is one" if token else "none: gated models cannot be fetched",
        None if token else "set HF_TOKEN, or `hf auth login`",
    )


def _stored_token() -> str | None:
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    with suppress(OSError):
        return Path(home, "token").expanduser().read_text(encoding="utf-8").strip() or None
    return None


def disk(datasets: Path) -> Iterator[Finding]:
    """Room for runs and for what is fetched."""
    for about, path in (
        ("disk (results)", datasets.absolute().parent),
        ("disk (cache)", fetch.cache_dir()),
    ):
        there = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(there).free / 2**30
        enough = free >= MIN_FREE_GIB
        yield Finding(
            about,
            "ok" if enough else "problem",
            f"{free:.0f} GiB free at {there}",
            None if enough else "make room, or --results / SPECBENCH_CACHE elsewhere",
        )


def ports(_: Path) -> Iterator[Finding]:
    """Whether servers can be started on this machine's own address."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        yield Finding("ports", "ok", "127.0.0.1 can be listened on")
    except OSError as error:
        yield Finding("ports", "problem", f"127.0.0.1 cannot be listened on: {error.strerror}")


def clock(_: Path) -> Iterator[Finding]:
    """What requests are timed by."""
    about = time.get_clock_info("perf_counter")
    source = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    name = "unknown"
    with suppress(OSError):
        name = source.read_text(encoding="ascii").strip()
    readings = [time.perf_counter_ns() for _ in range(20_000)]
    cost_ns = (readings[-1] - readings[0]) / len(readings)
    slow = cost_ns > 1_000
    yield Finding(
        "clock",
        "note" if slow or not about.monotonic else "ok",
        f"{about.implementation}, source {name}, a reading takes {cost_ns:.0f} ns",
        "a slow source (hpet, acpi_pm) blurs short gaps" if slow else None,
    )
    try:
        stamped = arrivals.are_stamped()
    except OSError:
        return  # `ports` says it
    yield Finding(
        "arrivals",
        "ok" if stamped else "note",
        "stamped by the kernel" if stamped else "stamped when the client wakes",
        None if stamped else "`specbench calibrate` says how late that is",
    )


def others(_: Path) -> Iterator[Finding]:
    """Processes that use the CPU now."""
    busy = []
    processes = [p for p in psutil.process_iter(["name"]) if p.pid != os.getpid()]
    for process in processes:
        with suppress(psutil.Error):
            process.cpu_percent()
    time.sleep(0.5)
    for process in processes:
        with suppress(psutil.Error):
            share = process.cpu_percent() / 100
            if share > BUSY_SHARE:
                busy.append((share, process))
    if not busy:
        yield Finding("other load", "ok", "no process uses more than a tenth of a core")
    for share, process in sorted(busy, key=lambda pair: -pair[0])[:5]:
        said = f"{process.info['name']} (pid {process.pid}) uses {share:.1f} cores"
        yield Finding("other load", "note", said, "measure when it is done")


def noise(_: Path) -> Iterator[Finding]:
    """How steady this machine is: the spread of a fixed piece of work over some seconds."""
    import numpy as np

    matrix = np.random.default_rng(0).standard_normal((256, 256))
    times_ms = []
    end = time.monotonic() + NOISE_S
    while time.monotonic() < end:
        began = time.perf_counter_ns()
        for _repeat in range(4):
            matrix @ matrix
        times_ms.append((time.perf_counter_ns() - began) / 1e6)
    low, middle, high = np.percentile(times_ms, [5, 50, 95])
    spread = (high - low) / middle
    yield Finding(
        "noise",
        "ok" if spread < NOISY_SPREAD else "note",
        f"a fixed piece of work takes {middle:.2f} ms, 90% of the time within {spread:.0%}",
        None
        if spread < NOISY_SPREAD
        else "pairs and repeats see through it; a quiet machine needs fewer of them",
    )


def triton(command: Sequence[str]) -> Finding:
    """Whether that tritonserver runs Python backends, which the vLLM backend is."""
    try:
        version = triton_probe.probe(command)
    except EngineError as error:
        return Finding("Triton", "problem", error.message, error.hint)
    return Finding("Triton", "ok", f"{version}; its Python stub loads a model and answers")


CHECKS: Sequence[Callable[[Path], Iterator[Finding]]] = (
    python,
    engine,
    gpu,
    load_generators,
    models_and_data,
    disk,
    ports,
    clock,
    others,
    noise,
)


def examine(
    datasets: Path,
    *,
    tritonserver: Sequence[str] = (),
    without_noise: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[Finding]:
    """Every finding, as it is made; of Triton too where its command is given or on PATH."""
    for check in CHECKS:
        if check is noise:
            if without_noise:
                continue
            say(f"watching this machine for {NOISE_S:.0f} s")
        yield from check(datasets)
    on_path = shutil.which("tritonserver")
    if command := tritonserver or ((on_path,) if on_path else ()):
        say(f"starting {command[0]} for a moment")
        yield triton(command)


def as_record(finding: Finding) -> dict[str, str | None]:
    """A finding for scripts."""
    return asdict(finding)


def as_lines(finding: Finding) -> list[str]:
    """A finding for people."""
    mark = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}[finding.status]
    lines = [f"{mark} {finding.about}: {finding.said}"]
    if finding.advice:
        lines.append(f"        -> {finding.advice}")
    return lines
