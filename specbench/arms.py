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
from specbench.engines.process import Child, PreforkServer, log_tail
from specbench.engines.server import attach
from specbench.engines.triton import TritonModel, TritonServer, write_model
from specbench.errors import EngineError
from specbench.load.base import LoadGenerator
from specbench.load.clients import Clients
from specbench.load.replay import ReplayClient
from specbench.load.tool_client import Target
from specbench.prepare import Prepared
from specbench.records import EngineCounters, EngineFacts, RequestRecord
from specbench.store import RunStore
from specbench.sweep import Arm, Case, Stage, served_names


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
                live = _attached(prepared, store, progress, wanted, stack)
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
            for arm in arms:
                fail_arm(store, progress, stage, arm.id, error)
            return {}
        return _loaded(triton, self._served_names(), prepared, store, progress, stage, arms, stack)

    def triton(self) -> TritonServer:
        """The run's Triton, started (or found) when it is first needed, and again when it died.

        Raises:
            EngineError: there is none.
        """
        if self._triton is None or self._triton.has_died:
            prepared, store = self.prepared, self._store
            folder = store.path / "engines" / "triton"
            repository = folder / "model_repository"
            for arm_id, launch in prepared.launches.items():
                write_model(repository, self._served_names()[arm_id], launch.model_json)
            env = next(iter(prepared.launches.values())).env if prepared.launches else {}
            self._triton = self._stack.enter_context(
                TritonServer(
                    command=prepared.config.engine.server,
                    repository=repository,
                    folder=folder,
                    env=env,
                    url=prepared.config.engine.url,
                    grpc_url=prepared.config.engine.grpc_url,
                    timeout_s=prepared.config.engine.startup_timeout_s,
                    waiting=self._progress.waiting,
                )
            )
        return self._triton

    def _served_names(self) -> dict[str, str]:
        """The models' names by arm."""
        config, arms = self.prepared.config, self.prepared.plan.arms
        return {**served_names(arms), **config.engine.models}


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
            fail_arm(store, progress, stage, arm.id, error)
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
    arms: Sequence[Arm],
    stack: ExitStack,
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
                fail_arm(store, progress, stage, arm.id, error)
        for arm_id, facts in _wait_for(starting, store, progress, stage):
            store.save_engine(facts)
            engine = starting[arm_id]
            arm = next(a for a in batch if a.id == arm_id)
            live[arm_id] = _live(prepared, progress, arm, facts.start, engine.server, engine.child)
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
                fail_arm(store, progress, stage, arm_id, error)
                continue
            if facts is not None:
                del pending[arm_id]
                progress.say(f"{arm_id} is up after {facts.startup_s:.0f} s")
                yield arm_id, facts
        if pending:
            time.sleep(0.25)


def fail_arm(
    store: RunStore, progress: Progress, stage: Stage, arm_id: str, error: EngineError
) -> None:
    """Give every unmeasured case of the arm its reason."""
    problem = f"{error.message}\n{error.tail}".strip()
    for case in itertools.chain.from_iterable(stage.rounds):
        if case.arm == arm_id and not is_measured(store, case):
            store.finish_case(case.id, "failed", problem)
    progress.say(str(error))
    if error.tail:
        progress.say(error.tail)


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


def death_of(arm: LiveArm) -> str | None:
    """The arm's obituary if its engine is gone: its status and the end of its log."""
    if arm.child is None or (status := arm.child.poll()) is None:
        return None
    return f"the engine of {arm.arm.id} died with status {status}:\n{log_tail(arm.child.log, 12)}"
