"""What a cluster's worker does for a unit: start node.py behind a guard, and pass on what it tells.

If the worker ends, by whatever signal, so does node.py with its engines (engines/guard.py).
"""

import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from specbench import __version__
from specbench.engines.process import STOP_PATIENCE_S, Child, log_tail
from specbench.executors.node import ORDER, SHARE, TOLD
from specbench.executors.told import End, Hello, Told
from specbench.scratch import scratch

LOOK_S = 0.05  # between two looks at what was told
MOST = 64 << 10  # bytes passed on at a time, so that a cluster sends them along and not for pick-up


def carry_out(order: str, share: str, *, node: str, notes: Sequence[str] = ()) -> Iterator[str]:
    """Measure the unit *share* of *order* (JSON: told.py) on this host; whole lines as they come.

    *notes* are said first. The last line is an `End`. Leaving the iteration early ends the engines first.
    """
    with scratch("unit") as folder:
        for name, text in ((ORDER, order), (SHARE, share)):
            (folder / name).write_text(text, encoding="utf-8")
        host = socket.gethostname()
        hello = Hello(host=host, node=node, version=__version__, folder=str(folder / "unit"))
        yield Told(hello=hello).line
        yield from (Told(say=note).line for note in notes)
        yield from _measured(folder)


def _measured(folder: Path) -> Iterator[str]:
    log, told = folder / "log", folder / TOLD
    told.touch()
    child = Child(
        [sys.executable, "-m", "specbench.executors.node", str(folder)],
        log=log,
        cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},  # this specbench, installed or not
        patience_s=STOP_PATIENCE_S + 5,  # its engines have theirs
    )
    with child, told.open("rb") as file:
        status = None
        while status is None:
            status = child.poll()
            yield from _new_lines(file.fileno())
            time.sleep(LOOK_S if status is None else 0)
    yield Told(end=End(status=status, log=log_tail(log, 12))).line


def _new_lines(descriptor: int) -> Iterator[str]:
    """What was added, in whole lines, many at a time."""
    while True:
        at = os.lseek(descriptor, 0, os.SEEK_CUR)
        block = os.read(descriptor, MOST)
        while block and b"\n" not in block and (more := os.read(descriptor, MOST)):
            block += more
        whole = block.rfind(b"\n") + 1
        os.lseek(descriptor, at + whole, os.SEEK_SET)
        if not whole:
            return
        yield block[:whole].decode()
