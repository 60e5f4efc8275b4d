"""A method over its k: what a step costs, what is predicted, which k is best. From a run's cases."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from specbench.analysis import cost
from specbench.analysis.cases import Condition, MeasuredCase, Requests
from specbench.analysis.cost import BestK, Choice, CostModel, Predicted
from specbench.analysis.hosts import hosts_of, on_one_host
from specbench.analysis.outlines import Request
from specbench.analysis.speedup import Key


@dataclass(frozen=True)
class Curve:
    """One method (by its arms' `label`) under one condition (prompt set, max_tokens, concurrency).

    `best` is among the measured k and vanilla, those with a flag left out where the rows' choice is
    known. `predicted` holds every k from 1 to the largest that
    was measured, from vanilla, k = 1 and that largest alone; empty where `not_predicted` says why.
    """

    label: str
    method: str
    condition: Condition
    model: CostModel | None
    best: BestK | None
    predicted: Mapping[int, Predicted]
    predicted_best: BestK | None
    not_predicted: str | None


Choices = Mapping[tuple[Condition, str], Choice]  # by condition and label


def curves(
    cases: Iterable[MeasuredCase], *, baseline: str | None, chosen: Choices = MappingProxyType({})
) -> list[Curve]:
    """The curves of a run, by condition and label in the order in which they are met.

    *chosen* is what the rows call the best k (`rows.choices`); without, it is chosen here, where
    nothing is known of flags.
    """
    found: dict[tuple[Condition, str], list[MeasuredCase]] = {}
    beside: dict[Condition, list[MeasuredCase]] = {}
    for case in cases:
        if case.arm == baseline:
            beside.setdefault(case.condition, []).append(case)
        elif case.k:
            found.setdefault((case.condition, case.label), []).append(case)
    return [
        _curve(label, condition, of_label, beside.get(condition, []), chosen)
        for (condition, label), of_label in found.items()
    ]


def _curve(
    label: str,
    condition: Condition,
    cases: Sequence[MeasuredCase],
    baseline: Sequence[MeasuredCase],
    chosen: Choices,
) -> Curve:
    by_k: dict[int, Requests] = {}
    group_of = {case.k: case.group for case in cases}
    engines_of = {case.k: case.engines for case in cases}
    for case in cases:
        by_k.setdefault(case.k, {}).update(case.keyed())
    vanilla: dict[int, Requests] = {}
    for case in baseline:
        vanilla.setdefault(case.group, {}).update(case.keyed())
    first = vanilla.get(group_of[min(by_k)], {})
    measured: dict[int, Mapping[Key, Request]] = {0: first}
    hosts = hosts_of(baseline[0].engines) if baseline else {}
    for k, requests in by_k.items():  # what another host answered than vanilla is not compared
        beside, own = vanilla.get(group_of[k], {}), hosts_of(engines_of[k])
        measured[k] = on_one_host(requests, beside, own, hosts)
    pace = {k: cost.pace_of(first, vanilla.get(group_of[k], {})) for k in by_k}
    method = cases[0].method
    predicted: Mapping[int, Predicted] = {}
    predicted_best, why = None, None
    try:
        _must_draft_one_by_one(cases)
        prediction = cost.predict(measured, method, pace=pace)
        predicted, predicted_best = prediction.at, prediction.best
    except cost.NotPredictable as refusal:
        why = str(refusal)
    return Curve(
        label=label,
        method=method,
        condition=condition,
        model=cost.fit(measured, pace, method=method),
        best=cost.best_k(measured, choice=chosen.get((condition, label)), pace=pace),
        predicted=predicted,
        predicted_best=predicted_best,
        not_predicted=why,
    )


def _must_draft_one_by_one(cases: Sequence[MeasuredCase]) -> None:
    """Raise NotPredictable where an option makes the engine draft otherwise than its method does."""
    argv = " ".join(word for case in cases for one in case.engines for word in one.argv or ())
    for option in ('"parallel_drafting": true', "num_speculative_tokens_per_batch_size"):
        if option in argv:
            raise cost.NotPredictable(f"drafts are not made one by one at a fixed k ({option})")


@dataclass(frozen=True)
class Estimate:
    """What a claimed acceptance length would give on this machine, by the times of its steps."""

    label: str
    condition: Condition
    k: int
    tau: float
    step_ms: float
    vanilla_ms: float
    speedup: float


def estimates(found: Iterable[Curve], tau: float, k: int | None = None) -> list[Estimate]:
    """The speed-up that *tau* tokens a step would give at *k*, or at each measured k that allows it.

    Of methods whose steps are of two kinds there is none; `refusals` says why.

    Raises:
        UserError: *tau* cannot be at *k*, or nothing tells the time of a step there.
    """
    made = []
    for curve in found:
        if curve.model is None or curve.model.mixed:
            continue
        ks = [k] if k is not None else [one for one in curve.model.step_ms if 1 <= tau <= one + 1]
        for one in ks:
            if tau <= one + 1 and curve.model.step_ms_at(one) is None:
                continue  # nothing tells this method's time at that k; it may tell another's
            speedup = cost.what_if(curve.model, tau, one)
            step_ms, vanilla_ms = curve.model.step_ms_at(one), curve.model.vanilla_ms
            assert step_ms is not None  # what_if has raised
            made.append(
                Estimate(curve.label, curve.condition, one, tau, step_ms, vanilla_ms, speedup)
            )
    return made


def refusals(found: Iterable[Curve]) -> list[str]:
    """Why some methods have no estimate, a line each."""
    mixed = [(curve.label, curve.model.mixed) for curve in found if curve.model]
    return [f"{label}: {why}" for label, why in dict.fromkeys(mixed) if why]
