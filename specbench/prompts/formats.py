"""From records to prompts: one layout a file, ids that are unique, each problem with its line."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from specbench.errors import PromptError
from specbench.prompts.layouts import LAYOUTS, Malformed, Piece, detect
from specbench.prompts.rows import Record, Row, read_rows
from specbench.records import Prompt, Style


class Located(NamedTuple):
    """A prompt, the line its record starts on, and the layout it was read in."""

    line: int
    layout: str
    prompt: Prompt


class Skipped(NamedTuple):
    """A record of a known layout that holds no usable prompt."""

    line: int
    reason: str


def read_prompts(
    path: Path,
    *,
    layout: str | None = None,
    style: Style = "chat",
    on_skip: Callable[[Skipped], None] | None = None,
) -> Iterator[Located]:
    """The prompts of a file; without *on_skip* the first malformed record is an error."""
    return prompts_in(read_rows(path), where=path, layout=layout, style=style, on_skip=on_skip)


def prompts_in(
    rows: Iterable[Row],
    *,
    where: Path | str,
    layout: str | None = None,
    style: Style = "chat",
    on_skip: Callable[[Skipped], None] | None = None,
) -> Iterator[Located]:
    """The prompts of *rows*, lazily; *where* is named in errors."""
    first_line: dict[str, int] = {}
    for line, name, piece in _whole(rows, where, layout):
        if piece.id is not None:
            if (before := first_line.setdefault(piece.id, line)) != line:
                raise PromptError(where, line, _twice(name, piece.id, before))
        elif first_line and piece.problem is None:
            piece = piece._replace(problem="no id, where records before it have one")
        if piece.problem is None:
            id = piece.id if piece.id is not None else str(line)
            prompt = Prompt(id=id, turns=piece.turns, category=piece.category, style=style)
            yield Located(line, name, prompt)
        elif on_skip is not None:
            on_skip(Skipped(line, piece.problem))
        else:
            raise PromptError(where, line, piece.problem)


def _twice(layout: str, id: str, line: int) -> str:
    if LAYOUTS[layout].joins:
        return f"session `{id}` began on line {line} and goes on here, after another session"
    return f"the id `{id}` is taken by line {line}"


def _whole(
    rows: Iterable[Row], where: Path | str, layout: str | None
) -> Iterator[tuple[int, str, Piece]]:
    """Pieces with their line and layout, those of one session joined."""
    held: tuple[int, str, Piece] | None = None
    for line, name, piece in _pieces(rows, where, layout):
        if not LAYOUTS[name].joins or piece.id is None:
            yield line, name, piece
        elif held is not None and held[2].id == piece.id:
            held = _joined(held, line, piece)
        else:
            if held is not None:
                yield held
            held = line, name, piece
    if held is not None:
        yield held


def _joined(held: tuple[int, str, Piece], line: int, piece: Piece) -> tuple[int, str, Piece]:
    start, name, before = held
    if before.problem is not None:
        return held
    if piece.problem is not None:  # a conversation without one of its turns is another one
        return line, name, before._replace(problem=piece.problem)
    return start, name, before._replace(turns=before.turns + piece.turns)


def _pieces(
    rows: Iterable[Row], where: Path | str, layout: str | None
) -> Iterator[tuple[int, str, Piece]]:
    if layout is not None and layout not in LAYOUTS:
        raise PromptError(where, None, f"no layout `{layout}`; there are {', '.join(LAYOUTS)}")
    name = layout
    for line, record in rows:
        if name is None:
            try:
                name = detect(record)
            except Malformed as bad:
                raise PromptError(where, line, bad.reason) from bad
        elif layout is None:
            _refuse_mixture(where, line, record, name)
        try:
            piece = LAYOUTS[name].read(record)
        except Malformed as bad:
            piece = Piece(bad.id, (), problem=bad.reason)
        yield line, name, piece


def _refuse_mixture(where: Path | str, line: int, record: Record, name: str) -> None:
    known = LAYOUTS[name]
    if known.claims(record):
        return
    others = {other for other, layout in LAYOUTS.items() if layout.claims(record)} - known.also
    if others:
        other = " or ".join(sorted(others))
        raise PromptError(where, line, f"a record of layout {other} in a file of layout {name}")
