"""Did speculation change what was said? Token ids of two arms, prompt by prompt.

Under greedy sampling speculation is lossless (Leviathan et al. 2023): in float32 the ids are
equal. In bfloat16 near-ties fall differently in a step of one row and a step of several, so a
difference there is reported and is no failure.
"""

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from specbench.analysis.outlines import Request
from specbench.analysis.speedup import Key

LEAD, SHOWN = 20, 40  # characters shown before and after the point where two texts part
SHOWN_IDS = 4


@dataclass(frozen=True)
class Difference:
    """One output that differs: from `position` (in output tokens, from 0) on, ids and text.

    `lead` is the end of what both said before. The texts can be equal where the ids are not (one
    text cut into tokens in two ways); then they are empty.
    """

    key: Key
    position: int
    lead: str
    baseline_text: str
    arm_text: str
    baseline_ids: tuple[int, ...]
    arm_ids: tuple[int, ...]

    def told(self, baseline: str, arm: str) -> str:
        """In words, with the names of the two."""
        where = f"{self.key.prompt_id}, token {self.position + 1}"
        if self.baseline_text == self.arm_text:
            ids = f"{list(self.baseline_ids)} and {list(self.arm_ids)}"
            return f"{where}: the same text in other tokens: {ids}"
        return (
            f"{where}: after {self.lead!r} {baseline} says {self.baseline_text!r}, "
            f"{arm} {self.arm_text!r}"
        )


class Differences(Sequence[Difference]):
    """Outputs that differ, in the order of their keys: what they say is read when it is asked for.

    `positions` are those of the differences.
    """

    def __init__(self) -> None:
        self.positions = array("q")
        self._pairs: list[tuple[Key, Request, Request]] = []

    def add(self, key: Key, one: Request, other: Request) -> None:
        """Take up two answers whose token ids are not the same."""
        self.positions.append(
            _in_common(one.whole().token_ids or (), other.whole().token_ids or ())
        )
        self._pairs.append((key, one, other))

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, at: int) -> Difference: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Difference]: ...
    def __getitem__(self, at: int | slice) -> Difference | Sequence[Difference]:
        if isinstance(at, slice):
            return [_difference(*pair) for pair in self._pairs[at]]
        return _difference(*self._pairs[at])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list


@dataclass(frozen=True)
class Parity:
    """How many of the compared outputs are identical, and where each of the others parts."""

    identical: int
    compared: int
    differences: Sequence[Difference] = ()

    @property
    def first_differences(self) -> tuple[int, ...]:
        """Positions from 0 in output tokens, ascending, one for each output that differs."""
        return tuple(sorted(self._positions))

    @property
    def earliest(self) -> Difference | None:
        """The difference that comes first in its output; None where there is none."""
        positions = self._positions
        return self.differences[positions.index(min(positions))] if positions else None

    @property
    def _positions(self) -> Sequence[int]:
        if isinstance(self.differences, Differences):
            return self.differences.positions
        return [difference.position for difference in self.differences]

    @property
    def differing(self) -> float:
        """The share of the compared outputs that differ."""
        return 1 - self.identical / self.compared

    def histogram(self) -> dict[tuple[int, int], int]:
        """First differences by position: (first, last) of a bucket, which doubles in width.

        The buckets are 0, 1, 2-3, 4-7, 8-15, …; those that hold nothing are left out.
        """
        buckets = Counter(position.bit_length() for position in self.first_differences)
        return {(2**b // 2, max(2**b - 1, 0)): n for b, n in sorted(buckets.items())}

    def told(self) -> str:
        """How many are identical and where the others part (tokens from 1), in words."""
        said = f"{self.identical} of {self.compared} outputs identical"
        parted = (
            f"{n} at token {first + 1}" + (f"-{last + 1}" if last > first else "")
            for (first, last), n in self.histogram().items()
        )
        return f"{said}; they part: {', '.join(parted)}" if self.differences else said


def compare(baseline: Mapping[Key, Request], arm: Mapping[Key, Request]) -> Parity | None:
    """The outputs of *arm* beside those of *baseline*; None where no token ids can be compared.

    A second turn's prompt holds the engine's own first answer: where those differ, the prompts
    do, and the turn is left out.
    """
    identical, differences = 0, Differences()
    for key in sorted(baseline.keys() & arm.keys()):
        same = is_same(baseline[key], arm[key])
        if same:
            identical += 1
        elif same is not None:
            differences.add(key, baseline[key], arm[key])
    compared = identical + len(differences)
    return Parity(identical, compared, differences or ()) if compared else None


def is_same(one: Request, other: Request) -> bool | None:
    """Whether two answers to one prompt are the same tokens; None where that cannot be said."""
    if not one.ok or not other.ok:  # a stream that was cut says nothing of what was left
        return None
    if one.ids_hash is None or other.ids_hash is None or one.prompt_hash != other.prompt_hash:
        return None
    return one.ids_hash == other.ids_hash


def _difference(key: Key, request: Request, beside: Request) -> Difference:
    one, other = request.whole(), beside.whole()
    ids, other_ids = one.token_ids or (), other.token_ids or ()
    at = _in_common(ids, other_ids)
    same = _in_common(one.text, other.text)
    return Difference(
        key=key,
        position=at,
        lead=one.text[max(same - LEAD, 0) : same],
        baseline_text=one.text[same : same + SHOWN],
        arm_text=other.text[same : same + SHOWN],
        baseline_ids=ids[at : at + SHOWN_IDS],
        arm_ids=other_ids[at : at + SHOWN_IDS],
    )


def _in_common(one: Sequence[object], other: Sequence[object]) -> int:
    """How long the two are the same."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
