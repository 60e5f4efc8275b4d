"""What a layout of prompts is: how one record of it is recognised, read and written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from specbench.prompts.fields import Record

Container = Literal["jsonl", "json", "text", "csv", "parquet"]


class Found(NamedTuple):
    """One prompt of a source, and the line (item, row) it starts on, from 1."""

    line: int
    id: str
    turns: tuple[str, ...]
    category: str | None = None


class Piece(NamedTuple):
    """What one record says: a conversation, or one turn of it in a layout that joins records."""

    id: str | None  # None: its line number
    turns: tuple[str, ...]
    category: str | None = None
    problem: str | None = None
    unkept: Mapping[str, int] | None = None  # messages that no prompt set has a place for, by role


class Unfit(Exception):
    """Why a prompt cannot be written in a layout."""


Read = Callable[[Record], Piece]
Write = Callable[[Found, int | None], list[Record]]  # the int: how many tokens to ask for


@dataclass(frozen=True)
class Layout:
    """`claims` says whether a record is of this layout, `read` what it holds (or Malformed).

    `write` gives the records of a prompt, or raises Unfit. A layout that keeps no ids gives a
    prompt its line number on reading.
    """

    claims: Callable[[Record], bool]
    read: Read
    write: Write
    containers: tuple[Container, ...] = ("jsonl",)  # the first is the usual one
    joins: bool = False  # consecutive records of one id are the turns of one prompt
    also: frozenset[str] = frozenset()  # layouts whose records mean the same here
    turns: bool = False  # holds more than one
    ids: bool = False
    categories: bool = False
    lengths: bool = False  # of the output: --output-tokens


def never(_: Record) -> bool:
    """For layouts that are known by their file and not by their records."""
    return False
