"""Time that did not pass for everybody: no figure holds it, and it is measured again."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from control_groups import control_group, write

from specbench.config import Load, Sampling
from specbench.load.clocks import (
    FREEZES,
    STOPS,
    Clocks,
    ClockWatch,
    Freezes,
    Stops,
    happened_since,
    jump,
    moment,
    read_clocks,
)
from specbench.load.direct import DirectClient
from specbench.load.tool_client import Exchange, record_of
from specbench.records import Prompt, RequestRecord
from specbench.store import RunStore

S = 1_000_000_000
FAKE = Path(__file__).with_name("fake_vllm.py")
THEN = Clocks(monotonic_ns=100 * S, boot_ns=150 * S, day_ns=1_700_000_000 * S)


def later(
    passed_s: float, *, slept_s: float = 0, stepped_s: float = 0, before: Clocks = THEN
) -> Clocks:
    """The clocks *passed_s* of work, a sleep and a step of the wall clock after *before*."""
    passed, slept, stepped = (round(s * S) for s in (passed_s, slept_s, stepped_s))
    return Clocks(
        before.monotonic_ns + passed,
        before.boot_ns + passed + slept,
        before.day_ns + passed + slept + stepped,
    )


def readings(*moments: Clocks) -> Callable[[], Clocks]:
    """A reader of clocks that show *moments*, and then the last of them for ever."""
    left = list(moments)
    return lambda: left.pop(0) if len(left) > 1 else left[0]


# --- telling what happened -----------------------------------------------------------------------


def test_time_that_just_passes_is_no_jump() -> None:
    assert jump(THEN, later(3600)) is None
    assert jump(THEN, later(10, stepped_s=0.001)) is None  # less than reading them apart can make
    assert jump(read_clocks(), read_clocks()) is None


@pytest.mark.parametrize("slept_s", [0.1, 5, 30_000])
def test_a_sleep_is_told_from_a_clock_that_was_set(slept_s: float) -> None:
    """A sleep moves the wall clock as well, and is no step of it."""
    found = jump(THEN, later(1, slept_s=slept_s))
    assert found is not None
    assert (found.slept_ns, found.stepped_ns) == (round(slept_s * S), 0)
    assert found.told() == f"the machine slept for {slept_s:.1f} s during this request"


@pytest.mark.parametrize("stepped_s", [-3600, -0.02, 0.02, 3600])
def test_a_clock_that_was_set_is_no_sleep(stepped_s: float) -> None:
    found = jump(THEN, later(1, stepped_s=stepped_s))
    assert found is not None
    assert (found.slept_ns, found.stepped_ns) == (0, round(stepped_s * S))
    assert "the wall clock was set by" in found.told()


def test_a_stop_is_known_by_its_end() -> None:
    stops = Stops()
    handler = signal.getsignal(signal.SIGCONT)
    try:
        stops.listen()
        assert stops.count == 0
        os.kill(os.getpid(), signal.SIGCONT)
        assert stops.count == 1
    finally:
        signal.signal(signal.SIGCONT, handler)


def test_a_freeze_is_known_by_waking_late() -> None:
    freezes = Freezes()
    freezes.woke(-1000)
    freezes.woke(round(1.9 * S))  # a core may be waited for as long as that
    assert freezes.count == 0
    freezes.woke(3 * S)
    assert (freezes.count, freezes.last_ns) == (1, 3 * S)


def test_who_waits_for_a_tool_notes_that_a_look_came_late() -> None:
    shown = [THEN, THEN, later(0.1), later(0.1), later(0.1), later(5.2), later(5.2)]
    seen = ClockWatch(readings(*shown))
    seen.wait(lambda _: None)
    seen.wait(lambda _: None)
    seen.look()
    (found,) = seen.jumps
    assert found.told().startswith("specbench did not run for 5.0 s during this request (frozen")
    in_flight, after = (later(4).monotonic_ns, later(6).monotonic_ns), later(5.25).monotonic_ns
    assert seen.around(*in_flight, by_day=False, steps=False) is found
    assert seen.around(after, after + S, by_day=False, steps=False) is None
    assert seen.from_day_ns(later(6).day_ns) == later(6).monotonic_ns  # the clocks are as they were


def test_a_freeze_and_a_step_of_the_clock_in_one_are_both() -> None:
    """A virtual machine that goes on, whose guest agent sets the clock at once."""
    seen = ClockWatch(readings(THEN, later(5, stepped_s=60)))
    seen.look(late_ns=5 * S)
    (found,) = seen.jumps
    assert (found.frozen_ns, found.stepped_ns) == (5 * S, 60 * S)
    at = later(1).monotonic_ns
    assert seen.around(at, at + S, by_day=False, steps=False) is found
    assert found.told().startswith("specbench did not run")


# --- our own client ------------------------------------------------------------------------------


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, str(FAKE), "--port", str(port), "--served-model-name", "m"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    for _ in range(500):
        with suppress(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/health")
            break
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


def send(url: str, prompts: Sequence[Prompt], *moments: Clocks) -> list[RequestRecord]:
    client = DirectClient(
        url=url,
        served_model="m",
        api_key=None,
        sampling=Sampling(),
        load=Load(),
        clocks=readings(*moments),
    )
    records: list[RequestRecord] = []
    with closing(client):
        client.send(prompts, max_tokens=24, concurrency=1, on_record=records.append)
    return records


TWO = [Prompt(id=name, turns=("hello",)) for name in "ab"]


def test_a_request_during_which_the_machine_slept_fails_and_the_next_one_does_not(
    url: str,
) -> None:
    woken = later(1, slept_s=7)
    slept, fine = send(url, TWO, THEN, woken, woken, later(1, before=woken))
    assert slept.error == "the machine slept for 7.0 s during this request"
    assert not slept.ok
    assert fine.error is None


def test_a_wall_clock_that_is_set_does_not_touch_our_own_clients_requests(url: str) -> None:
    moved = later(1, stepped_s=-86_400)
    assert [record.error for record in send(url, TWO, THEN, moved, moved, moved)] == [None, None]


def test_a_freeze_between_two_requests_harms_neither() -> None:
    before = moment()
    FREEZES.woke(3 * S)
    assert "did not run for 3.0 s" in str(happened_since(before))
    assert happened_since(moment()) is None


def test_a_stop_between_two_requests_harms_neither() -> None:
    before = moment()
    assert happened_since(before) is None
    STOPS.count += 1
    assert "was stopped" in str(happened_since(before))
    assert happened_since(moment()) is None


# --- tools ---------------------------------------------------------------------------------------


def watch(*moments: Clocks) -> ClockWatch:
    seen = ClockWatch(readings(*moments))
    for _ in moments[1:]:
        seen.look()
    return seen


def test_requests_around_a_step_are_found_by_the_time_of_day() -> None:
    before, after = later(10), later(10.1, stepped_s=60)
    seen = watch(THEN, before, after, later(10, before=after))
    day = THEN.day_ns

    def hit(sent_s: float, end_s: float) -> bool:
        times = (day + round(sent_s * S), day + round(end_s * S))
        return seen.around(*times, by_day=True, steps=True) is not None

    assert not hit(1, 9)
    assert hit(9, 72)  # 10.1 s of work, and a minute that was none
    assert not hit(71, 79)


def test_times_of_day_come_to_the_requests_clock_on_either_side_of_a_step() -> None:
    before, after = later(10), later(10.1, stepped_s=60)
    seen = watch(THEN, before, after, later(20, stepped_s=60))
    for one in (later(3), before, later(15, stepped_s=60)):
        assert seen.from_day_ns(one.day_ns) == one.monotonic_ns


def test_a_clock_that_is_set_back_makes_either_time_doubtful() -> None:
    before, after = later(10), later(10.1, stepped_s=-5)
    seen = watch(THEN, before, after)
    day = THEN.day_ns
    assert seen.around(day + 6 * S, day + 7 * S, by_day=True, steps=True) is not None
    assert seen.around(day + 1 * S, day + 4 * S, by_day=True, steps=True) is None


def test_requests_by_the_monotonic_clock_mind_a_sleep_and_no_step() -> None:
    stepped = later(10, stepped_s=60)
    woken = later(20, slept_s=30, stepped_s=60)
    seen = watch(THEN, stepped, later(15, stepped_s=60), woken)
    at = THEN.monotonic_ns
    assert seen.around(at, at + 12 * S, by_day=False, steps=False) is None
    assert seen.around(at, at + 12 * S, by_day=False, steps=True) is not None
    found = seen.around(at + 14 * S, at + 19 * S, by_day=False, steps=False)
    assert found is not None
    assert found.slept_ns == 30 * S


def exchange(*times: int) -> Exchange:
    """An answer of a recorded stream, whose pieces arrive at *times*; sent at 1000."""
    said: list[dict[str, Any]] = [
        {"choices": [{"delta": {"content": "a"}, "token_ids": [1]}]} for _ in times[:-1]
    ]
    said.append({"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]})
    pieces = [
        (at, f"data: {json.dumps(event)}\n\n".encode())
        for at, event in zip(times, said, strict=True)
    ]
    prompt = Prompt(id="a", turns=("hello",))
    return Exchange(prompt, 0, {"messages": []}, 1000, pieces, due_ns=900)


def test_a_tools_request_whose_times_run_backwards_fails_and_can_be_stored() -> None:
    good = record_of(exchange(1100, 1200, 1300), (), 0)
    assert (good.error, good.impossible, good.chunk_ns) == (None, None, (1100, 1200, 1300))
    for times in [(900, 1200, 1300), (1100, 1050, 1300), (1100, 1200, 500)]:
        record = record_of(exchange(*times), (), 0)
        assert record.error == "the wall clock was set back during this request"
        assert record.impossible is None
        assert record.end_ns == record.sent_ns
        assert record.text == "aab"  # what it said is kept


# --- end to end ----------------------------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path: Path, fake_python: Path) -> Path:
    lines = "".join(json.dumps({"text": f"prompt {i}"}) + "\n" for i in range(3))
    (tmp_path / "three.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(
        "model: some/model\nspeculation: {method: eagle, model: some/head, k: 3}\n"
        "prompts: three.jsonl\nmax_tokens: 24\nbaseline: false\nload: {warmup: 0}\n"
        f"engine: {{python: {fake_python}, env: {{FAKE_GAP_S: '0.08'}}}}\n",
        encoding="utf-8",
    )
    return tmp_path


def of_the_run(workplace: Path) -> list[int]:
    """Every process that was started in *workplace* and still lives."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (proc / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            if Path(os.readlink(proc / "cwd")).is_relative_to(workplace) and state != "Z":
                found.append(int(proc.name))
    return found


class Run:
    """`specbench run` in a workplace, caught in its second request."""

    def __init__(self, workplace: Path) -> None:
        self.workplace = workplace
        command = [
            sys.executable,
            "-m",
            "specbench",
            "run",
            "--config",
            "c.yaml",
            "--run-id",
            "one",
        ]
        with (workplace / "said").open("wb") as said:
            self.process = subprocess.Popen(command, cwd=workplace, stdout=said, stderr=said)
        self.results = workplace / "results" / "one"
        deadline = time.monotonic() + 60
        while not self._has_answer() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # a request takes 1.5 s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # whose guards end the engine
        self.process.wait()

    def _has_answer(self) -> bool:
        return any(self.results.glob("cases/*/requests.jsonl"))

    def pids(self) -> list[int]:
        """specbench first."""
        first = self.process.pid
        return [first, *(pid for pid in of_the_run(self.workplace) if pid != first)]

    def failed_and_measured_again(self, error: str) -> None:
        """The second request failed with that, and `--resume` measures it."""
        assert self.process.wait(60) == 3, (self.workplace / "said").read_text(encoding="utf-8")
        store = RunStore.open(self.results)
        (case,) = [one["id"] for one in store.document["cases"]]
        errors = [record.error for record in store.requests(case)]
        assert [one and re.sub(r"\d\.\d", "N", one) for one in errors] == [None, error, None]
        done = store.case_status(case)
        assert done is not None
        assert (done["status"], done["failure"]) == ("partial", "time_jumped")
        command = [sys.executable, "-m", "specbench", "run", "--resume", "one"]
        resumed = subprocess.run(
            command, cwd=self.workplace, capture_output=True, text=True, check=False
        )
        assert resumed.returncode == 0, resumed.stderr
        records = list(store.requests(case))
        assert [record.ok for record in records] == [True, False, True, True]
        took_s = [(record.end_ns - record.sent_ns) / S for record in records if record.ok]
        assert max(took_s) < 2.4  # none has the time that it stood still
        assert of_the_run(self.workplace) == []


@pytest.mark.engine
def test_a_run_that_was_stopped_measures_the_request_again(workplace: Path) -> None:
    """specbench and its engine stand still for a moment, as under Ctrl-Z, in the second request."""
    with Run(workplace) as run:
        stopped = run.pids()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1)
        for pid in reversed(stopped):
            os.kill(pid, signal.SIGCONT)
        run.failed_and_measured_again("the run was stopped (SIGSTOP, Ctrl-Z) during this request")


@pytest.fixture
def freezer() -> Iterator[Callable[[Sequence[int]], None]]:
    """Freezes processes for 3 s as `docker pause` does, where this machine lets us."""
    with control_group("freezer") as (group, is_old):
        switch = group / ("freezer.state" if is_old else "cgroup.freeze")
        freeze, thaw = ("FROZEN", "THAWED") if is_old else ("1", "0")

        def freeze_for(seconds: float, pids: Sequence[int]) -> None:
            for pid in pids:
                write(group / "cgroup.procs", str(pid))
            write(switch, freeze)
            time.sleep(seconds)
            write(switch, thaw)

        with subprocess.Popen(["sleep", "60"]) as somebody:
            try:
                freeze_for(0, [somebody.pid])  # a test that is skipped is so before it starts a run
            finally:
                somebody.kill()
        try:
            yield partial(freeze_for, 3)
        finally:
            write(switch, thaw)


@pytest.mark.engine
def test_a_run_that_was_frozen_with_its_container_measures_the_request_again(
    workplace: Path, freezer: Callable[[Sequence[int]], None]
) -> None:
    """No signal tells of that: the client wakes seconds after it wanted to."""
    with Run(workplace) as run:
        freezer(run.pids())
        run.failed_and_measured_again(
            "specbench did not run for N s during this request "
            "(frozen with its container or virtual machine, or starved of the CPU)"
        )
