"""A run as one .zip, and back.

A zip is a stranger's: nothing of it gets a name in results/ before all of it has been looked at, and
what it says of itself (names of arms, cases and prompt sets are folders' names) is checked as well.
"""

import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from specbench.analysis.metrics import summarise
from specbench.errors import SpecbenchError, StoreError
from specbench.render.columns import printable
from specbench.render.read import measured_cases
from specbench.run_document import is_plain
from specbench.runs import BLOCK, MIB, files_of, is_locked, size_text
from specbench.store import RUN_ID, RunStore

NOT_KEPT = ("lock",)
# A real run compresses 5 to 30 times (text of models, times in digits); its logs up to 100.
MOST_ENTRIES, MOST_BYTES, DEEPEST = 200_000, 64 << 30, 12
LARGEST_RATIO, FREE_OF_RATIO = 200, 64 * MIB


def export_zip(folder: Path, target: Path) -> int:
    """Write the run in *folder* to *target*; how many files it holds.

    Raises:
        StoreError: *target* is there already, or can't be written; or the run is being written to.
    """
    RunStore.open(folder)
    if is_locked(folder):
        raise StoreError(f"Another specbench is writing to {folder}.", hint="Wait for its end.")
    if target.exists():
        raise StoreError(f"{target} is there already.", hint="Delete it or choose another -o.")
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    name = folder.resolve().name
    count = 0
    try:
        with zipfile.ZipFile(draft, "x", zipfile.ZIP_DEFLATED) as made:
            for path in files_of(folder):
                if path.name not in NOT_KEPT and not path.name.endswith(".draft"):
                    made.write(path, f"{name}/{path.relative_to(folder).as_posix()}")
                    count += 1
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(target)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise StoreError(f"{target} can't be written: {why}.") from None
    finally:
        draft.unlink(missing_ok=True)
    return count


def import_zip(file: Path, results: Path) -> Path:
    """The run in the zip *file* as a folder of *results*; whole or not at all.

    Raises:
        StoreError: it is no zip of a run, holds what could do harm, or its id is taken.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            entries = _checked_entries(file, archive)
            run_id = PurePosixPath(entries[0].filename).parts[0]
            if (results / run_id).exists():
                raise StoreError(f"{results / run_id} is taken.", hint="Delete or move that run.")
            results.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".import-", dir=results) as made:
                _unpack(file, archive, entries, Path(made))
                draft = Path(made, run_id)
                _must_be_a_run(file, draft)
                draft.rename(results / run_id)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
        raise StoreError(f"{file} is no sound zip: {str(error)[:200]}.") from None
    except (OSError, ValueError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise StoreError(f"{file} can't be imported: {why}.") from None
    except Exception as error:  # zlib.error and lzma.LZMAError have no base in common
        if isinstance(error, SpecbenchError):
            raise
        raise StoreError(f"{file} is no sound zip: {str(error)[:200]}.") from None
    return results / run_id


def _checked_entries(file: Path, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The files in the archive, none of which could do harm."""
    everything = archive.infolist()
    if len(everything) > MOST_ENTRIES:
        raise _refusal(file, f"{len(everything)} entries, more than {MOST_ENTRIES}")
    names: set[str] = set()
    for entry in everything:
        name = entry.filename
        problem = _problem(entry) or ("stands twice" if name in names else None)
        if problem is not None:
            raise _refusal(file, f"{printable(name)[:120]!r} {problem}")
        names.add(name)
    tops = {PurePosixPath(name).parts[0] for name in names}
    run_id = min(tops, default="")
    if len(tops) != 1 or f"{run_id}/run.json" not in names:
        raise _refusal(file, "is no run: one folder with a run.json in it was expected")
    if not RUN_ID.fullmatch(run_id):
        raise _refusal(file, f"{run_id!r} can't be a run's id")
    entries = [entry for entry in everything if not entry.is_dir()]
    total = sum(entry.file_size for entry in entries)
    if total > _most_bytes(file):
        sizes = f"{size_text(file.stat().st_size)} that unpack to {size_text(total)}"
        raise _refusal(file, f"{sizes} are no run")
    return entries


def _refusal(file: Path, why: str) -> StoreError:
    return StoreError(f"{file}: {why}.", hint="Nothing was imported.")


def _problem(entry: zipfile.ZipInfo) -> str | None:
    """Why an entry is not taken."""
    name = entry.orig_filename
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "is an absolute path"
    parts = name.removesuffix("/").split("/")
    if len(parts) > DEEPEST or not all(map(is_plain, parts)):
        return "leads out of its folder, or is no name of a run's file"
    if entry.flag_bits & 0x1:
        return "is encrypted"
    kind = stat.S_IFMT(entry.external_attr >> 16)  # 0 where the zip is not from a Unix
    if kind and kind != (stat.S_IFDIR if entry.is_dir() else stat.S_IFREG):
        return "is a link or another special file"
    return None


def _most_bytes(file: Path) -> int:
    return min(MOST_BYTES, max(FREE_OF_RATIO, LARGEST_RATIO * file.stat().st_size))


def _unpack(
    file: Path, archive: zipfile.ZipFile, entries: Sequence[zipfile.ZipInfo], into: Path
) -> None:
    """Write the files; sizes are counted, whatever the archive says of them."""
    left = min(_most_bytes(file), shutil.disk_usage(into).free)
    for entry in entries:
        path = into / entry.filename
        path.parent.mkdir(parents=True, exist_ok=True)
        with archive.open(entry) as packed, path.open("xb") as out:
            left -= _copy(packed, out, left)
        if left < 0:
            raise StoreError(f"{file} unpacks to more than there is room for.")


def _copy(packed: Any, out: BinaryIO, most: int) -> int:  # noqa: ANN401  (zipfile's reader)
    written = 0
    while block := packed.read(BLOCK):
        written += len(block)
        if written > most:
            break
        out.write(block)
    return written


def _must_be_a_run(file: Path, folder: Path) -> None:
    """Read all of the run in *folder* once, as a report would.

    Raises:
        StoreError: something in it can't be read, or names what lies elsewhere.
    """
    try:
        store = RunStore.open(folder)
        if store.document.get("id") != folder.name:
            raise StoreError(f"run.json is of another run than its folder, {folder.name}.")
        store.status()
        for case in measured_cases(store):
            summarise(case.records, case.spans)
    except StoreError as error:  # without the name of the folder that it is looked through in
        said = printable(str(error).replace(f"{folder.parent}/", ""))
        raise StoreError(f"{file}: {said}") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = printable(" ".join(f"{type(error).__name__}: {error}"[:200].split()))
        raise StoreError(f"{file}: is no run ({why}).") from None
