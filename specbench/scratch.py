"""Temporary folders that are gone afterwards, also where specbench is killed: the next one deletes them.

A folder is in use as long as its file `held` is locked, and the kernel unlocks it with the process.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "specbench-"
HELD = "held"
NEW_S = 60.0  # a younger folder may not be locked yet


@contextmanager
def scratch(what: str) -> Iterator[Path]:
    """An empty folder (but for its lock) for as long as the block lasts; *what* is part of its name."""
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-"))
    try:
        with (folder / HELD).open("w", encoding="utf-8") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Delete our folders that nobody holds any more."""
    for held in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{HELD}"):
        with suppress(OSError):
            about = held.parent.lstat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < NEW_S:
                continue
            with held.open("r+", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(held.parent, ignore_errors=True)
