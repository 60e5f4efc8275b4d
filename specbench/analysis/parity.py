"""Did speculation change what was said? Token ids of two arms, prompt by prompt.

Under greedy sampling speculation is lossless (Leviathan et al. 2023): in float32 the ids are
equal. In bfloat16 near-ties fall differently in a step of one row and a step of several, so a
difference there is reported and is no failure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from specbench.analysis.speedup import Key
from specbench.records import RequestRecord


@dataclass(frozen=True)
class Parity:
    """How many of the compared outputs are identical; where the others part, in output tokens.

    `first_differences` are positions from 0, one for each output that differs.
    """

    identical: int
    compared: int
    first_differences: tuple[int, ...]


def compare(
    baseline: Mapping[Key, RequestRecord], arm: Mapping[Key, RequestRecord]
) -> Parity | None:
    """The outputs of *arm* beside those of *baseline*; None where no token ids can be compared.

    A second turn's prompt holds the engine's own first answer: where those differ, the prompts
    do, and the turn is left out.
    """
    identical, differences = 0, []
    for key in baseline.keys() & arm.keys():
        one, other = baseline[key], arm[key]
        if not one.token_ids or not other.token_ids or one.prompt_sha256 != other.prompt_sha256:
            continue
        if one.token_ids == other.token_ids:
            identical += 1
        else:
            differences.append(_first_difference(one.token_ids, other.token_ids))
    compared = identical + len(differences)
    return Parity(identical, compared, tuple(sorted(differences))) if compared else None


def _first_difference(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(one, other, strict=False)
    shorter = min(len(one), len(other))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
