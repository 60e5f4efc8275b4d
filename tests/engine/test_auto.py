"""k: auto and what-if on real engines: two k measured, the best predicted and confirmed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specbench.store import RunStore

pytestmark = pytest.mark.engine

CONFIG = """
model: demo:target
speculation: {method: eagle, model: demo:eagle, k: auto, k_max: 3}
prompts: short
max_tokens: 24
sampling: {temperature: 0}
load: {warmup: 1, warmup_tokens: 4}
engine:
  args: {dtype: float32, max_model_len: 1024, enforce_eager: true, kv_cache_memory_bytes: 67108864}
"""
PROMPTS = [
    "Name the days of the week, one a line.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\nWrite mul and div.",
    "Count from one to twenty in words.",
]


def specbench(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specbench", *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auto")
    (folder / "datasets").mkdir()
    lines = "".join(json.dumps({"text": text}) + "\n" for text in PROMPTS)
    (folder / "datasets" / "short.jsonl").write_text(lines, encoding="utf-8")
    (folder / "auto.yaml").write_text(CONFIG, encoding="utf-8")
    done = specbench(folder, "run", "--config", "auto.yaml", "--run-id", "auto")
    assert done.returncode == 0, done.stderr
    return folder


def test_auto_measures_the_ends_and_confirms_what_it_predicts(place: Path) -> None:
    store = RunStore.open(place / "results" / "auto")
    assert store.document["schedule"] == "interleaved"
    (chosen,) = store.document["chosen_k"].values() or [[]]
    expected = {"vanilla", "eagle-k1", "eagle-k3", *(f"eagle-k{k}" for k in chosen)}
    assert set(store.document["arms"]) == expected
    report = json.loads(specbench(place, "report", "--format", "json").stdout)
    (curve,) = report["curves"]
    assert set(curve["predicted"]) == {"1", "2", "3"}
    assert curve["best"]["k"] in {0, 1, 2, 3}
    for row in report["rows"][1:]:
        assert row["break_even"] > 0
        assert row["outputs_identical"] == row["outputs_compared"] == 3
        assert row["kv_cache_tokens"] > 0
        assert row["startup_s"] > 0


def test_every_record_says_what_was_sent(place: Path) -> None:
    store = RunStore.open(place / "results" / "auto")
    for case in store.document["cases"]:
        for record in store.requests(case["id"]):
            assert record.sampling is not None
            assert record.sampling["temperature"] == 0
            assert record.sampling["max_tokens"] == 24


def test_what_if_estimates_and_refuses_what_this_build_would_die_of(place: Path) -> None:
    """vLLM 0.32's CPU kernels assert on synthetic acceptance and take the engine along."""
    words = ["--tau", "1.5", "--k", "1", "--method", "eagle"]
    said = specbench(place, "what-if", "results/auto", *words, "--json")
    (estimate,) = json.loads(said.stdout)["estimates"]
    assert estimate["estimated_speedup"] > 0
    done = specbench(place, "what-if", "results/auto", *words, "--measure")
    assert done.returncode == 2
    assert "cannot hold acceptance at a set length on a CPU" in done.stderr
    assert "Leave out --measure" in done.stderr
