"""Control groups of the kernel, v1 or v2, for tests that freeze processes or limit their memory."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def control_group(controller: str) -> Iterator[tuple[Path, bool]]:
    """A group of our own, and whether it is one of v1 (*controller*'s); deleted when it is empty.

    The test is skipped where this machine lets nobody make one, or nobody use it.
    """
    is_old = (ROOT / controller).is_dir()
    group = (ROOT / controller if is_old else ROOT) / f"specbench-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        yield group, is_old
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:  # its last process is not quite gone
                time.sleep(0.05)


def write(path: Path, text: str) -> None:
    """What a group is told; the test is skipped where that is not allowed."""
    try:
        path.write_text(text, encoding="ascii")
    except OSError as error:
        pytest.skip(f"{path.name} cannot be written here: {error.strerror}")
