"""Does speculation still pay as concurrency grows? From the rows of a run with several."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specbench.analysis.cost import Crossing, crossing, dynamic_schedule
from specbench.analysis.rows import Row, best_of, is_sound

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
    sound: dict[tuple[str, str, int | None], dict[int, list[Row]]] = {}
    for row in rows:
        if row.k and row.part is None and row.rate is None and is_sound(row):
            place = (row.label, row.prompt_set, row.max_tokens)
            sound.setdefault(place, {}).setdefault(row.concurrency, []).append(row)
    found: dict[tuple[str, str, int | None], dict[int, Best]] = {}
    for place, by_concurrency in sound.items():
        for at, of_k in by_concurrency.items():
            best = best_of(of_k)
            if best and best.speedup and best.speedup.tpot:
                found.setdefault(place, {})[at] = (best.k, best.speedup.tpot.value)
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
