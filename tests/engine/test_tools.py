"""GenAI-Perf, AIPerf and Triton, the real ones, measure the demo's EAGLE arm beside vanilla.

Each tool in an environment of its own, which the first run makes in the user's cache. On a machine
whose glibc is too old for perf_analyzer the fix that `doctor` offers is applied first. Triton's vLLM
backend is that of tests/triton, over the real vLLM; two runs go through it, one by our own client
and one by GenAI-Perf over gRPC.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specbench.analysis.metrics import (
    acceptance_of_chunks,
    acceptance_of_counters,
    acceptance_of_requests,
    counted,
)
from specbench.fetch import cache_dir
from specbench.records import RequestRecord
from specbench.store import RunStore

pytestmark = pytest.mark.engine

CONFIG = """
model: demo:target
speculation: {method: eagle, model: demo:eagle, k: 2}
prompts: [mixed]
max_tokens: 24
sampling: {temperature: 0}
load: {warmup: 1, warmup_tokens: 4}
engine:
  args: {dtype: float32, max_model_len: 1024, enforce_eager: true, kv_cache_memory_bytes: 67108864}
"""
LINES = [
    {"session_id": "talk", "text": "What is the capital of France?", "delay": 0},
    {"session_id": "talk", "text": "And what is it known for?"},
    {"session_id": "code", "text": "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n"},
    {"session_id": "days", "text": " Name the days of the week, one a line.\n"},
]
CLIENTS = ["direct", "genai-perf", "aiperf"]
ARMS = ["vanilla", "eagle-k2"]


def specbench(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specbench", *words]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "datasets").mkdir()
    lines = "".join(json.dumps(line) + "\n" for line in LINES)
    (folder / "datasets" / "mixed.jsonl").write_text(lines, encoding="utf-8")
    (folder / "tools.yaml").write_text(CONFIG, encoding="utf-8")
    fixed = specbench(folder, "doctor", "--fix-perf-analyzer")
    assert fixed.returncode == 0, fixed.stderr
    for client in CLIENTS:
        sets = ["--set", f"load.client={client}", "--run-id", client]
        done = specbench(folder, "run", "--config", "tools.yaml", *sets)
        assert done.returncode == 0, done.stderr
    return folder


def doubts(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row, apart from who else used this machine meanwhile."""
    found = [f"{flag['check']}: {flag['finding']}" for flag in row["flags"]]
    return [one for one in found if not one.startswith("other-load") and "other-load" not in one]


def store(place: Path, client: str) -> RunStore:
    return RunStore.open(place / "results" / client)


def records(place: Path, client: str, arm: str) -> list[RequestRecord]:
    found = store(place, client).requests(f"{arm}.mixed.t24.c1.r0")
    return sorted(found, key=lambda r: (r.prompt_id, r.turn))


@pytest.mark.parametrize("client", CLIENTS)
def test_every_prompt_and_turn_is_measured_once(place: Path, client: str) -> None:
    for arm in ARMS:
        found = records(place, client, arm)
        keys = [(r.prompt_id, r.turn) for r in found]
        assert keys == [("code", 0), ("days", 0), ("talk", 0), ("talk", 1)]
        assert all(r.ok for r in found)


@pytest.mark.parametrize("client", CLIENTS[1:])
def test_the_same_work_whoever_sends_it(place: Path, client: str) -> None:
    """Greedy float32: the same prompts, sent with the same sampling, get the same tokens."""
    for arm in ARMS:
        ours, theirs = records(place, "direct", arm), records(place, client, arm)
        assert [r.prompt_sha256 for r in theirs] == [r.prompt_sha256 for r in ours]
        assert [r.token_ids for r in theirs] == [r.token_ids for r in ours]
        assert [r.sampling for r in theirs] == [r.sampling for r in ours]


@pytest.mark.parametrize("client", CLIENTS)
def test_the_engines_counters_are_around_exactly_these_requests(place: Path, client: str) -> None:
    case = "eagle-k2.mixed.t24.c1.r0"
    spans = store(place, client).counters(case)
    spent, inside = counted(spans, records(place, client, "eagle-k2"))
    assert spent is not None, spans
    assert len(inside) == spent.requests == 4
    assert spent.generation_tokens == sum(r.output_tokens or 0 for r in inside)
    acceptance = acceptance_of_counters(spent, inside)
    assert acceptance is not None
    assert acceptance.length is not None
    assert 1.1 < acceptance.length <= 3


@pytest.mark.parametrize("client", CLIENTS)
def test_the_table_is_the_same_table(place: Path, client: str) -> None:
    done = specbench(place, "report", f"results/{client}", "--format", "json")
    vanilla, eagle = json.loads(done.stdout)["rows"]
    assert doubts(vanilla) == doubts(eagle) == []
    assert eagle["speedup"] > 0
    assert eagle["outputs_identical"] == eagle["outputs_compared"] == 4
    figures = {one["figure"]: one for one in eagle["tool_figures"]}
    assert bool(figures) == (client != "direct")
    if figures:
        assert figures["ttft_ms"]["theirs"] == pytest.approx(figures["ttft_ms"]["ours"], rel=0.02)


def test_no_key_stays_in_a_file(place: Path) -> None:
    for client in CLIENTS[1:]:
        logs = [p.read_bytes() for p in (place / "results" / client).rglob("*") if p.is_file()]
        assert any(b"<api key>" in text for text in logs) == (client == "genai-perf")
        assert not any(b"Bearer " in t and b"Bearer <" not in t for t in logs)


# --- through Triton --------------------------------------------------------------------------------

TRITON = {"triton-direct": "direct", "triton-genai-perf": "genai-perf"}


@pytest.fixture(scope="module")
def through_triton(place: Path) -> Path:
    """The same config through a real Triton: the base model loaded, measured, unloaded; then EAGLE."""
    script = Path(__file__).parents[1] / "triton" / "install.sh"
    folder = cache_dir() / "test-triton"
    if not (folder / "tritonserver").is_file():
        subprocess.run(["bash", str(script), str(folder)], check=True)
    here = script.parent
    for name in ("model.py", "worker.py"):  # those of this checkout
        backend = folder / "unpacked" / "pytriton" / "tritonserver" / "backends" / "vllm"
        (backend / name).write_bytes((here / name).read_bytes())
    engine = {
        "kind": "triton",
        "server": str(folder / "tritonserver"),
        "env.SPECBENCH_TEST_VLLM": sys.executable,
    }
    sets = [part for key, value in engine.items() for part in ("--set", f"engine.{key}={value}")]
    for run_id, client in TRITON.items():
        more = ["--set", f"load.client={client}", "--run-id", run_id]
        done = specbench(place, "run", "--config", "tools.yaml", *sets, *more)
        assert done.returncode == 0, done.stderr
    return place


def test_triton_answers_what_vllm_serve_answers(through_triton: Path) -> None:
    """The chat template is applied on our side: the same text must come out, step by step."""
    for arm in ARMS:
        ours = records(through_triton, "direct", arm)
        theirs = records(through_triton, "triton-direct", arm)
        assert [r.text for r in theirs] == [r.text for r in ours]
        assert [r.chunk_tokens for r in theirs] == [r.chunk_tokens for r in ours]
        assert [r.output_tokens for r in theirs] == [r.output_tokens for r in ours]
        assert [r.prompt_tokens for r in theirs] == [r.prompt_tokens for r in ours]


def test_acceptance_from_chunks_is_near_the_engines_own(through_triton: Path) -> None:
    here = acceptance_of_chunks(records(through_triton, "triton-direct", "eagle-k2"))
    there = acceptance_of_requests(records(through_triton, "direct", "eagle-k2"))
    assert here is not None
    assert there is not None
    assert here.length == pytest.approx(there.length, rel=0.03)


@pytest.mark.parametrize("run_id", TRITON)
def test_the_table_through_triton(through_triton: Path, run_id: str) -> None:
    done = specbench(through_triton, "report", f"results/{run_id}", "--format", "json")
    vanilla, eagle = json.loads(done.stdout)["rows"]
    assert doubts(vanilla) == doubts(eagle) == []
    assert vanilla["requests"] == eagle["requests"] == 4
    assert eagle["acceptance_source"] == "chunks"
    assert 1.1 < eagle["acceptance_length"] <= 3
    assert eagle["speedup"] > 0
    assert eagle["tokens_per_s"] > 0
    log = through_triton / "results" / run_id / "engines" / "triton" / "tritonserver.log"
    said = log.read_text(encoding="utf-8", errors="replace")
    assert "successfully unloaded 'base_model'" in said
    assert "successfully unloaded 'eagle_model'" in said
