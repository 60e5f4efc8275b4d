"""A short form of the kill campaign, and proof that its net and its checks catch what they look for."""

import json
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specbench.records import EngineFacts, Prompt, RequestRecord
from specbench.store import RunStore

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def checks() -> Iterator[ModuleType]:
    """benchmarks/faults_checks.py, which is in no package."""
    sys.path.insert(0, str(BENCHMARKS))
    import faults_checks

    yield faults_checks
    sys.path.remove(str(BENCHMARKS))


def campaign(kind: str, *more: str) -> str:
    """The figures of a short campaign."""
    command = [sys.executable, str(BENCHMARKS / "faults.py"), kind, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.engine
def test_twenty_kills_of_a_replayed_run_leave_nothing_and_lose_nothing() -> None:
    said = campaign("replayed", "--kills", "20", "--seconds", "60", "--seed", "7")
    (all_of_them,) = re.findall(
        r"^\| replayed \| all \| (\d+) \| (.*) \| [\d.]+ \|$", said, re.MULTILINE
    )
    assert int(all_of_them[0]) >= 20
    assert all_of_them[1] == "0 | 0 | 0 | 0"
    assert "0 faults" in said
    assert int(re.findall(r"(\d+) runs finished", said)[0]) >= 1


# --- the net -------------------------------------------------------------------------------------

DAEMON = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:  # a daemon: no parent, a session of its own, another name, no environment
        os.execve("/bin/sleep", ["kworker", "600"], {})
    os._exit(0)
os.wait()
"""


def caught(code: str, token_only: bool = False) -> list[str]:
    """What the net finds of a "specbench" that runs *code*."""
    harness = f"""
    import os, sys, time
    sys.path.insert(0, {str(BENCHMARKS)!r})
    from pathlib import Path
    import faults_process as processes
    if not {token_only}:
        processes.become_subreaper()
    env = dict(os.environ, **{{processes.TOKEN: "t0ken"}})
    running = processes.start(["-c", {code!r}], cwd=Path("/"), env=env, err=Path(os.devnull))
    left = processes.wait_until_gone(running, "t0ken", 2.0)
    for one in left:
        print(one.cmdline()[0])
        one.kill()
    """
    command = [sys.executable, "-c", textwrap.dedent(harness)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_the_net_catches_a_daemon_that_hides_its_name_session_and_environment() -> None:
    assert caught(DAEMON) == ["kworker"]


def test_the_net_catches_by_environment_what_descends_from_nobody_here() -> None:
    kept = DAEMON.replace("{})", "dict(os.environ))")
    assert len(caught(kept, token_only=True)) == 1


def test_the_net_is_empty_after_a_process_that_leaves_nothing() -> None:
    assert caught("import subprocess; subprocess.run(['true'])") == []


# --- the checks ----------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, record: Callable[..., RequestRecord]) -> RunStore:
    """A case of one prompt and a conversation, measured by start 0 of its arm."""
    case = {"id": "vanilla.p", "arm": "vanilla", "prompt_set": "p"}
    prompts = [Prompt(id="a", turns=("A?",)), Prompt(id="t", turns=("T?", "And?"))]
    document = {"cases": [case], "prompt_sets": {"p": {}}}
    store = RunStore.create(tmp_path, "run", document, {"p": prompts})
    facts: dict[str, Any] = {"kind": "vllm", "version": "0", "url": "http://127.0.0.1:1"}
    facts |= {"argv": None, "started_at": "", "arm": "vanilla", "served_model": "s0", "start": 0}
    store.save_engine(EngineFacts.model_validate(facts))
    for one in (record("a"), record("t"), record("t", turn=1)):
        store.append_request("vanilla.p", one)
    store.finish("ok")
    return store


@pytest.fixture
def sent(checks: ModuleType) -> list[Any]:
    """What the engine says that it answered."""
    asked = (("A?", 0), ("T?", 0), ("T?", 1))
    return [checks.Answered("s0", text, turn, 10**9) for text, turn in asked]


def faults(
    checks: ModuleType, run: RunStore, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setattr(
        checks, "table", lambda *_, **__: [{"arm": "vanilla", "k": 0, "requests": 3, "groups": 1}]
    )
    reference = [{"arm": "vanilla", "k": 0, "requests": 3, "groups": 1}]
    return list(checks.finished(run.path, reference, sent, whole=False))


def test_a_good_run_has_no_fault(
    checks: ModuleType, run: RunStore, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = checks.requests_of(run.path)
    assert faults(checks, run, sent, monkeypatch) == []
    assert list(checks.after_a_kill(run.path, before)) == []
    assert checks.unstored(run.path, sent, 0, 2 * 10**9) == ([], 0.0)
    assert checks.uncounted(run.path, {("vanilla", 0): 4}, warm_up=1) == []


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"prompt": "a"}, "twice: vanilla.p a#0@0"),
        ({"prompt": "t", "turn": 1}, "twice: vanilla.p t#1@0"),
        ({"prompt": "a", "start": 1}, "mixed: vanilla has records of start 1, which never was"),
    ],
)
def test_what_is_measured_twice_or_by_another_engine_is_noticed(
    checks: ModuleType,
    run: RunStore,
    sent: list[Any],
    record: Callable[..., RequestRecord],
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
    found: str,
) -> None:
    run.append_request("vanilla.p", record(**more))
    assert found in faults(checks, run, sent, monkeypatch)


def test_a_conversation_that_was_cut_may_begin_anew(
    checks: ModuleType,
    run: RunStore,
    sent: list[Any],
    record: Callable[..., RequestRecord],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = run.path / "cases" / "vanilla.p" / "requests.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], *lines[1:]]))
    assert faults(checks, run, [*sent, sent[1]], monkeypatch) == []
    path.write_bytes(b"".join(lines[:2]))
    assert faults(checks, run, sent, monkeypatch) == ["unmeasured: vanilla.p t"]


def test_an_answer_that_its_engine_did_not_give_is_noticed(
    checks: ModuleType, run: RunStore, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = faults(checks, run, sent[1:], monkeypatch)
    assert found == "mixed: start 0 of vanilla did not answer all of its 3 records"


def test_losses_are_noticed_by_every_witness(
    checks: ModuleType, run: RunStore, sent: list[Any]
) -> None:
    before = checks.requests_of(run.path)
    path = run.path / "cases" / "vanilla.p" / "requests.jsonl"
    path.write_bytes(before["vanilla.p"][: before["vanilla.p"].index(b"\n") + 1])
    (lost,) = checks.after_a_kill(run.path, before)
    assert lost.startswith("lost: ")
    losses, oldest_s = checks.unstored(run.path, sent, 0, 2 * 10**9)
    assert len(losses) == 2
    assert oldest_s == 1.0
    just_sent = checks.unstored(run.path, sent, 0, 10**9 + 10**8)
    assert just_sent == ([], 0.1)
    assert len(checks.uncounted(run.path, {("vanilla", 0): 4}, warm_up=1)) == 1


def test_torn_files_and_a_lock_that_is_held_are_noticed(checks: ModuleType, run: RunStore) -> None:
    path = run.path / "cases" / "vanilla.p" / "requests.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"prompt_id')
    assert list(checks.after_a_kill(run.path, {})) == []  # the last line may be torn
    path.write_bytes(b'{"prompt_id\n' + whole)
    (run.path / "done.json").write_text("{", encoding="utf-8")
    with run:
        found = list(checks.after_a_kill(run.path, {}))
    assert [one.partition(":")[0] for one in found] == ["torn", "torn", "locked"]


def test_tracebacks_are_told_from_those_of_pythons_own_start(checks: ModuleType) -> None:
    code = "import time; time.sleep(5)"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    time.sleep(0.3)
    process.send_signal(2)
    said = process.communicate()[1]
    assert "KeyboardInterrupt" in said
    assert checks.tracebacks(said) == ([], 1)
    ours, pythons = checks.tracebacks(said.replace("<string>", f"{ROOT}/specbench/cli/run.py"))
    assert (len(ours), pythons) == (1, 0)
    assert checks.tracebacks(json.dumps({"error": "no"})) == ([], 0)
