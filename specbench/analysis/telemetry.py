"""What the machine did while an arm's requests were in flight: energy, clocks, other people's load.

  energy       the difference of a counter (GPU: NVML; CPU packages: RAPL), linear between samples,
               over the time with a request of the arm in flight; without a counter the integral of
               power by trapezoids
  J/token      energy / output tokens
  mean power   energy / time in flight
  throttled    share of the samples in that time at which the clock was held down
  others       CPU time of the cores that the run may use and did not / time in flight

A sample interval that straddles two arms' requests is split between them by time: at concurrency 1
that is exact to a sample at each end of a request. Where samples are further apart than the arm's
requests are long, there is no energy. NVML's power is a mean over a second (Ampere and later), its
energy counter is not: power alone needs requests of a second.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from specbench.analysis.outlines import Request
from specbench.analysis.spans import Counter, Floats, Ints, Spans
from specbench.records import (
    GpuReading,
    LoadScan,
    TelemetryLine,
    TelemetrySample,
    TelemetrySession,
)

THROTTLING = {  # bits of NVML's mask; idle, chosen clocks and display clocks are no throttling
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat (driver)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
POWER_MEAN_S = 1.0  # over which NVML's power is averaged
COVERED = 0.95  # of the time in flight; with less there is no energy
SCANNED = 0.5  # of the time in flight; with less nobody knows who else computed
TURN_GAP_NS = 50_000_000  # between requests of one arm, with none of another in between
BUSY_GPU = 0.05  # of the time, where NVML does not say whose processes are on it
READ = (
    *("energy_j", "power_w", "sm_mhz", "temperature_c", "slowed_by", "memory_bytes"),
    *("busy", "ours"),
)
WALL_NS = 10**17  # 3 years: no machine is up for so long, so this is time since 1970


class Other(NamedTuple):
    """A process that is not ours, and the cores that it took."""

    name: str
    pid: int
    cores: float


class Energy(NamedTuple):
    """Joules over some time, and from what: "gpu counter", "gpu power" or "cpu counter"."""

    joules: float
    seconds: float
    source: str


class Clock(NamedTuple):
    """Mean clock of the device, with its standard error, over this many samples."""

    mhz: float
    error_mhz: float
    samples: int
    device: str


@dataclass(frozen=True)
class Meanwhile:
    """The machine while one row's requests were in flight. None where it is not known.

    `resolution_ms` is the typical time between samples. Of several GPUs, energy, power and memory
    are added, the hottest and the most throttled one counts. `others_cores` are cores that worked
    for anything but the run, seen or unseen; `others` the processes that can be named.
    """

    resolution_ms: float
    energy_per_token_j: float | None = None
    energy_source: str | None = None
    power_w: float | None = None
    throttled_share: float | None = None
    throttled_by: tuple[str, ...] = ()
    max_temperature_c: float | None = None
    gpu_memory_bytes: float | None = None
    clock: Clock | None = None
    others_cores: float | None = None
    stolen_cores: float | None = None
    others: tuple[Other, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """The readings of one GPU: an array each; NaN where NVML did not say."""

    at_ns: Ints
    start: Ints
    columns: Mapping[str, Floats]

    def known(self, name: str, spans: Spans | None = None) -> Floats:
        """The readings of *name* (within *spans*) that are known."""
        values: Floats = self.columns[name]
        if spans is not None:
            values = values[spans.hold(self.at_ns)]
        known: Floats = values[~np.isnan(values)]
        return known

    def counter(self) -> Counter:
        """Its energy by its own counter."""
        return self._counter("energy_j")

    def integral(self) -> Counter:
        """Its energy as the integral of its power."""
        power = self._counter("power_w")
        steps = np.diff(power.at_ns) / 1e9 * (power.joules[1:] + power.joules[:-1]) / 2
        joules = np.concatenate([[0.0], np.cumsum(steps)]) if len(power.at_ns) else power.joules
        return Counter(power.at_ns, joules, power.start)

    def _counter(self, name: str) -> Counter:
        known = ~np.isnan(self.columns[name])
        return Counter(self.at_ns[known], self.columns[name][known], self.start[known])


@dataclass(frozen=True)
class Timeline:
    """All that was sampled during a run, in order of time. Made by `timeline`.

    `scans` are (load, when it was taken).
    """

    session: TelemetrySession
    at_ns: Ints
    gpus: Mapping[int, Gpu]
    rapl: Counter
    cpu_clock: tuple[Ints, Floats]
    scans: Sequence[tuple[LoadScan, int]]

    @property
    def resolution_s(self) -> float:
        """The typical time between samples."""
        return float(np.median(np.diff(self.at_ns))) / 1e9

    def during(self, records: Sequence[Request]) -> Meanwhile | None:
        """The machine while *records* were in flight; None where nothing was sampled then."""
        good = [record for record in records if record.ok]
        starts = _times(self._here(record.sent_ns) for record in good)
        ends = _times(self._here(record.end_ns) for record in good)
        took_time = ends > starts
        in_flight = starts[took_time], ends[took_time]
        if not took_time.any():
            return None
        spans = Spans(*in_flight)
        if spans.ends[-1] < self.at_ns[0] or spans.starts[0] > self.at_ns[-1]:
            return None
        used = self._gpus_in_use(spans)
        energy = self._energy(spans, used)
        if energy and Spans(*in_flight, gap_ns=TURN_GAP_NS).mean_s < self._shortest_s(energy):
            energy = None
        tokens = sum(record.output_tokens or 0 for record in good)
        return Meanwhile(
            resolution_ms=self.resolution_s * 1e3,
            energy_per_token_j=energy.joules / tokens if energy and tokens else None,
            energy_source=energy.source if energy else None,
            power_w=energy.joules / energy.seconds if energy else None,
            clock=self._clock(spans, used),
            **_of_gpus(used, spans),
            **self._load(spans),
        )

    def _here(self, at_ns: int) -> int:
        """A time on the samples' clock; perf_analyzer's are since 1970."""
        wall = self.session.at_ns - self.session.wall_ns
        return at_ns + wall if at_ns > WALL_NS else at_ns

    def _shortest_s(self, energy: Energy) -> float:
        """The shortest request of which such energy says anything."""
        return max(self.resolution_s, POWER_MEAN_S if energy.source == "gpu power" else 0.0)

    def _gpus_in_use(self, spans: Spans) -> list[Gpu]:
        """Those that the run computed on: by their processes, else by their being busy."""
        ours = [gpu for gpu in self.gpus.values() if gpu.known("ours", spans).any()]
        busy = [(gpu, gpu.known("busy", spans)) for gpu in self.gpus.values()]
        return ours or [gpu for gpu, of in busy if of.size and of.mean() >= BUSY_GPU]

    def _energy(self, spans: Spans, used: Sequence[Gpu]) -> Energy | None:
        """Of the GPUs in use together, else of the CPUs; None where too little of it is known."""
        if not used:
            return _enough([self.rapl], spans, "cpu counter")
        return _enough([gpu.counter() for gpu in used], spans, "gpu counter") or _enough(
            [gpu.integral() for gpu in used], spans, "gpu power"
        )

    def _clock(self, spans: Spans, used: Sequence[Gpu]) -> Clock | None:
        at_ns, mhz = self.cpu_clock
        found = [gpu.known("sm_mhz", spans) for gpu in used] or [mhz[spans.hold(at_ns)]]
        clocks = np.concatenate(found)
        if not clocks.size:
            return None
        error = float(np.std(clocks, ddof=1)) / clocks.size**0.5 if clocks.size > 1 else 0.0
        return Clock(float(clocks.mean()), error, clocks.size, "GPU" if used else "CPU")

    def _load(self, spans: Spans) -> dict[str, Any]:
        """Who else computed: each scan counts by the share of it that lies within *spans*."""
        loads = [load for load, _ in self.scans]
        since: Ints = np.array([load.since_ns for load in loads], np.int64)
        until: Ints = np.array([at for _, at in self.scans], np.int64)
        within_s = spans.before(until) - spans.before(since)
        seconds = float(within_s.sum())
        if seconds < SCANNED * spans.seconds:
            return {}
        shares = within_s / np.maximum(1e-9, (until - since) / 1e9)
        taken: dict[tuple[str, int], float] = {}
        for i in np.flatnonzero(shares):
            for one in loads[i].others:
                key = (one.name, one.pid)
                taken[key] = taken.get(key, 0.0) + one.cpu_s * float(shares[i])
        others = [Other(name, pid, cpu_s / seconds) for (name, pid), cpu_s in taken.items()]
        busy, ours, stolen = (
            float(np.dot(_numbers(loads, name), shares)) / seconds
            for name in ("busy_s", "ours_s", "stolen_s")
        )
        return {
            "others": tuple(sorted(others, key=lambda one: -one.cores)),
            "others_cores": None if np.isnan(busy) else max(0.0, busy - ours),
            "stolen_cores": None if np.isnan(stolen) else stolen,
        }


def timeline(lines: Iterable[TelemetryLine]) -> Timeline | None:
    """The samples of a run; None where there are none.

    Nor where the machine was restarted in between: its clock began anew, so that nobody knows which
    requests a sample stands beside.
    """
    sessions: list[TelemetrySession] = []
    samples: list[tuple[TelemetrySample, int]] = []
    for line in lines:
        if line.session:
            sessions.append(line.session)
        elif line.sample and sessions:
            samples.append((line.sample, len(sessions)))
    if len(samples) < 2 or len({session.boot_id for session in sessions}) > 1:
        return None
    readings: dict[int, list[tuple[GpuReading, int]]] = {}
    for sample, start in samples:
        for one in sample.gpus:
            readings.setdefault(one.index, []).append((one, start))
    rapl = [(s.at_ns, s.rapl_j, start) for s, start in samples if s.rapl_j is not None]
    clocks = [(s.at_ns, s.cpu_mhz) for s, _ in samples if s.cpu_mhz is not None]
    return Timeline(
        session=sessions[0],
        at_ns=_times(sample.at_ns for sample, _ in samples),
        gpus={i: _gpu(some) for i, some in readings.items()},
        rapl=Counter(
            _times(at for at, _, _ in rapl),
            np.array([joules for _, joules, _ in rapl], float),
            _times(start for _, _, start in rapl),
        ),
        cpu_clock=(_times(at for at, _ in clocks), np.array([mhz for _, mhz in clocks], float)),
        scans=[(sample.load, sample.at_ns) for sample, _ in samples if sample.load],
    )


def _gpu(read: Sequence[tuple[GpuReading, int]]) -> Gpu:
    return Gpu(
        _times(one.at_ns for one, _ in read),
        _times(start for _, start in read),
        {name: _numbers([one for one, _ in read], name) for name in READ},
    )


def _of_gpus(used: Sequence[Gpu], spans: Spans) -> dict[str, Any]:
    """What is read of each GPU and not integrated."""
    masks = [mask.astype(int) for gpu in used if (mask := gpu.known("slowed_by", spans)).size]
    hottest = [heat.max() for gpu in used if (heat := gpu.known("temperature_c", spans)).size]
    memory = [most.max() for gpu in used if (most := gpu.known("memory_bytes", spans)).size]
    shares = [float(((mask & sum(THROTTLING)) != 0).mean()) for mask in masks]
    return {
        "throttled_share": max(shares, default=None),
        "throttled_by": tuple(
            name for bit, name in THROTTLING.items() if any((mask & bit).any() for mask in masks)
        ),
        "max_temperature_c": float(max(hottest)) if hottest else None,
        "gpu_memory_bytes": float(sum(memory)) if memory else None,
    }


def _enough(counters: Sequence[Counter], spans: Spans, source: str) -> Energy | None:
    """All counters together; None where one of them does not cover the time in flight.

    What is not covered is taken to have had the mean power.
    """
    found = [counter.over(spans) for counter in counters]
    if any(seconds < COVERED * spans.seconds for _, seconds in found):
        return None
    power = sum(joules / seconds for joules, seconds in found)
    known = 0 < power < np.inf
    return Energy(power * spans.seconds, spans.seconds, source) if known else None


def _numbers(facts: Sequence[object], name: str) -> Floats:
    """One field of each; NaN where it is None."""
    return np.array(list(map(attrgetter(name), facts)), float)


def _times(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)
