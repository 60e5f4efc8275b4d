"""From records to prompts: one layout a file, ids that are unique, each problem with its line."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from specbench.errors import PromptError
from specbench.prompts.fields import Malformed, Record
from specbench.prompts.files import Rows, open_rows
from specbench.prompts.layout import Found, Piece
from specbench.prompts.layouts import LAYOUTS, detect
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


OnSkip = Callable[[Skipped], None]


class Reading(Protocol):
    """Prompts that are read lazily, and what was learnt on the way."""

    layout: str | None
    column: str | None  # of a table
    unit: str  # what Found.line counts
    unkept: Counter[str]  # messages that no prompt set has a place for, by role

    def __iter__(self) -> Iterator[Found]: ...


def read_prompts(
    path: Path,
    *,
    layout: str | None = None,
    style: Style = "chat",
    on_skip: OnSkip | None = None,
) -> Iterator[Located]:
    """The prompts of a file; without *on_skip* the first malformed record is an error."""
    reader = Reader(path, layout=layout, on_skip=on_skip)
    for line, id, turns, category in reader:
        prompt = Prompt(id=id, turns=turns, category=category, style=style)
        yield Located(line, str(reader.layout), prompt)


class Reader:
    """The prompts of *rows*, or of the file *where*; *where* is named in errors."""

    def __init__(
        self,
        where: Path | str,
        *,
        rows: Rows | None = None,
        layout: str | None = None,
        on_skip: OnSkip | None = None,
    ) -> None:
        if layout is not None and layout not in LAYOUTS:
            raise PromptError(where, None, f"no layout `{layout}`; there are {', '.join(LAYOUTS)}")
        self._rows = open_rows(Path(where), layout=layout) if rows is None else rows
        self.where, self.on_skip = where, on_skip
        self.layout = layout or self._rows.layout
        self.column, self.unit = self._rows.column, self._rows.unit
        self.unkept: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Found]:
        first_line: dict[str, int] = {}
        for line, (id, turns, category, problem, unkept) in self.pieces():
            if id is not None:
                if (before := first_line.setdefault(id, line)) != line:
                    raise self._error(line, self._twice(id, before))
            elif first_line and problem is None:
                problem = "no id, where records before it have one"
            if problem is None:
                if unkept is not None:
                    self.unkept.update(unkept)
                yield Found(line, str(line) if id is None else id, turns, category)
            elif self.on_skip is not None:
                self.on_skip(Skipped(line, problem))
            else:
                raise self._error(line, problem)

    def _error(self, line: int, problem: str) -> PromptError:
        return PromptError(self.where, line, problem, unit=self.unit)

    def _twice(self, id: str, line: int) -> str:
        if self.layout is not None and LAYOUTS[self.layout].joins:
            return f"session `{id}` began on {self.unit} {line} and goes on here, after another session"
        return f"the id `{id}` is taken by {self.unit} {line}"

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """What the records say, with their lines, before ids are compared; sessions are joined."""
        held: tuple[int, Piece] | None = None
        joins: bool | None = None
        for line, piece in self._records():
            if joins is None:
                joins = LAYOUTS[str(self.layout)].joins
            if not joins:
                yield line, piece
            elif piece.id is None:
                if held is not None and piece.problem is None:
                    yield held
                    held = None
                yield line, piece
            elif held is not None and held[1].id == piece.id:
                held = _joined(held, line, piece)
            else:
                if held is not None:
                    yield held
                held = line, piece
        if held is not None:
            yield held

    def _records(self) -> Iterator[tuple[int, Piece]]:
        forced = self.layout is not None
        known = LAYOUTS[self.layout] if self.layout is not None else None
        for line, record in self._rows.rows:
            if known is None:
                known = LAYOUTS[self._detected(line, record)]
            elif not forced and not known.claims(record):
                self._refuse_mixture(line, record)
            try:
                piece = known.read(record)
            except Malformed as bad:
                piece = Piece(bad.id, (), problem=bad.reason)
            yield line, piece

    def _detected(self, line: int, record: Record) -> str:
        try:
            self.layout = detect(record)
        except Malformed as bad:
            raise self._error(line, bad.reason) from bad
        return self.layout

    def _refuse_mixture(self, line: int, record: Record) -> None:
        name = str(self.layout)
        others = {other for other, layout in LAYOUTS.items() if layout.claims(record)}
        if others := others - LAYOUTS[name].also:
            other = " or ".join(sorted(others))
            raise self._error(line, f"a record of layout {other} in a file of layout {name}")


def _joined(held: tuple[int, Piece], line: int, piece: Piece) -> tuple[int, Piece]:
    start, before = held
    if before.problem is not None:
        return held
    if piece.problem is not None:  # a conversation without one of its turns is another one
        return line, before._replace(problem=piece.problem)
    return start, before._replace(turns=before.turns + piece.turns)
