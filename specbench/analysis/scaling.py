"""Does speculation still pay as concurrency grows? From the rows of a run with several."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specbench.analysis.cost import Crossing, crossing, dynamic_schedule
from specbench.analysis.rows import Row

Best = tuple[int, float]  # k, speed-up


@dataclass(frozen=True)
class Scaling:
    """One method on one prompt set and output length, over concurrency.

    `best` is its fastest k and the speed-up there by concurrency; `crossing` where that falls to 1;
    `schedule` the value for vLLM's `num_speculative_tokens_per_batch_size`, with k = 0 where
    vanilla is faster.
    """

    label: str
    prompt_set: str
    max_tokens: int | None
    best: Mapping[int, Best]
    crossing: Crossing | None
    schedule: list[tuple[int, int, int]]


def scaling(rows: Iterable[Row]) -> list[Scaling]:
    """What the rows say of concurrency; nothing for a method that was measured at one only.

    Flagged rows and those that failed say nothing.
    """
    found: dict[tuple[str, str, int | None], dict[int, Best]] = {}
    for row in rows:
        ratio = row.speedup.tpot if row.speedup and row.k and row.part is None else None
        if ratio is None or row.flags or row.problem or row.rate is not None:
            continue
        best = found.setdefault((row.label, row.prompt_set, row.max_tokens), {})
        if ratio.value > best.get(row.concurrency, (0, 0.0))[1]:
            best[row.concurrency] = (row.k, ratio.value)
    return [
        Scaling(
            *place,
            best=dict(sorted(best.items())),
            crossing=crossing({at: speedup for at, (_, speedup) in best.items()}),
            schedule=dynamic_schedule({at: k if s > 1 else 0 for at, (k, s) in best.items()}),
        )
        for place, best in found.items()
        if len(best) > 1
    ]
