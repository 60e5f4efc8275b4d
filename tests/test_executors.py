"""A run spread over hosts: units, what they need, facts that come home, hosts that die on the way."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench import config as configs
from specbench import prepare as preparing
from specbench.errors import EngineError, FailedFast, UserError
from specbench.executors import fanout, node, on_ray, task
from specbench.executors.fanout import FanOut, News, on, order_of
from specbench.executors.node import Teller
from specbench.executors.on_ray import RayCluster
from specbench.executors.relay import Keeper, RelayStore
from specbench.executors.told import Hello, Order, Piece, Share, Start, Told, Verdict
from specbench.executors.units import Needs, check, needs_of, units_of, whole_node_cpus
from specbench.prepare import Earlier, Prepared, document, prepare, stored
from specbench.prompts.sets import PromptSet, prompt_set_sha256
from specbench.records import CounterSpan, EngineFacts, Prompt, RequestRecord, ToolReport
from specbench.run import execute
from specbench.store import RunStore
from specbench.sweep import Case, plan

PROMPTS = tuple(Prompt(id=f"p{i}", turns=(f"question {i}",)) for i in range(4))
SET = PromptSet("he", PROMPTS, prompt_set_sha256(PROMPTS), "made up", Path("he.jsonl"))
Build = Callable[..., RequestRecord]


class Heard:
    """A `Progress` that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.requests = 0

    def say(self, text: str) -> None:
        self.said.append(text)

    def waiting(self, text: str) -> None:
        pass

    def advance(self, case: Case, record: RequestRecord) -> None:
        self.requests += 1


@pytest.fixture
def tape(tmp_path: Path, record: Build) -> Path:
    """A run folder with an answer of each arm to each prompt."""
    arms = ["vanilla", "eagle-k1", "eagle-k2", "eagle-k3"]
    store = RunStore.create(tmp_path, "tape", {"cases": [{"id": a, "arm": a} for a in arms]})
    for arm, prompt in itertools.product(arms, PROMPTS):
        store.append_request(arm, record(prompt.id, chunks=(10, 20 + len(arm))))
    return store.path


def begin(tape: Path, *sets: str, prompts: PromptSet = SET) -> tuple[Prepared, RunStore]:
    path = tape.parent / "c.yaml"
    path.write_text(
        "model: m\nprompts: he\nspeculation: {method: eagle, model: d, k: [1, 2]}\nrepeats: 3\n"
        f"load: {{client: replay, tape: {tape}}}\n",
        encoding="utf-8",
    )
    earlier = Earlier({"he": prompts})
    prepared = prepare(
        configs.load(path, sets), config_path=path, prompt_folders=(), earlier=earlier
    )
    about = document(prepared, config_path=path, command=["test"])
    return prepared, RunStore.create(tape.parent, "run", about)


class FakeCluster:
    """Hosts that measure at once in this process. *dies* says after how many lines a ticket's does."""

    def __init__(self, folder: Path, dies: dict[int, int] | None = None) -> None:
        self.folder, self.dies = folder, dies or {}
        self.lines: dict[int, list[str]] = {}
        self.shares: list[Share] = []
        self.needs: list[Needs] = []
        self.hosts: list[str | None] = []
        self.cancelled = 0
        self.lacking: str | None = None

    def submit(self, order: str, share: str, needs: Needs, name: str, host: str | None) -> int:
        ticket = len(self.shares)
        self.shares.append(Share.model_validate_json(share))
        self.needs.append(needs)
        self.hosts.append(host)
        place = self.folder / f"host{ticket}"
        place.mkdir()
        teller = Teller(place / "told")
        node.measure(Order.model_validate_json(order), self.shares[-1], place, teller)
        hello = Hello(host=f"host{ticket}", node="n", version="1", folder=str(place / "unit"))
        told = (place / "told").read_text(encoding="utf-8").splitlines(keepends=True)
        end = Told.model_validate({"end": {"status": 0}})
        self.lines[ticket] = [Told(hello=hello).line, *told, end.line]
        return ticket

    def news(self, timeout_s: float) -> Sequence[News]:
        found = []
        for ticket, lines in list(self.lines.items()):
            if self.dies.get(ticket) == 0:
                found.append(News(ticket, over=True, lost="the node died"))
            elif lines:
                found.append(News(ticket, lines.pop(0)))
                self.dies[ticket] = self.dies.get(ticket, 10**9) - 1
                continue
            else:
                found.append(News(ticket, over=True))
            del self.lines[ticket]
        return found

    def lacks(self, needs: Needs) -> str | None:
        return self.lacking

    def cancel(self) -> None:
        self.cancelled += 1


class Waiting(FakeCluster):
    """A cluster whose last node went before anything began."""

    def submit(self, order: str, share: str, needs: Needs, name: str, host: str | None) -> int:
        self.lacking = "no node of the cluster has that (it has none)"
        self.shares.append(Share.model_validate_json(share))
        return len(self.shares)

    def news(self, timeout_s: float) -> Sequence[News]:
        return []


def facts(store: RunStore) -> dict[str, list[tuple[str, int, tuple[int, ...] | None]]]:
    """What was measured, apart from times and starts."""
    return {
        case["id"]: sorted((r.prompt_id, r.turn, r.token_ids) for r in store.requests(case["id"]))
        for case in store.document["cases"]
    }


# --- units ---------------------------------------------------------------------------------------


def planned(tmp_path: Path, together: int, *sets: str) -> Prepared:
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: m\nprompts: he\nspeculation: {method: eagle, model: d, k: [1, 2, 3]}\n",
        encoding="utf-8",
    )
    config = configs.load(path, sets)
    return Prepared(config, plan(config, ["he"], together=together), {"he": SET}, {}, None)


def test_an_interleaved_stage_is_a_unit(tmp_path: Path) -> None:
    """vanilla with three k, two engines at once: three groups, each with its own baseline."""
    units = units_of(planned(tmp_path, 2, "repeats=2").plan)
    assert [len(unit.stages) for unit in units] == [1] * 6
    for unit in units:
        assert "vanilla" in unit.starts
        assert len({(case.repeat, case.group) for case in unit.cases}) == 1


def test_blocks_of_a_repeat_stay_together_because_their_ratios_do(tmp_path: Path) -> None:
    units = units_of(planned(tmp_path, 1, "repeats=2", "schedule=blocks").plan)
    assert [len(unit.stages) for unit in units] == [4, 4]
    assert [{case.repeat for case in unit.cases} for unit in units] == [{0}, {1}]
    assert units[0].starts == {"vanilla": 1, "eagle-k1": 1, "eagle-k2": 1, "eagle-k3": 1}


def test_without_a_baseline_every_stage_is_by_itself(tmp_path: Path) -> None:
    units = units_of(planned(tmp_path, 1, "baseline=false", "schedule=blocks").plan)
    assert [sorted(unit.starts) for unit in units] != []
    assert all(len(unit.starts) == 1 for unit in units)
    assert len(units) == 3


def test_every_case_is_in_one_unit(tmp_path: Path) -> None:
    for together, sets in ((1, ["schedule=blocks"]), (2, []), (4, ["max_tokens=[16,32]"])):
        prepared = planned(tmp_path, together, "repeats=2", *sets)
        cases = [case for unit in units_of(prepared.plan) for case in unit.cases]
        assert Counter(cases) == Counter(prepared.plan.cases)


@pytest.mark.parametrize(
    ("sets", "gpus"),
    [
        ([], 1),
        (["engine.args.tensor_parallel_size=2"], 2),
        (["engine.args.tensor_parallel_size=2", "engine.args.pipeline_parallel_size=2"], 4),
        (["engine.args.data_parallel_size=3"], 3),
        (["engine.extra_args={--tensor-parallel-size: 8}"], 8),
    ],
)
def test_gpus_are_those_of_one_engine_which_the_others_share(
    tmp_path: Path, sets: list[str], gpus: int
) -> None:
    prepared = planned(tmp_path, 2, *sets)
    assert needs_of(prepared, units_of(prepared.plan)[0]) == Needs(cpus=3, gpus=gpus)


def test_a_number_of_gpus_that_is_none_is_refused(tmp_path: Path) -> None:
    prepared = planned(tmp_path, 2, "engine.args.tensor_parallel_size=many")
    with pytest.raises(UserError, match="tensor_parallel_size is 'many'"):
        needs_of(prepared, units_of(prepared.plan)[0])


def test_cpu_engines_take_a_node_because_they_are_bound_to_its_cores(tmp_path: Path) -> None:
    from specbench.engines.installation import absent_installation

    cpu = replace(absent_installation(), is_cpu=True)
    prepared = replace(planned(tmp_path, 2), installation=cpu)
    needs = needs_of(prepared, units_of(prepared.plan)[0])
    assert needs.whole_node
    assert str(needs) == "a node's CPUs"


@pytest.mark.parametrize(
    ("nodes", "asked"), [([8, 8], 8), ([8, 16], 16), ([16, 12, 4], 12), ([2.0], 2), ([], 1)]
)
def test_no_node_takes_two_units_that_need_all_of_it(nodes: list[float], asked: int) -> None:
    assert whole_node_cpus(nodes) == asked
    assert all(total < 2 * asked for total in nodes)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("{kind: triton, server: tritonserver}", "kind: triton"),
        ("{url: 'http://127.0.0.1:1'}", "engine.url"),
        ("{env: {CUDA_VISIBLE_DEVICES: '0'}}", "CUDA_VISIBLE_DEVICES"),
        ("{args: {distributed_executor_backend: ray}}", "distributed_executor_backend is ray"),
    ],
)
def test_what_cannot_be_spread_is_refused_in_a_sentence(
    tmp_path: Path, engine: str, said: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model: m\nprompts: he\nengine: {engine}\n", encoding="utf-8")
    with pytest.raises(UserError, match=said):
        check(configs.load(path))


# --- facts that come home ------------------------------------------------------------------------


def test_a_run_that_was_spread_holds_what_one_here_holds(tape: Path, tmp_path: Path) -> None:
    prepared, store = begin(tape)
    cluster, heard = FakeCluster(tmp_path), Heard()
    assert execute(prepared, store, heard, on(cluster)) == "ok"
    here, local = begin_again(tape, "local")
    assert execute(here, local, Heard()) == "ok"
    assert facts(store) == facts(local)
    assert len(cluster.shares) == 3  # a unit a repeat
    assert heard.requests == 3 * 3 * 4
    assert cluster.cancelled == 1
    assert store.status() == {**(store.status() or {}), "status": "ok"}


def begin_again(tape: Path, run_id: str, *sets: str) -> tuple[Prepared, RunStore]:
    """Another run of the same tape."""
    (tape.parent / run_id).mkdir()
    prepared, _ = begin_in(tape, tape.parent / run_id, *sets)
    return prepared, RunStore.open(tape.parent / run_id / "run")


def begin_in(tape: Path, folder: Path, *sets: str) -> tuple[Prepared, RunStore]:
    prepared = prepare(
        configs.load(tape.parent / "c.yaml", sets),
        config_path="c.yaml",
        prompt_folders=(),
        earlier=Earlier({"he": SET}),
    )
    about = document(prepared, config_path="c.yaml", command=["test"])
    return prepared, RunStore.create(folder, "run", about)


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanout, "PAUSE_S", 0.0)


@pytest.mark.usefixtures("without_pauses")
@pytest.mark.parametrize("after", range(0, 22, 3))
def test_what_a_dead_host_leaves_is_measured_elsewhere_and_nothing_twice(
    tape: Path, tmp_path: Path, after: int
) -> None:
    prepared, store = begin(tape, "repeats=2")
    cluster, heard = FakeCluster(tmp_path, dies={1: after}), Heard()
    assert execute(prepared, store, heard, on(cluster)) == "ok"
    for case in prepared.plan.cases:
        assert Counter(r.prompt_id for r in store.requests(case.id)) == {p.id: 1 for p in PROMPTS}
    assert len(cluster.shares) == 3
    if after:
        assert any("is lost to unit 2" in line and "attempt 2 of 3" in line for line in heard.said)
    else:
        assert any(
            "unit 2 (" in line and "lost before its host began" in line for line in heard.said
        )
    told = {case_id: len(records) for case_id, records in cluster.shares[2].measured.items()}
    assert sum(told.values()) <= after


def test_starts_have_numbers_that_no_other_start_has(tape: Path, tmp_path: Path) -> None:
    prepared, store = begin(tape)
    cluster = FakeCluster(tmp_path, dies={0: 6})
    execute(prepared, store, Heard(), on(cluster))
    given = Counter(
        (arm, number)
        for share in cluster.shares
        for arm, numbers in share.starts.items()
        for number in numbers
    )
    assert len(given) == 3 * 4  # three repeats, one of them twice
    assert set(given.values()) == {1}
    # a later resume counts on from there, also where numbers were handed out in vain
    assert store.next_start("vanilla") == max(n for arm, n in given if arm == "vanilla") + 1


def test_a_unit_whose_hosts_keep_dying_is_given_up_with_the_reason(
    tape: Path, tmp_path: Path
) -> None:
    prepared, store = begin(tape, "repeats=1")
    cluster = FakeCluster(tmp_path, dies={0: 8, 1: 5, 2: 5})
    assert execute(prepared, store, Heard(), on(cluster)) == "partial"
    assert len(cluster.shares) == fanout.ATTEMPTS
    status = store.case_status("vanilla.he.t256.c1.r0")
    assert status is not None
    assert "3 attempts failed, the last one on host2: the node died" in status["problem"]
    assert status["failure"] == "not_measured"


@pytest.mark.usefixtures("without_pauses")
def test_hosts_that_are_lost_before_they_begin_are_no_attempts(tape: Path, tmp_path: Path) -> None:
    """Ray may send to a node that it does not know to be dead, and more than once."""
    prepared, store = begin(tape, "repeats=1")
    cluster, heard = FakeCluster(tmp_path, dies={0: 8, 1: 0, 2: 0, 3: 0, 4: 5}), Heard()
    assert execute(prepared, store, heard, on(cluster)) == "ok"
    assert len(cluster.shares) == 6
    assert any("host4 is lost" in line and "attempt 3 of 3" in line for line in heard.said)


def test_a_pause_before_a_unit_is_sent_again_is_slept_through(
    tape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster with nothing under way answers at once: asked in a loop, that takes a core."""

    class Asked(FakeCluster):
        in_vain = 0

        def news(self, timeout_s: float) -> Sequence[News]:
            self.in_vain += not self.lines
            return super().news(timeout_s)

    monkeypatch.setattr(fanout, "PAUSE_S", 0.1)
    prepared, store = begin(tape, "repeats=1")
    cluster = Asked(tmp_path, dies={0: 0})
    assert execute(prepared, store, Heard(), on(cluster)) == "ok"
    assert (len(cluster.shares), cluster.in_vain) == (2, 0)


def test_with_the_last_node_goes_what_waits_to_be_sent_again(
    tape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Emptied(Waiting):
        """Its first unit is lost before it begins; nobody is there for the others."""

        def news(self, timeout_s: float) -> Sequence[News]:
            first = len(self.shares) > 1 and not self.hosts
            self.hosts += [None]
            return [News(1, over=True, lost="the node died")] if first else []

    monkeypatch.setattr(fanout, "NO_NODE_S", 0.0)
    prepared, store = begin(tape)
    heard = Heard()
    cluster = Emptied(tmp_path)
    assert execute(prepared, store, heard, on(cluster)) == "partial"
    assert len(cluster.shares) == 3
    assert sum("no node is left for it" in line for line in heard.said) == 3


@pytest.mark.usefixtures("without_pauses")
def test_a_unit_that_no_host_begins_is_given_up_with_the_reason(tape: Path, tmp_path: Path) -> None:
    prepared, store = begin(tape, "repeats=1")
    cluster = FakeCluster(tmp_path, dies=dict.fromkeys(range(100), 0))
    assert execute(prepared, store, Heard(), on(cluster)) == "partial"
    assert len(cluster.shares) == fanout.UNBEGUN + 1
    status = store.case_status("vanilla.he.t256.c1.r0")
    assert status is not None
    assert "sent 11 times, and no host began; the last time: the node died" in status["problem"]


def test_an_error_of_the_unit_itself_is_an_attempt_also_where_nothing_was_told(
    tape: Path, tmp_path: Path
) -> None:
    """No specbench on the node, say: that is the same the eleventh time."""

    class Failing(FakeCluster):
        def news(self, timeout_s: float) -> Sequence[News]:
            tickets = list(self.lines)
            self.lines.clear()
            return [News(ticket, over=True, lost="No module", ran=True) for ticket in tickets]

    prepared, store = begin(tape, "repeats=1")
    cluster = Failing(tmp_path)
    assert execute(prepared, store, Heard(), on(cluster)) == "partial"
    assert len(cluster.shares) == fanout.ATTEMPTS


def test_resuming_goes_on_where_either_executor_stopped(tape: Path, tmp_path: Path) -> None:
    prepared, store = begin(tape)
    first = FakeCluster(tmp_path)
    first.dies = dict.fromkeys(range(9), 7)  # every attempt
    assert execute(prepared, store, Heard(), on(first)) == "partial"
    config, earlier = stored(store)
    again = prepare(config, config_path="run.json", prompt_folders=(), earlier=earlier)
    (tmp_path / "later").mkdir()
    assert execute(again, store, Heard(), on(FakeCluster(tmp_path / "later"))) == "ok"
    for case in prepared.plan.cases:
        assert Counter(r.prompt_id for r in store.requests(case.id)) == {p.id: 1 for p in PROMPTS}
    assert execute(again, store, Heard()) == "ok"  # here there is nothing left to do


def test_a_resumed_unit_goes_to_the_host_that_began_it(tape: Path, tmp_path: Path) -> None:
    """Or its ratios would be between hosts. After a death within the run it may go anywhere."""
    prepared, store = begin(tape, "repeats=2")
    first = FakeCluster(tmp_path)
    first.dies = {0: 8, 2: 5, 3: 5}  # of unit 1 all attempts; unit 2 is whole
    assert execute(prepared, store, Heard(), on(first)) == "partial"
    assert first.hosts == [None] * 4
    last = next(r for case in units_of(prepared.plan)[0].cases for r in store.requests(case.id))
    arm = next(c.arm for c in prepared.plan.cases if list(store.requests(c.id))[:1] == [last])
    store.save_engine(FACTS.model_copy(update={"arm": arm, "start": last.start, "host": "h7"}))
    (tmp_path / "later").mkdir()
    again = FakeCluster(tmp_path / "later", dies={0: 5})
    assert execute(prepared, store, Heard(), on(again)) == "ok"
    assert again.hosts == ["h7", None]


def test_no_node_that_could_is_said_before_anything_is_sent(tape: Path, tmp_path: Path) -> None:
    prepared, store = begin(tape)
    cluster = FakeCluster(tmp_path)
    cluster.lacking = "no node of the cluster has that (1 CPUs and 0 GPUs)"
    with pytest.raises(EngineError, match="needs 1 CPU: no node of the cluster has that"):
        execute(prepared, store, Heard(), on(cluster))
    assert cluster.shares == []


def test_a_cluster_that_lost_its_last_node_does_not_hold_up_the_run(
    tape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "NO_NODE_S", 0.0)
    prepared, store = begin(tape)
    heard = Heard()
    assert execute(prepared, store, heard, on(Waiting(tmp_path))) == "partial"
    assert any("no node is left for it" in line for line in heard.said)


def test_precision_goes_on_until_the_ratio_is_known_on_the_host(tape: Path, tmp_path: Path) -> None:
    """The tape's answers never vary: two passes, as many as it takes to know that."""
    sets = ["repeats=1", "precision={within: 0.01, max_cycles: 3}"]
    prepared, store = begin(tape, *sets)
    assert execute(prepared, store, Heard(), on(FakeCluster(tmp_path))) == "ok"
    here, local = begin_again(tape, "local", *sets)
    assert execute(here, local, Heard()) == "ok"
    assert facts(store) == facts(local)
    assert len(list(store.requests("vanilla.he.t256.c1.r0"))) > len(PROMPTS)


def test_the_k_that_is_chosen_is_measured_by_the_cluster_too(
    tape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specbench import run

    def choose(prepared: Prepared, store: RunStore, progress: Heard) -> Prepared:
        extended = preparing.with_chosen_k(prepared, {"eagle": [3]})
        store.amend({"chosen_k": {"eagle": [3]}, **preparing.plan_document(extended.plan)})
        return extended

    monkeypatch.setattr(run, "_choose_k", choose)
    prepared, store = begin(tape, "speculation.k=auto", "speculation.k_max=2", "repeats=1")
    cluster = FakeCluster(tmp_path)
    assert execute(prepared, store, Heard(), on(cluster)) == "ok"
    assert [sorted(share.starts) for share in cluster.shares][1:] == [["eagle-k3", "vanilla"]]
    assert len(list(store.requests("eagle-k3.he.t256.c1.r0.g1"))) == len(PROMPTS)


def test_fail_fast_ends_with_the_first_failure_that_is_told(tape: Path, tmp_path: Path) -> None:
    (tape / "cases" / "eagle-k2" / "requests.jsonl").unlink()
    prepared, store = begin(tape)
    cluster = FakeCluster(tmp_path)
    with pytest.raises(FailedFast, match=r"eagle-k2.*--resume .*run"):
        execute(replace(prepared, fail_fast=True), store, Heard(), on(cluster))
    assert cluster.cancelled == 1


# --- what is told and kept -----------------------------------------------------------------------


def keeper(tape: Path) -> tuple[Keeper, RunStore, Heard]:
    prepared, store = begin(tape, "repeats=1")
    heard = Heard()
    return Keeper(prepared, store, prepared.plan.cases, heard), store, heard


CASE = "vanilla.he.t256.c1.r0"
FACTS = EngineFacts(
    arm="vanilla",
    start=4,
    kind="vllm",
    version="0.32.0",
    url="u",
    served_model="m",
    argv=None,
    host="h7",
    started_at="now",
)


def test_every_kind_of_fact_comes_home_as_it_was(tape: Path, tmp_path: Path, record: Build) -> None:
    ours, store, heard = keeper(tape)
    lines: list[str] = []
    made = RunStore.create(tmp_path, "unit", {})
    theirs = RelayStore(
        made.path, made.document, lambda told: lines.append(told.line), {"vanilla": [4]}
    )
    assert theirs.next_start("vanilla") == 4
    theirs.save_engine(FACTS)
    theirs.reopen_case(CASE)
    theirs.append_request(CASE, record("p0", tokens=2))
    theirs.append_counters(CASE, CounterSpan(requests=1, keys=("p0#0@4",), start=4))
    folder = theirs.case_folder(CASE) / "aiperf.0"
    folder.mkdir()
    (folder / "profile.json").write_text('{"a": 1}', encoding="utf-8")
    report = ToolReport(
        tool="aiperf",
        version="1",
        argv=("aiperf",),
        folder="aiperf.0",
        start=4,
        keys=("p0#0@4",),
        wall_s=1.0,
    )
    theirs.append_tool(CASE, report)
    log = theirs.engine_folder("vanilla", 4) / "engine.log"
    log.write_text("ready\n", encoding="utf-8")
    theirs.tell_logs()
    theirs.finish_case(CASE, "partial", f"see {theirs.path}/engines/vanilla.4", "died")
    hello = Hello(host="h7", node="n", version="1", folder=str(theirs.path))
    ours.take(Told(hello=hello).line)
    for line in lines:
        ours.take(line)
    assert store.engines() == [FACTS] == theirs.engines()
    assert list(store.requests(CASE)) == list(theirs.requests(CASE)) != []
    assert store.counters(CASE) == theirs.counters(CASE) != []
    assert store.tools(CASE) == [report]
    kept = store.case_folder(CASE) / "aiperf.0" / "profile.json"
    assert kept.read_text(encoding="utf-8") == '{"a": 1}'
    assert (store.path / "engines/vanilla.4/engine.log").read_text(encoding="utf-8") == "ready\n"
    status = store.case_status(CASE)
    assert status is not None
    assert (status["status"], status["failure"]) == ("partial", "died")
    assert status["problem"] == f"see {store.path}/engines/vanilla.4"  # not where it was
    assert heard.requests == 1


def bad_lines(record: Build) -> Iterator[Told]:
    yield Told(case="other.he.t256.c1.r0", request=record())
    yield Told(reopened="../../elsewhere")
    yield Told(start=Start(arm="../x", number=0))
    yield Told(engine=FACTS.model_copy(update={"arm": "draft-k1"}))
    for path in (
        "run.json",
        "../outside",
        "/etc/passwd",
        f"cases/{CASE}/done.json",
        f"cases/{CASE}/../../run.json",
        f"cases/{CASE}/tool/../../x",
        "engines/vanilla.0/engine.json",
        "engines/other.0/engine.log",
        "telemetry.jsonl",
    ):
        yield Told(piece=Piece(path=path, data="aGk="))
    yield Told(piece=Piece(path=f"cases/{CASE}/tool/x", data="no base64!"))


def test_a_host_can_write_nothing_but_facts_of_its_own_unit(tape: Path, record: Build) -> None:
    ours, store, _ = keeper(tape)
    before = sorted(store.path.rglob("*"))
    for told in bad_lines(record):
        with pytest.raises(EngineError, match="is not what it measures"):
            ours.take(told.line)
    for line in ("no json\n", '{"unknown": 1}\n', "[]\n"):
        with pytest.raises(EngineError, match="no specbench of this version"):
            ours.take(line)
    assert [p for p in sorted(store.path.rglob("*")) if p.is_file()] == [
        p for p in before if p.is_file()
    ]


def test_an_order_holds_everything_by_content(tape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tape.parent)
    prepared, _ = begin(Path("tape").absolute(), "load.tape=tape", "engine.env.HF_TOKEN=hush")
    order = Order.model_validate_json(order_of(prepared))
    assert order.prompt_sets["he"].prompts == PROMPTS
    assert order.config["load"] == {
        **prepared.config.load.model_dump(mode="json"),
        "tape": str(tape),
    }
    engine = order.config["engine"]
    assert isinstance(engine, dict)
    assert engine["env"] == {"HF_TOKEN": "hush"}  # the engines need it there


# --- the process on the host ---------------------------------------------------------------------


def carried_out(order: str, share: str) -> list[Told]:
    lines = "".join(task.carry_out(order, share, node="n1", notes=["nice"]))
    return [Told.model_validate_json(line) for line in lines.splitlines()]


def test_a_unit_is_measured_by_a_process_of_its_own_and_leaves_no_file(
    tape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    prepared, store = begin(tape, "repeats=1")
    share = FanOut(FakeCluster(tmp_path), store, Heard())._share(units_of(prepared.plan)[0])
    told = carried_out(order_of(prepared), share.model_dump_json())
    assert told[0].hello is not None
    assert told[0].hello.node == "n1"
    assert told[1].say == "nice"
    assert told[-1].end is not None
    assert told[-1].end.status == 0, told[-1].end.log
    asked = Counter(one.request.prompt_id for one in told if one.request is not None)
    assert asked == {prompt.id: 3 for prompt in PROMPTS}
    assert list(scratch.iterdir()) == []


@pytest.mark.engine
def test_another_version_or_another_plan_is_refused_with_the_reason(
    tape: Path, tmp_path: Path
) -> None:
    prepared, store = begin(tape, "repeats=1")
    share = FanOut(FakeCluster(tmp_path), store, Heard())._share(units_of(prepared.plan)[0])
    older: dict[str, Any] = {**json.loads(order_of(prepared)), "version": "0.0.1", "new": 1}
    told = carried_out(json.dumps(older), share.model_dump_json())
    (refused,) = [one.refused for one in told if one.refused]
    assert "the run is of 0.0.1" in refused
    other = share.model_copy(update={"cases": ("x",)})
    told = carried_out(order_of(prepared), other.model_dump_json())
    (refused,) = [one.refused for one in told if one.refused]
    assert "Its plan is not the run's" in refused


def test_a_host_that_refuses_gives_its_cases_the_reason(tape: Path, tmp_path: Path) -> None:
    class Refusing(FakeCluster):
        def submit(self, order: str, share: str, needs: Needs, name: str, host: str | None) -> int:
            ticket = super().submit(order, share, needs, name, host)
            end = Told.model_validate({"refused": "There is no vLLM.", "end": {"status": 3}})
            self.lines[ticket] = [self.lines[ticket][0], end.line]
            return ticket

    prepared, store = begin(tape, "repeats=1")
    assert execute(prepared, store, Heard(), on(Refusing(tmp_path))) == "partial"
    status = store.case_status(CASE)
    assert status is not None
    assert status["problem"] == "host0: There is no vLLM."
    assert status["status"] == "failed"


def test_a_worker_is_as_nice_as_its_parent_or_says_that_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray runs workers at 15, where they and their engines get what nobody else wants."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(os, "getppid", lambda: 1 << 30)  # nobody
    monkeypatch.setattr(os, "getpriority", lambda _, pid: 0 if pid else 15)
    asked: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda *args: asked.append(args[2]))
    assert list(on_ray._as_without_ray()) == []
    assert asked == [0]

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    (note,) = on_ray._as_without_ray()
    assert "niceness of 15" in note
    assert "RAY_worker_niceness=0" in note


def test_a_ray_client_is_refused() -> None:
    with pytest.raises(UserError, match="no results can be streamed"):
        RayCluster("ray://head:10001").connect()


@pytest.mark.engine  # Ray is imported
def test_a_cluster_that_is_not_there_is_said_at_once_and_standard_output_stays(
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = sys.stdout
    began = time.monotonic()
    with pytest.raises(UserError, match=r"no Ray cluster at 127\.0\.0\.1:9: .*refused"):
        RayCluster("127.0.0.1:9").connect()
    assert sys.stdout is out
    assert time.monotonic() - began < 60  # Ray itself would try for minutes
    assert capfd.readouterr().out == ""


def test_without_ray_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'specbench\[ray\]'"):
        RayCluster("127.0.0.1:9").connect()


def test_a_verdict_is_one_that_the_store_knows() -> None:
    with pytest.raises(ValueError, match="status"):
        Verdict.model_validate({"status": "fine"})


# --- the command line, and engines that die with their worker ------------------------------------


def specbench(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specbench", "run", "--config", "c.yaml", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture
def workplace(tmp_path: Path, fake_python: Path) -> Path:
    """A config of two repeats, for engines that answer slowly enough to be killed meanwhile."""
    (tmp_path / "datasets").mkdir()
    lines = "".join(json.dumps({"text": f"prompt {i}"}) + "\n" for i in range(40))
    (tmp_path / "datasets" / "he.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(
        "model: some/model\nspeculation: {method: eagle, model: some/head, k: 3}\n"
        "prompts: he\nmax_tokens: 24\nrepeats: 2\nschedule: interleaved\n"
        f"engine: {{python: {fake_python}, extra_args: {{tensor_parallel_size: 2}}}}\n",
        encoding="utf-8",
    )
    return tmp_path


def test_a_dry_run_prints_the_units_and_what_each_takes(workplace: Path) -> None:
    done = specbench(workplace, "--executor", "ray", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "unit 1 (vanilla, eagle-k3; repeat 0): stage 1 on one host, with 3 CPUs and 2 GPUs",
        "unit 2 (vanilla, eagle-k3; repeat 1): stage 2 on one host, with 3 CPUs and 2 GPUs",
    ]
    assert not (workplace / "results").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--executor", "slurm"], "--executor slurm: write local or ray."),
        (["--address", "h:1"], "--address is a cluster's; it goes with --executor ray."),
        pytest.param(
            ["--executor", "ray", "--address", "127.0.0.1:9"],
            "no Ray cluster at 127.0.0.1:9",
            marks=pytest.mark.engine,  # Ray is imported
        ),
        (["--executor", "ray", "--set", "engine={url: 'http://h'}"], "already up"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_run(
    workplace: Path, args: list[str], said: str
) -> None:
    done = specbench(workplace, *args)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (workplace / "results").exists()


WORKER = """
import json, sys
from specbench.executors.task import carry_out
for lines in carry_out(*json.load(open(sys.argv[1])), node="n"):
    print(lines, end="", flush=True)
"""


def inside(folder: Path) -> list[int]:
    """The processes at work in *folder*."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(proc / "cwd")).is_relative_to(folder):
                found.append(int(proc.name))
        except OSError:
            continue
    return found


@pytest.mark.engine
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_worker_that_ends_takes_its_engines_with_it(
    workplace: Path, number: signal.Signals
) -> None:
    """INT is a cancelled task, KILL a dead node; what was told until then is whole lines."""
    scratch = workplace / "tmp"
    scratch.mkdir()
    path = workplace / "c.yaml"
    text = path.read_text(encoding="utf-8").replace(", extra_args: {tensor_parallel_size: 2}", "")
    path.write_text(text, encoding="utf-8")
    prepared = prepare(
        configs.load(path), config_path=path, prompt_folders=(workplace / "datasets",)
    )
    about = document(prepared, config_path=path, command=["test"])
    store = RunStore.create(workplace / "results", "run", about)
    fan_out = FanOut(FakeCluster(workplace), store, Heard())
    share = fan_out._share(units_of(prepared.plan)[0]).model_dump_json()
    (workplace / "unit").write_text(json.dumps([order_of(prepared), share]), encoding="utf-8")
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(workplace / "unit")],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    asked = 0
    for line in worker.stdout:
        asked += Told.model_validate_json(line).request is not None
        if asked == 3:
            break
    assert len(inside(scratch)) >= 2  # the unit's process, and engines
    worker.send_signal(number)
    worker.stdout.close()
    worker.wait(30)
    deadline = time.monotonic() + 10
    while inside(scratch) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert inside(scratch) == []
    if number == signal.SIGINT:
        assert list(scratch.glob("specbench-unit-*")) == []
