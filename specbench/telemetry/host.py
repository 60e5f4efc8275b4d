"""What the kernel tells of a host: energy of its CPUs, their clock, and whose work they do.

/proc is read here and not through psutil, which takes five times the CPU time for it (90 against
19 us a process, measured): that would be a load of its own on a host of a thousand processes.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

KERNEL_THREAD = 0x00200000  # PF_KTHREAD of include/linux/sched.h
WORTH_KEEPING = 0.02  # of a core: what takes less of it is in no sample
CLOCKS_READ = 8  # CPUs whose clock is read, at most


class Rapl:
    """The energy counters of the CPU packages (Intel's RAPL, AMD's too), as one that never wraps.

    Linux documents them in Documentation/power/powercap; energy of the memory is not in them, and
    most systems let only root read them.
    """

    def __init__(self, root: Path = Path("/sys/class/powercap")) -> None:
        zones = sorted(root.glob("intel-rapl:*"))  # parts of a package (core, dram) among them
        packages = [p for p in zones if (_read(p / "name") or "").startswith("package")]
        self._last: dict[Path, int] = {}
        for zone in packages:
            if (now := _number(zone / "energy_uj")) is not None:
                self._last[zone] = now
        self._spent_uj = 0

    @property
    def is_readable(self) -> bool:
        """Whether there is a counter that we may read."""
        return bool(self._last)

    def joules(self) -> float | None:
        """Energy since this object was made; None without a counter."""
        for zone, before in self._last.items():
            now = _number(zone / "energy_uj")
            if now is None:
                return None
            wraps = _number(zone / "max_energy_range_uj") if now < before else 0
            self._spent_uj += now - before + (wraps or 0)
            self._last[zone] = now
        return self._spent_uj / 1e6 if self._last else None


class CpuTime(NamedTuple):
    """Seconds that some CPUs worked, and that a hypervisor took from them, since boot."""

    busy_s: float
    stolen_s: float


def cpu_time(cpus: Iterable[int], stat: Path = Path("/proc/stat")) -> CpuTime | None:
    """Of *cpus* together (proc(5): user, nice, system, irq and softirq; steal)."""
    ticks, wanted = os.sysconf("SC_CLK_TCK"), {f"cpu{n}" for n in cpus}
    busy = stolen = 0
    for line in (_read(stat) or "").splitlines():
        name, *fields = line.split()
        if name in wanted and len(fields) >= 8:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    return CpuTime(busy / ticks, stolen / ticks) if busy else None


def clock_mhz(
    cpus: Sequence[int],
    sys_cpu: Path = Path("/sys/devices/system/cpu"),
    cpuinfo: Path = Path("/proc/cpuinfo"),
) -> float | None:
    """The mean clock of some of *cpus* now; None where the kernel does not say."""
    some = cpus[:: max(1, len(cpus) // CLOCKS_READ)][:CLOCKS_READ]
    khz = [_number(sys_cpu / f"cpu{n}" / "cpufreq" / "scaling_cur_freq") for n in some]
    known = [one / 1e3 for one in khz if one]
    if not known:
        said = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", _read(cpuinfo) or "", re.MULTILINE)
        known = [float(one) for one in said]
    return round(sum(known) / len(known), 1) if known else None


class Process(NamedTuple):
    """One process of a scan. `started` and `ticks` (of CPU time) are as /proc counts them."""

    parent: int
    name: str
    started: int
    ticks: int
    is_kernel: bool


def processes(proc: Path = Path("/proc")) -> dict[int, Process]:
    """Every process that we can see, by its id."""
    found = {}
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"{entry.path}/stat", "rb") as file:
                head, _, tail = file.read().rpartition(b")")
        except OSError:  # it ended just now
            continue
        fields = tail.split()
        found[int(entry.name)] = Process(
            parent=int(fields[1]),
            name=head.partition(b"(")[2].decode(errors="replace"),
            started=int(fields[19]),
            ticks=int(fields[11]) + int(fields[12]),
            is_kernel=bool(int(fields[6]) & KERNEL_THREAD),
        )
    return found


def tree(root: int, found: Mapping[int, Process]) -> set[int]:
    """*root* and everything below it."""
    children: dict[int, list[int]] = {}
    for pid, process in found.items():
        children.setdefault(process.parent, []).append(pid)
    ours, queue = set(), [root]
    while queue:
        pid = queue.pop()
        ours.add(pid)
        queue += children.get(pid, [])
    return ours


class Load:
    """Whose work the CPUs do: ours (the tree below *root*) or somebody else's, scan by scan."""

    def __init__(
        self,
        root: int,
        cpus: Sequence[int],
        *,
        look: Callable[[], dict[int, Process]] = processes,
        total: Callable[[Sequence[int]], CpuTime | None] = cpu_time,
    ) -> None:
        self._root, self._cpus, self._look, self._total = root, cpus, look, total
        self._before: dict[int, Process] = {}
        self._time: CpuTime | None = None
        self._at_ns: int | None = None
        self.pids: set[int] = {root}

    def scan(self, now_ns: int) -> dict[str, Any] | None:
        """What happened since the last scan; None the first time.

        Names and ids of other processes, no command lines: those may hold secrets. Kernel threads
        are nobody's: what they do may be for us.
        """
        found, time = self._look(), self._total(self._cpus)
        self.pids = tree(self._root, found)
        since, before, earlier = self._at_ns, self._before, self._time
        self._at_ns, self._before, self._time = now_ns, found, time
        if since is None:
            return None
        hertz, elapsed_s = os.sysconf("SC_CLK_TCK"), (now_ns - since) / 1e9
        ours_s, others = 0.0, []
        for pid, process in found.items():
            same = before.get(pid)
            known = same.ticks if same and same.started == process.started else 0
            spent_s = (process.ticks - known) / hertz
            if pid in self.pids:
                ours_s += spent_s
            elif spent_s >= WORTH_KEEPING * elapsed_s and not process.is_kernel:
                others.append({"pid": pid, "name": process.name, "cpu_s": round(spent_s, 3)})
        scan = {"since_ns": since, "ours_s": round(ours_s, 3), "others": others}
        if time and earlier:
            scan["busy_s"] = round(time.busy_s - earlier.busy_s, 3)
            scan["stolen_s"] = round(time.stolen_s - earlier.stolen_s, 3)
        return scan


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text and text.isdigit() else None
