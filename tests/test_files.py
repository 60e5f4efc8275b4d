"""A run's files survive what disks, kernels and people do to them; tests/test_store.py has the rest."""

import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specbench import store as stores
from specbench.errors import StoreError
from specbench.records import CounterSpan, EngineCounters, Prompt, RequestRecord
from specbench.render.read import measured_cases
from specbench.store import RunStore

Build = Callable[..., RequestRecord]
Made = Callable[..., RunStore]
CASE = "vanilla.he.t256.c1.r0"
TORN = ("requests.jsonl", "counters.jsonl")
LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_REMOUNT, MS_BIND = 1, 32, 4096


@contextmanager
def mounted(
    kind: bytes, source: bytes, target: Path, flags: int, data: bytes = b""
) -> Iterator[None]:
    """A file system for the length of a test; skips where this user may mount none."""
    if LIBC.mount(source, os.fsencode(target), kind, flags, data) != 0:
        pytest.skip(f"cannot mount here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        assert LIBC.umount2(os.fsencode(target), 0) == 0


def prompts() -> list[Prompt]:
    return [Prompt(id=str(n), turns=(f"prompt {n}",)) for n in range(3)]


def say(_: str, prompt: Prompt, __: int) -> str:
    return f"an answer of {prompt.id} in eight words or so"


# --- torn and corrupt ----------------------------------------------------------------------------


def test_every_kind_of_line_may_be_torn_at_any_byte(
    tmp_path: Path, record: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # hundreds of them take seconds
    store = RunStore.create(tmp_path, "run", {})
    span = CounterSpan(requests=1, keys=("a#0@0",), spent=EngineCounters(drafts=1))
    store.append_request(CASE, record("a"))
    store.append_counters(CASE, span)
    folder = store.path / "cases" / CASE
    whole = {name: (folder / name).read_bytes() for name in TORN}
    for name in TORN:
        for cut in range(len(whole[name])):
            (folder / name).write_bytes(whole[name] + whole[name][:cut])
            assert len(list(store.requests(CASE))) == 1, (name, cut)
            assert store.counters(CASE) == [span], (name, cut)
            store.reopen_case(CASE)
            assert (folder / name).read_bytes() == whole[name], (name, cut)


def test_a_torn_document_is_named_wherever_it_is_torn(made_run: Made) -> None:
    """Write, sync, rename never tears one; a copy of a run folder may."""
    store = made_run(prompts(), say=say)
    for path in (store.path / "run.json", next((store.path / "cases").glob("*/done.json"))):
        whole = path.read_bytes()
        for cut in range(0, len(whole.rstrip()), 7):
            path.write_bytes(whole[:cut])
            with pytest.raises(StoreError, match=f"{path.name} can't be read"):
                list(measured_cases(RunStore.open(store.path)))
        path.write_bytes(whole)
    assert len(list(measured_cases(RunStore.open(store.path)))) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunk_ns": [9, 5]}, "times that run backwards"),
        ({"chunk_ns": [1]}, "times that run backwards"),  # before it was sent
        ({"chunk_ns": []}, "neither an answer nor an error"),
        ({"output_tokens": -1}, "a count that can't be"),
        ({"output_tokens": 10**400}, "a count that can't be"),
        ({"end_ns": 10**30}, "a time that can't be"),
        ({"prompt_id": "\ud800"}, "Invalid JSON"),
        ({"sampling": []}, "sampling"),
        ({"new_key": 1}, "new_key"),
    ],
)
def test_figures_that_no_clock_gives_are_a_corrupt_line(
    made_run: Made, change: dict[str, object], said: str
) -> None:
    store = made_run(prompts(), say=say)
    path = store.path / "cases" / "vanilla.c1" / "requests.jsonl"
    first, second, *rest = path.read_text(encoding="utf-8").splitlines()
    damaged = {**json.loads(second), "sent_ns": 2, **change}
    path.write_text("\n".join([first, json.dumps(damaged), *rest, ""]), encoding="utf-8")
    with pytest.raises(StoreError) as caught:
        list(measured_cases(store))
    assert f"{path}, line 2: not a RequestRecord" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("cases",), None),
        (("cases", 0, "arm"), "gone"),
        (("cases", 0, "id"), "../../etc"),
        (("cases", 0, "concurrency"), "1"),
        (("methods", "vanilla"), {}),
        (("methods", "eagle-k1", "k"), -1),
        (("prompt_sets", "he", "available"), "164"),
        (("config", "sampling"), {"temperature": "0", "ignore_eos": False}),
        (("config", "goodput"), {"ttft": 1}),
        (("machine", "gpus"), ["one"]),
        (("calibration",), {"not": "one"}),
    ],
)
def test_a_run_document_that_was_edited_is_refused_by_its_key(
    made_run: Made, key: tuple[str | int, ...], value: object
) -> None:
    store = made_run(prompts(), say=say)
    document = json.loads((store.path / "run.json").read_bytes())
    inside = document
    for part in key[:-1]:
        inside = inside[part]
    inside[key[-1]] = value
    (store.path / "run.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(StoreError) as caught:
        list(measured_cases(RunStore.open(store.path)))
    assert f"{store.path}/run.json: `{key[0]}" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ['{"a": 1e999}', '{"a": NaN}', '{"a": "\\ud800"}', "[" * 9999])
def test_json_that_could_not_be_written_again_is_not_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(StoreError, match=r"run\.json can't be read"):
        RunStore.open(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"status": 5}', '{"status": "ok", "problem": []}'])
def test_a_verdict_that_is_none_is_refused(made_run: Made, content: str) -> None:
    store = made_run(prompts(), say=say)
    (store.path / "cases" / "vanilla.c1" / "done.json").write_text(content, encoding="utf-8")
    with pytest.raises(StoreError, match=r"done\.json can't be read: no `status`"):
        list(measured_cases(store))


# --- full and read-only disks --------------------------------------------------------------------


def test_a_full_disk_loses_nothing_that_was_measured(tmp_path: Path, record: Build) -> None:
    """A tmpfs of 256 kB: what the kernel says, not a stand-in for it."""
    with mounted(b"tmpfs", b"tmpfs", tmp_path, 0, b"size=256k"):
        store = RunStore.create(tmp_path, "run", {"x": "y" * 100})
        before = (store.path / "run.json").read_bytes()
        kept: list[RequestRecord] = []

        def fill() -> None:
            for n in range(1000):
                one = record(str(n), text="x" * 1000)
                store.append_request(CASE, one)
                kept.append(one)

        with pytest.raises(StoreError, match="can't be added to: No space left on device"):
            fill()
        assert len(kept) > 50
        small = record("small")  # fits where the last one did not
        store.append_request(CASE, small)
        kept.append(small)
        assert list(store.requests(CASE)) == kept
        with pytest.raises(StoreError, match=r"run\.json can't be written: No space left"):
            store.amend({"more": "z" * 300_000})
        assert (store.path / "run.json").read_bytes() == before
        assert not list(store.path.glob(".*.draft"))


def test_a_file_that_may_not_grow_is_an_error_in_words(tmp_path: Path) -> None:
    """RLIMIT_FSIZE, in a process of its own: also where nothing can be mounted."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from specbench import store\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: store.write_text(Path(sys.argv[1]), 'x' * 100_000)\n"
        "except store.StoreError as error: print(error)\n"
    )
    path = tmp_path / "x.json"
    path.write_text("old", encoding="utf-8")
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{path} can't be written: File too large.\n"
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("x.json", "old")]


def test_read_only_results_are_an_error_in_words(tmp_path: Path, record: Build) -> None:
    """A bind mount, because root may write where the mode says no."""
    store = RunStore.create(tmp_path, "run", {})
    store.append_request(CASE, record("a"))
    where = os.fsencode(tmp_path)
    with mounted(b"", where, tmp_path, MS_BIND):
        if LIBC.mount(b"", where, b"", MS_REMOUNT | MS_BIND | MS_RDONLY, b"") != 0:
            pytest.skip("cannot remount read-only here")
        with pytest.raises(StoreError, match=r"other can't be made: Read-only file system\."):
            RunStore.create(tmp_path, "other", {})
        again = RunStore.open(store.path)
        with pytest.raises(StoreError, match=r"run.*: Read-only file system"), again:
            pass
        with pytest.raises(StoreError, match=r"requests\.jsonl can't be added to: Read-only"):
            again.append_request(CASE, record("b"))
        with pytest.raises(StoreError, match=r"done\.json can't be written: Read-only"):
            again.finish("ok")
        with pytest.raises(StoreError, match="Read-only file system"):
            again.reopen_case(CASE)
        assert [one.prompt_id for one in again.requests(CASE)] == ["a"]


# --- documents -----------------------------------------------------------------------------------


def test_a_document_is_written_then_synced_then_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, events = tmp_path / "x.json", []
    stores.write_document(path, {"old": 1})
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        at = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if at.is_dir():
            events.append("sync the folder")
        else:
            events.append("sync the draft")
            assert json.loads(at.read_bytes()) == {"new": 2}  # all of it, before it is synced
            assert at != path
        sync(descriptor)

    def replaced(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        events.append("rename")
        assert json.loads(path.read_bytes()) == {"old": 1}
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    stores.write_document(path, {"new": 2})
    assert events == ["sync the draft", "rename", "sync the folder"]


# --- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2, 99, "1", None, True, 1.5, [1]])
def test_a_run_of_another_format_is_refused_by_every_reader(
    made_run: Made, version: object
) -> None:
    store = made_run(prompts(), say=say)
    document = {**store.document, "format": version}
    (store.path / "run.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(StoreError, match=f"has format .*this specbench reads {stores.FORMAT}"):
        RunStore.open(store.path)


# --- large runs ----------------------------------------------------------------------------------


def test_requests_are_read_one_at_a_time(tmp_path: Path, record: Build) -> None:
    """A case's file may be larger than memory; what is read of it is not kept by the store."""
    store = RunStore.create(tmp_path, "run", {})
    line = record("a", text="x" * 100_000).model_dump_json(exclude_none=True).encode() + b"\n"
    path = store.case_folder(CASE) / "requests.jsonl"
    with path.open("wb") as file:
        file.writelines(line for _ in range(400))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(1 for _ in store.requests(CASE)) == 400
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 10  # of 40


def test_a_torn_line_of_any_length_is_cut_off(tmp_path: Path, record: Build) -> None:
    """Looked for from the end in blocks: lines shorter, longer and as long as one."""
    store = RunStore.create(tmp_path, "run", {})
    path = store.case_folder(CASE) / "requests.jsonl"
    whole = record("a").model_dump_json(exclude_none=True).encode() + b"\n"
    for length in (1, stores.BLOCK - 1, stores.BLOCK, stores.BLOCK + 1, 3 * stores.BLOCK):
        for before in (b"", whole, whole * 200):
            path.write_bytes(before + b"x" * length)
            store.reopen_case(CASE)
            assert path.read_bytes() == before, (length, len(before))
