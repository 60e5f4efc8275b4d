"""How much faster an arm is than its baseline: paired, with an interval for each of two questions.

Per (prompt, turn, repeat, cycle) the ratio baseline / arm of TPOT (of latency too, apart); the
speed-up is the geometric mean over prompts. A log ratio is taken for a sum of effects,

    d = speed-up + prompt + restart + noise

and each question has the effects that count for it:

    on prompts like these   prompts are a sample of more: prompt + restart (noise is in both)
    on this prompt set      prompts are given: noise or, where engines were restarted, restart (noise
                            is in it), and prompts of the set that were not measured, with the finite
                            population correction (Cochran 1977, 2.6)

The effects that count are independent, and each is resampled on its own: the means of prompts (of all
their turns and cycles), and noise by its residuals (Efron & Tibshirani 1993, 9.4). Percentiles of a
small sample are too narrow, so deviations are stretched to a t interval's (Hesterberg 2015, 3.4).
Restarts are too few to be resampled at all: their mean is drawn from Student's t, which is exact.

Whoever tries several arms and names the fastest needs intervals that hold all at once: those of N arms
are stretched from a t interval's 95% to its 1 - 5% / N (Bonferroni; `Ratio.among`).
"""

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbench.analysis.metrics import latency_ms, tokens_per_step, tpot_ms, ttft_ms
from specbench.analysis.outlines import Request

RESAMPLES = 4000
DRAWS_AT_ONCE = 1 << 18
CONFIDENCE = 0.95
FEWEST_RESIDUALS = 3  # fewer say nothing of the noise
LARGEST = 700.0  # a logarithm: of more there is no exponential
Floats = NDArray[np.float64]
Question = Literal["like_these", "this_set"]
NoiseSource = Literal["restarts", "cycles", "steps"]


class Key(NamedTuple):
    """What two requests of a pair share. A repeat is an engine restart, a cycle a further pass
    over the prompts on the same engines.
    """

    prompt_id: str
    turn: int
    repeat: int
    cycle: int = 0


Pair = tuple[Key, Request, Request]
Cells = Mapping[Key, float]


@dataclass(frozen=True)
class Interval:
    """A 95% interval of a speed-up; `freedom` are the degrees of freedom that it rests on."""

    low: float
    high: float
    freedom: float = math.inf

    @property
    def half_width(self) -> float:
        """Half of its width as a share of the speed-up: 0.02 is ±2%."""
        return math.log(self.high / self.low) / 2

    @property
    def excludes_1(self) -> bool:
        """Whether a difference is shown."""
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Ratio:
    """A speed-up: `value` times as fast, over `prompts` prompts and `restarts` engine starts.

    `like_these` is None for fewer than 2 prompts, which say nothing of their spread; `this_set`
    where nothing tells the noise from the prompts (`noise_from` is None): neither restarts nor
    cycles, nor steps, whose time does not depend on what the prompt lets the draft guess.
    `prompt_spread` is the standard deviation of the prompts' log ratios without the noise.
    """

    value: float
    like_these: Interval | None
    this_set: Interval | None
    prompts: int
    restarts: int
    noise_from: NoiseSource | None
    prompt_spread: float | None = None

    def prompts_needed(self, within: float) -> int | None:
        """How many prompts it takes to answer for prompts like these to ± *within* (a share).

        However often each is sent, and with restarts that do not differ; None if it is not known.
        """
        if self.prompt_spread is None:
            return None
        return math.ceil((norm_quantile() * self.prompt_spread / within) ** 2)

    def interval(self, question: Question) -> Interval | None:
        """The interval that answers *question*."""
        return self.like_these if question == "like_these" else self.this_set

    def among(self, tried: int, question: Question = "like_these") -> Interval | None:
        """The wider interval for one of *tried* arms: with 95% those of all hold at once.

        By Bonferroni's inequality, however much the arms have in common; 1 leaves it as it is.
        """
        interval = self.interval(question)
        if interval is None or tried <= 1:
            return interval
        by = _quantile(interval.freedom, tried) / _quantile(interval.freedom, 1)
        center = math.log(self.value)
        ends = (center + by * (math.log(end) - center) for end in (interval.low, interval.high))
        low, high = (math.exp(max(-LARGEST, min(LARGEST, end))) for end in ends)
        return Interval(low, high, interval.freedom)

    @property
    def shown(self) -> bool | None:
        """Whether a difference is shown on prompts like these; None without an interval.

        For this arm alone: who picks one of several asks `among`.
        """
        return self.like_these.excludes_1 if self.like_these else None


@dataclass(frozen=True)
class Speedup:
    """The ratios of one arm to its baseline under the same conditions.

    `total_time` is all the baseline's latencies together over all the arm's: long answers weigh
    more in it.
    """

    tpot: Ratio | None
    latency: Ratio | None
    ttft: Ratio | None
    total_time: float | None
    pairs: int
    unpaired: int
    asked_otherwise: int = 0  # of the unpaired, later turns that both answered: see `pairs_of`


def compare(
    baseline: Mapping[Key, Request],
    arm: Mapping[Key, Request],
    *,
    speculative: bool = True,
    set_size: int | None = None,
    seed: int = 0,
) -> Speedup:
    """The speed-up of *arm* over *baseline*, from the requests that both answered.

    *set_size* is how many prompts the whole set has, of which these may be a part. An arm that is
    not *speculative* emits one token a step.
    """
    answered = _answered_by_both(baseline, arm)
    pairs = [pair for pair in answered if _asked_alike(*pair)]
    make = partial(ratio_of, set_size=set_size, seed=seed)
    arm_ms = sum(latency_ms(other) for _, _, other in pairs)
    return Speedup(
        tpot=_tpot_ratio(pairs, speculative=speculative, set_size=set_size, seed=seed),
        latency=make(_cells(pairs, partial(_log_ratio, latency_ms)), {}),
        ttft=make(_cells(pairs, partial(_log_ratio, ttft_ms)), {}),
        total_time=sum(latency_ms(base) for _, base, _ in pairs) / arm_ms if arm_ms else None,
        pairs=len(pairs),
        unpaired=len(baseline) + sum(key not in baseline for key in arm) - len(pairs),
        asked_otherwise=len(answered) - len(pairs),
    )


def tpot_ratio(
    baseline: Mapping[Key, Request],
    arm: Mapping[Key, Request],
    *,
    speculative: bool = True,
    set_size: int | None = None,
    seed: int = 0,
) -> Ratio | None:
    """The ratio of TPOT alone, see `compare`."""
    pairs = pairs_of(baseline, arm)
    return _tpot_ratio(pairs, speculative=speculative, set_size=set_size, seed=seed)


def _tpot_ratio(
    pairs: Sequence[Pair], *, speculative: bool, set_size: int | None, seed: int
) -> Ratio | None:
    steps = _cells(pairs, partial(_log_step_ratio, speculative=speculative))
    cells = _cells(pairs, partial(_log_ratio, tpot_ms))
    return ratio_of(cells, steps, set_size=set_size, seed=seed)


def pairs_of(baseline: Mapping[Key, Request], arm: Mapping[Key, Request]) -> list[Pair]:
    """The requests that both answered, in the order of their keys.

    Of a conversation only as far as both were asked the same: from the second turn on a prompt holds
    the engine's own answers.
    """
    return [pair for pair in _answered_by_both(baseline, arm) if _asked_alike(*pair)]


def _answered_by_both(baseline: Mapping[Key, Request], arm: Mapping[Key, Request]) -> list[Pair]:
    both = sorted(key for key in baseline if key in arm and baseline[key].ok and arm[key].ok)
    return [(key, baseline[key], arm[key]) for key in both]


def _asked_alike(key: Key, base: Request, other: Request) -> bool:
    """Also true for every first turn, which `hygiene` judges."""
    return key.turn == 0 or base.prompt_hash == other.prompt_hash


def _cells(
    pairs: Sequence[Pair], log_ratio: Callable[[Request, Request], float | None]
) -> dict[Key, float]:
    found = ((key, log_ratio(base, other)) for key, base, other in pairs)
    return {key: value for key, value in found if value is not None}


def _log_ratio(
    measure: Callable[[Request], float | None], base: Request, other: Request
) -> float | None:
    a, b = measure(base), measure(other)
    return math.log(a / b) if a and b else None


def _log_step_ratio(base: Request, other: Request, *, speculative: bool) -> float | None:
    """The log ratio of TPOT without what acceptance made of it: that of the times of a step."""
    ratio = _log_ratio(tpot_ms, base, other)
    emitted = tokens_per_step(other) if speculative else 1.0
    return ratio - math.log(emitted) if ratio is not None and emitted else None


# --- the interval --------------------------------------------------------------------------------


class _Effect(NamedTuple):
    """One source of variation of the mean: draws of its deviation, its variance, and how well known."""

    draws: Floats  # [RESAMPLES], stretched for their degrees of freedom
    variance: float
    freedom: float


def ratio_of(cells: Cells, steps: Cells, *, set_size: int | None, seed: int) -> Ratio | None:
    """Geometric mean over prompts with both intervals; None where there is nothing to compare.

    *cells* are log ratios, *steps* those of the times of a step (for the noise; may be empty).
    """
    if not cells:
        return None
    rng = np.random.default_rng(seed)
    values = np.array(list(cells.values()))
    by_prompt = _Groups(key.prompt_id for key in cells)
    means = by_prompt.means(values)
    center = float(means.mean())
    prompt = _of_sample(means - center, rng)
    restarts = len({key.repeat for key in cells})
    table = _by_restart(cells) if restarts > 1 else np.empty((0, 1))
    restart = _of_restarts(table.mean(axis=0), rng) if len(table) else None
    noise, of_noise = restart, 0.0
    source: NoiseSource | None = "restarts" if restart else None
    if restarts > 1:
        of_noise = _interaction(table, len(cells)) * _shrinks_to(by_prompt)
    else:
        residuals, freedom, source = _noise(cells, steps)
        if source:
            of_noise = float((residuals**2).sum() / freedom) * _shrinks_to(by_prompt)
            noise = _Effect(_noise_draws(residuals, by_prompt, freedom, rng), of_noise, freedom)
    true = max(0.0, prompt.variance - of_noise) if prompt else 0.0  # of prompts, without the noise
    left_out = 1 - len(means) / set_size if set_size and set_size > len(means) else 0.0
    unmeasured = _scaled(prompt, left_out * true) if prompt and true and left_out else None
    return Ratio(
        value=math.exp(center),
        like_these=_interval(center, _each_once(prompt, true, restart)) if prompt else None,
        this_set=_interval(center, [noise, unmeasured])
        if noise and (prompt or not left_out)
        else None,
        prompts=len(means),
        restarts=restarts,
        noise_from=source,
        prompt_spread=math.sqrt(len(means) * true) if prompt and source else None,
    )


def _each_once(prompt: _Effect, true: float, restart: _Effect | None) -> list[_Effect | None]:
    """Prompts and restarts with the noise in one of them: in the restarts where there are some."""
    if restart is None:
        return [prompt]
    return [_scaled(prompt, true) if true else None, restart]


def _interval(center: float, effects: Sequence[_Effect | None]) -> Interval:
    counted = [effect for effect in effects if effect]
    total = np.sum([effect.draws for effect in counted], axis=0)
    low, high = np.quantile(total, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    low, high = (math.exp(center + float(end)) for end in (low, high))
    return Interval(low, high, _freedom(counted))


def _freedom(effects: Sequence[_Effect]) -> float:
    """Degrees of freedom of the sum of *effects* (Satterthwaite 1946)."""
    squares = sum(effect.variance**2 / effect.freedom for effect in effects)
    if not squares:  # no effect at all, so that there is nothing to stretch
        return min((effect.freedom for effect in effects), default=math.inf)
    return sum(effect.variance for effect in effects) ** 2 / squares


def norm_quantile() -> float:
    """How many standard deviations the interval reaches to either side under a normal law."""
    return NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@functools.cache
def _quantile(freedom: float, tried: int) -> float:
    """How many standard errors a t interval with this much *freedom*, one of *tried*, reaches."""
    level = 1 - (1 - CONFIDENCE) / tried / 2
    if math.isinf(freedom):
        return NormalDist().inv_cdf(level)
    from scipy.special import stdtrit  # slow to import, and not needed by most commands

    return float(stdtrit(freedom, level))


def _stretch(freedom: float) -> float:
    """How much longer a t interval with this much *freedom* is than a normal one."""
    return _quantile(freedom, 1) / norm_quantile()


def _of_sample(deviations: Floats, rng: np.random.Generator) -> _Effect | None:
    """The effect of a sample's mean: deviations drawn with replacement, as many as there are."""
    count = len(deviations)
    if count < 2:
        return None
    at_once = max(1, DRAWS_AT_ONCE // count)  # whole, 1000 prompts take 64 MB
    parts = [min(at_once, RESAMPLES - done) for done in range(0, RESAMPLES, at_once)]
    draws = np.concatenate(
        [deviations[rng.integers(0, count, (part, count))].mean(axis=1) for part in parts]
    )
    unbiased = math.sqrt(count / (count - 1))  # resampling alone gives the variance over n
    variance = float((deviations**2).sum() / (count - 1) / count)
    return _Effect(draws * unbiased * _stretch(count - 1), variance, count - 1)


def _scaled(effect: _Effect, variance: float) -> _Effect:
    scale = math.sqrt(variance / effect.variance)
    return _Effect(effect.draws * scale, variance, effect.freedom)


def _by_restart(cells: Cells) -> Floats:
    """What each restart measured of each (prompt, turn): [turns, restarts], cycles averaged.

    Only of those that every restart has, so that what one of them lacks does not count as its own.
    """
    keys, values = list(cells), list(cells.values())
    repeats = sorted({key.repeat for key in keys})
    shared = []
    for places in _Groups((key.prompt_id, key.turn) for key in keys):
        measured: dict[int, list[float]] = {}
        for place in places:
            measured.setdefault(keys[place].repeat, []).append(values[place])
        if len(measured) == len(repeats):
            shared.append([np.mean(measured[repeat]) for repeat in repeats])
    return np.array(shared).reshape(len(shared), len(repeats))


def _interaction(table: Floats, cells: int) -> float:
    """The variance of a pair around what its prompt and its restart make it: noise.

    *table* as `_by_restart` makes it of so many *cells*; 0 where it does not say.
    """
    turns, restarts = table.shape
    if turns < 2:
        return 0.0
    left = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    averaged = max(1.0, cells / table.size)  # pairs in a place of the table: one a cycle
    return float((left**2).sum() / ((turns - 1) * (restarts - 1))) * averaged


def _of_restarts(means: Floats, rng: np.random.Generator) -> _Effect:
    """The effect of restarts, from the mean of each, and of the noise in these means."""
    count = len(means)
    from scipy.special import stdtrit

    variance = float(np.var(means, ddof=1) / count)
    strata = (np.arange(RESAMPLES) + 0.5) / RESAMPLES  # whose quantiles are those of the law
    draws = rng.permutation(stdtrit(count - 1, strata))
    return _Effect(draws * math.sqrt(variance), variance, count - 1)


def _noise(cells: Cells, steps: Cells) -> tuple[Floats, float, NoiseSource | None]:
    """Residuals of single measurements, their degrees of freedom, and where they are from.

    From pairs of the same prompt, turn and restart that were measured more than once. Else from
    the times of a step, whose spread over prompts is noise and, at most, the length of the
    context: an upper bound.
    """
    again: list[list[float]] = []
    if any(key.cycle for key in cells):
        measured = list(cells.values())
        groups = _Groups((key.prompt_id, key.turn, key.repeat) for key in cells)
        again = [[measured[place] for place in group] for group in groups if len(group) > 1]
    freedom = sum(len(group) - 1 for group in again)
    if freedom >= FEWEST_RESIDUALS:
        centered = [np.array(group) - np.mean(group) for group in again]
        return np.concatenate(centered), freedom, "cycles"
    values = np.array(list(steps.values()))
    if len(values) < FEWEST_RESIDUALS:
        return np.array([]), 1, None
    return values - values.mean(), len(values) - 1, "steps"


def _noise_draws(
    residuals: Floats, by_prompt: "_Groups", freedom: float, rng: np.random.Generator
) -> Floats:
    """Deviations of the mean over prompts when every pair gets a residual drawn from all."""
    unbiased = math.sqrt(len(residuals) / freedom) * _stretch(freedom)
    total = np.zeros(RESAMPLES)
    for size in by_prompt.sizes:
        drawn = residuals[rng.integers(0, len(residuals), (RESAMPLES, size))]
        total += drawn.mean(axis=1)
    return total * unbiased / len(by_prompt)


def _shrinks_to(by_prompt: "_Groups") -> float:
    """The variance of the mean over prompts, in units of a single pair's."""
    return sum(1 / size for size in by_prompt.sizes) / len(by_prompt) ** 2


class _Groups:
    """Places of the same part, in the order in which parts are first met."""

    def __init__(self, parts: Iterable[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        of = np.fromiter((numbers.setdefault(part, len(numbers)) for part in parts), np.int64)
        self._order, counts = np.argsort(of, kind="stable"), np.bincount(of)
        self._ends = np.cumsum(counts)
        self.sizes: list[int] = counts.tolist()

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        for size, end in zip(self.sizes, self._ends, strict=True):
            yield self._order[end - size : end].tolist()

    def means(self, values: Floats) -> Floats:
        """The mean of each part's *values*."""
        ordered, last = values[self._order], self._ends - 1
        found = ordered[last]
        for part in np.flatnonzero(np.array(self.sizes) > 1):
            found[part] = np.mean(ordered[last[part] + 1 - self.sizes[part] : last[part] + 1])
        return found
