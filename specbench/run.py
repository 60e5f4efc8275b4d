"""The story of a run: start engines, send prompts, keep what happened.

    plan -> for each stage: engines up -> warm-up -> for each round: prompts to each arm in turn

A failed engine or request becomes a fact about its case; the sweep goes on with the others.
"""

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from specbench.analysis.curves import curves
from specbench.analysis.precision import PrecisionWatch
from specbench.config import Config
from specbench.engines import counters, vllm
from specbench.engines.process import Child, PreforkServer, log_tail
from specbench.engines.server import Server, attach
from specbench.errors import EngineError
from specbench.load.base import LoadGenerator, warm_up_prompts
from specbench.load.direct import DirectClient
from specbench.load.replay import ReplayClient
from specbench.prepare import Prepared, plan_document, with_chosen_k
from specbench.records import CounterSpan, EngineCounters, EngineFacts, Prompt, RequestRecord
from specbench.render.read import measured_cases
from specbench.store import RunStore
from specbench.sweep import VANILLA, Arm, Case, Stage, turns

FAILURES_THAT_STOP_A_CASE = 3


class Progress(Protocol):
    """Who is told how far a run is."""

    def say(self, text: str) -> None:
        """Something worth keeping on the screen."""

    def waiting(self, text: str) -> None:
        """What is going on now."""

    def advance(self, case: Case, record: RequestRecord) -> None:
        """One request of *case* ended."""


@dataclass
class LiveArm:
    """An arm whose engine is up."""

    arm: Arm
    start: int
    server: Server | None
    client: LoadGenerator
    child: Child | None = None
    failures: dict[str, int] = field(default_factory=dict)


def execute(prepared: Prepared, store: RunStore, progress: Progress) -> str:
    """Do all of the plan that *store* does not hold yet; the run's status.

    "ok": every case is measured in full; "partial": some cases are not. The reasons are in the
    cases' done.json.
    """
    for name, prompts in prepared.prompt_sets.items():
        store.save_prompts(name, prompts.prompts)
    _run_stages(prepared, store, progress)
    if (
        any(one.choose_k for one in prepared.config.speculation)
        and "chosen_k" not in store.document
    ):
        prepared = _choose_k(prepared, store, progress)
        _run_stages(prepared, store, progress)
    done = [store.case_status(case.id) for case in prepared.plan.cases]
    status = "ok" if all(d and d["status"] == "ok" for d in done) else "partial"
    store.finish(status)
    return status


def _run_stages(prepared: Prepared, store: RunStore, progress: Progress, *, since: int = 0) -> None:
    for stage in prepared.plan.stages[since:]:
        todo: set[str] = set()
        for round_ in stage.rounds:
            left = {case.id for case in round_ if not _is_measured(store, case)}
            if left and prepared.config.precision:  # further passes need the baseline beside them
                left |= {case.id for case in round_ if case.arm == VANILLA}
            todo |= left
        if todo:
            _run_stage(prepared, store, progress, stage, todo)


def _choose_k(prepared: Prepared, store: RunStore, progress: Progress) -> Prepared:
    """Add the arms that `k: auto` comes to: for each condition, the k that is predicted best.

    Nothing is chosen while something is missing; a resumed run chooses then.
    """
    missing = [case for case in prepared.plan.cases if not _is_measured(store, case)]
    if missing:
        progress.say(f"no k is chosen yet: {len(missing)} cases are not measured in full")
        return prepared
    choosing = {one.label for one in prepared.config.speculation if one.choose_k}
    chosen: dict[str, list[int]] = {}
    for curve in curves(measured_cases(store), baseline=VANILLA):
        if curve.label not in choosing:
            continue
        if curve.predicted_best is None:
            progress.say(f"{curve.label}: no k is chosen: {curve.not_predicted}")
            continue
        best, at = curve.predicted_best.k, curve.predicted
        said = ", ".join(f"k={k} {at[k].speedup:.2f}x" for k in at)
        progress.say(f"{curve.label} on {curve.condition[0]}: predicted {said}; best k = {best}")
        if best and best not in chosen.setdefault(curve.label, []):
            chosen[curve.label].append(best)
    extended = with_chosen_k(prepared, chosen)
    store.amend({"chosen_k": chosen, **plan_document(extended.plan)})
    return extended


def _is_measured(store: RunStore, case: Case) -> bool:
    done = store.case_status(case.id)
    return done is not None and done["status"] == "ok"


def _run_stage(
    prepared: Prepared, store: RunStore, progress: Progress, stage: Stage, todo: set[str]
) -> None:
    with _engines(prepared, store, progress, stage, todo) as live:
        for arm in list(live.values()):
            _warm_up(arm, prepared.config, progress)
            if (death := _death(arm)) is not None:
                _fail_arm(store, progress, stage, arm.arm.id, EngineError(death))
                del live[arm.arm.id]
        for round_ in stage.rounds:
            cases = [case for case in round_ if case.id in todo and case.arm in live]
            if cases:
                _run_round(prepared, store, progress, cases, live)


@contextmanager
def _engines(
    prepared: Prepared, store: RunStore, progress: Progress, stage: Stage, todo: set[str]
) -> Iterator[dict[str, LiveArm]]:
    """The stage's engines, up; an arm whose engine fails is left out and its cases say why."""
    wanted = [
        arm
        for arm in stage.arms
        if any(case.arm == arm.id and case.id in todo for round_ in stage.rounds for case in round_)
    ]
    with ExitStack() as stack:
        if prepared.config.load.client == "replay":
            live = _replayed(prepared.config, store, stage, wanted)
        elif prepared.config.engine.url:
            live = _attached(prepared, store, wanted, stack)
        else:
            live = _started(prepared, store, progress, stage, wanted, stack)
        for live_arm in live.values():
            stack.callback(live_arm.client.close)
        try:
            yield live
        finally:
            progress.waiting("stopping engines")
            for live_arm in live.values():
                if live_arm.child is not None:
                    live_arm.child.ask_to_stop()


def _replayed(
    config: Config, store: RunStore, stage: Stage, arms: Sequence[Arm]
) -> dict[str, LiveArm]:
    """Each arm's cases of the tape; of the same repeat and group where the tape has them."""
    assert config.load.tape is not None
    tape = RunStore.open(config.load.tape)
    here = {(case.repeat, case.group) for round_ in stage.rounds for case in round_}
    live = {}
    for arm in arms:
        of_arm = [case for case in tape.document["cases"] if case["arm"] == arm.id]
        alike = [c for c in of_arm if (c.get("repeat", 0), c.get("group", 0)) in here]
        case_ids = [case["id"] for case in alike or of_arm]
        records = itertools.chain.from_iterable(tape.requests(case_id) for case_id in case_ids)
        start = store.next_start(arm.id)
        store.engine_folder(arm.id, start).mkdir(parents=True, exist_ok=True)
        client = ReplayClient(records, start=start, speed=config.load.tape_speed)
        live[arm.id] = LiveArm(arm, start, None, client)
    return live


def _attached(
    prepared: Prepared, store: RunStore, arms: Sequence[Arm], stack: ExitStack
) -> dict[str, LiveArm]:
    (arm,) = arms
    server = attach(prepared.config.engine)
    stack.callback(server.close)
    start = store.next_start(arm.id)
    facts = EngineFacts(
        arm=arm.id,
        start=start,
        kind="vllm",
        version=server.version(),
        url=server.url,
        served_model=server.served_model,
        argv=None,
        started_at=store.document.get("id", ""),
        notes=("a server that was already up; its arguments are not known",),
    )
    store.save_engine(facts)
    return {arm.id: LiveArm(arm, start, server, _client(prepared, server, arm.id, start))}


def _started(
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    stage: Stage,
    arms: Sequence[Arm],
    stack: ExitStack,
) -> dict[str, LiveArm]:
    """Start the arms' engines, as many side by side as the machine has room for.

    In a shuffled order: an engine that starts first may lie better in memory.
    """
    installation = prepared.installation
    assert installation is not None
    first = stage.rounds[0][0]
    shuffled = random.Random(f"{prepared.config.seed} start {first.repeat} {first.group}")
    arms = shuffled.sample(arms, len(arms))
    live: dict[str, LiveArm] = {}
    prefork = _prefork(prepared, store, progress, arms, stack)
    for batch in _batches(arms, vllm.starts_at_once(installation)):
        starting = {}
        for arm in batch:
            start = store.next_start(arm.id)
            engine = vllm.StartingEngine(
                prepared.launches[arm.id],
                installation,
                arm=arm.id,
                start=start,
                folder=store.engine_folder(arm.id, start),
                startup_timeout_s=prepared.config.engine.startup_timeout_s,
                prefork=prefork,
            )
            try:
                starting[arm.id] = stack.enter_context(engine)
            except EngineError as error:
                _fail_arm(store, progress, stage, arm.id, error)
        for arm_id, facts in _wait_for(starting, store, progress, stage):
            store.save_engine(facts)
            engine = starting[arm_id]
            client = _client(prepared, engine.server, arm_id, facts.start)
            arm = next(a for a in batch if a.id == arm_id)
            live[arm_id] = LiveArm(arm, facts.start, engine.server, client, engine.child)
    return live


def _prefork(
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    arms: Sequence[Arm],
    stack: ExitStack,
) -> PreforkServer | None:
    """On a CPU, one import of vLLM for all of the stage's engines; None where each does its own."""
    installation = prepared.installation
    if installation is None or not installation.is_cpu or not prepared.config.engine.prefork:
        return None
    log = store.path / "engines" / "prefork.log"
    log.parent.mkdir(exist_ok=True)
    server = stack.enter_context(
        vllm.prefork_server(prepared.launches[arms[0].id], installation, log)
    )
    began = time.monotonic()
    while not server.ready():
        progress.waiting(f"importing vLLM ({time.monotonic() - began:.0f} s)")
        time.sleep(0.1)
    progress.say(f"vLLM {installation.version} is imported after {time.monotonic() - began:.0f} s")
    return server


def _batches(arms: Sequence[Arm], size: int) -> Iterator[Sequence[Arm]]:
    for first in range(0, len(arms), size):
        yield arms[first : first + size]


def _wait_for(
    starting: Mapping[str, vllm.StartingEngine], store: RunStore, progress: Progress, stage: Stage
) -> Iterator[tuple[str, EngineFacts]]:
    """Each engine as it becomes ready; those that fail are stopped and marked."""
    pending = dict(starting)
    began = time.monotonic()
    while pending:
        names = " and ".join(pending)
        progress.waiting(f"starting {names} ({time.monotonic() - began:.0f} s)")
        for arm_id, engine in list(pending.items()):
            try:
                facts = engine.poll()
            except EngineError as error:
                del pending[arm_id]
                engine.child.stop()
                _fail_arm(store, progress, stage, arm_id, error)
                continue
            if facts is not None:
                del pending[arm_id]
                progress.say(f"{arm_id} is up after {facts.startup_s:.0f} s")
                yield arm_id, facts
        if pending:
            time.sleep(0.25)


def _fail_arm(
    store: RunStore, progress: Progress, stage: Stage, arm_id: str, error: EngineError
) -> None:
    """Give every unmeasured case of the arm its reason."""
    problem = f"{error.message}\n{error.tail}".strip()
    for case in itertools.chain.from_iterable(stage.rounds):
        if case.arm == arm_id and not _is_measured(store, case):
            store.finish_case(case.id, "failed", problem)
    progress.say(str(error))
    if error.tail:
        progress.say(error.tail)


def _client(prepared: Prepared, server: Server, arm: str, start: int) -> LoadGenerator:
    config, seed_of = prepared.config, prepared.seed_of
    return DirectClient(
        url=server.url,
        served_model=server.served_model,
        api_key=server.api_key,
        sampling=config.sampling,
        load=config.load,
        start=start,
        seed_of=partial(seed_of, arm, start) if seed_of else None,
    )


def _warm_up(arm: LiveArm, config: Config, progress: Progress) -> None:
    """Send prompts that nobody measures, at the highest concurrency of the run."""
    if not config.load.warmup or arm.server is None:
        return
    progress.waiting(f"warming up {arm.arm.id}")
    concurrency = max(config.concurrency)
    arm.client.send(
        warm_up_prompts(max(config.load.warmup, concurrency if concurrency > 1 else 0)),
        max_tokens=min(config.load.warmup_tokens, max(config.max_tokens)),
        concurrency=concurrency,
        on_record=lambda _: None,
    )


# --- one round -----------------------------------------------------------------------------------


def _run_round(
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    cases: Sequence[Case],
    live: dict[str, LiveArm],
) -> None:
    """Every prompt to every case; with `precision`, again and again until the ratios are known."""
    prompts = prepared.prompt_sets[cases[0].prompt_set].prompts
    for case in cases:
        store.reopen_case(case.id)
    watch = _watch(prepared, store, cases)
    stopped: dict[str, str] = {}
    settled: dict[str, str] = {}
    cycles = prepared.config.precision.max_cycles if watch and prepared.config.precision else 1
    for cycle in range(cycles):
        _run_cycle(prepared, store, progress, cases, live, cycle, watch, stopped, settled)
        if watch is None or not _settle(watch, stopped, settled):
            break
    for case in cases:
        problem = stopped.get(case.id) or _unpaired(prepared, watch, case, stopped, settled)
        _close_case(store, case, prompts, problem)
        if watch and case.id in watch.arms and not problem:
            limit = f"{watch.reached(case.id)} after {cycles} passes: the limit"
            progress.say(f"{case.id}: {settled.get(case.id, limit)}")


def _unpaired(
    prepared: Prepared,
    watch: PrecisionWatch | None,
    case: Case,
    stopped: Mapping[str, str],
    settled: Mapping[str, str],
) -> str | None:
    """Why an arm that should have been measured to a precision was not: it has no baseline."""
    if prepared.config.precision is None or case.arm == VANILLA or case.id in settled:
        return None
    if watch is None:
        return "no precision without the baseline, whose engine is not up"
    if watch.baseline in stopped:
        return "no precision without the baseline, which broke off"
    return None


def _run_cycle(
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    cases: Sequence[Case],
    live: dict[str, LiveArm],
    cycle: int,
    watch: PrecisionWatch | None,
    stopped: dict[str, str],
    settled: dict[str, str],
) -> None:
    """One pass over the prompts, in file order the first time and in a fresh one from then on."""
    prompts = list(prepared.prompt_sets[cases[0].prompt_set].prompts)
    seed = f"{prepared.config.seed} {cases[0].conditions}" + (f" {cycle}" if cycle else "")
    if cycle:
        random.Random(seed).shuffle(prompts)
    done = {case.id: _whole_conversations(store, case, prompts, cycle) for case in cases}
    in_turns = cases[0].concurrency == 1 and all(
        live[case.arm].client.unit == "conversation" for case in cases
    )
    units: list[Sequence[Prompt]] = [[p] for p in prompts] if in_turns else [prompts]
    for unit, order in turns(cases, units, seed):
        for case in order:
            left = [prompt for prompt in unit if prompt.id not in done[case.id]]
            if left and case.id not in stopped and case.id not in settled:
                problem = _send(store, progress, case, left, live[case.arm], cycle, watch)
                if problem:
                    stopped[case.id] = problem
                    progress.say(f"{case.id}: {problem}")


def _watch(prepared: Prepared, store: RunStore, cases: Sequence[Case]) -> PrecisionWatch | None:
    """What tells when to stop, fed with what an earlier attempt measured; None without need."""
    arms = {arm.id: arm for arm in prepared.plan.arms}
    baseline = [case for case in cases if arms[case.arm].k == 0]
    others = {case.id: arms[case.arm].k > 0 for case in cases if case not in baseline}
    if prepared.config.precision is None or not baseline or not others:
        return None
    watch = PrecisionWatch(
        prepared.config.precision,
        baseline[0].id,
        others,
        prepared.prompt_sets[cases[0].prompt_set].available,
    )
    for case in cases:
        for record in store.requests(case.id):
            watch.add(case.id, record)
    return watch


def _settle(watch: PrecisionWatch, stopped: Mapping[str, str], settled: dict[str, str]) -> bool:
    """Note which arms are known well enough; whether any is left. The baseline goes on till then."""
    for case_id in watch.arms:
        if case_id not in settled and case_id not in stopped and (why := watch.settled(case_id)):
            settled[case_id] = why
    left = watch.arms.keys() - settled.keys() - stopped.keys()
    return bool(left) and watch.baseline not in stopped


def _whole_conversations(
    store: RunStore, case: Case, prompts: Sequence[Prompt], cycle: int = 0
) -> set[str]:
    """The prompts whose every turn is measured already in this pass."""
    measured: dict[str, set[int]] = {}
    for record in store.requests(case.id):
        if record.ok and record.cycle == cycle:
            measured.setdefault(record.prompt_id, set()).add(record.turn)
    return {p.id for p in prompts if measured.get(p.id, set()) >= set(range(len(p.turns)))}


def _send(
    store: RunStore,
    progress: Progress,
    case: Case,
    prompts: Sequence[Prompt],
    arm: LiveArm,
    cycle: int,
    watch: PrecisionWatch | None,
) -> str | None:
    """Send *prompts* for *case*, with the counters read around them; why it must stop, or None."""
    sent: list[RequestRecord] = []
    failed = arm.failures.get(case.id, 0)

    def keep(record: RequestRecord) -> None:
        nonlocal failed
        record = record.model_copy(update={"cycle": cycle}) if cycle else record
        store.append_request(case.id, record)
        sent.append(record)
        if watch is not None:
            watch.add(case.id, record)
        failed = 0 if record.ok else failed + 1
        progress.advance(case, record)

    before, problem = _counters(arm)
    arm.client.send(
        prompts, max_tokens=case.max_tokens, concurrency=case.concurrency, on_record=keep
    )
    arm.failures[case.id] = failed
    if before is not None or problem is not None:
        store.append_counters(case.id, _span(arm, before, problem, sent))
    if (death := _death(arm)) is not None:
        return death
    if failed >= FAILURES_THAT_STOP_A_CASE:
        return f"{failed} requests in a row failed"
    return None


def _death(arm: LiveArm) -> str | None:
    """The arm's obituary if its engine is gone: its status and the end of its log."""
    if arm.child is None or (status := arm.child.poll()) is None:
        return None
    return f"the engine of {arm.arm.id} died with status {status}:\n{log_tail(arm.child.log, 12)}"


def _counters(arm: LiveArm) -> tuple[EngineCounters | None, str | None]:
    if arm.server is None:
        return None, None
    try:
        return arm.server.counters(), None
    except counters.CountersUnreadable as error:
        return None, str(error)


def _span(
    arm: LiveArm,
    before: EngineCounters | None,
    problem: str | None,
    sent: Sequence[RequestRecord],
) -> CounterSpan:
    """What was counted around *sent* since *before*; null with the reason if that is unknown."""
    inside = CounterSpan(
        requests=len(sent), keys=tuple(r.key for r in sent), start=arm.start, problem=problem
    )
    if before is None or arm.server is None:
        return inside
    try:
        after = arm.server.counters_after(before, sum(record.ok for record in sent))
    except counters.CountersUnreadable as error:
        return inside.model_copy(update={"problem": str(error)})
    spent = after - before
    numbers = [n for n in spent.model_dump(exclude_none=True).values() if isinstance(n, int)]
    if spent.process_start_s or min(numbers) < 0:
        return inside.model_copy(update={"problem": "the server was restarted in between"})
    return inside.model_copy(update={"spent": spent})


def _close_case(
    store: RunStore, case: Case, prompts: Sequence[Prompt], problem: str | None
) -> None:
    whole = len(_whole_conversations(store, case, prompts))
    if whole == len(prompts) and problem is None:
        store.finish_case(case.id, "ok")
        return
    missing = f"{whole} of {len(prompts)} prompts measured"
    status = "partial" if whole else "failed"
    store.finish_case(case.id, status, f"{missing}: {problem}" if problem else missing)
