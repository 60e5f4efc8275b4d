"""A short form of the kill campaign with engines: the stand-in, which notes what it answered.

benchmarks/faults.py has the long ones, with vLLM too. Engines here ignore TERM in half of the runs, have a
grandchild in a session of its own, and are forked from a process that has "imported vLLM".
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
UP = """
import sys
sys.path.insert(0, {benchmarks!r})
from pathlib import Path
import faults_place
faults_place.make("fake", Path({folder!r}))
"""


def test_kills_of_a_run_with_stand_in_engines_leave_nothing_and_lose_nothing() -> None:
    command = [sys.executable, str(BENCHMARKS / "faults.py"), "fake"]
    more = ["--kills", "6", "--seconds", "30", "--seed", "1"]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(
        r"^\| fake \| all \| (\d+) \| (.*) \| [\d.]+ \|$", done.stdout, re.MULTILINE
    )
    assert int(found[0]) >= 1
    assert found[1] == "0 | 0 | 0 | 0"


def test_stubborn_engines_end_side_by_side(tmp_path: Path) -> None:
    """Two that ignore TERM: 6 s of patience for both together, and 10 s from Ctrl-C to nothing left."""
    code = UP.format(benchmarks=str(BENCHMARKS), folder=str(tmp_path))
    subprocess.run([sys.executable, "-c", code], check=True)
    command = [sys.executable, "-m", "specbench", "run", "--run-id", "one", "--config"]
    env = {**os.environ, "SPECBENCH_CALIBRATION": "off", "SPECBENCH_TELEMETRY": "off"}
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [*command, "interleaved-false-stubborn.yaml"],
            cwd=tmp_path,
            env=env,
            stdout=said,
            stderr=said,
        )
    run = tmp_path / "results" / "one"
    deadline_s = time.monotonic() + 60
    while not list(run.glob("cases/*/requests.jsonl")) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert len(list(run.glob("engines/*/engine.json"))) == 2
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130, (tmp_path / "said").read_text(encoding="utf-8")
    assert 5 < time.monotonic() - began_s < 10
