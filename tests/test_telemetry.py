"""The machine, sampled: energy that adds up, times that fit, and nobody accused without evidence."""

import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench import doctor
from specbench.analysis.cases import MeasuredCase
from specbench.analysis.hygiene import CaseFacts, PairFacts, machine
from specbench.analysis.metrics import summarise
from specbench.analysis.rows import Row, rows
from specbench.analysis.speedup import compare
from specbench.analysis.telemetry import Clock, Meanwhile, Other, Timeline, timeline
from specbench.errors import EngineError
from specbench.records import (
    GpuReading,
    LoadScan,
    OtherProcess,
    RequestRecord,
    TelemetryLine,
    TelemetrySample,
    TelemetrySession,
)
from specbench.render.columns import columns
from specbench.render.report import Findings, as_csv, as_json
from specbench.render.words import explanations
from specbench.store import RunStore
from specbench.telemetry import gpu, host, start
from specbench.telemetry.__main__ import OWN_SHARE, samples, session

Build = Callable[..., RequestRecord]
S = 1_000_000_000


# --- NVML ----------------------------------------------------------------------------------------


class NVMLError(Exception):
    """As nvidia-ml-py's: `value` is NVML's error code."""

    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Nvml(ModuleType):
    """nvidia-ml-py with two GPUs, by its documented names; `cannot` are functions that fail."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_GPU_IS_LOST = 3, 13, 15

    def __init__(self, **cannot: int) -> None:
        super().__init__("pynvml")
        self.NVMLError = NVMLError
        self.cannot = cannot
        self.asked: list[str] = []
        self.pids = [4242]
        answers: dict[str, Callable[..., object]] = {
            "nvmlInit": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: b"550.54.15",
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda i: i,
            "nvmlDeviceGetName": lambda _: "NVIDIA H200",
            "nvmlDeviceGetUUID": lambda i: f"GPU-{i}aaa",
            "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
            "nvmlDeviceGetMaxClockInfo": lambda _, __: 1980,
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=150 << 30, used=90 << 30),
            "nvmlDeviceGetTotalEnergyConsumption": lambda i: 5_000_500 + i,
            "nvmlDeviceGetPowerUsage": lambda _: 312_500,
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=97, memory=60),
            "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0x24,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x04,
            "nvmlDeviceGetClockInfo": lambda _, kind: {1: 1755, 2: 2619}[kind],
            "nvmlDeviceGetTemperature": lambda _, __: 61,
            "nvmlDeviceGetComputeRunningProcesses": lambda i: (
                [SimpleNamespace(pid=pid) for pid in self.pids] if i == 0 else []
            ),
        }
        for name, answer in answers.items():
            setattr(self, name, self._counted(name, answer))

    def _counted(self, name: str, answer: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            self.asked.append(name)
            if name in self.cannot:
                raise NVMLError(self.cannot[name])
            return answer(*arguments)

        return call


def opened(nvml: Nvml, visible: str | None = None) -> gpu.Gpus:
    found, problem = gpu.Gpus.of(nvml, visible)
    assert problem is None
    assert found is not None
    return found


def read(gpus: gpu.Gpus, pids: Sequence[int] = ()) -> list[GpuReading]:
    return [GpuReading.model_validate(one) for one in gpus.read(lambda: pids, lambda: 7)]


def test_a_reading_is_in_our_units() -> None:
    first, second = read(opened(Nvml()), [4242])
    assert first == GpuReading(
        index=0,
        at_ns=7,
        energy_j=5000.5,
        power_w=312.5,
        sm_mhz=1755,
        memory_mhz=2619,
        temperature_c=61,
        slowed_by=0x24,
        memory_bytes=90 << 30,
        busy=0.97,
        ours=True,
    )
    assert (second.index, second.ours) == (1, None)


def test_a_gpu_on_which_only_others_compute_is_not_ours() -> None:
    assert read(opened(Nvml()), [1])[0].ours is False


def test_facts_name_the_gpu_and_its_driver() -> None:
    first = opened(Nvml()).facts()[0]
    assert (first["name"], first["driver"]) == ("NVIDIA H200", "550.54.15")
    assert (first["power_limit_w"], first["max_sm_mhz"]) == (700, 1980)


@pytest.mark.parametrize(
    ("visible", "indices"), [(None, [0, 1]), ("1", [1]), ("GPU-0", [0]), ("1,0", [0, 1])]
)
def test_only_the_gpus_that_engines_see_are_read(visible: str | None, indices: list[int]) -> None:
    assert [one.index for one in read(opened(Nvml(), visible))] == indices


def test_hidden_gpus_are_said() -> None:
    assert gpu.Gpus.of(Nvml(), "") == (None, "no GPU is visible to engines")


def test_a_driver_that_is_not_there_is_said() -> None:
    assert gpu.Gpus.of(Nvml(nvmlInit=9), None) == (None, "NVML: error 9")


def test_without_nvidia_ml_py_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.Gpus.open() == (None, gpu.INSTALL)


def test_what_a_gpu_cannot_say_is_none_and_asked_once() -> None:
    nvml = Nvml(nvmlDeviceGetTotalEnergyConsumption=3)
    gpus = opened(nvml, "0")
    assert [read(gpus)[0].energy_j for _ in range(3)] == [None] * 3
    assert nvml.asked.count("nvmlDeviceGetTotalEnergyConsumption") == 1


def test_a_passing_error_is_asked_again() -> None:
    nvml = Nvml(nvmlDeviceGetPowerUsage=15)
    gpus = opened(nvml, "0")
    assert read(gpus)[0].power_w is None
    nvml.cannot.clear()
    assert read(gpus)[0].power_w == 312.5


def test_an_older_nvidia_ml_py_knows_throttling_by_its_older_name() -> None:
    nvml = Nvml()
    del nvml.nvmlDeviceGetCurrentClocksEventReasons
    assert read(opened(nvml))[0].slowed_by == 0x04


def test_every_name_of_nvml_that_we_use_is_in_nvidia_ml_py() -> None:
    pynvml = pytest.importorskip("pynvml")
    text = Path(gpu.__file__).read_text(encoding="utf-8")
    used = set(re.findall(r"\b(?:nvml[A-Z]\w+|NVML_\w+|NVMLError)\b", text))
    assert len(used) > 15
    assert {name for name in used if not hasattr(pynvml, name)} == set()
    assert {name for name in used if not hasattr(Nvml(), name)} == set()  # nor does the stub lie


# --- the host ------------------------------------------------------------------------------------


def zone(root: Path, name: str, label: str, energy_uj: int, most_uj: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "name").write_text(label, encoding="utf-8")
    (folder / "energy_uj").write_text(f"{energy_uj}\n", encoding="utf-8")
    (folder / "max_energy_range_uj").write_text(f"{most_uj}\n", encoding="utf-8")
    return folder / "energy_uj"


def test_packages_are_added_and_their_parts_are_not(tmp_path: Path) -> None:
    one = zone(tmp_path, "intel-rapl:0", "package-0", 100)
    other = zone(tmp_path, "intel-rapl:1", "package-1", 200)
    part = zone(tmp_path, "intel-rapl:0:0", "core", 0)
    whole = zone(tmp_path, "intel-rapl:2", "psys", 0)
    rapl = host.Rapl(tmp_path)
    for counter in (one, other, part, whole):
        counter.write_text("500100\n", encoding="utf-8")
    assert rapl.joules() == pytest.approx(0.5 + 0.4999)


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    rapl = host.Rapl(tmp_path)
    counter.write_text("100000\n", encoding="utf-8")
    assert rapl.joules() == pytest.approx(0.2)


def test_without_a_counter_there_is_no_energy(tmp_path: Path) -> None:
    assert (host.Rapl(tmp_path).joules(), host.Rapl(tmp_path).is_readable) == (None, False)


def test_cpu_time_is_of_the_cores_that_we_may_use(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    line = "cpu{} 100 20 30 9999 888 4 6 {} 0 0\n"
    stat.write_text(line.format("", 0) + line.format(0, 50) + line.format(1, 70), encoding="utf-8")
    ticks = os.sysconf("SC_CLK_TCK")
    assert host.cpu_time([0], stat) == (160 / ticks, 50 / ticks)
    assert host.cpu_time([0, 1], stat) == (320 / ticks, 120 / ticks)
    assert host.cpu_time([0], tmp_path / "none") is None


def test_the_clock_is_read_where_the_kernel_has_it(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert host.clock_mhz([0], tmp_path, cpuinfo) is None
    cpuinfo.write_text("cpu MHz\t\t: 2000.0\ncpu MHz\t\t: 3000.0\n", encoding="utf-8")
    assert host.clock_mhz([0], tmp_path, cpuinfo) == 2500
    (tmp_path / "cpu0" / "cpufreq").mkdir(parents=True)
    (tmp_path / "cpu0" / "cpufreq" / "scaling_cur_freq").write_text("3400000\n", encoding="utf-8")
    assert host.clock_mhz([0], tmp_path, cpuinfo) == 3400


def test_a_process_is_read_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "13").mkdir()  # ended between the two
    fields = "S 7 1 1 0 -1 2097216 0 0 0 0 30 12 0 0 20 0 1 0 4321 0 0"
    (tmp_path / "12" / "stat").write_bytes(b"12 (a) (\xff b) " + fields.encode())
    found = host.processes(tmp_path)
    assert found == {12: host.Process(7, "a) (\ufffd b", 4321, 42, True)}


def at(parent: int, name: str, ticks: int, *, started: int = 1, kernel: bool = False) -> Any:  # noqa: ANN401
    return host.Process(parent, name, started, ticks, kernel)


def scans(*looks: dict[int, host.Process], busy: Sequence[float] = ()) -> list[Any]:
    """Scans of process 10 and its children, a second apart."""
    seen, times = iter(looks), iter(host.CpuTime(b, 0.0) for b in busy)
    load = host.Load(10, [0], look=lambda: next(seen), total=lambda _: next(times, None))
    return [load.scan(i * S) for i in range(len(looks))]


TICKS = os.sysconf("SC_CLK_TCK")


def test_children_are_ours_and_the_rest_is_not() -> None:
    before = {10: at(1, "specbench", 0), 11: at(10, "vllm", 0), 20: at(1, "make", 0)}
    after = {10: at(1, "specbench", 10), 11: at(10, "vllm", 80), 20: at(1, "make", 50)}
    first, second = scans(before, after, busy=[0, 1.5])
    assert first is None
    assert second == {
        "since_ns": 0,
        "ours_s": 90 / TICKS,
        "others": [{"pid": 20, "name": "make", "cpu_s": 50 / TICKS}],
        "busy_s": 1.5,
        "stolen_s": 0.0,
    }


def test_a_process_counts_from_its_start_even_where_its_id_was_anothers() -> None:
    before = {20: at(1, "old", 900)}
    after = {20: at(1, "new", 30, started=2), 21: at(1, "born", 40)}
    others = scans(before, after)[1]["others"]
    assert [(one["name"], one["cpu_s"]) for one in others] == [
        ("new", 30 / TICKS),
        ("born", 40 / TICKS),
    ]


def test_kernel_threads_and_idlers_are_nobody() -> None:
    before = {2: at(0, "kthreadd", 0, kernel=True), 20: at(1, "cron", 0)}
    after = {2: at(0, "kthreadd", 90, kernel=True), 20: at(1, "cron", 1)}
    assert scans(before, after)[1]["others"] == []


# --- the sampler ---------------------------------------------------------------------------------


def test_the_sampler_waits_until_it_costs_less_than_its_share(tmp_path: Path) -> None:
    """Each sample takes 50 ms of CPU time here: one every 6.25 s, not every second."""
    slept: list[float] = []
    now, cpu = itertools.count(0, S // 20), itertools.count(0, S // 20)
    made = samples(
        None,
        host.Rapl(tmp_path),
        None,
        interval_s=1,
        clock=lambda: next(now),
        cpu_clock=lambda: next(cpu),
        wait=slept.append,
    )
    for _ in range(3):
        next(made)
    assert slept == [pytest.approx(0.05 / OWN_SHARE - 0.05)] * 2


def test_what_the_sampler_makes_are_facts(tmp_path: Path) -> None:
    gpus, rapl = opened(Nvml()), host.Rapl(tmp_path)
    first = session(gpus, None, root=os.getpid(), rapl=False, interval_s=0.2)
    assert TelemetrySession.model_validate(first).gpus[1].uuid == "GPU-1aaa"
    load = host.Load(os.getpid(), [0])
    made = samples(gpus, rapl, load, interval_s=0, wait=lambda _: None)
    facts = [TelemetrySample.model_validate(next(made)) for _ in range(3)]
    assert [len(one.gpus) for one in facts] == [2, 2, 2]
    assert facts[0].at_ns < facts[1].at_ns <= time.perf_counter_ns()
    assert facts[0].own_s is not None
    assert facts[1].own_s is None  # whose work the CPUs do is looked at once a second


def test_the_end_of_a_run_is_sampled_too(tmp_path: Path) -> None:
    load, waits = host.Load(os.getpid(), [0]), iter([None, "a signal"])
    made = samples(None, host.Rapl(tmp_path), load, interval_s=0, wait=lambda _: next(waits))
    assert ["load" in one for one in made] == [False, False, True]


def store_in(folder: Path) -> RunStore:
    return RunStore.create(folder, "run", {})


def wait_for_line(store: RunStore, lines: int) -> TelemetryLine:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if len(found := list(store.telemetry())) >= lines:
            return found[0]
        time.sleep(0.005)
    raise AssertionError("the sampler wrote nothing")


def test_a_sampler_lives_as_long_as_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the clock of the requests, as a process of its own, and gone afterwards."""
    monkeypatch.delenv(start.SWITCH)
    said: list[str] = []
    store = store_in(tmp_path)
    before = time.perf_counter_ns()
    already = host.tree(os.getpid(), host.processes())
    with start.sampled(store, say=said.append):
        first = wait_for_line(store, 2).session
        mine = host.tree(os.getpid(), host.processes()) - already
    assert first is not None
    assert before < first.at_ns < time.perf_counter_ns()
    assert first.root_pid == os.getpid()
    assert mine
    assert not mine & host.processes().keys()
    assert sum(line.sample is not None for line in store.telemetry()) >= 2  # the last at the end
    assert [path.name for path in store.path.glob("telemetry*")] == ["telemetry.jsonl"]
    assert said == []


def test_a_sampler_that_cannot_start_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(start.SWITCH)
    said: list[str] = []
    monkeypatch.setattr(start, "Child", RefusingChild)
    with start.sampled(store_in(tmp_path), say=said.append):
        pass
    assert said == ["the machine is not sampled: no such program"]


class RefusingChild:
    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> None:
        raise EngineError("no such program")

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("url", [None, "http://gpu-box:8000", "https://10.0.0.7"])
def test_nothing_is_sampled_where_that_is_off_or_engines_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str | None
) -> None:
    if url:
        monkeypatch.delenv(start.SWITCH)
    store = store_in(tmp_path)
    already = host.tree(os.getpid(), host.processes())
    with start.sampled(store, say=print, engine_url=url):
        assert host.tree(os.getpid(), host.processes()) <= already
    assert list(store.telemetry()) == []


@pytest.mark.parametrize("url", ["http://localhost:8000", "http://127.0.0.1:1", "http://[::1]:1"])
def test_an_address_of_this_machine_is_here(url: str) -> None:
    assert start.is_here(url)


@pytest.mark.parametrize(
    ("engines", "own", "seen"),
    [
        ([{}], None, None),
        ([], "0,1", "0,1"),
        ([{}, {"CUDA_VISIBLE_DEVICES": "2"}], "1", "1,2"),
        ([{"CUDA_VISIBLE_DEVICES": "0, 1"}, {"CUDA_VISIBLE_DEVICES": "1"}], None, "0,1"),
        ([{"CUDA_VISIBLE_DEVICES": ""}], None, ""),
    ],
)
def test_the_gpus_of_all_engines_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
    engines: list[dict[str, str]],
    own: str | None,
    seen: str | None,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if own:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    assert start.visible_gpus(engines) == seen


def test_a_torn_line_is_dropped_and_cut_off(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    line = TelemetryLine(sample=TelemetrySample(at_ns=1)).model_dump_json(exclude_none=True)
    store.telemetry_file().write_text(f'{line}\n{{"sam', encoding="utf-8")
    assert len(list(store.telemetry())) == 1
    assert store.telemetry_file().read_text(encoding="utf-8") == f"{line}\n"


# --- energy --------------------------------------------------------------------------------------

FIRST = TelemetrySession(
    boot_id="b", at_ns=0, wall_ns=1_700_000_000 * S, interval_s=0.2, root_pid=1, cores=2
)


def sampled(*made: TelemetrySample, boots: Sequence[str] = ("b",)) -> Timeline | None:
    """The timeline of these samples; a second boot id begins another session at the end."""
    lines = [TelemetryLine(session=FIRST), *(TelemetryLine(sample=one) for one in made)]
    for boot in boots[1:]:
        lines.append(TelemetryLine(session=FIRST.model_copy(update={"boot_id": boot})))
    return timeline(lines)


def on_gpu(
    power: Callable[[float], float],
    seconds: float,
    *,
    every: float = 0.2,
    counted: bool = True,
    **more: Any,  # noqa: ANN401  (any field of GpuReading)
) -> list[TelemetrySample]:
    """Samples of one GPU with *power* (W at s), whose counter is exact to 0.1 ms steps."""
    made, joules, now, step = [], 0.0, 0.0, 1e-4
    for i in range(round(seconds / every) + 1):
        while now < i * every - step / 2:
            joules += power(now) * step
            now += step
        at_ns = round(i * every * S)
        reading = {"index": 0, "at_ns": at_ns, "power_w": power(i * every), "ours": True, **more}
        if counted:
            reading["energy_j"] = joules
        made.append(TelemetrySample(at_ns=at_ns, gpus=(GpuReading.model_validate(reading),)))
    return made


def request(record: Build, sent_s: float, end_s: float, *, tokens: int = 100) -> RequestRecord:
    return record(f"p{sent_s}", sent=sent_s * 1e3, chunks=(end_s * 1e3,), tokens=tokens)


def during(made: Timeline | None, *records: RequestRecord) -> Meanwhile:
    assert made is not None
    found = made.during(records)
    assert found is not None
    return found


@pytest.mark.parametrize("counted", [True, False])
def test_a_constant_power_is_power_times_time(record: Build, counted: bool) -> None:
    """300 W for 2 s and 100 tokens: 6 J a token."""
    made = sampled(*on_gpu(lambda _: 300, 4, counted=counted))
    found = during(made, request(record, 1.03, 3.03))
    assert found.energy_per_token_j == pytest.approx(6)
    assert found.power_w == pytest.approx(300)
    assert found.energy_source == ("gpu counter" if counted else "gpu power")
    assert found.resolution_ms == pytest.approx(200)


def test_a_power_that_rises_is_integrated(record: Build) -> None:
    """100 W a second: from 1 s to 3 s that is 400 J."""
    made = sampled(*on_gpu(lambda s: 100 * s, 4, counted=False))
    found = during(made, request(record, 1, 3))
    assert found.energy_per_token_j == pytest.approx(4)


def test_arms_in_turns_each_get_their_own_power(record: Build) -> None:
    """Two seconds of 400 W and two of 200 W: at the edges a sample of 0.2 s is shared."""
    made = sampled(*on_gpu(lambda s: 400 if s % 4 < 2 else 200, 24))
    one = during(made, *(request(record, s, s + 1.99) for s in range(4, 20, 4)))
    other = during(made, *(request(record, s, s + 1.99) for s in range(6, 22, 4)))
    assert one.power_w == pytest.approx(400, rel=0.001)
    assert other.power_w == pytest.approx(200, rel=0.001)
    off = during(made, *(request(record, s + 0.1, s + 2.09) for s in range(4, 20, 4)))
    assert off.power_w == pytest.approx(400 - 200 * 0.09 / 1.99, rel=0.03)


@given(st.lists(st.floats(0, 8), min_size=2, max_size=6, unique=True))
def test_energies_of_parts_add_up_to_that_of_the_whole(cuts: list[float]) -> None:
    made = sampled(*SAWTOOTH)
    assert made is not None
    edges = sorted(cuts)

    def joules(start_s: float, end_s: float) -> float:
        found = made.gpus[0].counter().over(spans_of((start_s, end_s)))
        return found[0]

    parts = sum(joules(a, b) for a, b in itertools.pairwise(edges))
    assert parts == pytest.approx(joules(edges[0], edges[-1]), abs=1e-4)


def spans_of(*spans: tuple[float, float]) -> Any:  # noqa: ANN401  (Spans)
    from specbench.analysis.spans import Spans

    starts, ends = (np.array([round(one[at] * S) for one in spans], np.int64) for at in (0, 1))
    return Spans(starts, ends)


SAWTOOTH = on_gpu(lambda s: 100 + 50 * (s % 3), 8)


def test_requests_in_flight_together_share_one_energy(record: Build) -> None:
    made = sampled(*on_gpu(lambda _: 300, 4))
    found = during(made, request(record, 1, 3), request(record, 1, 3), request(record, 2, 3))
    assert found.energy_per_token_j == pytest.approx(2)


def test_requests_shorter_than_a_sample_have_no_energy(record: Build) -> None:
    made = sampled(*on_gpu(lambda _: 300, 20, every=1))
    turns = [request(record, s, s + 0.4) for s in range(2, 18)]
    assert during(made, *turns).energy_per_token_j is None
    back_to_back = [request(record, s / 2.5, s / 2.5 + 0.39) for s in range(5, 40)]
    assert during(made, *back_to_back).energy_per_token_j is not None


def test_power_that_is_a_mean_over_a_second_needs_requests_of_a_second(record: Build) -> None:
    turns = [request(record, s, s + 0.6) for s in range(2, 8)]
    assert during(sampled(*on_gpu(lambda _: 300, 9)), *turns).power_w == pytest.approx(300)
    assert during(sampled(*on_gpu(lambda _: 300, 9, counted=False)), *turns).power_w is None


def test_a_hole_in_the_samples_has_no_energy(record: Build) -> None:
    made = on_gpu(lambda _: 300, 20)
    holed = [one for one in made if not 4.9 * S < one.at_ns < 8.1 * S]
    assert during(sampled(*holed), request(record, 4, 9)).power_w is None
    assert during(sampled(*holed), request(record, 9, 14)).power_w == pytest.approx(300)


def test_requests_outside_the_samples_have_nothing(record: Build) -> None:
    made = sampled(*on_gpu(lambda _: 300, 4))
    assert made is not None
    assert made.during([request(record, 50, 60)]) is None
    assert made.during([record(sent=1000, chunks=(2000,), error="cut")]) is None
    assert during(made, request(record, 3, 60)).power_w is None


def test_a_tools_wall_clock_times_are_laid_beside_the_samples(record: Build) -> None:
    made = sampled(*on_gpu(lambda _: 300, 4))
    wall_s = FIRST.wall_ns / S
    assert during(made, request(record, wall_s + 1, wall_s + 3)).power_w == pytest.approx(300)


def test_after_a_reboot_nobody_knows_what_stood_beside_what() -> None:
    made = on_gpu(lambda _: 300, 4)
    assert sampled(*made, boots=("b", "b")) is not None
    assert sampled(*made, boots=("b", "c")) is None


def two_gpus(**more: Any) -> list[TelemetrySample]:  # noqa: ANN401
    one, other = on_gpu(lambda _: 300, 4, slowed_by=0), on_gpu(lambda _: 70, 4, index=1, **more)
    return [
        a.model_copy(update={"gpus": (*a.gpus, *b.gpus)}) for a, b in zip(one, other, strict=True)
    ]


def test_only_gpus_of_the_run_count_and_all_of_them(record: Build) -> None:
    for more, watts in [({"ours": False}, 300), ({"ours": True}, 370)]:
        made = sampled(*two_gpus(**more))
        assert during(made, request(record, 1, 3)).power_w == pytest.approx(watts)


def test_in_a_container_the_busy_gpus_count(record: Build) -> None:
    for busy, watts in [(0.0, 300), (0.9, 370)]:
        made = two_gpus(busy=busy)
        hidden = [
            one.model_copy(
                update={
                    "gpus": tuple(
                        r.model_copy(update={"ours": None, "busy": 0.97 if r.index == 0 else busy})
                        for r in one.gpus
                    )
                }
            )
            for one in made
        ]
        assert during(sampled(*hidden), request(record, 1, 3)).power_w == pytest.approx(watts)


def test_on_a_cpu_energy_is_that_of_its_packages(record: Build) -> None:
    made = [TelemetrySample(at_ns=i * S, rapl_j=65.0 * i, cpu_mhz=3000) for i in range(20)]
    found = during(sampled(*made), request(record, 2.5, 12.5))
    assert found.energy_per_token_j == pytest.approx(6.5)
    assert found.energy_source == "cpu counter"
    assert found.power_w == pytest.approx(65)
    assert found.clock is not None
    assert (found.clock.device, found.clock.mhz) == ("CPU", 3000)
    assert found.throttled_share is None


def test_the_clock_is_that_of_the_time_in_flight(record: Build) -> None:
    made = [TelemetrySample(at_ns=i * S, cpu_mhz=3000 if i < 10 else 2000) for i in range(20)]
    clocks = [
        during(sampled(*made), request(record, *at)).clock for at in [(2.5, 8.5), (10.5, 18.5)]
    ]
    assert [clock and (clock.mhz, clock.samples) for clock in clocks] == [(3000, 6), (2000, 8)]


def test_a_sampler_that_began_again_counts_from_0_again(record: Build) -> None:
    """A resumed run: between the two samplers nothing is known, though they follow closely."""
    made = [TelemetrySample(at_ns=i * S, rapl_j=65.0 * (i % 10)) for i in range(20)]
    lines = [TelemetryLine(sample=one) for one in made]
    again = timeline(
        [TelemetryLine(session=FIRST), *lines[:10], TelemetryLine(session=FIRST), *lines[10:]]
    )
    assert during(again, request(record, 11.5, 15.5)).power_w == pytest.approx(65)
    assert during(again, request(record, 7.5, 12.5)).power_w is None


def test_the_most_throttled_gpu_counts(record: Build) -> None:
    made = sampled(*two_gpus(ours=True, slowed_by=0x40))
    found = during(made, request(record, 1, 3))
    assert (found.throttled_share, found.throttled_by) == (1, ("heat (hardware)",))


def test_throttling_heat_and_memory_are_those_of_the_time_in_flight(record: Build) -> None:
    made = on_gpu(lambda _: 300, 10, temperature_c=60, memory_bytes=80 << 30, slowed_by=0x01)
    hot = [
        one.model_copy(
            update={
                "gpus": (one.gpus[0].model_copy(update={"slowed_by": 0x21, "temperature_c": 88}),)
            }
        )
        if 2 * S <= one.at_ns < 3 * S
        else one
        for one in made
    ]
    found = during(sampled(*hot), request(record, 1.1, 5.1))
    assert found.throttled_share == pytest.approx(5 / 20)
    assert found.throttled_by == ("heat (driver)",)
    assert (found.max_temperature_c, found.gpu_memory_bytes) == (88, 80 << 30)
    cool = during(sampled(*hot), request(record, 5.1, 9.1))
    assert (cool.throttled_share, cool.throttled_by) == (0, ())


# --- who else ------------------------------------------------------------------------------------


def loads(*scanned: tuple[float, float, dict[str, float]], stolen: float = 0) -> list[Any]:
    """A scan a second: ours, all that was busy, and others by name."""
    made = [TelemetrySample(at_ns=0)]
    for i, (ours, busy, others) in enumerate(scanned):
        named = tuple(OtherProcess(pid=9, name=name, cpu_s=s) for name, s in others.items())
        scan = LoadScan(since_ns=i * S, ours_s=ours, busy_s=busy, stolen_s=stolen, others=named)
        made.append(TelemetrySample(at_ns=(i + 1) * S, load=scan))
    return made


def test_others_count_while_requests_are_in_flight(record: Build) -> None:
    """make computed half of the two seconds in flight, and later, when nobody measured."""
    made = sampled(
        *loads(
            (1, 1, {}), (1, 2, {"make": 1}), (1, 1.1, {}), (0, 2, {"make": 2}), (0, 2, {"make": 2})
        )
    )
    found = during(made, request(record, 1, 3))
    (make,) = found.others
    assert (make.name, make.pid) == ("make", 9)
    assert make.cores == pytest.approx(0.5)
    assert found.others_cores == pytest.approx(0.55)
    assert during(made, request(record, 0, 1)).others == ()


def test_a_scan_counts_by_its_share(record: Build) -> None:
    made = sampled(*loads((1, 1, {}), (1, 2, {"make": 1}), (1, 1, {})))
    assert during(made, request(record, 0.5, 1.5)).others[0].cores == pytest.approx(0.5)


def facts(record: Build, seen: Meanwhile | None) -> CaseFacts:
    records = [request(record, 1, 3)]
    metrics = summarise(records, [], speculative=False)
    return CaseFacts("vanilla", 0, 1, records, [], metrics, meanwhile=seen)


SEEN = Meanwhile(resolution_ms=200)


@pytest.mark.parametrize(
    ("seen", "finding"),
    [
        (None, None),
        (SEEN, None),
        (replace(SEEN, throttled_share=0.0), None),
        (replace(SEEN, throttled_share=0.01), None),
        (
            replace(
                SEEN, throttled_share=0.34, throttled_by=("power cap",), max_temperature_c=87.0
            ),
            "the GPU was throttled in 34% of the samples (power cap; up to 87 °C)",
        ),
    ],
)
def test_a_throttled_gpu_is_a_flag(
    record: Build, seen: Meanwhile | None, finding: str | None
) -> None:
    assert machine.throttled(facts(record, seen)) == finding


@pytest.mark.parametrize(
    ("seen", "finding"),
    [
        (None, None),
        (replace(SEEN, others=(Other("cron", 7, 0.10),), stolen_cores=0.10), None),
        (replace(SEEN, others_cores=0.10), None),
        (
            replace(SEEN, others_cores=0.945),  # many small ones: nobody to name
            "others computed meanwhile: 0.9 cores for processes too small or short to name, or the kernel",
        ),
        (
            replace(SEEN, others=(Other("cc1", 7, 0.06), Other("cc1", 8, 0.08)), others_cores=0.14),
            "others computed meanwhile: 0.1 cores for processes too small or short to name, or the kernel",
        ),
        (
            replace(SEEN, others=(Other("make", 7, 0.84),), others_cores=0.9),
            "others computed meanwhile: make (pid 7) 0.8 cores",
        ),
        (
            replace(SEEN, others=(Other("make", 7, 0.84),), others_cores=1.5),
            (
                "others computed meanwhile: make (pid 7) 0.8 cores, 0.7 cores for processes too "
                "small or short to name, or the kernel"
            ),
        ),
        (
            replace(SEEN, others=(Other("make", 7, 0.84), Other("cron", 8, 0.05))),
            "others computed meanwhile: make (pid 7) 0.8 cores",
        ),
        (
            replace(SEEN, others=tuple(Other("cc1", i, 1.0) for i in range(5))),
            (
                "others computed meanwhile: cc1 (pid 0) 1.0 cores, cc1 (pid 1) 1.0 cores, "
                "cc1 (pid 2) 1.0 cores, 2 more"
            ),
        ),
        (
            replace(SEEN, stolen_cores=0.4),
            "others computed meanwhile: the hypervisor for other guests 0.4 cores (steal)",
        ),
    ],
)
def test_another_process_is_a_flag_that_names_it(
    record: Build, seen: Meanwhile | None, finding: str | None
) -> None:
    assert machine.somebody_else(facts(record, seen)) == finding


@pytest.mark.parametrize(
    ("cores", "is_flagged"), [(2, True), (16, True), (64, False), (None, True)]
)
def test_what_nobody_is_named_for_is_a_flag_by_its_share_of_a_large_machine(
    record: Build, cores: int | None, is_flagged: bool
) -> None:
    seen = replace(facts(record, replace(SEEN, others_cores=0.5)), machine={"cores": cores})
    assert (machine.somebody_else(seen) is not None) == is_flagged


def clocked(mhz: float, *, error: float = 1, samples: int = 50, device: str = "GPU") -> Meanwhile:
    return replace(SEEN, clock=Clock(mhz, error, samples, device))


@pytest.mark.parametrize(
    ("base", "arm", "is_flagged"),
    [
        (clocked(2000), clocked(1890), True),
        (clocked(1890), clocked(2000), True),
        (clocked(2000), clocked(1910), False),
        (clocked(2000), clocked(1500, samples=9), False),
        (clocked(2000), clocked(1800, error=80), False),
        (clocked(2000), clocked(1500, device="CPU"), False),
        (clocked(2000), SEEN, False),
        (None, clocked(2000), False),
    ],
)
def test_another_clock_than_the_baselines_is_a_flag(
    record: Build, base: Meanwhile | None, arm: Meanwhile | None, is_flagged: bool
) -> None:
    sides = facts(record, base), facts(record, arm)
    pair = PairFacts(*sides, [], compare({}, {}, speculative=True))
    finding = machine.other_clock(pair)
    assert (finding is not None) == is_flagged
    if finding and arm and arm.clock and arm.clock.mhz == 1890:
        assert finding == (
            "the GPU ran at 1,890 MHz on average, at 2,000 MHz for the baseline (-6%)"
        )


# --- in a report ---------------------------------------------------------------------------------


def case(record: Build, arm: str, k: int, sent: float, made: Timeline | None) -> MeasuredCase:
    return MeasuredCase(
        arm=arm,
        method=arm,
        k=k,
        prompt_set="he",
        max_tokens=100,
        concurrency=1,
        repeat=0,
        expected_requests=1,
        records=[record("a", sent=sent * 1e3, chunks=(sent * 1e3 + 10, sent * 1e3 + 2000))],
        spans=[],
        status="ok",
        timeline=made,
    )


def table(record: Build, made: Timeline | None) -> list[Row]:
    cases = [case(record, "vanilla", 0, 1, made), case(record, "same", 0, 4, made)]
    return rows(cases, baseline="vanilla")


def test_a_row_has_its_energy_in_every_format(record: Build) -> None:
    made = sampled(*on_gpu(lambda s: 300 if s < 3.5 else 150, 8, sm_mhz=1980, temperature_c=55))
    found = table(record, made)
    (column,) = [one for one in columns(found) if one.key == "energy_per_token_j"]
    assert [column.show(row) for row in found] == ["300.00", "150.00"]
    assert '"energy_source": "gpu counter"' in as_json(REPORT, Findings(found))
    assert "energy_per_token_j" in as_csv(REPORT, Findings(found)).splitlines()[0]
    assert [line for line in explanations(found, []) if "meanwhile" in line] == [
        (
            "the machine meanwhile: power 150 to 300 W (the GPU's energy counter), clock 1,980 MHz, "
            "up to 55 °C; a sample every 200 ms"
        )
    ]


def test_runs_without_telemetry_are_as_they_were(record: Build) -> None:
    found = table(record, None)
    assert [row.meanwhile for row in found] == [None, None]
    assert "energy_per_token_j" not in {column.key for column in columns(found)}
    assert '"power_w": null' in as_json(REPORT, Findings(found))
    assert not any("meanwhile" in line for line in explanations(found, []))


REPORT: dict[str, Any] = {"id": "r", "config": {}, "machine": {}, "vllm": None, "prompt_sets": {}}


def test_a_busy_neighbour_flags_the_row_and_what_is_compared_with_it(record: Build) -> None:
    quiet: tuple[float, float, dict[str, float]] = (1.0, 1.0, {})
    noisy = (1.0, 2.0, {"make": 1.0})
    (base, arm) = table(record, sampled(*loads(quiet, noisy, noisy, quiet, quiet, quiet, quiet)))
    assert [flag.check for flag in base.flags] == ["other-load"]
    assert [flag.check for flag in arm.flags] == ["baseline"]
    assert [row.flags for row in table(record, sampled(*loads(*[quiet] * 7)))] == [(), ()]


def test_doctor_says_what_a_gpu_does_now_or_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("specbench.machine.facts", lambda: {"gpus": [{"name": "H200"}]})
    monkeypatch.setattr("specbench.machine.gpu_processes", list)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    _, missing = doctor.gpu(tmp_path)
    assert (missing.status, missing.advice) == ("note", gpu.INSTALL)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    _, there = doctor.gpu(tmp_path)
    assert there.said.startswith("GPU 0: 312.5 W, 1755 MHz, 61 °C, 90.0 GiB in use; GPU 1:")
