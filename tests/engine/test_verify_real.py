"""Real engines: the CPU build of vLLM 0.32 samples wrongly under speculation.

`verify` must find that by what it measures; where a build is mended, this file says so by failing.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specbench.analysis import distribution
from specbench.records import RequestRecord
from specbench.store import RunStore

pytestmark = pytest.mark.engine

CONFIG = """
model: demo:target
speculation: {method: eagle, model: demo:eagle, k: 3}
prompts: {set: openings, style: completion}
max_tokens: 8
schedule: interleaved
sampling: {temperature: 1.0}
engine:
  args: {dtype: float32, max_model_len: 256, enforce_eager: true, kv_cache_memory_bytes: 67108864}
"""
# Short, because on a CPU most of the time of a short answer goes to its prompt.
OPENINGS = [
    "The days of the week are",
    "The capital of France is",
    "def add(a, b):\n    return",
    "Once upon a time there was a",
]
SAMPLES = 24


@dataclass
class Finished:
    """What `specbench verify` left and said."""

    code: int
    found: dict[str, Any]
    store: RunStore

    def records(self, arm: str) -> list[RequestRecord]:
        (case,) = (c["id"] for c in self.store.document["cases"] if c["arm"] == arm)
        return list(self.store.requests(case))


@pytest.fixture(scope="module")
def verified(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    place = tmp_path_factory.mktemp("verify")
    (place / "datasets").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in OPENINGS)
    (place / "datasets" / "openings.jsonl").write_text(lines, encoding="utf-8")
    (place / "v.yaml").write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "specbench", "verify", "--config", "v.yaml", "--json"]
    done = subprocess.run(
        [*command, "--samples", str(SAMPLES)],
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    return Finished(done.returncode, found, RunStore.open(place / found["run"]))


def test_a_sampler_that_is_broken_under_speculation_is_found(verified: Finished) -> None:
    assert verified.code == 1
    (eagle,) = verified.found["arms"]
    assert (eagle["arm"], eagle["state"]) == ("eagle-k3", "differs")
    assert eagle["p_corrected"] <= 0.001
    assert (eagle["prompts"], eagle["samples"]) == (4, 4 * SAMPLES)


def test_every_sample_has_a_seed_of_its_own(verified: Finished) -> None:
    records = [*verified.records("vanilla"), *verified.records("eagle-k3")]
    assert len(records) == 2 * 4 * SAMPLES
    assert len({(record.sampling or {})["seed"] for record in records}) == len(records)


def test_vanilla_against_vanilla_is_not_flagged(verified: Finished) -> None:
    """Two halves of one engine's samples, every one with its own seed."""
    halves = [
        distribution.samples_of(
            [r for r in verified.records("vanilla") if int(r.prompt_id.partition("~")[2]) % 2 == i],
            lambda record: record.prompt_id.partition("~")[0],
        )
        for i in (0, 1)
    ]
    found = distribution.compare(*halves)
    assert found is not None
    assert found.prompts == 4
    assert found.p_value > distribution.ALPHA


def test_an_ordinary_runs_check_suspects_it_too(verified: Finished) -> None:
    vanilla, eagle = verified.records("vanilla"), verified.records("eagle-k3")
    assert distribution.sampler_suspect(vanilla, eagle) is not None
    half = len(vanilla) // 2
    other = [
        record.model_copy(update={"prompt_id": first.prompt_id})
        for first, record in zip(
            sorted(vanilla, key=by_number)[:half],
            sorted(vanilla, key=by_number)[half:],
            strict=True,
        )
    ]
    assert distribution.sampler_suspect(sorted(vanilla, key=by_number)[:half], other) is None


def by_number(record: RequestRecord) -> tuple[int, str]:
    prompt, _, number = record.prompt_id.partition("~")
    return int(number), prompt


def test_no_engine_is_left(verified: Finished) -> None:
    for facts in verified.store.engines():
        deadline = time.monotonic() + 10
        while Path(f"/proc/{facts.pid}/cwd").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not Path(f"/proc/{facts.pid}/cwd").exists()
