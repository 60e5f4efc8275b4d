"""How often do intervals of few prompts cover the truth, if prompts differ in this way or that?

    python benchmarks/coverage.py [--worlds 1000]

No engine: prompts' log ratios are drawn from a law whose mean is known, with noise on top, and the
interval *on prompts like these* is made of them. A/A runs cannot tell, since there prompts differ in
nothing but noise. Laws are scaled to the same spread: the normal one; the exponential one (skewness
2), and the log-normal one (skewness 6), where a few prompts gain far more than the rest, as with
n-gram drafts.
"""

import argparse
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specbench.analysis import speedup
from specbench.analysis.speedup import Key, ratio_of

SPREAD, NOISE = 0.2, 0.02  # standard deviations of log ratios: of prompts, and of a pair
TRUE = 0.3  # the mean log ratio
SIZES = (3, 5, 8, 16, 24, 80)
Law = Callable[[np.random.Generator, int], NDArray[np.float64]]


def lognormal(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Mean 0, standard deviation 1, skewness 6.2."""
    mean, deviation = math.exp(0.5), math.sqrt((math.e - 1) * math.e)
    return (rng.lognormal(size=count) - mean) / deviation


LAWS: dict[str, Law] = {
    "normal": lambda rng, count: rng.normal(size=count),
    "exponential": lambda rng, count: rng.exponential(size=count) - 1,
    "log-normal": lognormal,
}


def coverage(law: Law, prompts: int, worlds: int) -> tuple[float, float, float]:
    """Shares of intervals that cover the truth, lie below it, and lie above it."""
    below = above = 0
    for seed in range(worlds):
        rng = np.random.default_rng([prompts, seed])
        noise = rng.normal(0, NOISE, prompts)
        ratios = TRUE + SPREAD * law(rng, prompts) + noise
        cells = {Key(str(i), 0, 0): float(ratio) for i, ratio in enumerate(ratios)}
        steps = {Key(str(i), 0, 0): float(one) for i, one in enumerate(noise)}
        found = ratio_of(cells, steps, set_size=None, seed=seed)
        assert found is not None
        assert found.like_these is not None
        below += found.like_these.high < math.exp(TRUE)
        above += found.like_these.low > math.exp(TRUE)
    return 1 - (below + above) / worlds, below / worlds, above / worlds


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--worlds", type=int, default=1000)
    args = parser.parse_args()
    speedup.RESAMPLES = 1000
    print("| prompts | " + " | ".join(LAWS) + " |\n|---|" + "---|" * len(LAWS))
    for size in SIZES:
        cells = []
        for law in LAWS.values():
            covered, below, above = coverage(law, size, args.worlds)
            cells.append(f"{covered:.1%} (too low {below:.1%}, too high {above:.1%})")
        print(f"| {size} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
