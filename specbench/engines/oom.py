"""Whether the kernel's out-of-memory killer was at work where a process lives."""

import re
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomWatch:
    """Counts what the killer ended in a process's control group since the group was first seen.

    The group is looked up while the process lives (`look`), because it is forgotten with it. Where
    no group can be read, the count is the whole machine's (/proc/vmstat).
    """

    def __init__(self, cgroups: Path = CGROUPS, proc: Path = Path("/proc")) -> None:
        self._cgroups, self._proc = cgroups, proc
        self._before: dict[Path, int] = {}
        self._seen = ""
        self._machine = proc / "vmstat"
        self._machine_before = _count(self._machine)

    def look(self, pid: int) -> None:
        """Note the control groups that *pid* is in now, and their counts so far."""
        try:
            groups = (self._proc / str(pid) / "cgroup").read_text(encoding="utf-8")
        except OSError:
            return
        if groups == self._seen:
            return
        self._seen = groups
        for file in _event_files(self._cgroups, groups):
            if file not in self._before and (count := _count(file)) is not None:
                self._before[file] = count

    def kills(self) -> int:
        """How many processes the killer has ended there since; 0 where nothing tells."""
        if self._before:
            return sum(
                max(0, (_count(file) or 0) - before) for file, before in self._before.items()
            )
        now = _count(self._machine)
        return 0 if now is None or self._machine_before is None else now - self._machine_before


def _event_files(cgroups: Path, own: str) -> Iterator[Path]:
    """Where the groups in *own*, a /proc/PID/cgroup, count: memory.events (version 2), memory.oom_control (1).

    In a container the path may be the host's; the group is at the top of what is mounted then.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = cgroups / "memory" if controllers else cgroups
        name = "memory.oom_control" if controllers else "memory.events"
        below = Path(path.lstrip("/"))
        groups = (top / part / name for part in (below, *below.parents))
        if (found := next((file for file in groups if file.is_file()), None)) is not None:
            yield found


def _count(file: Path) -> int | None:
    try:
        found = COUNT.search(file.read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(found[1]) if found else None
