"""Checks of the two arms of a ratio: was it the same work, and is the difference over the noise?"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from specbench.analysis.hygiene import PairFacts
from specbench.analysis.hygiene.setup import engine_differences, machine_differences
from specbench.analysis.metrics import tpot_ms
from specbench.analysis.outlines import Request
from specbench.analysis.speedup import Key, Pair

LENGTH_GAP = 0.02  # arms whose outputs differ in length by more are not the same work
SHOWN = 3  # differences that a finding lists
T = TypeVar("T")


def other_prompts(pair: PairFacts) -> str | None:
    """The arms were not asked the same. Later turns hold the engines' own answers: not judged."""
    sides = (pair.baseline.prompts, pair.arm.prompts)
    planned = [set[str]() if sides[0] is sides[1] else {one.id for one in side} for side in sides]
    if all(planned) and (apart := planned[0] ^ planned[1]):
        return f"{len(apart)} prompts belong to one of the two arms only ({min(apart)})"
    first = [(key, base, arm) for key, base, arm in pair.pairs if key.turn == 0]
    unlike = [key.prompt_id for key, a, b in first if a.prompt_hash != b.prompt_hash]
    if unlike:
        return f"{len(unlike)} of {len(first)} prompts were another text ({unlike[0]})"
    unlike = [key.prompt_id for key, a, b in first if _unlike(a.prompt_tokens, b.prompt_tokens)]
    if unlike:
        return (
            f"{len(unlike)} of {len(first)} prompts became another number of tokens "
            f"({unlike[0]}): another chat template or tokenizer?"
        )
    return None


def _unlike(one: int | None, other: int | None) -> bool:
    return one is not None and other is not None and one != other


def other_sampling(pair: PairFacts) -> str | None:
    """The arms were sent different sampling, seeds included."""
    both = [(key, a.sampling, b.sampling) for key, a, b in pair.pairs if a.sampling and b.sampling]
    for key, one, other in both:
        for name in one:
            if one[name] != other.get(name):
                return f"{name} is {one[name]} for the baseline, {other.get(name)} here ({key.prompt_id})"
    return None


def other_hosts(pair: PairFacts) -> str | None:
    """Some of the two arms' requests were answered on different hosts."""
    if not pair.apart:
        return None
    where = [
        ", ".join(sorted({engine.host for engine in side.engines if engine.host}))
        for side in (pair.baseline, pair.arm)
    ]
    return (
        f"{pair.apart} requests were answered on another host than the baseline's and are in no "
        f"ratio (baseline: {where[0]}; here: {where[1]})"
    )


def other_setup(pair: PairFacts) -> str | None:
    """The engines differ in more than their speculation, or the machines do."""
    found = engine_differences(pair.baseline.engines, pair.arm.engines)
    found += machine_differences(pair.baseline.machine, pair.arm.machine)
    if not found:
        return None
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"set up unlike the baseline: {'; '.join(found[:SHOWN])}{more}"


def unequal_lengths(pair: PairFacts) -> str | None:
    """The arms did not do the same work: outputs to the same prompts differ in total length."""
    base = sum(one.output_tokens or 0 for _, one, _ in pair.pairs)
    arm = sum(other.output_tokens or 0 for _, _, other in pair.pairs)
    if not base or not arm or abs(arm / base - 1) <= LENGTH_GAP:
        return None
    differ = f"{abs(arm / base - 1):.1%} {'longer' if arm > base else 'shorter'}"
    return f"outputs are {differ} than the baseline's: compare TPOT only"


def noise_exceeds_claim(pair: PairFacts) -> str | None:
    """A difference is claimed that is smaller than what the machine makes by itself.

    Measured one arm after the other, the baseline's own passes over the prompts (repeats, cycles)
    say how much that is. Measured prompt by prompt in turns, both arms feel the machine alike and
    it cancels: there it is how far restarts differ in the ratio.
    """
    ratio = pair.speedup.tpot
    intervals = [i for i in (ratio.like_these, ratio.this_set) if i] if ratio else []
    if ratio is None or (intervals and not any(i.excludes_1 for i in intervals)):
        return None
    claimed = abs(ratio.value - 1)
    if _in_turns(pair.pairs):
        spread = _spread(pair.pairs, _log_ratio, lambda key: (key.repeat, 0))
        whose = "the speed-up differs"
    else:
        spread = _spread(pair.pairs, _log_baseline, lambda key: (key.repeat, key.cycle))
        whose = "the baseline's own TPOT differs"
    if spread <= claimed:
        return None
    return f"{whose} by {spread:.1%} between repeats, more than the {claimed:.1%} claimed"


def _in_turns(pairs: Sequence[Pair]) -> bool:
    """Whether the arms were measured during the same time, in every repeat."""
    spans: dict[int, list[Pair]] = defaultdict(list)
    for pair in pairs:
        spans[pair[0].repeat].append(pair)
    return all(
        max(min(base.sent_ns for _, base, _ in some), min(arm.sent_ns for _, _, arm in some))
        < min(max(base.end_ns for _, base, _ in some), max(arm.end_ns for _, _, arm in some))
        for some in spans.values()
    )


def _log_baseline(base: Request, _: Request) -> float | None:
    time = tpot_ms(base)
    return math.log(time) if time else None


def _log_ratio(base: Request, arm: Request) -> float | None:
    one, other = tpot_ms(base), tpot_ms(arm)
    return math.log(one / other) if one and other else None


def _spread(
    pairs: Iterable[Pair],
    measure: Callable[[Request, Request], float | None],
    pass_of: Callable[[Key], tuple[int, int]],
) -> float:
    """By which share the slowest pass differs from the fastest; 0 for a single one.

    Each request against the mean of its own prompt, so that a pass that lacks some prompts does
    not differ by that. A pass that has less than half of the prompts says too little.
    """
    measured = [(key, measure(base, arm)) for key, base, arm in pairs]
    values = {key: value for key, value in measured if value is not None}
    means = _means(values, lambda key: (key.prompt_id, key.turn))
    deviations = {key: value - means[key.prompt_id, key.turn] for key, value in values.items()}
    sizes: dict[tuple[int, int], int] = defaultdict(int)
    for key in deviations:
        sizes[pass_of(key)] += 1
    passes = _means(deviations, pass_of)
    full = [value for name, value in passes.items() if sizes[name] * 2 >= max(sizes.values())]
    return math.exp(max(full) - min(full)) - 1 if full else 0.0


def _means(values: Mapping[Key, float], part: Callable[[Key], T]) -> dict[T, float]:
    parts: dict[T, list[float]] = defaultdict(list)
    for key, value in values.items():
        parts[part(key)].append(value)
    return {name: sum(some) / len(some) for name, some in parts.items()}
