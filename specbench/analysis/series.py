"""One measure prompt by prompt, and what engine starts make of it: what two runs are paired by."""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbench.records import Fact

WHOLE_CASE = ""  # stands for a prompt where only the case as a whole has a figure


class Cell(NamedTuple):
    """Where a single measurement stands. A start is (group, repeat): engines started anew."""

    start: tuple[int, int]
    prompt: str
    turn: int = 0
    cycle: int = 0


class Series(Fact):
    """One measure of one row, in natural logs, prompts weighed alike.

    `by_prompt` is a prompt's mean over turns, starts and cycles. `starts` is how far the mean of each
    engine start is from that of all, `noise` the standard deviation that noise alone gives one of
    them (None: not known).
    """

    by_prompt: dict[str, float]
    starts: tuple[float, ...]
    noise: float | None = None


def series(cells: Mapping[Cell, float]) -> Series | None:
    """*cells* (logs) as a series; None where there are none."""
    if not cells:
        return None
    by_prompt: dict[str, list[float]] = defaultdict(list)
    places: dict[tuple[str, int], dict[tuple[int, int], list[float]]] = defaultdict(dict)
    for cell, value in cells.items():
        by_prompt[cell.prompt].append(value)
        places[cell.prompt, cell.turn].setdefault(cell.start, []).append(value)
    starts = sorted({cell.start for cell in cells})
    # Of what every start has, so that what one of them lacks does not count as its own.
    shared = [
        [float(np.mean(at[start])) for start in starts]
        for at in places.values()
        if len(at) == len(starts)
    ]
    means, noise = _starts(np.array(shared).reshape(len(shared), len(starts)))
    return Series(
        by_prompt={prompt: float(np.mean(values)) for prompt, values in by_prompt.items()},
        starts=means,
        noise=noise,
    )


def _starts(
    table: NDArray[np.float64],
) -> tuple[tuple[float, ...], float | None]:
    """Each start's deviation from the mean of all, and the noise in it, from [places, starts]."""
    places, starts = table.shape
    if not places:
        return (0.0,), None  # no two starts measured the same: as good as one
    means = table.mean(axis=0)
    deviations = tuple(float(mean - means.mean()) for mean in means)
    if places < 2 or starts < 2:
        return deviations, None
    left = table - table.mean(axis=1, keepdims=True) - means + table.mean()
    variance = float((left**2).sum()) / ((places - 1) * (starts - 1))
    return deviations, math.sqrt(variance / places)
