"""Parts of a run from its own facts: by category, turn, prompt length, output position.

A part says what each request is in it: itself, a piece of it, or nothing. So everything that works
on requests (TPOT, acceptance, paired speed-ups) works on parts.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from specbench.analysis.outlines import Request
from specbench.records import RequestRecord, SpecRequest

By = Literal["category", "turn", "length", "position"]
WAYS: tuple[By, ...] = get_args(By)
SMALLEST_BIN = 16  # tokens; bins end at 16, 32, 64, ...


@dataclass(frozen=True)
class Part:
    """One slice: its name, and what is in it of a request (None: nothing).

    `is_piece`: not requests but pieces of them, see `piece`.
    """

    name: str | None
    of: Callable[[Request], Request | None]
    is_piece: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether it leaves nothing out."""
        return self.of is _itself


def _itself(record: Request) -> Request:
    return record


WHOLE = Part(None, _itself)


def parts(by: By, records: Iterable[Request]) -> list[Part]:
    """The parts that *records* fall into, in their natural order; categories as they are met.

    Where all are in one part it is the whole under that part's name.
    """
    if by == "position":
        return _by_position(records) or [WHOLE]
    found = _by_request(by, records)
    return found if len(found) > 1 else [Part(part.name, WHOLE.of) for part in found] or [WHOLE]


def _by_request(by: By, records: Iterable[Request]) -> list[Part]:
    if by == "category":
        seen = {record.category: None for record in records}
        return [Part(name, _where("category", name)) for name in seen]
    if by == "turn":
        turns = sorted({record.turn for record in records})
        return [Part(f"turn {turn + 1}", _where("turn", turn)) for turn in turns]
    lengths = {record.prompt_tokens for record in records}
    return [
        Part(f"{low}-{high - 1} prompt tokens", _of_length(low, high))
        for low, high in _bins(sorted(length for length in lengths if length is not None))
    ]


def _by_position(records: Iterable[Request]) -> list[Part]:
    longest = max((record.output_tokens or 0 for record in records), default=0)
    return [
        Part(f"tokens {low}-{high - 1}", _piece(low, high), is_piece=True)
        for low, high in _bins(range(longest))
    ]


def _where(name: str, value: object) -> Callable[[Request], Request | None]:
    return lambda record: record if getattr(record, name) == value else None


def _of_length(low: int, high: int) -> Callable[[Request], Request | None]:
    def of(record: Request) -> Request | None:
        return record if low <= (record.prompt_tokens or 0) < high else None

    return of


def _bins(values: Sequence[int]) -> list[tuple[int, int]]:
    """[low, high) by powers of two, those that hold a value."""
    found = []
    low, high = 0, SMALLEST_BIN
    while values and low <= max(values):
        if any(low <= value < high for value in values):
            found.append((low, high))
        low, high = high, 2 * high
    return found


def _piece(low: int, high: int) -> Callable[[Request], Request | None]:
    return lambda record: piece(record, low, high)


def piece(request: Request, low: int, high: int) -> RequestRecord | None:
    """The part of a request that made its output tokens *low* to *high* - 1.

    A chunk belongs to where its first token stands. The chunk before is kept in front as a single
    token, from which time runs, as if it were a request's first. It has no TTFT of its own. None
    where no chunk is in it, or chunks have no token counts.
    """
    sizes = request.later_sizes
    if not request.ok or sizes is None:
        return None
    if (request.first_tokens or 0) + sum(tokens * chunks for tokens, chunks in sizes) < low:
        return None  # it ends before: not worth reading
    record = request.whole()
    counts = record.chunk_tokens
    if counts is None or len(counts) != len(record.chunk_ns):
        return None
    begins = [0, *itertools.accumulate(counts)][:-1]
    inside = [i for i, begin in enumerate(begins) if i and low <= begin < high]
    if not inside:
        return None
    kept = slice(inside[0] - 1, inside[-1] + 1)
    return record.model_copy(
        update={
            "chunk_ns": record.chunk_ns[kept],
            "chunk_tokens": (1, *counts[kept][1:]),
            "output_tokens": 1 + sum(counts[kept][1:]),
            "sent_ns": record.chunk_ns[kept][0],
            "end_ns": record.chunk_ns[kept][-1],
            "spec": _steps(record, inside),
            "token_ids": None,
        }
    )


def _steps(record: RequestRecord, chunks: Sequence[int]) -> SpecRequest | None:
    """Speculation in the steps that made *chunks*; None unless every step made one chunk."""
    spec = record.spec
    if spec is None or spec.per_step_accepted is None or spec.per_step_drafted is None:
        return None
    if len(spec.per_step_accepted) != len(record.chunk_ns) - 1:
        return None
    drafted = [spec.per_step_drafted[i - 1] for i in chunks]
    accepted = [spec.per_step_accepted[i - 1] for i in chunks]
    deepest = max(spec.per_step_drafted)
    with_draft = [got for got, tried in zip(accepted, drafted, strict=True) if tried]
    return SpecRequest(
        drafts=len(with_draft),
        draft_tokens=sum(drafted),
        accepted=sum(accepted),
        accepted_histogram=tuple(with_draft.count(n) for n in range(deepest + 1)),
        per_step_accepted=tuple(accepted),
        per_step_drafted=tuple(drafted),
    )
