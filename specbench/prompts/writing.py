"""Prompts into a file of a layout: read back before it gets its name, and nothing lost unsaid."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specbench.errors import PromptError
from specbench.prompts.fields import Record
from specbench.prompts.files import SUFFIXES, open_rows, write_records
from specbench.prompts.formats import Reader
from specbench.prompts.layout import Container, Found, Unfit
from specbench.prompts.layouts import LAYOUTS

STRIPPED = ("genai-perf", "genai-perf-sessions")  # GenAI-Perf strips what it reads from these


class CannotHold(Exception):
    """A layout has no place for something without which a prompt is another prompt."""

    def __init__(self, found: Found, layout: str, why: str) -> None:
        super().__init__(why)
        self.found, self.layout, self.why = found, layout, why


@dataclass
class Written:
    """What a file holds, and what its layout had no place for."""

    layout: str
    prompts: int = 0
    turns: int = 0
    ids_lost: int = 0  # that reading the file gives other ones instead
    categories_lost: int = 0
    stripped: int = 0  # prompts that GenAI-Perf sends without their outer white space
    first_stripped: str = ""
    digest: int = 0  # of what has to read back

    def notes(self) -> Iterator[str]:
        """What the user should know of a file that was written."""
        if self.stripped:
            yield (
                f"GenAI-Perf strips white space around prompts: it changes {self.stripped} of "
                f"{self.prompts} here, `{self.first_stripped}` first"
            )


def write_prompts(
    path: Path,
    layout: str,
    prompts: Iterable[Found],
    *,
    tokens: int | None = None,
    note: Callable[[Found], None] | None = None,
) -> Written:
    """Write *prompts* and read them back; *note* is told of each on the way.

    CannotHold where the layout does not hold one of them, PromptError where there is none or the
    file does not read back the same.
    """
    written = Written(layout)
    write_records(path, container_for(path, layout), _records(prompts, written, tokens, note))
    if not written.prompts:
        raise PromptError(path.name, None, "there is not one prompt to write")
    try:
        digest = _digest_of(path, layout)
    except PromptError as error:
        raise PromptError(path.name, None, f"{NOT_THE_SAME} ({error.message})") from error
    if digest != written.digest:
        raise PromptError(path.name, None, NOT_THE_SAME)
    return written


NOT_THE_SAME = "what was written does not read back the same"


def container_for(path: Path, layout: str) -> Container:
    """What a file of that name and layout is made of; PromptError where the name is misleading."""
    containers = LAYOUTS[layout].containers
    for container in containers:
        if path.name.endswith(SUFFIXES[container]):
            return container
    endings = " or ".join(SUFFIXES[container] for container in containers)
    raise PromptError(path, None, f"{layout} is written to a file that ends in {endings}")


def _records(
    prompts: Iterable[Found],
    written: Written,
    tokens: int | None,
    note: Callable[[Found], None] | None,
) -> Iterator[Record]:
    layout, strips = LAYOUTS[written.layout], written.layout in STRIPPED
    write, holds_turns = layout.write, layout.turns
    digest = count = turns_written = 0
    for found in prompts:
        count += 1
        id: str | None
        _, id, turns, category = found
        turns_written += len(turns)
        if not holds_turns and len(turns) > 1:
            raise CannotHold(found, written.layout, f"has {len(turns)} turns")
        if not layout.ids:
            if id != str(count):
                written.ids_lost += 1
            id = None
        if category is not None and not layout.categories:
            written.categories_lost += 1
            category = None
        digest = hash((digest, id, turns, category))
        if strips and _is_stripped(turns):
            written.stripped += 1
            written.first_stripped = written.first_stripped or found.id
        if note is not None:
            note(found)
        try:
            yield from write(found, tokens)
        except Unfit as unfit:
            raise CannotHold(found, written.layout, str(unfit)) from unfit
    written.prompts, written.turns, written.digest = count, turns_written, digest


def _is_stripped(turns: tuple[str, ...]) -> bool:
    """Whether GenAI-Perf would change one of them."""
    for text in turns:  # noqa: SIM110  (`any` costs three times as much, on each of 100,000)
        if text != text.strip():
            return True
    return False


def _digest_of(path: Path, name: str) -> int:
    """The digest of what a file of a layout holds, as it is read (with the hashes of this process)."""
    layout, digest = LAYOUTS[name], 0
    reader = Reader(path, rows=open_rows(path, layout=name), layout=name)
    for _, (id, turns, category, problem, _) in reader.pieces():
        if problem is not None:
            raise PromptError(path.name, None, problem)
        digest = hash((digest, id if layout.ids else None, turns, category))
    return digest
