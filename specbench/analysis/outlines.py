"""Requests without their long lists: all that the numbers need of them, in some 250 bytes each.

A run's requests may be larger than memory. Each is reduced when its line is read: lists of chunks,
steps and token ids to counts and hashes, names that come again to their number in a pool. What single
requests are looked at for (texts, token ids, pieces of an output) is read again from where it stands.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple, TypeVar, overload

from pydantic import JsonValue

from specbench.records import RequestRecord, TokenSource, key_of

UNKNOWN = -1  # for None: no count and no hash is -1
NEVER = -(2**63)  # for None, among times
HEAD = 2  # of the prompt's first token ids; more are not looked at
T = TypeVar("T")


class Drafts(NamedTuple):
    """What is kept of a SpecRequest."""

    drafts: int
    draft_tokens: int | None
    accepted: int
    accepted_histogram: tuple[int, ...] | None
    last_accepted: int | None


class Pool:
    """Values that come again and again, each kept once: numbers stand for them. 0 stands for None."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {None: 0}
        self._values: list[Any] = [None]

    def number(self, value: Any) -> int:  # noqa: ANN401  (what can be hashed)
        """What stands for *value*."""
        found = self._numbers.setdefault(value, len(self._values))
        if found == len(self._values):
            self._values.append(value)
        return found

    def value(self, number: int) -> Any:  # noqa: ANN401
        """What *number* stands for."""
        return self._values[number]


# Columns by what they hold. Counts take 4 bytes until one needs 8; what needs more is in a list (only
# a piece can: sums of counts that no engine gave).
TIMES = ("sent_ns", "end_ns", "first_ns", "last_ns", "due_ns", "offset")
HASHES = ("prompt_hash", "ids_hash", "text_hash")
COUNTS = (
    *("turn", "start", "cycle", "chunks", "together", "first_tokens", "prompt_tokens"),
    *("output_tokens", "cached_tokens", "text_length"),
    *("drafts", "draft_tokens", "accepted", "last_accepted"),
)
NAMES = ("prompt_id", "category", "prompt_head", "token_source", "finish_reason", "sampling")
LISTS = ("later_sizes", "histogram")  # of numbers; where each ends is in a column of its own


class Outlines(Sequence["Outline"]):
    """The outlines of a file's requests, in its order. *whole* reads the request at an offset."""

    def __init__(self, pool: Pool, whole: Callable[[int], RequestRecord]) -> None:
        self.pool, self.whole = pool, whole
        self.columns: dict[str, array[int] | list[int]] = {
            **{name: array("q") for name in (*TIMES, *HASHES)},
            **{name: array("i") for name in (*COUNTS, *NAMES, *LISTS)},
            **{f"{name}_end": array("i") for name in LISTS},
            "ok": array("b"),
        }

    def add(self, record: RequestRecord, offset: int) -> None:
        """Take up the request that begins at *offset*. It holds nothing impossible."""
        chunks, spec = record.chunk_ns, record.spec
        number = self.pool.number
        self._put("sent_ns", record.sent_ns)
        self._put("end_ns", record.end_ns)
        self._put("first_ns", chunks[0] if chunks else 0)
        self._put("last_ns", chunks[-1] if chunks else 0)
        self._put("due_ns", NEVER if record.due_ns is None else record.due_ns)
        self._put("offset", offset)
        for name in (*HASHES, *COUNTS[:-4]):
            value = getattr(record, name)
            self._put(name, UNKNOWN if value is None else value)
        for name in COUNTS[-4:]:
            value = getattr(spec, name) if spec else None
            self._put(name, UNKNOWN if value is None else value)
        sizes = record.later_sizes
        self._put_list(
            "later_sizes", None if sizes is None else [n for both in sizes for n in both]
        )
        self._put_list("histogram", spec.accepted_histogram if spec else None)
        self._put("ok", record.ok)
        head, said = record.prompt_head, record.sampling
        self._put("prompt_id", number(record.prompt_id))
        self._put("category", number(record.category))
        self._put("prompt_head", number(None if head is None else head[:HEAD]))
        self._put("token_source", number(record.token_source))
        self._put("finish_reason", number(record.finish_reason))
        self._put("sampling", number(None if said is None else json.dumps(said)))

    def _put(self, name: str, value: int) -> None:
        column = self.columns[name]
        try:
            column.append(value)
        except OverflowError:
            wider = list(column) if isinstance(column, array) and column.typecode == "q" else None
            self.columns[name] = array("q", column) if wider is None else wider
            self._put(name, value)

    def _put_list(self, name: str, values: Sequence[int] | None) -> None:
        """A list of its own length, or None: told from an empty one by a negative end."""
        for value in values or ():
            self._put(name, value)
        end = len(self.columns[name])
        self._put(f"{name}_end", end if values is not None else -1 - end)

    def numbers(self, name: str, at: int) -> tuple[int, ...] | None:
        """The list *name* of the request at this place."""
        ends = self.columns[f"{name}_end"]
        end = ends[at]
        if end < 0:
            return None
        before = ends[at - 1] if at else 0
        return tuple(self.columns[name][before if before >= 0 else -1 - before : end])

    def __len__(self) -> int:
        return len(self.columns["ok"])

    @overload
    def __getitem__(self, at: int) -> "Outline": ...
    @overload
    def __getitem__(self, at: slice) -> "Sequence[Outline]": ...
    def __getitem__(self, at: int | slice) -> "Outline | Sequence[Outline]":
        places = range(len(self))[at]
        if isinstance(places, range):
            return [Outline(self, place) for place in places]
        return Outline(self, places)

    def __iter__(self) -> "Iterator[Outline]":
        return (Outline(self, place) for place in range(len(self)))


@lru_cache(maxsize=256)
def _sampling(text: str) -> dict[str, JsonValue]:
    found: dict[str, JsonValue] = json.loads(text)
    return found


class _Known:
    """A number that every request has."""

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, outline: "Outline", _: type) -> int:
        return outline.of.columns[self._name][outline.at]


class _Count(_Known):
    """A count that may not be known."""

    def __get__(self, outline: "Outline", _: type) -> int | None:  # type: ignore[override]
        found = outline.of.columns[self._name][outline.at]
        return None if found == UNKNOWN else found


class _Name(_Known, Generic[T]):
    """A value in the pool."""

    def __get__(self, outline: "Outline", _: type) -> T:  # type: ignore[override]
        found: T = outline.of.pool.value(outline.of.columns[self._name][outline.at])
        return found


class Outline:
    """One request in outline. Every attribute is what RequestRecord's of that name says, but for
    `prompt_head`, which is no longer than HEAD, and `spec`, which lists no steps.
    """

    __slots__ = ("at", "of")

    def __init__(self, of: Outlines, at: int) -> None:
        self.of, self.at = of, at

    prompt_id = _Name[str]()
    category = _Name[str | None]()
    prompt_head = _Name[tuple[int, ...] | None]()
    token_source = _Name[TokenSource | None]()
    finish_reason = _Name[str | None]()
    turn, start, cycle = _Known(), _Known(), _Known()
    sent_ns, end_ns, first_ns, last_ns = _Known(), _Known(), _Known(), _Known()
    chunks, together = _Known(), _Known()
    first_tokens, prompt_tokens, output_tokens = _Count(), _Count(), _Count()
    cached_tokens = _Count()
    prompt_hash, text_hash, text_length = _Known(), _Known(), _Known()
    ids_hash = _Count()

    @property
    def ok(self) -> bool:
        """Whether it counts as measured."""
        return bool(self.of.columns["ok"][self.at])

    @property
    def key(self) -> str:
        """What tells it from the others of its case."""
        return key_of(self.prompt_id, self.turn, self.start, self.cycle)

    @property
    def due_ns(self) -> int | None:
        """When it should have been sent, where a rate set that."""
        found = self.of.columns["due_ns"][self.at]
        return None if found == NEVER else found

    @property
    def sampling(self) -> dict[str, JsonValue] | None:
        """What its body said of sampling. Not to be changed."""
        text = self.of.pool.value(self.of.columns["sampling"][self.at])
        return None if text is None else _sampling(text)

    @property
    def later_sizes(self) -> tuple[tuple[int, int], ...] | None:
        """(tokens, how many chunks of so many) after the first; None where they are not known."""
        flat = self.of.numbers("later_sizes", self.at)
        return None if flat is None else tuple(zip(flat[::2], flat[1::2], strict=True))

    @property
    def spec(self) -> Drafts | None:
        """vLLM's account of its speculation."""
        drafts, tokens, accepted, last = (
            self.of.columns[name][self.at]
            for name in ("drafts", "draft_tokens", "accepted", "last_accepted")
        )
        if drafts == UNKNOWN:
            return None
        return Drafts(
            drafts,
            None if tokens == UNKNOWN else tokens,
            accepted,
            self.of.numbers("histogram", self.at),
            None if last == UNKNOWN else last,
        )

    def whole(self) -> RequestRecord:
        """All of it, read again."""
        return self.of.whole(self.of.columns["offset"][self.at])


Request = RequestRecord | Outline


def identity(request: Request) -> tuple[int, int]:
    """The same for two outlines of one request; another for every other one that is alive."""
    return (id(request.of), request.at) if isinstance(request, Outline) else (id(request), 0)
