"""Temporary folders: gone with the block, and with the next one where the process was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specbench.scratch import HELD, NEW_S, PREFIX, scratch, sweep

HOLD = """
import sys, time
from specbench.scratch import scratch
with scratch("prefork") as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def age(folder: Path) -> None:
    long_ago = time.time() - 2 * NEW_S
    os.utime(folder, (long_ago, long_ago))


def test_a_folder_goes_with_its_block(temporary: Path) -> None:
    with scratch("unit") as folder:
        assert folder.parent == temporary
        assert folder.name.startswith("specbench-unit-")
        (folder / "some").mkdir()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_deleted_by_the_next(temporary: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        left = Path(child.stdout.readline().strip())
        age(left)
        sweep()
        assert (left / "socket").exists()  # it lives
        child.send_signal(signal.SIGKILL)
    with scratch("unit") as folder:
        assert list(temporary.iterdir()) == [folder]


def test_what_is_young_or_not_ours_stays(temporary: Path) -> None:
    young, without_lock, other = (temporary / n for n in (f"{PREFIX}a", f"{PREFIX}b", "else"))
    for folder in (young, without_lock, other):
        folder.mkdir()
    (young / HELD).touch()
    (other / HELD).touch()
    for folder in (without_lock, other):
        age(folder)
    sweep()
    assert sorted(temporary.iterdir()) == sorted([young, without_lock, other])
    age(young)
    sweep()
    assert not young.exists()
