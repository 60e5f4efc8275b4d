"""The story of a run: start engines, send prompts, keep what happened.

    plan -> for each stage: engines up -> warm-up -> for each round: prompts to each arm in turn

A failed engine or request becomes a fact about its case; the sweep goes on with the others (or, with
--fail-fast, ends there).
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from specbench.analysis.curves import curves
from specbench.analysis.precision import PrecisionWatch
from specbench.arms import (
    Engines,
    LiveArm,
    Progress,
    death_of,
    end_of,
    explain_memory,
    fail_arms,
    fail_case,
    failing,
    is_measured,
    trouble_from,
)
from specbench.config import Config
from specbench.engines import counters
from specbench.errors import EngineError, LoadError
from specbench.failures import Failure, Trouble, of_request, of_requests
from specbench.load.base import warm_up_prompts
from specbench.prepare import Prepared, plan_document, with_chosen_k
from specbench.records import CounterSpan, EngineCounters, Prompt, RequestRecord
from specbench.render.read import measured_cases
from specbench.store import RunStore
from specbench.sweep import VANILLA, Case, Stage, turns
from specbench.telemetry.start import sampled

FAILURES_THAT_STOP_A_CASE = 3
PART_OF_STREAMS = 4  # prompts for each stream that an arm is sent before it is another's turn
# Of these, so many in a row stop a case at once: each of the others in flight costs its whole limit.
COSTLY: frozenset[Failure] = frozenset({"stalled", "timed_out", "unreachable"})


class _GivenUp(Exception):
    """No further request of this case will be answered."""


Measure = Callable[[Prepared], None]  # all of its plan that is not measured yet
Executor = Callable[[Prepared, RunStore, Progress], AbstractContextManager[Measure]]


@contextmanager
def here(prepared: Prepared, store: RunStore, progress: Progress) -> Iterator[Measure]:
    """Measure on this machine, stage by stage; what samples it and the engines end with the block."""
    with _sampled(prepared, store, progress), Engines(prepared, store, progress) as engines:

        def measure(prepared: Prepared) -> None:
            engines.prepared = prepared
            run_stages(engines, store, progress)

        yield measure


def execute(
    prepared: Prepared, store: RunStore, progress: Progress, executor: Executor = here
) -> str:
    """Do all of the plan that *store* does not hold yet, where *executor* does it; the run's status.

    "ok": every case is measured in full; "partial": some cases are not. The reasons are in the
    cases' done.json.

    Raises:
        FailedFast: a case failed, and the run is to end with the first.
    """
    for name, prompts in prepared.prompt_sets.items():
        store.save_prompts(name, prompts.prompts)
    with executor(prepared, store, progress) as measure:
        measure(prepared)
        chooses = any(one.choose_k for one in prepared.config.speculation)
        if chooses and "chosen_k" not in store.document:
            prepared = _choose_k(prepared, store, progress)
            measure(prepared)
    done = [store.case_status(case.id) for case in prepared.plan.cases]
    status = "ok" if all(d and d["status"] == "ok" for d in done) else "partial"
    store.finish(status)
    return status


def _sampled(
    prepared: Prepared, store: RunStore, progress: Progress
) -> AbstractContextManager[None]:
    """The machine, sampled meanwhile; a tape's times are of another day."""
    if prepared.config.load.client == "replay":
        return nullcontext()
    return sampled(
        store,
        say=progress.say,
        engine_url=prepared.config.engine.url,
        environments=[launch.env for launch in prepared.launches.values()],
    )


def run_stages(engines: Engines, store: RunStore, progress: Progress) -> None:
    """Bring up the engines of each stage of which *store* lacks something, and measure that."""
    prepared = engines.prepared
    for stage in prepared.plan.stages:
        todo: set[str] = set()
        for round_ in stage.rounds:
            left = {case.id for case in round_ if not is_measured(store, case)}
            if left and prepared.config.precision:  # further passes need the baseline beside them
                left |= {case.id for case in round_ if case.arm == VANILLA}
            todo |= left
        if todo:
            _run_stage(engines, store, progress, stage, todo)
    explain_memory(prepared, store, progress)


def _choose_k(prepared: Prepared, store: RunStore, progress: Progress) -> Prepared:
    """Add the arms that `k: auto` comes to: for each condition, the k that is predicted best.

    Nothing is chosen while something is missing; a resumed run chooses then.
    """
    missing = [case for case in prepared.plan.cases if not is_measured(store, case)]
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
        progress.say(
            f"{curve.label} on {curve.condition.prompt_set}: predicted {said}; best k = {best}"
        )
        if best and best not in chosen.setdefault(curve.label, []):
            chosen[curve.label].append(best)
    extended = with_chosen_k(prepared, chosen)
    store.amend({"chosen_k": chosen, **plan_document(extended.plan)})
    return extended


def _run_stage(
    engines: Engines, store: RunStore, progress: Progress, stage: Stage, todo: set[str]
) -> None:
    prepared = engines.prepared
    with engines.up(stage, todo) as live:
        for arm in list(live.values()):
            if (error := _warmed_up(arm, prepared.config, progress)) is not None:
                fail_arms(prepared, store, progress, stage, [arm.arm], error)
                del live[arm.arm.id]
        for round_ in stage.rounds:
            cases = [case for case in round_ if case.id in todo and case.arm in live]
            if cases:
                _run_round(prepared, store, progress, cases, live)


def _warmed_up(arm: LiveArm, config: Config, progress: Progress) -> EngineError | None:
    """Warm the engine up; why nothing can be measured on it, or None."""
    try:
        _warm_up(arm, config, progress)
    except LoadError as error:
        return EngineError(error.message, failure="load_generator_failed", hint=error.hint)
    return death_of(arm)


def _warm_up(arm: LiveArm, config: Config, progress: Progress) -> None:
    """Send prompts that nobody measures, at the highest concurrency of the run.

    By our own client also where a tool measures: its own warm-up would be in the counters.
    """
    if not config.load.warmup or arm.warm_up is None:
        return
    progress.waiting(f"warming up {arm.arm.id}")
    concurrency = config.in_flight
    arm.warm_up.send(
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
    stopped: dict[str, Trouble] = {}
    settled: dict[str, str] = {}
    cycles = prepared.config.precision.max_cycles if watch and prepared.config.precision else 1
    for cycle in range(cycles):
        _run_cycle(prepared, store, progress, cases, live, cycle, watch, stopped, settled)
        if watch is None or not _settle(watch, stopped, settled):
            break
    for case in cases:
        trouble = stopped.get(case.id) or _unpaired(prepared, watch, case, stopped, settled)
        _close_case(prepared, store, case, prompts, trouble)
        if watch and case.id in watch.arms and not trouble:
            limit = f"{watch.reached(case.id)} after {cycles} passes: the limit"
            progress.say(f"{case.id}: {settled.get(case.id, limit)}")


def _unpaired(
    prepared: Prepared,
    watch: PrecisionWatch | None,
    case: Case,
    stopped: Mapping[str, Trouble],
    settled: Mapping[str, str],
) -> Trouble | None:
    """Why an arm that should have been measured to a precision was not: it has no baseline."""
    if prepared.config.precision is None or case.arm == VANILLA or case.id in settled:
        return None
    if watch is None:
        why = "no precision without the baseline, whose engine is not up"
        return Trouble("no_baseline", why)
    if watch.baseline in stopped:
        return Trouble("no_baseline", "no precision without the baseline, which broke off")
    return None


def _run_cycle(
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    cases: Sequence[Case],
    live: dict[str, LiveArm],
    cycle: int,
    watch: PrecisionWatch | None,
    stopped: dict[str, Trouble],
    settled: dict[str, str],
) -> None:
    """One pass over the prompts, in file order the first time and in a fresh one from then on."""
    prompts = list(prepared.prompt_sets[cases[0].prompt_set].prompts)
    seed = f"{prepared.config.seed} {cases[0].conditions}" + (f" {cycle}" if cycle else "")
    if cycle:
        random.Random(seed).shuffle(prompts)
    done = {case.id: _whole_conversations(store, case, prompts, cycle) for case in cases}
    in_turns = all(live[case.arm].client.unit == "conversation" for case in cases)
    units = units_of(prompts, cases[0]) if in_turns else [prompts]
    for unit, order in turns(cases, units, seed):
        for case in order:
            left = [prompt for prompt in unit if prompt.id not in done[case.id]]
            if left and case.id not in stopped and case.id not in settled:
                trouble = _send(prepared, store, progress, case, left, live[case.arm], cycle, watch)
                if trouble is not None:
                    stopped[case.id] = trouble
                    progress.say(f"{case.id}: {trouble.problem}")
                    if prepared.fail_fast:
                        whole = prepared.prompt_sets[case.prompt_set].prompts
                        _close_case(prepared, store, case, whole, trouble)


def units_of(prompts: Sequence[Prompt], case: Case) -> list[Sequence[Prompt]]:
    """*prompts* in the parts that all arms are sent before the next part.

    One by one; some at a time where several are in flight, so that the last of a part, which have
    fewer beside them, are few; and all of them at a rate, whose arrivals are drawn for the whole.
    """
    if case.rate is not None:
        return [prompts]
    if case.concurrency == 1:
        return [[prompt] for prompt in prompts]
    count = max(1, len(prompts) // (PART_OF_STREAMS * case.concurrency))
    edges = [len(prompts) * place // count for place in range(count + 1)]
    return [prompts[begin:end] for begin, end in itertools.pairwise(edges)]


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


def _settle(watch: PrecisionWatch, stopped: Mapping[str, Trouble], settled: dict[str, str]) -> bool:
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


class _Keeper:
    """Keeps the records of one `send`, and gives up where it need not go on."""

    def __init__(
        self,
        store: RunStore,
        progress: Progress,
        case: Case,
        arm: LiveArm,
        cycle: int,
        watch: PrecisionWatch | None,
    ) -> None:
        self._store, self._progress, self._case = store, progress, case
        self._cycle, self._watch = cycle, watch
        self._may_give_up = arm.client.unit == "conversation"
        self.failed = arm.failures.get(case.id, 0)  # in a row
        self.sent: list[RequestRecord] = []

    @property
    def errors(self) -> list[str]:
        """Those of the requests that failed, in the order they ended."""
        return [record.error for record in self.sent if record.error is not None]

    def __call__(self, record: RequestRecord) -> None:
        """Raises _GivenUp once the record is kept."""
        record = record.model_copy(update={"cycle": self._cycle}) if self._cycle else record
        self._store.append_request(self._case.id, record)
        self.sent.append(record)
        if self._watch is not None:
            self._watch.add(self._case.id, record)
        name = of_request(record.error) if record.error is not None else None
        if name != "time_jumped":  # which is no fault of the engine's
            self.failed = 0 if record.ok else self.failed + 1
        self._progress.advance(self._case, record)
        is_over = self.failed >= FAILURES_THAT_STOP_A_CASE and name in COSTLY
        if self._may_give_up and (is_over or name == "engine_core_dead"):
            raise _GivenUp


def _send(
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    case: Case,
    prompts: Sequence[Prompt],
    arm: LiveArm,
    cycle: int,
    watch: PrecisionWatch | None,
) -> Trouble | None:
    """Send *prompts* for *case*, with the counters read around them; why it must stop, or None."""
    if arm.trouble is None and (death := death_of(arm)) is not None:
        arm.trouble = trouble_from(death)
    if arm.trouble is not None:
        return arm.trouble
    keep = _Keeper(store, progress, case, arm, cycle, watch)
    before, problem = _counters(arm)
    failure = None
    try:
        reports = arm.client.send(
            prompts,
            max_tokens=case.max_tokens,
            concurrency=case.concurrency,
            on_record=keep,
            rate=case.rate,
            folder=store.case_folder(case.id) if prepared.tool else None,
        )
        for report in reports or ():
            keys = tuple(f"{key}~{cycle}" for key in report.keys) if cycle else report.keys
            store.append_tool(case.id, report.model_copy(update={"keys": keys}))
    except LoadError as error:
        failure = str(error)
    except _GivenUp:  # the engine may have counted what was in flight beside
        before, problem = None, "the sending was given up"
    arm.failures[case.id] = keep.failed
    if before is not None or problem is not None:
        store.append_counters(case.id, _span(arm, before, problem, keep.sent))
    return _trouble(arm, keep, failure)


def _trouble(arm: LiveArm, keep: _Keeper, failure: str | None) -> Trouble | None:
    """Why the case must stop, now that something was sent; *failure* is the load generator's."""
    errors = keep.errors
    if (end := end_of(arm, [*errors, failure] if failure else errors)) is not None:
        arm.trouble = trouble_from(end)
        return arm.trouble
    if failure is not None:
        return Trouble("load_generator_failed", failure)
    if errors and keep.failed >= FAILURES_THAT_STOP_A_CASE:
        said = f"{keep.failed} requests in a row failed, the last with: {errors[-1]}"
        return trouble_from(failing(arm, said, of_requests(errors[-keep.failed :])))
    return None


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
    if arm.client.unit == "set" and spent.requests is not None and spent.requests > len(sent):
        problem = f"the engine counted {spent.requests} requests, {len(sent)} of them were measured"
        return inside.model_copy(update={"problem": problem})
    return inside.model_copy(update={"spent": spent})


def _close_case(
    prepared: Prepared,
    store: RunStore,
    case: Case,
    prompts: Sequence[Prompt],
    trouble: Trouble | None,
) -> None:
    whole = len(_whole_conversations(store, case, prompts))
    if whole == len(prompts) and trouble is None:
        store.finish_case(case.id, "ok")
        return
    if trouble is None:
        errors = _left_errors(store, case)
        trouble = Trouble(of_requests(errors), errors[-1] if errors else "")
    missing = f"{whole} of {len(prompts)} prompts measured"
    problem = f"{missing}: {trouble.problem}" if trouble.problem else missing
    status = "partial" if whole else "failed"
    fail_case(prepared, store, case, status, Trouble(trouble.failure, problem))


def _left_errors(store: RunStore, case: Case) -> list[str]:
    """Why requests failed that were not measured later on either."""
    errors: dict[tuple[str, int, int], str] = {}
    for one in store.requests(case.id):
        key = (one.prompt_id, one.turn, one.cycle)
        if one.error is None:
            errors.pop(key, None)
        else:
            errors[key] = one.error
    return list(errors.values())
