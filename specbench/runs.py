"""Keeping runs: list them, show one, delete one. An id never leads out of results/."""

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError, StoreError
from specbench.failures import status_text
from specbench.render.columns import printable
from specbench.store import RUN_ID, RunStore

STAMP = re.compile(r"^(\d{8}-\d{6})-")
MIB = 1 << 20
BLOCK = MIB


@dataclass(frozen=True)
class Summary:
    """A run in a line. `status` is "ok", "partial", "unfinished", "running" or "unreadable"."""

    id: str
    when: str
    config: str | None
    status: str
    arms: tuple[str, ...]
    requests: int
    bytes: int
    problem: str | None = None

    def record(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {**asdict(self), "arms": list(self.arms)}


# --- which runs there are -------------------------------------------------------------------------


def folder_of(results: Path, run: Path | str) -> Path:
    """The folder of the run that *run* names: an id in *results*, or a path to its folder.

    Raises:
        StoreError: there is none, or the id would lead out of *results*.
    """
    given = Path(run)
    if len(given.parts) > 1 or given.is_absolute():
        path = given
    elif RUN_ID.fullmatch(str(run)):
        path = results / given
    else:
        raise StoreError(f"{str(run)!r} can't be a run's id.", hint="See `specbench runs list`.")
    if not (path / "run.json").is_file():
        raise StoreError(f"{path} holds no run (no run.json).", hint="See `specbench runs list`.")
    return path


def list_runs(results: Path) -> list[Summary]:
    """Every run in *results*, the oldest first; one that can't be read says why."""
    found = [
        summary(path.parent)
        for path in results.glob("*/run.json")
        if RUN_ID.fullmatch(path.parent.name)
    ]
    return sorted(found, key=lambda one: (one.when, one.id))


def summary(folder: Path) -> Summary:
    """The run in *folder* in a line."""
    size = sum(path.stat().st_size for path in files_of(folder))
    try:
        store = RunStore.open(folder)
        document = store.document
        name = document.get("config", {}).get("name")
        config = name or Path(str(document.get("config_path") or "")).stem or None
        done = store.status()
        status = str(done["status"]) if done else "running" if is_locked(folder) else "unfinished"
        arms = tuple(map(str, document.get("arms", ())))
    except (SpecbenchError, AttributeError, KeyError, TypeError) as error:
        when, why = _when(folder), str(error)
        return Summary(folder.name, when, None, "unreadable", (), 0, size, problem=why)
    requests = sum(map(_lines, folder.glob("cases/*/requests.jsonl")))
    return Summary(folder.name, _when(folder), config, status, arms, requests, size)


def _when(folder: Path) -> str:
    """When the run began, ISO 8601 in UTC: its id says, else its file."""
    stamp = STAMP.match(folder.name)
    try:
        began = datetime.strptime(stamp[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC) if stamp else None
    except ValueError:
        began = None
    if began is None:
        began = datetime.fromtimestamp((folder / "run.json").stat().st_mtime, UTC)
    return began.isoformat(timespec="seconds")


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK), b""))


def files_of(folder: Path) -> Iterator[Path]:
    """Every regular file below *folder*, in order; symbolic links are neither listed nor followed."""
    for root, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(root, name)
            if stat.S_ISREG(path.lstat().st_mode):
                yield path


def is_locked(folder: Path) -> bool:
    """Whether another specbench is writing to the run now."""
    try:
        with (folder / "lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


# --- in words -------------------------------------------------------------------------------------


def as_lines(runs: Sequence[Summary]) -> list[str]:
    """A table for a terminal."""
    head = ("id", "began (UTC)", "config", "status", "arms", "requests", "size")
    rows = [head, *(_cells(one) for one in runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i > 3 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines + [f"{one.id}: {printable(one.problem)}" for one in runs if one.problem]


def _cells(one: Summary) -> tuple[str, ...]:
    return (
        one.id,
        one.when[:16].replace("T", " "),
        printable(one.config or "–"),
        one.status,
        str(len(one.arms)),
        f"{one.requests:,}",
        size_text(one.bytes),
    )


def size_text(count: int) -> str:
    """Bytes in words."""
    if count < MIB:
        return f"{max(1, round(count / 1024))} KiB" if count else "0"
    return f"{count / MIB:.1f} MiB" if count < 1024 * MIB else f"{count / MIB / 1024:.1f} GiB"


def details(folder: Path) -> dict[str, Any]:
    """What `runs show` says: the line of the list, and how the run came to be.

    Raises:
        StoreError: it can't be read.
    """
    store = RunStore.open(folder)
    try:
        return _details(store, folder)
    except (AttributeError, KeyError, TypeError) as error:
        raise StoreError(f"{folder}/run.json is not as specbench writes it ({error}).") from None


def _details(store: RunStore, folder: Path) -> dict[str, Any]:
    about = store.document
    return {
        **summary(folder).record(),
        "command": about.get("command"),
        "config_path": about.get("config_path"),
        "imported": about.get("imported"),
        "model": about.get("config", {}).get("model"),
        "vllm": about.get("vllm"),
        "load": about.get("load"),
        "machine": {
            name: about.get("machine", {}).get(name) for name in ("cpu", "cores", "gpus", "commit")
        },
        "prompt_sets": about.get("prompt_sets"),
        "cases": [_case(store, case["id"]) for case in about.get("cases", ())],
    }


def _case(store: RunStore, id: str) -> dict[str, Any]:
    done = store.case_status(id) or {"status": "unfinished", "problem": None, "failure": None}
    path = store.path / "cases" / id / "requests.jsonl"
    requests = _lines(path) if path.is_file() else 0
    said = {name: done[name] for name in ("status", "failure", "problem")}
    return {"id": id, **said, "requests": requests}


def details_lines(about: Mapping[str, Any]) -> list[str]:
    """The same for people."""
    origin = about["imported"]
    gpus = ", ".join(str(gpu.get("name")) for gpu in about["machine"]["gpus"] or ())
    sets = about["prompt_sets"] or {}
    pairs = [
        ("run", about["id"]),
        ("began", about["when"]),
        ("status", about["status"]),
        ("size", size_text(about["bytes"])),
        ("imported", f"{', '.join(origin['files'])} ({origin['from']})" if origin else None),
        ("command", " ".join(about["command"] or ())),
        ("config", about["config_path"]),
        ("model", about["model"]),
        ("vLLM", about["vllm"]),
        ("machine", gpus or about["machine"]["cpu"]),
        ("prompts", ", ".join(f"{name} ({one['prompts']})" for name, one in sets.items())),
        ("arms", ", ".join(about["arms"])),
    ]
    lines = [f"{name:<10}{printable(str(value))}" for name, value in pairs if value]
    for case in about["cases"]:
        why = f": {case['problem'].splitlines()[0]}" if case["problem"] else ""
        status = status_text(case["status"], case["failure"])
        told = f"{case['id']}: {status}, {case['requests']} requests{why}"
        lines.append(f"{'case':<10}{printable(told)}")
    return lines


# --- deleting -------------------------------------------------------------------------------------


def delete(results: Path, folder: Path) -> None:
    """Delete the run in *folder*, which lies in *results*.

    Raises:
        StoreError: it lies elsewhere, is a link, or another specbench is writing to it.
    """
    if folder.is_symlink() or folder.resolve().parent != results.resolve():
        raise StoreError(
            f"{folder} is no folder of {results}/.", hint="Name the folder of runs: --results."
        )
    try:
        with RunStore(folder, {}):
            going = folder.with_name(f".deleted-{os.getpid()}-{folder.name}")
            folder.rename(going)  # gone at once, whatever happens on the way
            shutil.rmtree(going)
    except OSError as error:
        raise StoreError(f"{folder} can't be deleted: {error.strerror}.") from None
