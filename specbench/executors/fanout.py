"""Units sent to a cluster and their facts kept as they come; what a dead node leaves goes elsewhere.

This process is the only writer of the run's folder. A request whose record came is never sent again:
the next attempt is told of it.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from specbench import __version__
from specbench.arms import Progress, fail_case, is_measured
from specbench.errors import EngineError
from specbench.executors.relay import Keeper
from specbench.executors.told import Order, SentSet, Share, Verdict
from specbench.executors.units import Needs, Unit, needs_of, units_of
from specbench.failures import Trouble
from specbench.prepare import Prepared
from specbench.run import Executor, Measure
from specbench.store import RunStore

ATTEMPTS = 3  # at a unit; each but the first because a node died
# Further ones that were lost with their node before it said a word, and so measured nothing: sent to one that
# was not known to be dead yet. A cluster takes a while to know, so there is a pause before each.
UNBEGUN = 10
PAUSE_S = 5.0
LOOK_S = 0.5
NODES_S = 5.0  # between two looks at the nodes
NO_NODE_S = 60.0  # without a node that could take a unit, before it is given up
KILLED = 128  # a status from here on is a signal's: the kernel's, say, for want of memory


@dataclass(frozen=True)
class News:
    """Of one ticket: *lines* that its unit told; or that it is over, *lost* with the reason or not.

    *ran*: it was lost by an error of its own and not with its node, so that it counts as an attempt.
    """

    ticket: int
    lines: str = ""
    over: bool = False
    lost: str | None = None
    ran: bool = False


class Cluster(Protocol):
    """Where units are sent. One unit is one ticket."""

    def submit(self, order: str, share: str, needs: Needs, name: str, host: str | None) -> int:
        """Have the unit measured once, as soon as some node has what it needs; its ticket.

        On *host*, if it is still there.
        """

    def news(self, timeout_s: float) -> Sequence[News]:
        """What came since, or nothing after *timeout_s*. Each ticket's in order, its end last."""

    def lacks(self, needs: Needs) -> str | None:
        """Why no node, however idle, can take a unit with these needs; None if one can."""

    def cancel(self) -> None:
        """End all units that are not over, and their engines."""


@dataclass
class _Attempt:
    """One sending of a unit."""

    unit: Unit
    keeper: Keeper
    number: int  # among those that began
    unbegun: int  # earlier ones that did not

    @property
    def has_begun(self) -> bool:
        """Whether its host said anything."""
        return self.keeper.hello is not None


class FanOut:
    """Has the units of a run measured, each in as many attempts as it takes (ATTEMPTS at most)."""

    def __init__(self, cluster: Cluster, store: RunStore, progress: Progress) -> None:
        self._cluster, self._store, self._progress = cluster, store, progress
        self._running: dict[int, _Attempt] = {}
        self._paused: list[tuple[float, _Attempt]] = []  # sent again from that moment on
        self._next_start: dict[str, int] = {}
        self._prepared: Prepared
        self._order = ""
        self._without_node_since: float | None = None
        self._look_at = 0.0

    def measure(self, prepared: Prepared) -> None:
        """All units of which something is not measured yet; returns when none is under way.

        Raises:
            EngineError: no node of the cluster can take some of them.
            FailedFast: a case failed, and the run is to end with the first.
        """
        self._prepared, self._order = prepared, order_of(prepared)
        todo = deque(unit for unit in units_of(prepared.plan) if self._is_left(unit))
        needs = {unit.number: needs_of(prepared, unit) for unit in todo}
        for unit in todo:
            if (why := self._cluster.lacks(needs[unit.number])) is not None:
                raise EngineError(f"{unit} needs {needs[unit.number]}: {why}.")
        for unit in todo:
            self._submit(unit, needs[unit.number])
        while self._running or self._paused:
            self._end_pauses(needs)
            for news in self._cluster.news(LOOK_S):
                attempt = self._running[news.ticket]
                if news.lines:
                    had_begun = attempt.has_begun
                    attempt.keeper.take(news.lines)
                    if attempt.has_begun and not had_begun:
                        self._progress.say(f"{attempt.unit} is measured on {attempt.keeper.host}")
                if news.over:
                    del self._running[news.ticket]
                    self._end(attempt, needs[attempt.unit.number], news)
            self._give_up_without_node(needs)

    def _is_left(self, unit: Unit) -> bool:
        return not all(is_measured(self._store, case) for case in unit.cases)

    def _submit(self, unit: Unit, needs: Needs, number: int = 1, unbegun: int = 0) -> None:
        share = self._share(unit)
        is_first = (number, unbegun) == (1, 0)
        host = self._host_of(unit, share) if is_first else None  # which may have died
        ticket = self._cluster.submit(self._order, share.model_dump_json(), needs, str(unit), host)
        keeper = Keeper(self._prepared, self._store, unit.cases, self._progress)
        self._running[ticket] = _Attempt(unit, keeper, number, unbegun)

    def _share(self, unit: Unit) -> Share:
        """What is left of the unit, with numbers for its engines' starts that no other start has."""
        starts = {}
        for arm, count in unit.starts.items():
            first = self._next_start.get(arm, self._store.next_start(arm))
            starts[arm] = tuple(range(first, first + count))
            self._next_start[arm] = first + count
        ids = [case.id for case in unit.cases]
        statuses = {case_id: self._store.case_status(case_id) for case_id in ids}
        verdicts = {
            case_id: Verdict.model_validate({k: v for k, v in status.items() if k != "at"})
            for case_id, status in statuses.items()
            if status is not None
        }
        return Share(
            stages=unit.stages,
            cases=tuple(ids),
            starts=starts,
            measured={case_id: tuple(self._store.requests(case_id)) for case_id in ids},
            verdicts=verdicts,
        )

    def _host_of(self, unit: Unit, share: Share) -> str | None:
        """Where an earlier run left off with the unit: its ratios are to be between its engines."""
        hosts = {(facts.arm, facts.start): facts.host for facts in self._store.engines()}
        last = ((case.arm, share.measured[case.id][-1:]) for case in reversed(unit.cases))
        found = (hosts.get((arm, record.start)) for arm, records in last for record in records)
        return next((host for host in found if host is not None), None)

    def _end_pauses(self, needs: dict[int, Needs]) -> None:
        """Send what has waited long enough; wait for the first where nothing else is under way."""
        if self._paused and not self._running:
            time.sleep(max(0.0, min(at for at, _ in self._paused) - time.monotonic()))
        now = time.monotonic()
        for at, one in list(self._paused):
            if at <= now:
                self._paused.remove((at, one))
                self._submit(one.unit, needs[one.unit.number], one.number, one.unbegun)

    def _end(self, attempt: _Attempt, needs: Needs, news: News) -> None:
        """Keep why a unit ended before its time; have it measured further where its node died."""
        keeper, unit, lost = attempt.keeper, attempt.unit, news.lost
        if lost is None and keeper.status is not None and keeper.status < KILLED:
            if keeper.status != 0:
                why = keeper.refused or f"the unit ended with status {keeper.status}:\n{keeper.log}"
                self._fail(unit, f"{keeper.host}: {why}")
            return
        why = lost or f"the unit was killed with status {keeper.status}:\n{keeper.log}".strip()
        if not self._is_left(unit):
            return
        if not (attempt.has_begun or news.ran):
            self._again_later(attempt, why)
        elif attempt.number == ATTEMPTS:
            self._fail(unit, f"{ATTEMPTS} attempts failed, the last one on {keeper.host}: {why}")
        else:
            number = attempt.number + 1
            self._progress.say(
                f"{keeper.host} is lost to {unit}: {why}\n"
                f"What is not measured of it goes to another (attempt {number} of {ATTEMPTS})"
            )
            self._submit(unit, needs, number, attempt.unbegun)

    def _again_later(self, attempt: _Attempt, why: str) -> None:
        """Send what no host began once more, but for the UNBEGUN-th time."""
        unit = attempt.unit
        if attempt.unbegun == UNBEGUN:
            self._fail(unit, f"sent {UNBEGUN + 1} times, and no host began; the last time: {why}")
            return
        self._progress.say(f"{unit} was lost before its host began: {why}\nIt is sent again.")
        attempt.unbegun += 1
        self._paused.append((time.monotonic() + PAUSE_S, attempt))

    def _fail(self, unit: Unit, why: str) -> None:
        """Give the cases that nobody measures any more the reason."""
        self._progress.say(f"{unit}: {why}")
        for case in unit.cases:
            if not is_measured(self._store, case):
                some = next(iter(self._store.requests(case.id)), None) is not None
                status = "partial" if some else "failed"
                trouble = Trouble("not_measured", why)
                fail_case(self._prepared, self._store, case, status, trouble)

    def _give_up_without_node(self, needs: dict[int, Needs]) -> None:
        """Fail what waits for a node when none is left that could take it, and none comes."""
        waiting = [at for at in self._running.values() if not at.has_begun]
        if len(waiting) < len(self._running):
            self._without_node_since = None
        if not waiting or len(waiting) < len(self._running) or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + min(NODES_S, NO_NODE_S)
        lacks = [self._cluster.lacks(needs[at.unit.number]) for at in waiting]
        if None in lacks:
            self._without_node_since = None
            return
        now = time.monotonic()
        if self._without_node_since is None:
            self._progress.say(f"waiting {NO_NODE_S:g} s for a node: {lacks[0]}")
            self._without_node_since = now
        elif now - self._without_node_since > NO_NODE_S:
            self._cluster.cancel()
            self._running.clear()
            for attempt, lack in zip(waiting, lacks, strict=True):
                self._fail(attempt.unit, f"no node is left for it: {lack}")
            for _, attempt in self._paused:
                self._fail(attempt.unit, f"no node is left for it: {lacks[0]}")
            self._paused.clear()


def order_of(prepared: Prepared) -> str:
    """What every host is told of the run: everything by content, nothing by a path of this machine."""
    config = prepared.config
    load = config.load
    if load.tape is not None:
        load = load.model_copy(update={"tape": load.tape.absolute()})
    chosen: dict[str, list[int]] = {}
    own = {one.label: set(one.k) for one in config.speculation}
    for arm in prepared.plan.arms:
        if arm.k and arm.k not in own[arm.label]:
            chosen.setdefault(arm.label, []).append(arm.k)
    sets = {
        name: SentSet(
            prompts=tuple(one.prompts),
            sha256=one.sha256,
            source=one.source,
            available=one.available,
        )
        for name, one in prepared.prompt_sets.items()
    }
    return Order(
        version=__version__,
        config=config.model_copy(update={"load": load}).model_dump(mode="json"),
        prompt_sets=sets,
        together=prepared.plan.together,
        chosen_k={label: tuple(ks) for label, ks in chosen.items()},
    ).model_dump_json()


def on(cluster: Cluster) -> Executor:
    """What `run.execute` takes to have a run measured by *cluster*, which it leaves idle."""

    @contextmanager
    def fanned_out(prepared: Prepared, store: RunStore, progress: Progress) -> Iterator[Measure]:
        try:
            yield FanOut(cluster, store, progress).measure
        finally:
            cluster.cancel()

    return fanned_out
