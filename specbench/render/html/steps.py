"""Which steps of the target made which chunk of an answer, as far as its facts say.

A step that accepted a drafts emits a + 1 tokens. vLLM lists a request's steps in order; chunks are
what the client read, and a busy machine reads several steps as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.records import RequestRecord


@dataclass(frozen=True)
class Told:
    """Of each chunk: its accepted and its drafted tokens, and how many steps are in it.

    The first chunk's first token is the prefill's, which is no step. `drafted` is None for a chunk
    of one token of which nobody knows whether its step drafted nothing or all in vain.
    """

    accepted: list[int]
    drafted: list[int | None]
    steps: list[int]


def told(record: RequestRecord) -> Told | None:
    """What is known of the steps of *record*; None where that is nothing."""
    spec, counts = record.spec, record.chunk_tokens
    if spec is None or counts is None or len(counts) != len(record.chunk_ns):
        return None
    if spec.per_step_accepted is None or spec.per_step_drafted is None:
        return None
    if len(spec.per_step_accepted) != len(spec.per_step_drafted):
        return None
    listed = list(zip(spec.per_step_accepted, spec.per_step_drafted, strict=True))
    return _all_listed(counts, listed) or _drafting_listed(counts, listed)


def _all_listed(counts: Sequence[int], listed: Sequence[tuple[int, int]]) -> Told | None:
    """With every step in the list, the chunks are whole steps one after the other."""
    found = Told([], [], [])
    at = 0
    for place, count in enumerate(counts):
        left, first = count - (place == 0), at
        while left > 0 and at < len(listed):
            left -= listed[at][0] + 1
            at += 1
        ends = place == len(counts) - 1  # the last step's tokens may be more than were asked for
        if left > 0 or (left < 0 and not ends):
            return None
        found.accepted.append(sum(accepted for accepted, _ in listed[first:at]))
        found.drafted.append(sum(drafted for _, drafted in listed[first:at]))
        found.steps.append(at - first)
    return found if at == len(listed) else None


def _drafting_listed(counts: Sequence[int], listed: Sequence[tuple[int, int]]) -> Told | None:
    """A method that looks drafts up has steps without one, which vLLM leaves out of the list.

    A chunk of several tokens is then a step that drafted; of those with one token nobody knows
    which of them were the steps that accepted nothing.
    """
    in_vain = any(accepted == 0 for accepted, _ in listed)
    fruitful = [step for step in listed if step[0]]
    found = Told([], [], [])
    for place, count in enumerate(counts):
        if place == 0 or count == 1:
            if count != 1:
                return None
            found.accepted.append(0)
            found.drafted.append(None if in_vain and place else 0)
        else:
            if not fruitful:
                return None
            accepted, drafted = fruitful.pop(0)
            trimmed = place == len(counts) - 1 and count <= accepted
            if count != accepted + 1 and not trimmed:
                return None
            found.accepted.append(accepted)
            found.drafted.append(drafted)
        found.steps.append(int(place > 0))
    return None if fruitful else found
