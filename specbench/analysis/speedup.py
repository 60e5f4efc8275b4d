"""How much faster an arm is than its baseline: paired by prompt, with an interval.

Per (prompt, turn, repeat) the ratio baseline / arm of TPOT (of latency too, apart); the speed-up
is their geometric mean. The interval resamples prompts (Efron & Tibshirani 1993, ch. 13, the
percentile bootstrap): turns and repeats of a prompt stay together, because they are not
independent of each other. It answers "on prompts like these".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbench.analysis.metrics import latency_ms, tpot_ms
from specbench.records import RequestRecord

RESAMPLES = 4000
Key = tuple[str, int, int]  # prompt id, turn, repeat


@dataclass(frozen=True)
class Ratio:
    """A speed-up: `value` times as fast, 95% interval [low, high] over `prompts` prompts.

    `low` and `high` are None for fewer than 2 prompts: one prompt says nothing of its spread.
    """

    value: float
    low: float | None
    high: float | None
    prompts: int

    @property
    def shown(self) -> bool | None:
        """Whether the interval excludes 1, so that a difference is shown; None without one."""
        if self.low is None or self.high is None:
            return None
        return self.low > 1 or self.high < 1


@dataclass(frozen=True)
class Speedup:
    """The ratios of one arm to its baseline under the same conditions."""

    tpot: Ratio | None
    latency: Ratio | None
    pairs: int
    unpaired: int


def compare(
    baseline: Mapping[Key, RequestRecord], arm: Mapping[Key, RequestRecord], *, seed: int = 0
) -> Speedup:
    """The speed-up of *arm* over *baseline*, from the requests that both answered."""
    both = sorted(key for key in baseline.keys() & arm.keys() if baseline[key].ok and arm[key].ok)
    pairs = [(key, baseline[key], arm[key]) for key in both]
    return Speedup(
        tpot=_ratio(_logs(pairs, tpot_ms), seed),
        latency=_ratio(_logs(pairs, latency_ms), seed),
        pairs=len(pairs),
        unpaired=len(baseline.keys() | arm.keys()) - len(pairs),
    )


def _logs(
    pairs: Sequence[tuple[Key, RequestRecord, RequestRecord]],
    measure: Callable[[RequestRecord], float | None],
) -> dict[str, list[float]]:
    """Logarithms of baseline/arm, gathered by prompt."""
    found: dict[str, list[float]] = {}
    for (prompt_id, _, _), base, other in pairs:
        a, b = measure(base), measure(other)
        if a and b:
            found.setdefault(prompt_id, []).append(math.log(a / b))
    return found


def _ratio(logs: Mapping[str, Sequence[float]], seed: int) -> Ratio | None:
    """Geometric mean over prompts (each prompt counts once), percentile bootstrap interval."""
    if not logs:
        return None
    means = np.array([np.mean(values) for values in logs.values()])
    value = float(np.exp(means.mean()))
    if len(means) < 2:
        return Ratio(value, None, None, len(means))
    draws = np.random.default_rng(seed).integers(0, len(means), (RESAMPLES, len(means)))
    low, high = np.exp(np.quantile(means[draws].mean(axis=1), [0.025, 0.975]))
    return Ratio(value, float(low), float(high), len(means))
