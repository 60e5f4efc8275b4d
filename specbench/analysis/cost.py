"""Why an arm is as fast as it is, and how fast it would be at another k. Pure.

The model (Leviathan et al. 2023, theorem 3.8, with a measured acceptance length in place of their
single acceptance rate): a target step at k costs T_step(k) and emits tau(k) tokens, a vanilla step
T_AR and one token, so

    speed-up   S(k) = T_AR * tau(k) / T_step(k)      break-even   tau = T_step(k) / T_AR
    step time  T_step(k) = T_v + k * T_d             verify overhead T_v / T_AR,  c = T_d / T_AR

Step times are decode time (last chunk - first chunk) over target steps, each summed over prompts (a
prompt's requests averaged first). `tau` is tokens that reached the client per target step, geometric
mean over prompts as in speedup.py: with it a prompt's T_AR * tau / step time is its TPOT ratio. It is
not `Acceptance.length`, which counts accepted tokens past a request's end too (S(k) would be 3%
too high at 24 tokens a request, k = 5) and weighs prompts by their steps.

Prediction from k = 1 and k_max: a chain drafter's first k tokens do not depend on how many follow,
so 1 + p_1 + ... + p_k at k_max is tau(k), had drafts at k begun where those at k_max began. They
do not: k_max leaps over what is easy, so that its drafts begin in harder places than those of a
smaller k (up to 10% too low in simulated bursts), and fewer tokens are trimmed at the end under a
smaller k. Both deviations are known at k = 1 and at k_max, where tau was measured; between them
their logarithm is interpolated linearly in k. Simulated chains, iid, bursty or of unequal prompts,
come out within 2.1% (replaying per-step counts did no better). Step times: the line through both.

All of this takes every step at k to be of one kind. Where drafts are looked up, a step without a match
has none: its time is vanilla's, and how many there are changes with tau. The mean step of such a mixture
tells neither a break-even nor what another tau would give (`CostModel.mixed`).
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specbench.analysis.hygiene import AGREEMENT as COUNTS_AGREE
from specbench.analysis.hygiene.acceptance import LOOK_UP_METHODS
from specbench.analysis.metrics import decode_steps, held_up, later_tokens, tpot_ms
from specbench.analysis.outlines import Request
from specbench.analysis.speedup import DRAWS_AT_ONCE, RESAMPLES, Key
from specbench.errors import UserError
from specbench.vllm_names import drafts_are_chains

WHOLE = 0.9  # of the requests of the fullest k: with fewer, a k broke off
AGREEMENT = 0.03  # expected and measured speed-up may differ by this share
Floats = NDArray[np.float64]
Measured = Mapping[int, Mapping[Key, Request]]  # by k (0: vanilla), one method, one condition
# What the times of each k are to be multiplied with: the machine's pace when vanilla was measured
# beside that k, against the pace when the vanilla of a `Measured` was. 1 where it is the same.
Pace = Mapping[int, float]
SAME_PACE: Pace = {}


class NotPredictable(ValueError):
    """Other k cannot be predicted from what was measured; the message says why."""


@dataclass(frozen=True)
class Line:
    """Step time as `verify_ms` + k * `draft_ms` (T_v, T_d).

    `residual` is the largest deviation of a measured step time from it, as a share; None for two
    k, which always lie on a line.
    """

    verify_ms: float
    draft_ms: float
    residual: float | None

    def step_ms(self, k: int) -> float:
        """Milliseconds of a target step at *k*."""
        return self.verify_ms + k * self.draft_ms


@dataclass(frozen=True)
class CostModel:
    """Step times of vanilla (`vanilla_ms`, T_AR) and of each measured k >= 1, and tokens per step.

    From `requests` requests over `prompts` prompts, the same under every k. `line` is None for
    fewer than two k. `mixed` says why a mean step mixes drafted and undrafted ones, where it does:
    then there is no line, no break-even and no what-if, and the rest is as measured.
    """

    vanilla_ms: float
    step_ms: Mapping[int, float]
    tau: Mapping[int, float]
    line: Line | None
    prompts: int
    requests: int
    mixed: str | None = None

    @property
    def verify_overhead(self) -> float | None:
        """T_v / T_AR: a verify step without its drafts, in vanilla steps."""
        return self.line.verify_ms / self.vanilla_ms if self.line else None

    @property
    def draft_cost(self) -> float | None:
        """c = T_d / T_AR: a drafted token, in vanilla steps."""
        return self.line.draft_ms / self.vanilla_ms if self.line else None

    def step_ms_at(self, k: int) -> float | None:
        """Milliseconds of a step at *k*: as measured, else by the line; None without either."""
        measured = self.step_ms.get(k)
        return self.line.step_ms(k) if measured is None and self.line else measured

    def break_even(self, k: int) -> float | None:
        """The tokens per step at which *k* is as fast as vanilla; None where no step time is, and
        where steps are mixed.
        """
        step = None if self.mixed else self.step_ms_at(k)
        return None if step is None else step / self.vanilla_ms

    def speedup(self, k: int) -> float:
        """The speed-up expected at a measured *k* from step times and tokens per step."""
        return self.vanilla_ms * self.tau[k] / self.step_ms[k]


@dataclass(frozen=True)
class Predicted:
    """What would be measured at one k: tokens per target step, a step's time, the speed-up."""

    tau: float
    step_ms: float
    speedup: float


@dataclass(frozen=True)
class BestK:
    """The fastest k (0: vanilla) and its speed-up; `share` of resamples of the prompts agree.

    `share` is None for fewer than 2 prompts. `flagged`: every k was flagged, so this one is too.
    """

    k: int
    speedup: float
    share: float | None
    prompts: int
    flagged: bool = False


@dataclass(frozen=True)
class Choice:
    """The k that a table's rows call the fastest (0: vanilla), out of `among`, with its speed-up.

    `among` are the k without a flag; all of them where each has one (`flagged`).
    """

    k: int
    speedup: float
    among: frozenset[int]
    flagged: bool


@dataclass(frozen=True)
class Prediction:
    """What is predicted for every k from 1 to the largest measured, and the best of these and 0."""

    at: Mapping[int, Predicted]
    best: BestK


@dataclass(frozen=True)
class Crossing:
    """The concurrency at which the speed-up has fallen to 1.

    `already` when it was no more than 1 at the lowest measured, which `concurrency` then is.
    """

    concurrency: float
    already: bool

    def __str__(self) -> str:
        if self.already:
            return f"already no faster at concurrency {self.concurrency:g}"
        return f"stops paying at concurrency {self.concurrency:.3g}"


def step_ms(record: Request, k: int) -> float | None:
    """Milliseconds of one target step of a request after its first chunk.

    None where steps are not known: under speculation (*k* > 0) without per-request metrics or
    when the first chunk held tokens of later steps too; with fewer than two chunks; with all
    chunks at once.
    """
    steps = _steps(record, k)
    return _decode_ms(record) / steps if steps else None


def fit(
    measured: Measured, pace: Pace = SAME_PACE, *, method: str | None = None
) -> CostModel | None:
    """The cost model of one *method* (vLLM's name), from the requests that every k answered.

    A k without any request of known step time is left out. None without vanilla, without another
    k, or without a common request.
    """
    common = _common(measured, _has_steps)
    if common is None:
        return None
    ks, keys = common
    means = {k: _decoding(measured, keys, k, pace).mean(axis=0).tolist() for k in ks}
    step = {k: decode_ms / steps for k, (decode_ms, steps, _) in means.items()}
    vanilla_ms = step.pop(0)
    mixed = _mixed(measured, keys, list(step), method)
    return CostModel(
        vanilla_ms=vanilla_ms,
        step_ms=step,
        tau={k: math.exp(means[k][2]) for k in step},
        line=None if mixed else _line(step),
        prompts=len({key.prompt_id for key in keys}),
        requests=len(keys),
        mixed=mixed,
    )


def _mixed(
    measured: Measured, keys: Sequence[Key], ks: Sequence[int], method: str | None
) -> str | None:
    """Why the steps of these requests are of two kinds, by the method or by what was counted."""
    if method in LOOK_UP_METHODS:
        return f"{method} looks drafts up, and a step without a match has none"
    for k in ks:
        chosen = [measured[k][key] for key in keys]
        drafts = sum(request.spec.drafts for request in chosen if request.spec)
        steps = sum(_steps(request, k) or 0 for request in chosen)
        if drafts < steps * (1 - COUNTS_AGREE):
            return f"at k = {k} only {drafts / steps:.0%} of the steps had a draft"
    return None


def pace_of(vanilla: Mapping[Key, Request], beside: Mapping[Key, Request]) -> float:
    """The pace for a `Pace`: vanilla steps over those of the same requests measured *beside* a k."""
    keys = [
        key
        for key in vanilla.keys() & beside.keys()
        if vanilla[key].ok and beside[key].ok and tpot_ms(vanilla[key]) and tpot_ms(beside[key])
    ]
    logs = [math.log((tpot_ms(vanilla[key]) or 1) / (tpot_ms(beside[key]) or 1)) for key in keys]
    return math.exp(sum(logs) / len(logs)) if logs else 1.0


def disagreement(expected: float, measured: float, tolerance: float = AGREEMENT) -> str | None:
    """A finding when the speed-up *expected* by the model is not the one *measured* by pairs.

    Both hold the same tau, so they differ where the time of a step is not the k's alone but the
    request's too: a few stalled requests, steps that grow with the context.
    """
    apart = expected / measured - 1
    if abs(apart) <= tolerance:
        return None
    return (
        f"step times and tokens per step give a speed-up of {expected:.2f}, measured was"
        f" {measured:.2f} ({apart:+.0%}): the time of a step is not the same for all requests"
    )


def predict(
    measured: Measured, method: str, *, pace: Pace = SAME_PACE, seed: int = 0
) -> Prediction:
    """Every k up to the largest in *measured*, from vanilla, k = 1 and the largest alone.

    Drafts are taken for sequential: whoever set `parallel_drafting` must not ask.

    Raises:
        NotPredictable: the method's drafts are not chains, or a measurement is missing.
    """
    top = max(measured, default=0)
    if not drafts_are_chains(method):
        raise NotPredictable(
            f"{method} does not draft token after token, so one k says nothing of another"
        )
    if top < 2 or not {0, 1} <= measured.keys():
        raise NotPredictable("a prediction needs vanilla, k = 1 and a larger k")
    common = _common({k: measured[k] for k in (0, 1, top)}, _has_steps)
    if common is None or common[0] != [0, 1, top]:
        raise NotPredictable(
            f"no request was answered by vanilla, k = 1 and k = {top} with step counts of its own"
        )
    keys = common[1]
    reached = _reached(measured[top], keys, top)
    prompts = len(reached)
    whole = [*(_decoding(measured, keys, k, pace) for k in (0, 1, top)), reached]
    vanilla, first, last, reached = _drawn(whole, seed)
    tau, step = _between(first, last, reached)
    speedup = vanilla[:, [0]] / vanilla[:, [1]] * tau / step
    points = zip(tau[0].tolist(), step[0].tolist(), speedup[0].tolist(), strict=True)
    return Prediction(
        at={k: Predicted(*point) for k, point in enumerate(points, start=1)},
        best=_best(range(top + 1), np.insert(speedup, 0, 1, axis=1), prompts),
    )


def _between(first: Floats, last: Floats, reached: Floats) -> tuple[Floats, Floats]:
    """Tokens per step and ms of a step at k = 1..top, [draws, top] each.

    From what `_decoding` says of k = 1 and top, and `_reached` of top, one row a draw.
    """
    ks = np.arange(1, reached.shape[1])
    way = (ks - 1) / (len(ks) - 1)  # 0 at k = 1, 1 at top
    chained = 1 + np.cumsum(reached[:, 1:] / reached[:, [0]], axis=1)
    low, high = np.exp(first[:, [2]]) / chained[:, [0]], np.exp(last[:, [2]]) / chained[:, [-1]]
    tau = chained * low ** (1 - way) * high**way
    first_ms, last_ms = first[:, [0]] / first[:, [1]], last[:, [0]] / last[:, [1]]
    return tau, first_ms + (last_ms - first_ms) * way


def best_k(
    measured: Measured, *, choice: Choice | None = None, pace: Pace = SAME_PACE, seed: int = 0
) -> BestK | None:
    """The measured k with the largest speed-up, geometric mean over prompts of TPOT ratios.

    With a *choice* it is that one, so that a report names one best k, and only the share of
    resamples that agree is found here. Needs no step counts. None without vanilla, without another
    k, or without a common request, unless there is a choice.
    """
    if choice is not None:
        measured = {k: measured[k] for k in measured if not k or k in choice.among}
    common = _common(measured, lambda request, _: bool(tpot_ms(request)))
    if common is None:
        return BestK(choice.k, choice.speedup, None, 0, choice.flagged) if choice else None
    ks, keys = common
    times = [[(tpot_ms(measured[k][key]) or 1) * pace.get(k, 1) for k in ks] for key in keys]
    logs = -_by_prompt(keys, np.log(times))
    gains = logs - logs[:, [0]]  # against vanilla, the first of ks
    prompts = len(gains)
    (drawn,) = _drawn([gains], seed)
    draws = np.vstack([gains.mean(axis=0), drawn[1:]])
    best = _best(ks, np.exp(draws), prompts)
    if choice is None:
        return best
    share = best.share
    if share is not None and choice.k != best.k:  # by requests that not every k answered
        place = ks.index(choice.k) if choice.k in ks else -1
        share = float(np.mean(drawn[1:].argmax(axis=1) == place))
    return BestK(choice.k, choice.speedup, share, prompts, choice.flagged)


def what_if(model: CostModel, tau: float, k: int) -> float:
    """The speed-up that *tau* tokens per target step, bonus token included, would give at *k*.

    Raises:
        UserError: *tau* or *k* cannot be, nothing tells the time of a step at *k*, or steps are
            of two kinds.
    """
    if model.mixed:
        raise UserError(
            f"no estimate from a mean step: {model.mixed}.", hint="Measure it: specbench run."
        )
    if k < 1 or not 1 <= tau <= k + 1:
        raise UserError(
            f"{tau:g} tokens per step cannot be at k = {k}.",
            hint="k is 1 or more, and a step emits 1 to k + 1 tokens, the bonus token included.",
        )
    step = model.step_ms_at(k)
    if step is None:
        known = ", ".join(map(str, model.step_ms))
        raise UserError(
            f"the time of a step at k = {k} is not known, only at k = {known}.",
            hint=f"Measure k = {k}, or any second k: the line through two gives the others.",
        )
    return model.vanilla_ms * tau / step


def crossing(speedups: Mapping[int, float]) -> Crossing | None:
    """Where the speed-up first falls to 1 as concurrency grows; None if it never does.

    *speedups* by concurrency. Between two measured the logarithm of the speed-up is taken to be
    linear in that of the concurrency, since both are ratios.
    """
    points = sorted(speedups.items())
    if points and points[0][1] <= 1:
        return Crossing(points[0][0], already=True)
    for (c, above), (d, below) in itertools.pairwise(points):
        if below <= 1:
            share = math.log(above) / math.log(above / below)
            return Crossing(c * (d / c) ** share, already=False)
    return None


def dynamic_schedule(best: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """The best k by concurrency as vLLM's `num_speculative_tokens_per_batch_size`.

    Entries are (first batch size, last, k), both ends inside: from 1, in order, without overlap
    or gap (vLLM 0.32, v1/spec_decode/dynamic/utils.py). A batch size that was not measured gets
    the k of the next smaller one that was, as vLLM fills gaps and the tail itself; those below
    the smallest get its k. vLLM caps every k at `num_speculative_tokens`, which must be at least
    1: set it to the largest here. A batch is what runs in a step, at most the concurrency.

    Raises:
        ValueError: nothing was measured, a concurrency below 1 or a k below 0.
    """
    if not best or min(best) < 1 or min(best.values()) < 0:
        raise ValueError(f"no schedule for best k by concurrency {dict(best)}")
    measured = sorted(best)
    starts = [1, *measured[1:]]
    ends = [start - 1 for start in starts[1:]] + [measured[-1]]
    schedule: list[tuple[int, int, int]] = []
    for start, end, concurrency in zip(starts, ends, measured, strict=True):
        k = best[concurrency]
        if schedule and schedule[-1][2] == k:
            start = schedule.pop()[0]
        schedule.append((start, end, k))
    return schedule


# --- from requests to arrays by prompt -----------------------------------------------------------


def _common(
    measured: Measured, usable: Callable[[Request, int], bool]
) -> tuple[list[int], list[Key]] | None:
    """The k with usable requests, vanilla first, and the keys usable under all of these.

    A k that broke off is left out: it would take all others down to the few requests it has.
    """
    found = {
        k: {key for key, request in requests.items() if request.ok and usable(request, k)}
        for k, requests in sorted(measured.items())
    }
    fullest = max((len(keys) for k, keys in found.items() if k), default=0)
    found = {
        k: keys for k, keys in found.items() if keys and (k == 0 or len(keys) >= WHOLE * fullest)
    }
    if 0 not in found or len(found) < 2:
        return None
    keys = sorted(set.intersection(*found.values()))
    return (list(found), keys) if keys else None


def _has_steps(record: Request, k: int) -> bool:
    return bool(_steps(record, k))


def _decode_ms(record: Request) -> float:
    return (record.last_ns - record.first_ns) / 1e6


def _steps(record: Request, k: int) -> int | None:
    """Target steps of a request between its first chunk and its last, None where not known.

    Accepted tokens past the end do not count: drafts are counted, and one that overshoots is one.
    """
    later = later_tokens(record)
    if not later or record.chunks < 2 or _decode_ms(record) <= 0 or held_up(record):
        return None
    if k == 0:
        return later
    return decode_steps(record)


def _decoding(measured: Measured, keys: Sequence[Key], k: int, pace: Pace) -> Floats:
    """Decode time in ms at the common pace, target steps, log of tokens per step: [prompts, 3]."""
    chosen = [measured[k][key] for key in keys]
    steps = np.array([_steps(request, k) for request in chosen], dtype=float)
    later = np.array([later_tokens(request) for request in chosen])
    decode_ms = [_decode_ms(request) * pace.get(k, 1) for request in chosen]
    return _by_prompt(keys, np.column_stack([decode_ms, steps, np.log(later / steps)]))


def _reached(requests: Mapping[Key, Request], keys: Sequence[Key], k: int) -> Floats:
    """Drafts, then those accepted up to each position: [prompts, 1 + k]."""
    reached = []
    for key in keys:
        spec = requests[key].spec
        if spec is None or not spec.drafts or len(spec.accepted_histogram or ()) != k + 1:
            raise NotPredictable(
                f"acceptance per position is not known for all requests at k = {k}"
            )
        reached.append(np.cumsum(np.array(spec.accepted_histogram)[::-1])[::-1])
    return _by_prompt(keys, reached)


def _by_prompt(keys: Sequence[Key], values: ArrayLike) -> Floats:
    """Means over each prompt's requests of *values*, [keys, columns]: [prompts, columns]."""
    prompts, rows = np.unique([key.prompt_id for key in keys], return_inverse=True)
    columns = np.asarray(values, dtype=float)
    total = np.zeros((len(prompts), columns.shape[1]))
    np.add.at(total, rows, columns)
    means: Floats = total / np.bincount(rows)[:, None]
    return means


def _line(step_ms: Mapping[int, float]) -> Line | None:
    """Least squares over the measured k."""
    if len(step_ms) < 2:
        return None
    ks, times = np.array(list(step_ms), dtype=float), np.array(list(step_ms.values()))
    draft_ms, verify_ms = np.polyfit(ks, times, 1)
    worst = np.max(np.abs(verify_ms + draft_ms * ks - times) / times)
    return Line(float(verify_ms), float(draft_ms), float(worst) if len(ks) > 2 else None)


def _drawn(values: Sequence[Floats], seed: int) -> list[Floats]:
    """The means over prompts of each of *values* [prompts, columns], then those of every bootstrap
    resample of the prompts: [1 + RESAMPLES, columns].
    """
    prompts = len(values[0])
    rng, at_once = np.random.default_rng(seed), max(1, DRAWS_AT_ONCE // prompts)
    found: list[list[Floats]] = [[] for _ in values]
    weights = np.full((1, prompts), 1 / prompts)
    for done in range(0, RESAMPLES, at_once):
        part = min(at_once, RESAMPLES - done)
        draws = rng.integers(0, prompts, (part, prompts))
        draws += prompts * np.arange(part)[:, None]
        counts = np.bincount(draws.ravel(), minlength=draws.size).reshape(draws.shape)
        weights = np.vstack([weights, counts / prompts]) if not done else counts / prompts
        for means, of in zip(found, values, strict=True):
            means.append(weights @ of)
    return [np.concatenate(means) for means in found]


def _best(ks: Sequence[int], speedups: Floats, prompts: int) -> BestK:
    """The best of *ks* by the first row of *speedups*, and how many of the other rows agree."""
    chosen = speedups.argmax(axis=1)
    best = int(chosen[0])
    share = float(np.mean(chosen[1:] == best)) if prompts > 1 else None
    return BestK(ks[best], float(speedups[0, best]), share, prompts)
