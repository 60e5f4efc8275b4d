"""A run on a local Ray cluster of two raylets: the table of the local executor, and a raylet killed.

Everything of Ray is on loopback addresses (127.0.0.2 and .3: of 127.0.0.1 it makes the machine's
own), and in process groups that this file starts and ends.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from specbench.records import Prompt, RequestRecord
from specbench.store import RunStore

pytestmark = pytest.mark.engine
RAY = Path(sys.executable).with_name("ray")
ENV = {
    **{name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "1000",  # a dead node is known sooner
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_memory_monitor_refresh_ms": "0",  # what others take of this machine is not for Ray to judge
}
PATIENCE_S = 600  # on a machine with much else to do; a tenth of it elsewhere
UNIT = "specbench.executors.node"


def until(condition: Callable[[], Any], seconds: float) -> bool:
    """Whether *condition* comes true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@dataclass
class Node:
    """A `ray start --block` in a process group of its own."""

    process: subprocess.Popen[bytes]

    @classmethod
    def started(cls, folder: Path, name: str, *args: str) -> "Node":
        usual = ["--block", "--disable-usage-stats", "--num-gpus=0"]
        usual += ["--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0"]
        log = folder / f"{name}.log"
        with log.open("wb") as out:
            command = [str(RAY), "start", *args, *usual]
            env = {**ENV, "TMPDIR": str(folder / "tmp")}  # a killed unit's folder is left there
            process = subprocess.Popen(
                command, env=env, cwd=folder, stdout=out, stderr=out, start_new_session=True
            )
        assert until(lambda: b"Ray runtime started" in log.read_bytes(), 90), log.read_text()
        return cls(process)

    def raylet(self) -> psutil.Process:
        below = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = [one for one in below if one.name() == "raylet"]
        return found

    def lives(self) -> bool:
        """Whether its raylet does."""
        try:
            return bool(self.raylet())
        except (psutil.Error, ValueError):
            return False

    def units(self) -> list[psutil.Process]:
        """The processes that measure on it, and their engines."""
        found = []
        for one in self.raylet().children(recursive=True):
            try:
                if UNIT in one.cmdline():  # a guard, and below it what it guards
                    found += [one, *one.children(recursive=True)]
            except psutil.Error:
                continue
        return found

    def end(self) -> None:
        """All of its group, at once: asked nicely, Ray drains for 30 s."""
        if self.process.poll() is None or group_lives(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def group_lives(pgid: int) -> bool:
    try:
        os.killpg(pgid, 0)
    except ProcessLookupError:
        return False
    return True


@dataclass
class LocalCluster:
    """The head, and the raylets that tests add."""

    folder: Path
    address: str
    head: Node
    others: list[Node] = field(default_factory=list)

    def another(self) -> Node:
        name = f"node{len(self.others)}"
        self.others.append(
            Node.started(
                self.folder,
                name,
                f"--address={self.address}",
                "--node-ip-address=127.0.0.3",
                "--num-cpus=2",
            )
        )
        return self.others[-1]


@pytest.fixture(scope="module")
def head() -> Iterator[LocalCluster]:
    folder = Path(tempfile.mkdtemp(prefix="sbr", dir="/tmp"))  # a socket's path is 107 long at most
    (folder / "tmp").mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    args = ["--head", f"--port={port}", "--node-ip-address=127.0.0.2", f"--temp-dir={folder}/ray"]
    node = Node.started(folder, "head", *args, "--include-dashboard=false", "--num-cpus=1")
    made = LocalCluster(folder, f"127.0.0.2:{port}", node)
    yield made
    for one in [*made.others, made.head]:
        one.end()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(head: LocalCluster) -> LocalCluster:
    """Two raylets, of one CPU and of two; a test that kills the second one leaves the next test a fresh one."""
    if not head.others or not head.others[-1].lives():
        head.another()
    return head


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a config that replays a tape: 0.25 s a request, four repeats of three arms."""
    arms = ["vanilla", "eagle-k1", "eagle-k2"]
    prompts = [Prompt(id=str(i), turns=(f"question {i}",)) for i in range(1, 5)]
    store = RunStore.create(tmp_path, "tape", {"cases": [{"id": a, "arm": a} for a in arms]})
    for number, arm in enumerate(arms):
        for prompt in prompts:
            end_ns = 250_000_000 + 1_000_000 * number
            record = RequestRecord(
                prompt_id=prompt.id,
                sent_ns=0,
                end_ns=end_ns,
                chunk_ns=(10_000_000, end_ns),
                output_tokens=20,
                token_source="usage",
                prompt_sha256="0" * 64,
            )
            store.append_request(arm, record)
    (tmp_path / "datasets").mkdir()
    lines = "".join(json.dumps({"text": prompt.turns[0]}) + "\n" for prompt in prompts)
    (tmp_path / "datasets" / "four.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(
        "model: m\nprompts: four\nrepeats: 4\nspeculation: {method: eagle, model: d, k: [1, 2]}\n"
        "load: {client: replay, tape: tape, tape_speed: 1.0}\n",
        encoding="utf-8",
    )
    return tmp_path


def specbench(*args: str) -> list[str]:
    return [sys.executable, "-m", "specbench", *args]


@contextmanager
def begun(place: Path, cluster: LocalCluster, *args: str) -> "Iterator[subprocess.Popen[bytes]]":
    """`specbench run` on the cluster, in the background; what it says is in place/log and out."""
    command = specbench("run", *args, "--executor", "ray", "--address", cluster.address)
    with (place / "log").open("ab") as log, (place / "out").open("ab") as out:
        process = subprocess.Popen(command, cwd=place, stdout=out, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def rows(place: Path, run: str) -> list[dict[str, Any]]:
    command = specbench("report", f"results/{run}", "--format", "json")
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)["rows"]
    return found


def asked(store: RunStore) -> dict[str, Counter[str]]:
    """How often each prompt was measured, by case."""
    cases = [case["id"] for case in store.document["cases"]]
    return {case: Counter(record.prompt_id for record in store.requests(case)) for case in cases}


def requests(place: Path, run: str) -> int:
    files = (place / "results" / run).glob("cases/*/requests.jsonl")
    return sum(path.read_bytes().count(b"\n") for path in files)


def left_behind(cluster: LocalCluster) -> list[str]:
    """Processes of units on it, and engines in their folders, that still live."""
    found = []
    for one in psutil.process_iter(["cmdline", "cwd", "status"]):
        words = [*(one.info["cmdline"] or ()), one.info["cwd"] or ""]
        of_unit = any(f"{cluster.folder}/tmp/" in word for word in words)
        if of_unit and one.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(" ".join(words)[:200])
    return found


def test_the_table_is_that_of_the_local_executor(place: Path, cluster: LocalCluster) -> None:
    """A tape's times are the tape's, so here even these are equal."""
    with begun(place, cluster, "--config", "c.yaml", "--run-id", "ray") as process:
        assert process.wait(PATIENCE_S) == 0, (place / "log").read_text()
    command = specbench("run", "--config", "c.yaml", "--run-id", "here")
    subprocess.run([*command, "--set", "load.tape_speed=null"], cwd=place, check=True)
    ray, here = RunStore.open(place / "results" / "ray"), RunStore.open(place / "results" / "here")
    assert asked(ray) == asked(here)
    assert rows(place, "ray") == rows(place, "here")
    assert left_behind(cluster) == []


def test_a_raylet_is_killed_and_nothing_is_measured_twice(
    place: Path, cluster: LocalCluster
) -> None:
    other = cluster.others[-1]
    with begun(place, cluster, "--config", "c.yaml", "--run-id", "one") as process:
        assert until(lambda: other.units() and requests(place, "one") > 4, PATIENCE_S)
        for one in other.units():  # Ray's own settings, which engines would inherit
            assert "OMP_NUM_THREADS" not in one.environ()
            assert one.nice() == other.raylet().nice() or os.geteuid() != 0
        kill(other)
        assert process.wait(PATIENCE_S) == 0, (place / "log").read_text()
    assert (place / "out").read_text(encoding="utf-8") == "results/one\n"  # and nothing of Ray's
    said = (place / "log").read_text(encoding="utf-8")
    assert "is lost to unit" in said
    assert "attempt 2 of 3" in said
    store = RunStore.open(place / "results" / "one")
    assert all(count == dict.fromkeys("1234", 1) for count in asked(store).values())
    assert left_behind(cluster) == []


def kill(node: Node) -> None:
    """Its raylet, with SIGKILL: ten seconds later nothing lives of what was measured there."""
    there = node.units()
    node.raylet().kill()
    assert until(lambda: not any(alive(one) for one in there), 10), [one for one in there]


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing_and_goes_on_with_either_executor(
    place: Path, cluster: LocalCluster, number: signal.Signals
) -> None:
    with begun(place, cluster, "--config", "c.yaml", "--run-id", "one") as process:
        assert until(lambda: requests(place, "one") > 4, PATIENCE_S)
        at = time.monotonic()
        process.send_signal(number)
        code = process.wait(30)
    assert until(lambda: not left_behind(cluster), 10 - (time.monotonic() - at)), left_behind(
        cluster
    )
    if number != signal.SIGKILL:
        assert code == 130
        assert "specbench run --resume results/one" in (place / "log").read_text(encoding="utf-8")
    kept = requests(place, "one")
    assert 4 < kept < 48
    again = specbench("run", "--resume", "results/one")
    subprocess.run(again, cwd=place, check=True, capture_output=True)
    store = RunStore.open(place / "results" / "one")
    assert all(count == dict.fromkeys("1234", 1) for count in asked(store).values())


# --- real engines --------------------------------------------------------------------------------

TRIO = """
model: demo:target
speculation: {method: eagle, model: demo:eagle, k: [1, 2]}
prompts: short
max_tokens: 24
schedule: interleaved
load: {warmup: 1}
engine:
  args: {dtype: float32, max_model_len: 1024, enforce_eager: true, kv_cache_memory_bytes: 67108864}
"""
SHORT = [
    "Name the days of the week, one a line.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\nWrite mul and div.",
    "What is the capital of France?",
]
SAME = ("arm", "k", "status", "requests", "output_tokens", "acceptance_length", "acceptance_rate")


def test_real_engines_give_the_local_table_with_a_raylet_killed_midway(
    tmp_path: Path, cluster: LocalCluster
) -> None:
    (tmp_path / "datasets").mkdir()
    text = "".join(json.dumps({"text": one}) + "\n" for one in SHORT)
    (tmp_path / "datasets" / "short.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(TRIO, encoding="utf-8")
    with begun(tmp_path, cluster, "--config", "c.yaml", "--run-id", "ray") as process:
        assert until(lambda: requests(tmp_path, "ray") or process.poll() is not None, PATIENCE_S)
        kill(cluster.others[-1])  # the larger one: engines on CPUs take a node of that size whole
        assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text(encoding="utf-8")
    assert left_behind(cluster) == []
    said = (tmp_path / "log").read_text(encoding="utf-8")
    assert "is lost to unit" in said, said
    ray = RunStore.open(tmp_path / "results" / "ray")
    assert all(count == dict.fromkeys("123", 1) for count in asked(ray).values())
    assert {facts.host for facts in ray.engines()} == {socket.gethostname()}
    starts = [(facts.arm, facts.start) for facts in ray.engines()]
    assert len(set(starts)) == len(starts) == 6  # three arms, twice
    assert asked_of_both(ray)
    assert all(log.stat().st_size for log in ray.path.glob("engines/*/engine.log"))

    here = specbench("run", "--config", "c.yaml", "--run-id", "here")
    subprocess.run(here, cwd=tmp_path, check=True, capture_output=True)
    assert tokens(ray) == tokens(RunStore.open(tmp_path / "results" / "here"))
    ours, theirs = rows(tmp_path, "ray"), rows(tmp_path, "here")
    assert [[row[name] for name in SAME] for row in ours] == [
        [row[name] for name in SAME] for row in theirs
    ]
    assert all(row["speedup"] > 0 for row in ours)


def tokens(store: RunStore) -> dict[tuple[str, str], Any]:
    """What was answered, and what was accepted on the way, by arm and prompt."""
    return {
        (case["arm"], record.prompt_id): (record.token_ids, record.spec)
        for case in store.document["cases"]
        for record in store.requests(case["id"])
    }


def asked_of_both(store: RunStore) -> bool:
    """Whether some requests are of the host that died, and some of the one that went on.

    Others may have been sent in vain between, where Ray did not know of the death yet.
    """
    cases = [case["id"] for case in store.document["cases"]]
    starts = {record.start for case in cases for record in store.requests(case)}
    return min(starts) == 0 and len(starts) == 2
