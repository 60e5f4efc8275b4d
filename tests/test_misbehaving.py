"""Engines that misbehave: each failure has a name in the table, the sweep goes on, the exit code says so."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import console
import pytest
from console import Done
from control_groups import control_group, write

from specbench import arms
from specbench.engines import vllm
from specbench.engines.oom import OomWatch
from specbench.engines.process import Child
from specbench.errors import EngineError, LoadError
from specbench.failures import FAILURES, SIGNS, cause_in, in_words, of_request
from specbench.store import RunStore

FAKE = Path(__file__).with_name("fake_vllm.py")
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.86 GiB. GPU 0 has a total "
    "capacity of 21.99 GiB of which 337.38 MiB is free."
)


def specbench(cwd: Path, *args: str) -> Done:
    """Run the console script in this process."""
    return console.specbench(*args, cwd=cwd, columns=200)


@pytest.fixture
def workplace(tmp_path: Path, fake_python: Path) -> Path:
    """A folder with four prompts, and a config whose engine is the stand-in."""
    lines = "".join(json.dumps({"text": f"prompt {i}"}) + "\n" for i in range(4))
    (tmp_path / "four.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(
        "model: some/model\n"
        "speculation: {method: eagle, model: some/head, k: 3}\n"
        "prompts: four.jsonl\nmax_tokens: 24\n"
        f"engine: {{python: {fake_python}, startup_timeout_s: 20}}\n"
        "load: {warmup: 1, stall_s: 0.5}\n",
        encoding="utf-8",
    )
    return tmp_path


def run(workplace: Path, *args: str, **env: str) -> Done:
    """A run whose engines have *env*."""
    sets = [f"--set=engine.env.{name}={json.dumps(value)}" for name, value in env.items()]
    return specbench(workplace, "run", "--config", "c.yaml", "--run-id", "one", *sets, *args)


def rows(workplace: Path) -> dict[str, dict[str, Any]]:
    """The run's rows by arm."""
    done = specbench(workplace, "report", "--format", "json")
    assert done.returncode == 0, done.stderr
    return {row["arm"]: row for row in json.loads(done.stdout)["rows"]}


def leftovers(workplace: Path) -> list[int]:
    """Processes that were started from *workplace* and still live."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            state = (proc / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            inside = Path(os.readlink(proc / "cwd")).is_relative_to(workplace)
        except OSError:
            continue
        if inside and state != "Z" and int(proc.name) != os.getpid():
            found.append(int(proc.name))
    return found


# --- the names -----------------------------------------------------------------------------------

ROWS: list[tuple[dict[str, str], str, str]] = [
    ({"FAKE_MODE": "exits"}, "exited_before_ready", "not supported on this device"),
    ({"FAKE_MODE": "exits", "FAKE_SAYS": OUT_OF_MEMORY}, "out_of_memory", "Tried to allocate"),
    ({"FAKE_MODE": "hangs"}, "not_ready_in_time", "not ready after 1 s"),
    ({"FAKE_MODE": "wrong-model"}, "wrong_model", "another/model"),
    ({"FAKE_MODE": "dies"}, "cuda_error", "illegal memory access"),
    ({"FAKE_MODE": "dies", "FAKE_SAYS": "bye"}, "died", "died with status 7"),
    ({"FAKE_MODE": "empty"}, "empty_answer", "sent no token"),
    ({"FAKE_MODE": "stalls"}, "stalled", "no data for 0.5 s"),
    ({"FAKE_MODE": "cut"}, "stream_cut", "the stream was cut"),
    ({"FAKE_MODE": "error"}, "error_in_stream", "EngineCore died"),
    ({"FAKE_MODE": "refuses"}, "refused", "maximum context length"),
    ({"FAKE_MODE": "core-dead"}, "engine_core_dead", "EngineCore encountered an issue"),
    (
        {"FAKE_MODE": "core-dead", "FAKE_SAYS": "CUDA error: an illegal memory access"},
        "cuda_error",
        "an illegal memory access",
    ),
    ({"FAKE_MODE": "core-silent"}, "engine_core_dead", "no data for 0.5 s"),
]


@pytest.mark.parametrize(("env", "name", "said"), ROWS, ids=lambda value: str(value)[:40])
def test_each_failure_has_a_name_and_the_other_arm_is_measured(
    workplace: Path,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    name: str,
    said: str,
) -> None:
    if env["FAKE_MODE"] == "cut":  # after each of four cuts it is asked whether the engine died
        monkeypatch.setattr(arms, "DEATH_S", 0.1)
    env = {"FAKE_ONLY": "draft", **env}
    limit = ["--set", "engine.startup_timeout_s=1.5"] if env["FAKE_MODE"] == "hangs" else []
    done = run(workplace, *limit, **env)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert "specbench run --resume results/one" in done.stderr
    found = rows(workplace)
    vanilla, eagle = found["vanilla"], found["eagle-k3"]
    if not limit:  # 1.5 s may be too short for a good one too, on a busy machine
        assert (vanilla["status"], vanilla["failure"], vanilla["requests"]) == ("ok", None, 4)
    assert (eagle["status"], eagle["failure"]) == ("failed", name)
    assert said.replace("1 s", "1.5 s") in eagle["problem"]
    if env["FAKE_MODE"] not in ("exits", "hangs"):  # which say it where they end, or nothing
        assert "recorded from vLLM 0.32" in eagle["problem"]  # the end of its log
    table = specbench(workplace, "report").stdout
    assert f"failed: {in_words(name)}" in table
    assert leftovers(workplace) == []


def test_an_answer_without_end_is_given_up_at_its_limit(workplace: Path) -> None:
    limits = ["--set", "load.timeout_s=0.4", "--set", "baseline=false"]
    assert run(workplace, *limits, FAKE_MODE="stalls").returncode == 3
    (row,) = rows(workplace).values()
    assert (row["status"], row["failure"]) == ("failed", "timed_out")


@pytest.mark.parametrize("warmup", ["0", "1"])
def test_a_load_generator_that_fails_is_a_named_failure(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, warmup: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise LoadError("genai-perf ended with status 1: boom.", hint="Its log: there")

    monkeypatch.setattr("specbench.load.direct.DirectClient.send", fail)
    done = run(workplace, "--set", f"load.warmup={warmup}")
    assert done.returncode == 3, done.stderr
    for row in rows(workplace).values():
        assert (row["status"], row["failure"]) == ("failed", "load_generator_failed")
        assert "boom" in row["problem"]


def test_a_vllm_that_cannot_be_imported_is_a_named_failure(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise EngineError("Importing vLLM failed with status 1.", tail="ImportError: no numba")

    monkeypatch.setattr("specbench.arms._prefork", fail)
    done = run(workplace)
    assert done.returncode == 3, done.stderr
    for row in rows(workplace).values():
        assert (row["status"], row["failure"]) == ("failed", "not_started")
        assert row["problem"].endswith("ImportError: no numba")


def test_the_end_of_the_log_is_in_the_table_the_page_and_the_json(workplace: Path) -> None:
    assert run(workplace, FAKE_MODE="exits", FAKE_SAYS="the last words").returncode == 3
    table = specbench(workplace, "report").stdout
    assert "the end of the log of vanilla:" in table
    assert table.count("the last words") == 1  # both engines said the same
    page = specbench(workplace, "report", "--format", "html").stdout
    assert "failed: exited before ready" in page
    assert "the last words" in page
    assert rows(workplace)["vanilla"]["problem"].endswith("the last words")
    shown = specbench(workplace, "runs", "show", "one").stdout
    assert "failed: exited before ready, 0 requests" in shown


def test_memory_that_is_short_for_the_draft_alone_is_said_to_be(workplace: Path) -> None:
    env = {"FAKE_ONLY": "draft", "FAKE_MODE": "exits", "FAKE_SAYS": OUT_OF_MEMORY}
    done = run(workplace, "--set", "schedule=blocks", **env)
    assert done.returncode == 3, done.stderr
    assert "The target alone fits (vanilla's engine came up)" in done.stderr
    problem = rows(workplace)["eagle-k3"]["problem"].splitlines()[0]
    assert "memory is short for some/head beside it" in problem
    assert "Lower engine.args.gpu_memory_utilization" in problem


@pytest.mark.engine
def test_memory_that_is_short_for_the_target_is_not_put_on_the_draft(workplace: Path) -> None:
    env = {"FAKE_MODE": "exits", "FAKE_SAYS": OUT_OF_MEMORY}
    assert run(workplace, "--set", "schedule=blocks", **env).returncode == 3
    found = rows(workplace)
    assert "draft" not in found["vanilla"]["problem"]
    assert "The target alone does not fit either" in found["eagle-k3"]["problem"].splitlines()[0]


def test_a_dead_engine_core_costs_one_request_and_not_each_ones_limit(workplace: Path) -> None:
    env = {"FAKE_ONLY": "draft", "FAKE_MODE": "core-silent", "FAKE_AFTER": "2"}
    assert run(workplace, **env).returncode == 3
    store = RunStore.open(workplace / "results" / "one")
    (case,) = [one["id"] for one in store.document["cases"] if one["arm"] == "eagle-k3"]
    errors = [record.error for record in store.requests(case)]
    assert [error is None for error in errors] == [True, False]  # one request warmed it up
    done = store.case_status(case)
    assert done is not None
    assert (done["status"], done["failure"]) == ("partial", "engine_core_dead")


@pytest.mark.engine
def test_many_streams_of_a_dead_engine_core_end_with_the_first_answer(workplace: Path) -> None:
    lines = "".join(json.dumps({"text": f"prompt {i}"}) + "\n" for i in range(300))
    (workplace / "four.jsonl").write_text(lines, encoding="utf-8")
    sets = ["--set", "concurrency=2", "--set", "baseline=false"]
    done = run(workplace, *sets, FAKE_MODE="core-dead", FAKE_AFTER="2")
    assert done.returncode == 3, done.stderr
    (row,) = rows(workplace).values()
    assert row["failure"] == "engine_core_dead"
    assert 1 <= row["failed"] < 150  # those that were answered before the first was looked at


def test_a_server_that_is_up_with_another_model_is_a_named_failure(workplace: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(FAKE), "--port", str(port), "--served-model-name", "other"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        up = ["--set", f"engine={{url: 'http://127.0.0.1:{port}', served_model: mine}}"]
        done = run(workplace, *up)
    finally:
        server.kill()
        server.communicate()
    assert done.returncode == 3, done.stderr
    assert "serves other, not mine" in done.stderr
    assert {row["failure"] for row in rows(workplace).values()} == {"wrong_model"}


def test_a_server_that_is_not_up_is_a_named_failure(workplace: Path) -> None:
    done = run(workplace, "--set", "engine={url: 'http://127.0.0.1:9'}")
    assert done.returncode == 3, done.stderr
    assert {row["failure"] for row in rows(workplace).values()} == {"unreachable"}


# --- the race for the port -----------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else listens on, and never answers at."""
    with closing(socket.create_server(("127.0.0.1", 0))) as somebody:
        yield somebody.getsockname()[1]


def hand_out(patch: pytest.MonkeyPatch, *ports: int) -> list[int]:
    """Have specbench choose *ports* first; those that it has left."""
    left, free = list(ports), vllm.free_port
    patch.setattr(vllm, "free_port", lambda: left.pop(0) if left else free())
    return left


def test_an_engine_whose_port_was_taken_is_started_on_another(
    workplace: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = hand_out(monkeypatch, taken)
    done = run(workplace, "--set", "baseline=false")
    assert done.returncode == 0, done.stderr
    assert left == []
    (engine,) = RunStore.open(workplace / "results" / "one").engines()
    assert f"another process took port {taken} first" in engine.notes
    assert str(taken) not in engine.url
    assert leftovers(workplace) == []


@pytest.mark.engine
def test_a_port_that_is_taken_twice_is_a_named_failure(
    workplace: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand_out(monkeypatch, taken, taken)
    done = run(workplace, "--set", "baseline=false")
    assert done.returncode == 3
    (row,) = rows(workplace).values()
    assert (row["status"], row["failure"]) == ("failed", "port_taken")
    assert leftovers(workplace) == []


def test_another_engine_that_answers_on_the_port_is_not_measured(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(FAKE), "--port", str(port), "--served-model-name", "other"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        hand_out(monkeypatch, port)
        done = run(workplace, "--set", "baseline=false")
    finally:
        server.kill()
        server.communicate()
    assert done.returncode == 0, done.stderr
    (engine,) = RunStore.open(workplace / "results" / "one").engines()
    assert f"another process took port {port} first" in engine.notes
    assert leftovers(workplace) == []


# --- --fail-fast ---------------------------------------------------------------------------------


def test_fail_fast_ends_with_the_first_case_that_fails(workplace: Path) -> None:
    env = {"FAKE_ONLY": "draft", "FAKE_MODE": "core-dead", "FAKE_AFTER": "3"}
    done = run(workplace, "--fail-fast", "--set", "schedule=interleaved", **env)
    assert done.returncode == 3, done.stderr
    assert done.stdout == "results/one\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("specbench: eagle-k3.four.t24.c1.r0: partial: engine core dead: 2 of 4")
    assert last.endswith("specbench run --resume results/one")
    assert leftovers(workplace) == []
    store = RunStore.open(workplace / "results" / "one")
    assert store.status() is None
    kept = {one["arm"]: list(store.requests(one["id"])) for one in store.document["cases"]}
    assert [record.ok for record in kept["eagle-k3"]] == [True, True, False]
    assert 2 <= len(kept["vanilla"]) <= 3
    vanilla = next(one["id"] for one in store.document["cases"] if one["arm"] == "vanilla")
    assert store.case_status(vanilla) is None
    again = specbench(workplace, "run", "--resume", "one", "--fail-fast")
    assert again.returncode == 0, again.stderr  # the new engine answers the two that are left
    assert {row["status"] for row in rows(workplace).values()} == {"ok"}


@pytest.mark.engine
def test_fail_fast_ends_a_resumed_run_too(workplace: Path) -> None:
    assert run(workplace, FAKE_MODE="exits").returncode == 3
    again = specbench(workplace, "run", "--resume", "one", "--fail-fast")
    assert again.returncode == 3
    assert "failed: exited before ready: The engine of " in again.stderr.splitlines()[-1]
    assert "not supported on this device" in again.stderr.splitlines()[-1]
    assert leftovers(workplace) == []


# --- the kernel's killer -------------------------------------------------------------------------


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory control group of 48 MB, where this machine lets us make one."""
    with control_group("memory") as (group, is_old):
        write(group / ("memory.limit_in_bytes" if is_old else "memory.max"), str(48 << 20))
        yield group


def test_an_engine_that_the_kernel_kills_is_out_of_memory(
    workplace: Path, small_group: Path
) -> None:
    env = {"FAKE_MODE": "eats", "FAKE_AFTER": "2", "FAKE_CGROUP": str(small_group)}
    done = run(workplace, FAKE_ONLY="draft", **env)
    assert done.returncode == 3, done.stderr
    found = rows(workplace)
    assert (found["vanilla"]["status"], found["vanilla"]["requests"]) == ("ok", 4)
    eagle = found["eagle-k3"]
    assert (eagle["status"], eagle["failure"]) == ("partial", "out_of_memory")
    assert "died with status 137: the kernel's out-of-memory killer ended it" in eagle["problem"]
    assert leftovers(workplace) == []


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("4:memory:/box/a", "memory/box/a/memory.oom_control"),
        ("4:memory:/of/the/host", "memory/memory.oom_control"),  # as a container sees it
        ("0::/box/a", "box/a/memory.events"),
    ],
)
def test_kills_are_counted_in_the_group_of_the_process(
    tmp_path: Path, line: str, file: str
) -> None:
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text(f"2:cpu:/\n{line}\n", encoding="ascii")
    (tmp_path / "proc" / "vmstat").write_text("oom_kill 9\n", encoding="ascii")
    events = tmp_path / "cgroup" / file
    events.parent.mkdir(parents=True)
    events.write_text("low 0\noom 5\noom_kill 3\n", encoding="ascii")
    watch = OomWatch(tmp_path / "cgroup", tmp_path / "proc")
    watch.look(7)
    (tmp_path / "proc" / "vmstat").write_text("oom_kill 19\n", encoding="ascii")
    assert watch.kills() == 0  # another's
    events.write_text("low 0\noom 6\noom_kill 4\n", encoding="ascii")
    assert watch.kills() == 1


def test_kills_are_the_machines_where_no_group_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("pgfault 1\noom_kill 9\n", encoding="ascii")
    watch = OomWatch(tmp_path / "none", tmp_path)
    watch.look(7)
    assert watch.kills() == 0
    (tmp_path / "vmstat").write_text("pgfault 1\noom_kill 10\n", encoding="ascii")
    assert watch.kills() == 1
    assert OomWatch(tmp_path / "none", tmp_path / "none").kills() == 0


# --- wordings ------------------------------------------------------------------------------------

# As they stand in logs that users posted; the number is that of vLLM's issue where there is one.
RECORDED = [
    (  # 8073
        (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 1.86 GiB. GPU 0 has a total "
            "capacity of 21.99 GiB of which 337.38 MiB is free."
        ),
        "out_of_memory",
    ),
    (  # vllm-omni 946
        (
            "(EngineCore_DP0 pid=6804) ValueError: No available memory for the cache blocks. Try "
            "increasing `gpu_memory_utilization` when initializing the engine."
        ),
        "out_of_memory",
    ),
    (  # 20305
        (
            "[multiproc_executor.py:492] ValueError: Free memory on device (31.44/47.38 GiB) on startup "
            "is less than desired GPU memory utilization (0.95, 45.01 GiB). Decrease GPU memory "
            "utilization or reduce GPU memory used by other processes."
        ),
        "out_of_memory",
    ),
    (  # pytorch 175666: newer ones name the device
        (
            "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired "
            "GPU memory utilization (0.9, 19.84 GiB)."
        ),
        "out_of_memory",
    ),
    (  # vllm/v1/core/kv_cache_utils.py of 0.32
        (
            "ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB "
            "KV cache is needed, which is larger than the available KV cache memory (2.1 GiB). Based on"
        ),
        "out_of_memory",
    ),
    (  # 13673
        (
            "ERROR 02-21 06:30:25 core.py:291] RuntimeError: CUDA error: an illegal memory access was "
            "encountered"
        ),
        "cuda_error",
    ),
    (  # 40756
        (
            "(EngineCore pid=175) torch.AcceleratorError: CUDA error: an illegal memory access was "
            "encountered\n(APIServer pid=100) ERROR 05-05 14:59:18 [serving.py:1137] "
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack "
            "trace (above) for the root cause."
        ),
        "cuda_error",
    ),
    (  # 20170
        "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:453 'an illegal memory access",
        "cuda_error",
    ),
    ("torch.AcceleratorError: CUDA error: out of memory", "out_of_memory"),
    ("OSError: [Errno 98] Address already in use", "port_taken"),  # 7514
    (  # 8204
        (
            "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 44319): [errno "
            "98] address already in use"
        ),
        "port_taken",
    ),
    (  # 42362
        (
            "(APIServer pid=1) ERROR 05-12 01:48:42 [api_router.py:72] "
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace"
        ),
        "engine_core_dead",
    ),
]


@pytest.mark.parametrize(("log", "name"), RECORDED)
def test_recorded_logs_give_their_cause_away(log: str, name: str) -> None:
    cause = cause_in(f"INFO 01-01 00:00:00 [x.py:1] before\n{log}\nafter it\n")
    assert cause is not None
    assert cause.failure == name
    assert not cause.line.startswith(("(", "ERROR 0"))


@pytest.mark.parametrize(
    "log",
    [
        "INFO 07-28 23:02:25 [gpu_worker.py:255] Available KV cache memory: 18.83 GiB",
        "WARNING: 'aten::empty.memory_format' has no CUDA error handler",
        "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s)",
        "",
    ],
)
def test_what_names_no_cause_gives_none_away(log: str) -> None:
    assert cause_in(log) is None


def test_the_list_of_names_is_closed_and_documented() -> None:
    assert {sign.failure for sign in SIGNS} <= set(FAILURES)
    page = (FAKE.parents[1] / "docs" / "failures.md").read_text(encoding="utf-8")
    documented = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert documented == ["failure", *FAILURES]


def test_a_name_that_specbench_does_not_write_is_refused(workplace: Path) -> None:
    assert run(workplace, FAKE_MODE="exits").returncode == 3
    path = next((workplace / "results" / "one" / "cases").glob("*/done.json"))
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, "failure": "bad luck"}), encoding="utf-8")
    done = specbench(workplace, "report")
    assert done.returncode == 2
    assert "no `status` or `failure` that specbench writes" in done.stderr
    del document["failure"]  # as runs of before have it
    path.write_text(json.dumps(document), encoding="utf-8")
    assert specbench(workplace, "report").returncode == 0


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("HTTP 503: overloaded", "refused"),
        ("the request failed: ConnectError: [Errno 111] Connection refused", "unreachable"),
        ("no complete answer within 600 s (load.timeout_s)", "timed_out"),
        ("the stream holds an event that is not JSON (x)", "bad_answer"),
        ("the machine slept for 3.0 s during this request", "time_jumped"),
        ("the wall clock was set by -3.000 s during this request", "time_jumped"),
        ("the run was stopped (SIGSTOP, Ctrl-Z) during this request", "time_jumped"),
        ("HTTP 400: the prompt says EngineDeadError", "refused"),
        ("HTTP 500: EngineCore encountered an issue. See stack trace", "engine_core_dead"),
        ("HTTP 500: CUDA out of memory. Tried to allocate 2 MiB", "out_of_memory"),
        (
            "the server sent an error inside the stream: CUDA error: an illegal memory access",
            "cuda_error",
        ),
        ("the server sent an error inside the stream: aborted", "error_in_stream"),
    ],
)
def test_a_failed_request_has_a_name(error: str, name: str) -> None:
    assert of_request(error) == name


# --- secrets, when specbench is killed -----------------------------------------------------------

CANARY = "canary-0b5e77d1"


def wait_for(condition: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.engine
def test_a_killed_run_leaves_no_secret_in_its_logs(workplace: Path, fake_python: Path) -> None:
    talkative = workplace / "python"
    talkative.write_text(
        f'#!/bin/sh\n[ "$1" = -I ] || env\nexec {shlex.quote(str(fake_python))} "$@"\n',
        encoding="utf-8",
    )
    talkative.chmod(0o755)
    command = [sys.executable, "-m", "specbench", "run", "--config", "c.yaml", "--run-id", "one"]
    command += ["--set", "baseline=false", "--set", f"engine.python={talkative}"]
    command += [
        "--set",
        f"engine.env.MY_PASSWORD={CANARY}",
        "--set",
        "engine.env.FAKE_GAP_S='0.05'",
    ]
    with (workplace / "said").open("wb") as said:
        process = subprocess.Popen(command, cwd=workplace, stdout=said, stderr=said)
    results = workplace / "results" / "one"
    wait_for(lambda: list(results.glob("cases/*/requests.jsonl")))
    (log,) = results.glob("engines/*/engine.log")
    assert CANARY in log.read_text(encoding="utf-8")  # while the engine lives
    process.kill()
    process.wait()
    wait_for(lambda: not leftovers(workplace))
    assert "MY_PASSWORD=****" in log.read_text(encoding="utf-8")
    held = [path for path in results.rglob("*") if path.is_file()]
    assert [path for path in held if CANARY.encode() in path.read_bytes()] == []
    key = next(line for line in log.read_text(encoding="utf-8").splitlines() if "API_KEY" in line)
    assert set(key.partition("=")[2]) == {"*"}


def test_a_forked_engines_secrets_are_covered_when_specbench_is_killed(tmp_path: Path) -> None:
    """Its guard is a fork too; the vLLM that is imported prints its environment and waits."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, *package.parents[:2]):
        (folder / "__init__.py").touch()
    (package / "main.py").write_text(
        "import os, time\n\n\ndef main():\n    print(os.environ['MY_TOKEN'], 'up', flush=True)\n"
        "    time.sleep(600)\n",
        encoding="utf-8",
    )
    code = f"""
import sys, time
from pathlib import Path
from specbench.engines.process import Child, PreforkServer
env = {{"PYTHONPATH": {str(tmp_path / "site")!r}}}
with PreforkServer(Path(sys.executable), env=env, log=Path("prefork.log")) as prefork:
    while not prefork.ready():
        time.sleep(0.01)
    secret = {{"MY_TOKEN": {CANARY!r}}}
    with Child(["serve"], log=Path("engine.log"), cwd=Path("."), env=secret, prefork=prefork):
        time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    log = tmp_path / "engine.log"
    try:
        wait_for(lambda: log.is_file() and "up" in log.read_text(encoding="utf-8"))
        assert CANARY in log.read_text(encoding="utf-8")
    finally:
        owner.kill()
        owner.wait()
    wait_for(lambda: CANARY not in log.read_text(encoding="utf-8"))
    wait_for(lambda: not leftovers(tmp_path))


def test_the_guard_covers_secrets_whether_or_not_anybody_listens(tmp_path: Path) -> None:
    code = "import os; print(os.environ['MY_TOKEN'], flush=True); os._exit(3)"
    env = {"MY_TOKEN": CANARY, "MY_FLAG": "printed"}
    with Child([sys.executable, "-c", code], log=tmp_path / "log", cwd=tmp_path, env=env) as child:
        assert child.secrets == [CANARY]
        wait_for(lambda: child.poll() is not None)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "*" * len(CANARY) + "\n"
