"""The arms of a stage, brought up: started, attached, loaded into Triton, or taken from a tape.

`Engines` is what a run holds them by. One vLLM a start, or one Triton for the whole run whose models
are loaded stage by stage. An arm whose engine fails is left out, and its cases say why.
"""

import itertools
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, Self

from specbench.config import Config
from specbench.engines import vllm
from specbench.engines.process import Child, PreforkServer
from specbench.engines.server import attach
from specbench.engines.triton import REPOSITORY, TritonModel, TritonServer, write_model
from specbench.errors import EngineError, FailedFast
from specbench.failures import Failure, Trouble, of_request, status_text, without_prefix
from specbench.load.base import LoadGenerator
from specbench.load.clients import Clients
from specbench.load.replay import ReplayClient
from specbench.load.tool_client import Target
from specbench.prepare import Prepared
from specbench.records import EngineCounters, EngineFacts, RequestRecord
from specbench.store import RunStore
from specbench.sweep import Arm, Case, Stage

LOOK_S = 0.25  # between two looks at engines that take seconds to start; less for quicker ones
DEATH_S = 0.5  # within which a process that drops its connections is known to be dead
LOG_LINES = 12  # of the end of a log, kept with a case


class Progress(Protocol):
    """Who is told how far a run is."""

    def say(self, text: str) -> None:
        """Something worth keeping on the screen."""

    def waiting(self, text: str) -> None:
        """What is going on now."""

    def advance(self, case: Case, record: RequestRecord) -> None:
        """One request of *case* ended."""


class Answering(Protocol):
    """A server that answers requests and may count them: a vLLM, or a model in Triton."""

    url: str
    served_model: str
    api_key: str | None

    def counters(self) -> EngineCounters:
        """Its counters now.

        Raises:
            counters.CountersUnreadable: with the reason, in words.
        """

    def counters_after(self, before: EngineCounters, finished: int) -> EngineCounters:
        """Its counters once *finished* more requests than *before* are counted."""

    def is_dead(self) -> bool:
        """Whether it says itself that nothing more can come of it."""

    def close(self) -> None:
        """Give up the connection."""


@dataclass
class LiveArm:
    """An arm whose engine is up."""

    arm: Arm
    start: int
    server: Answering | None
    client: LoadGenerator
    warm_up: LoadGenerator | None = None
    child: Child | None = None
    owns_child: bool = True  # whether the child ends with the arm
    failures: dict[str, int] = field(default_factory=dict)
    trouble: Trouble | None = None  # once it is known that no answer will come any more


def is_measured(store: RunStore, case: Case) -> bool:
    """Whether nothing of the case is left to do."""
    done = store.case_status(case.id)
    return done is not None and done["status"] == "ok"


class Engines:
    """Brings up the engines of one stage after the other; a context manager around the run."""

    def __init__(self, prepared: Prepared, store: RunStore, progress: Progress) -> None:
        self.prepared, self._store, self._progress = prepared, store, progress
        self._stack = ExitStack()
        self._triton: TritonServer | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def up(self, stage: Stage, todo: set[str]) -> Iterator[dict[str, LiveArm]]:
        """The stage's engines that the cases *todo* need, by arm; down again afterwards."""
        prepared, store, progress = self.prepared, self._store, self._progress
        needed = {case.arm for round_ in stage.rounds for case in round_ if case.id in todo}
        wanted = [arm for arm in stage.arms if arm.id in needed]
        engine = prepared.config.engine
        with ExitStack() as stack:
            if prepared.config.load.client == "replay":
                live = _replayed(prepared.config, store, stage, wanted)
            elif engine.kind == "triton":
                live = self._in_triton(stage, wanted, stack)
            elif engine.url:
                live = _attached(prepared, store, progress, stage, wanted, stack)
            else:
                live = _started(prepared, store, progress, stage, wanted, stack)
            for live_arm in live.values():
                for client in {live_arm.client, live_arm.warm_up}:
                    if client is not None:
                        stack.callback(client.close)
            try:
                yield live
            finally:
                progress.waiting("stopping engines")
                for live_arm in live.values():
                    if live_arm.child is not None and live_arm.owns_child:
                        live_arm.child.ask_to_stop()

    def _in_triton(self, stage: Stage, arms: Sequence[Arm], stack: ExitStack) -> dict[str, LiveArm]:
        """The arms' models in the run's Triton; where there is none, their cases say why."""
        prepared, store, progress = self.prepared, self._store, self._progress
        try:
            triton = self.triton()
        except EngineError as error:
            fail_arms(prepared, store, progress, stage, arms, error)
            return {}
        return _loaded(triton, prepared.model_names, prepared, store, progress, stage, arms, stack)

    def triton(self) -> TritonServer:
        """The run's Triton, started (or found) when it is first needed, and again when it died.

        Raises:
            EngineError: there is none.
        """
        if self._triton is None or self._triton.has_died:
            prepared, store = self.prepared, self._store
            repository = store.path / REPOSITORY
            for arm_id, launch in prepared.launches.items():
                write_model(repository, prepared.model_names[arm_id], launch.model_json)
            env = next(iter(prepared.launches.values())).env if prepared.launches else {}
            self._triton = self._stack.enter_context(
                TritonServer(
                    command=prepared.config.engine.server,
                    repository=repository,
                    folder=repository.parent,
                    env=env,
                    url=prepared.config.engine.url,
                    grpc_url=prepared.config.engine.grpc_url,
                    timeout_s=prepared.config.engine.startup_timeout_s,
                    waiting=self._progress.waiting,
                )
            )
        return self._triton


def _loaded(
    triton: TritonServer,
    names: Mapping[str, str],
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    stage: Stage,
    arms: Sequence[Arm],
    stack: ExitStack,
) -> dict[str, LiveArm]:
    """The arms' models, loaded into Triton one after the other; unloaded when *stack* closes."""
    live = {}
    for arm in arms:
        start = store.next_start(arm.id)
        store.engine_folder(arm.id, start).mkdir(parents=True)
        name = names[arm.id]
        try:
            model, facts = triton.load(name, arm=arm.id, start=start)
        except EngineError as error:
            fail_arms(prepared, store, progress, stage, [arm], error)
            continue
        stack.callback(_unload, triton, name, progress)
        store.save_engine(facts)
        progress.say(f"{name} is loaded after {facts.startup_s:.0f} s")
        live[arm.id] = _live(prepared, progress, arm, start, model, triton.child, owns_child=False)
    return live


def _unload(triton: TritonServer, name: str, progress: Progress) -> None:
    """Make room for the next model. What was measured stays measured if that fails."""
    try:
        triton.unload(name)
    except EngineError as error:
        progress.say(str(error))


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
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    stage: Stage,
    arms: Sequence[Arm],
    stack: ExitStack,
) -> dict[str, LiveArm]:
    (arm,) = arms
    try:
        server = attach(prepared.config.engine)
    except EngineError as error:
        fail_arms(prepared, store, progress, stage, arms, error)
        return {}
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
    return {arm.id: _live(prepared, progress, arm, start, server)}


def _started(
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    stage: Stage,
    arms: Sequence[Arm],
    stack: ExitStack,
) -> dict[str, LiveArm]:
    """Start the arms' engines, as many side by side as the machine has room for.

    In an order that `starting_order` draws.
    """
    installation = prepared.installation
    assert installation is not None
    arms = [arm for arm in starting_order(stage, prepared.config.seed) if arm in arms]
    live: dict[str, LiveArm] = {}
    children: list[Child] = []
    try:
        prefork = _prefork(prepared, store, progress, arms, stack)
    except EngineError as error:
        fail_arms(prepared, store, progress, stage, arms, error)
        return {}
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
                children.append(engine.child)
                stack.callback(_ask_to_stop, children)  # before the stack ends one after the other
            except EngineError as error:
                fail_arms(prepared, store, progress, stage, [arm], error)
        for arm_id, facts in _wait_for(prepared, starting, store, progress, stage):
            store.save_engine(facts)
            engine = starting[arm_id]
            arm = next(a for a in batch if a.id == arm_id)
            live[arm_id] = _live(prepared, progress, arm, facts.start, engine.server, engine.child)
    return live


def _ask_to_stop(children: Sequence[Child]) -> None:
    """Several engines that are slow to end must not take that long each: they end side by side."""
    for child in children:
        child.ask_to_stop()


def starting_order(stage: Stage, seed: int) -> list[Arm]:
    """The stage's arms as they are started, also where not all of them are.

    Shuffled, and in every second repeat the other way round: an engine that starts before another
    may lie otherwise in memory, and over an even number of repeats no arm has that more often.
    """
    first = stage.rounds[0][0]
    shuffled = random.Random(f"{seed} start {first.repeat // 2} {first.group}")
    order = shuffled.sample(stage.arms, len(stage.arms))
    return order[::-1] if first.repeat % 2 else order


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
    prepared: Prepared,
    starting: Mapping[str, vllm.StartingEngine],
    store: RunStore,
    progress: Progress,
    stage: Stage,
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
                failed = [arm for arm in stage.arms if arm.id == arm_id]
                fail_arms(prepared, store, progress, stage, failed, error)
                continue
            if facts is not None:
                del pending[arm_id]
                progress.say(f"{arm_id} is up after {facts.startup_s:.0f} s")
                yield arm_id, facts
        if pending:
            time.sleep(min(LOOK_S, max(0.02, (time.monotonic() - began) / 20)))


def fail_arms(
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    stage: Stage,
    arms: Sequence[Arm],
    error: EngineError,
) -> None:
    """Give every unmeasured case of *arms* its reason.

    Raises:
        FailedFast: the run is to end with the first.
    """
    progress.say(str(error))
    if error.tail:
        progress.say(error.tail)
    for arm in arms:
        for case in itertools.chain.from_iterable(stage.rounds):
            if case.arm == arm.id and not is_measured(store, case):
                fail_case(prepared, store, case, "failed", trouble_from(error))


def fail_case(
    prepared: Prepared, store: RunStore, case: Case, status: str, trouble: Trouble
) -> None:
    """Write down that the case is not measured in full, and why.

    Raises:
        FailedFast: the run is to end with it.
    """
    store.finish_case(case.id, status, trouble.problem, trouble.failure)
    if prepared.fail_fast:
        why, _, log = trouble.problem.partition("\n")
        last = without_prefix((log.strip().splitlines() or [""])[-1])[:200]
        more = f" ({last})" if last and last not in why else ""
        raise FailedFast(
            f"{case.id}: {status_text(status, trouble.failure)}: {why.removesuffix('.')}{more}.",
            hint="The run ends there (--fail-fast); the engines are stopped and everything measured "
            f"is kept. Go on with: specbench run --resume {store.path}",
        )


def trouble_from(error: EngineError) -> Trouble:
    """Why cases stop: the error, what to do about it, and the end of its log."""
    first = f"{error.message} {error.advice}" if error.advice else error.message
    log = error.tail.splitlines()[-LOG_LINES:]
    return Trouble(error.failure, "\n".join([first, *log]).strip())


def explain_memory(prepared: Prepared, store: RunStore, progress: Progress) -> None:
    """Add to the cases for which memory was short whether it was so for the draft alone.

    To be told when all engines had their turn: the baseline's may start after the arm's.
    """
    arms = {arm.id: arm for arm in prepared.plan.arms}
    for case in prepared.plan.cases:
        done = store.case_status(case.id)
        if done is None or done["failure"] != "out_of_memory" or arms[case.arm].k == 0:
            continue
        first, _, log = done["problem"].partition("\n")
        told = _of_draft_or_target(prepared, store, arms[case.arm])
        if told is not None and told not in first:
            progress.say(f"{case.id}: {told}")
            problem = f"{first} {told}\n{log}".strip()
            store.finish_case(case.id, done["status"], problem, "out_of_memory")


def _of_draft_or_target(prepared: Prepared, store: RunStore, arm: Arm) -> str | None:
    target = {other.id for other in prepared.plan.arms if other.k == 0}
    if any(facts.arm in target for facts in store.engines()):
        what = arm.draft or f"what {arm.method} drafts with"
        workers = prepared.config.engine.args.get("tensor_parallel_size", 1)
        spread = "" if workers == 1 else " or speculation.draft_tensor_parallel_size"
        return (
            f"The target alone fits (vanilla's engine came up): memory is short for {what} beside "
            f"it. A smaller draft{spread} is another way out."
        )
    done = [store.case_status(case.id) for case in prepared.plan.cases if case.arm in target]
    if any(one and one["failure"] == "out_of_memory" for one in done):
        return "The target alone does not fit either: it is not the draft."
    return None


def _live(
    prepared: Prepared,
    progress: Progress,
    arm: Arm,
    start: int,
    server: Answering,
    child: Child | None = None,
    *,
    owns_child: bool = True,
) -> LiveArm:
    """The arm with the clients that will send to it."""
    config, seed_of = prepared.config, prepared.seed_of
    launch = prepared.launches.get(arm.id)
    cores = launch.cores if launch else frozenset()
    clients = Clients(config.sampling, config.load, prepared.tool, cores)
    tokenizer = prepared.models.target if prepared.models else config.model
    target = Target(server.url, server.served_model, tokenizer, server.api_key)
    if isinstance(server, TritonModel):
        target = replace(target, triton_inputs=server.inputs, grpc_url=server.grpc_url)
    seeds = partial(seed_of, arm.id, start) if seed_of else None
    measuring = clients.measuring(
        target, start, seeds, lambda text: progress.waiting(f"{arm.id}: {text}")
    )
    warm_up = clients.direct(target, start) if config.load.is_tool else measuring
    return LiveArm(arm, start, server, measuring, warm_up, child, owns_child)


def death_of(arm: LiveArm) -> EngineError | None:
    """What its engine died of: its status and the end of its log; None while it lives."""
    if arm.child is None or (status := arm.child.poll()) is None:
        return None
    return arm.child.failed(f"The engine of {arm.arm.id} died with status {status}.", "died")


def end_of(arm: LiveArm, errors: Sequence[str] = ()) -> EngineError | None:
    """Why no answer of the arm's engine will come any more; None where one may.

    *errors* are those of requests that just failed: a process may have died, or its HTTP server
    have outlived the engine behind it.
    """
    names = {of_request(error) for error in errors}
    until = time.monotonic() + (DEATH_S if names & {"unreachable", "stream_cut"} else 0)
    while (death := death_of(arm)) is None and time.monotonic() < until:
        time.sleep(0.02)
    if death is not None or not errors or arm.server is None:
        return death
    if "engine_core_dead" not in names and not arm.server.is_dead():
        return None
    message = (
        f"The engine behind the HTTP server of {arm.arm.id} is dead, the server still answers "
        f"({errors[-1]})."
    )
    return failing(arm, message, "engine_core_dead")


def failing(arm: LiveArm, message: str, failure: Failure) -> EngineError:
    """What is wrong with an engine that lives: the cause and the end of its log are added, if ours."""
    if arm.child is None:
        return EngineError(message, failure=failure)
    return arm.child.failed(message, failure)
