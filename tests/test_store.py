"""Nothing measured is lost, nothing is overwritten, and what is torn or foreign is noticed."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbench import store as stores
from specbench.errors import StoreError
from specbench.records import CounterSpan, EngineCounters, EngineFacts, Prompt, RequestRecord
from specbench.store import RunStore

Build = Callable[..., RequestRecord]
CASE = "vanilla.he.t256.c1.r0"


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    return RunStore.create(tmp_path / "results", "run", {"arms": ["vanilla"]})


def requests_file(store: RunStore) -> Path:
    return store.path / "cases" / CASE / "requests.jsonl"


def engine(arm: str = "vanilla", start: int = 0) -> EngineFacts:
    return EngineFacts(
        arm=arm,
        start=start,
        kind="vllm",
        version="0.32.0",
        url="http://127.0.0.1:1",
        served_model="m",
        argv=("vllm", "serve"),
        started_at="2026-01-01T00:00:00+00:00",
    )


def fail_to_sync(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# --- opening -------------------------------------------------------------------------------------


def test_a_new_run_says_its_format_and_id(store: RunStore) -> None:
    assert RunStore.open(store.path).document == {"format": 1, "id": "run", "arms": ["vanilla"]}


def test_a_run_is_never_overwritten(store: RunStore) -> None:
    before = (store.path / "run.json").read_bytes()
    with pytest.raises(StoreError, match="already holds a run; choose another --run-id"):
        RunStore.create(store.path.parent, "run", {"arms": []})
    assert (store.path / "run.json").read_bytes() == before


@pytest.mark.parametrize("run_id", ["", "..", ".x", "a/b", "/etc", "a b", "a\n", "x" * 200, "é"])
def test_an_id_that_is_no_folder_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(StoreError, match="can't be a run's id"):
        RunStore.create(tmp_path, run_id, {})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file", encoding="utf-8")
    with pytest.raises(StoreError, match=r"already holds|can't be made"):
        RunStore.create(tmp_path / "results", "run", {})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "holds no run"),
        (b"{", "can't be read"),
        (b"\xff", "can't be read"),
        (b"[]", "has format None, this specbench reads 1"),
        (b'{"format": 2}', "has format 2, this specbench reads 1"),
    ],
)
def test_what_is_no_run_of_this_format_is_not_opened(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(StoreError, match=said):
        RunStore.open(tmp_path)


def test_two_writers_on_one_folder_are_one_too_many(store: RunStore) -> None:
    """Case G2: the second is another process, as it would be."""
    other = (
        "import sys; from pathlib import Path; from specbench.store import RunStore\n"
        "with RunStore.open(Path(sys.argv[1])): print('written')\n"
    )
    command = [sys.executable, "-c", other, str(store.path)]
    with store:
        beside = subprocess.run(command, capture_output=True, text=True, check=False)
    assert beside.returncode == 1
    assert f"Another specbench is writing to {store.path}." in beside.stderr
    after = subprocess.run(command, capture_output=True, text=True, check=False)
    assert after.stdout == "written\n"


# --- requests ------------------------------------------------------------------------------------


def test_what_is_appended_is_read_back(store: RunStore, record: Build) -> None:
    kept = [record("a", text="é\u2028\n\x00"), record("b", chunks=(), tokens=0, error="cut")]
    for one in kept:
        store.append_request(CASE, one)
    assert list(RunStore.open(store.path).requests(CASE)) == kept


def test_a_request_is_synced_before_append_returns(
    store: RunStore, record: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def note(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", note)
    store.append_request(CASE, record())
    assert synced[0] == requests_file(store).stat().st_size
    assert len(synced) == 2  # the second is of the folder, which has a new name in it


def test_a_case_without_requests_has_none(store: RunStore) -> None:
    assert list(store.requests(CASE)) == []
    assert store.counters(CASE) == []


def test_a_last_line_torn_at_any_byte_is_dropped_and_can_be_gone_on_from(
    store: RunStore, record: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case G2: power is lost in the middle of a write, wherever that is."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a thousand of them take seconds
    first, second, third = record("a"), record("b"), record("c")
    store.append_request(CASE, first)
    path = requests_file(store)
    head = path.read_bytes()
    store.append_request(CASE, second)
    line = path.read_bytes()[len(head) :]
    for cut in range(len(line)):
        path.write_bytes(head + line[:cut])
        assert list(store.requests(CASE)) == [first], cut
        store.reopen_case(CASE)
        store.append_request(CASE, third)
        assert list(store.requests(CASE)) == [first, third], cut


@pytest.mark.parametrize(
    "bad",
    [b"\n", b"{}\n", b"\xff\xfe\n", b'{"prompt_id": "x"\n', b"<<<<<<< HEAD\n", b"[1]\n"],
    ids=["blank", "empty", "binary", "torn", "merge", "list"],
)
def test_a_bad_line_in_the_middle_is_named(store: RunStore, record: Build, bad: bytes) -> None:
    store.append_request(CASE, record("a"))
    path = requests_file(store)
    path.write_bytes(path.read_bytes() + bad)
    store.append_request(CASE, record("b"))
    with pytest.raises(StoreError) as caught:
        list(store.requests(CASE))
    assert str(caught.value).startswith(f"{path}, line 2: not a RequestRecord")
    assert "\n" not in str(caught.value)


def test_reopening_forgets_the_verdict_but_not_the_facts(store: RunStore, record: Build) -> None:
    store.append_request(CASE, record())
    store.finish_case(CASE, "failed", "the engine died")
    store.reopen_case(CASE)
    assert store.case_status(CASE) is None
    assert len(list(store.requests(CASE))) == 1


# --- the other facts -----------------------------------------------------------------------------


def test_counters_prompts_and_engines_are_read_back(store: RunStore) -> None:
    spans = [
        CounterSpan(requests=2, spent=EngineCounters(drafts=3, accepted_per_pos=(2, 1))),
        CounterSpan(requests=1, spent=None, problem="HTTP 500"),
    ]
    for span in spans:
        store.append_counters(CASE, span)
    prompts = [Prompt(id="1", turns=("Q\n", "é")), Prompt(id="2", turns=("R",), category="c")]
    store.save_prompts("he", prompts)
    starts = [engine("vanilla", 0), engine("vanilla", 1)]
    for facts in reversed(starts):
        store.save_engine(facts)
    again = RunStore.open(store.path)
    assert again.counters(CASE) == spans
    assert again.prompts("he") == prompts
    assert again.engines() == starts


def test_engine_starts_are_numbered_by_arm(store: RunStore) -> None:
    assert store.next_start("eagle-k1") == 0
    store.save_engine(engine("eagle-k1", 0))
    assert store.next_start("eagle-k1") == 1
    assert store.next_start("eagle-k10") == 0


def test_damaged_engine_facts_are_named(store: RunStore) -> None:
    store.save_engine(engine())
    path = store.path / "engines" / "vanilla.0" / "engine.json"
    path.write_text('{"arm": "vanilla"}', encoding="utf-8")
    with pytest.raises(StoreError, match=r"engine\.json can't be read: start: "):
        store.engines()


def test_a_status_is_there_only_once_it_is_finished(store: RunStore) -> None:
    assert (store.case_status(CASE), store.status()) == (None, None)
    store.finish_case(CASE, "partial", "3 of 4 prompts measured")
    store.finish("partial")
    case, run = store.case_status(CASE), store.status()
    assert case is not None
    assert (case["status"], case["problem"]) == ("partial", "3 of 4 prompts measured")
    assert run is not None
    assert run["status"] == "partial"


# --- writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_no_document_holds_a_number_that_json_has_not(tmp_path: Path, number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        stores.write_document(tmp_path / "x.json", {"x": number})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_document_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.json"
    stores.write_document(path, {"x": 1})
    monkeypatch.setattr(os, "fsync", fail_to_sync)
    with pytest.raises(StoreError, match=r"x\.json can't be written: No space left on device\."):
        stores.write_document(path, {"x": 2})
    assert json.loads(path.read_bytes()) == {"x": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_stops_an_append_in_words(
    store: RunStore, record: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", fail_to_sync)
    with pytest.raises(StoreError, match=r"requests\.jsonl can't be added to: No space left"):
        store.append_request(CASE, record())


# --- which run -----------------------------------------------------------------------------------


def test_the_latest_run_is_the_one_made_last(tmp_path: Path) -> None:
    for age, name in enumerate(["b", "a", "c"]):
        made = RunStore.create(tmp_path, name, {})
        os.utime(made.path / "run.json", (1000 - age, 1000 - age))
    (tmp_path / "no-run").mkdir()
    assert stores.latest(tmp_path) == tmp_path / "b"


def test_no_run_at_all_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"There is no run in .*specbench run --config"):
        stores.latest(tmp_path / "nothing")


def test_a_fresh_id_is_a_valid_one() -> None:
    assert stores.RUN_ID.fullmatch(stores.new_run_id("eagle_k5"))


def test_no_key_of_the_document_is_lost(tmp_path: Path) -> None:
    document: dict[str, Any] = {"config": {"é": [1, None, True]}, "machine": {"gpus": []}}
    made = RunStore.create(tmp_path, "r", document)
    assert RunStore.open(made.path).document == {"format": 1, "id": "r", **document}
