"""What a prompt set is on disk: NAME.jsonl as GenAI-Perf reads it, beside its sidecar."""

import difflib
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specbench.errors import PromptError
from specbench.fetch import file_sha256
from specbench.prompts.files import bare_name
from specbench.prompts.formats import Reader, read_prompts
from specbench.prompts.layout import Found
from specbench.prompts.sidecar import (
    CONVERT_AGAIN,
    Facts,
    Index,
    Sidecar,
    Summary,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)
from specbench.prompts.sources import PUBLIC, Source, resolve
from specbench.prompts.writing import Written, write_prompts
from specbench.records import Prompt, Style


@dataclass(frozen=True)
class PromptSet:
    """Prompts in memory; `sha256` is of their content, not of the file.

    `available` is how many prompts the whole set has where these are a part of it.
    """

    name: str
    prompts: tuple[Prompt, ...]
    sha256: str
    source: str
    path: Path
    available: int | None = None


def prompt_sha256(text: str) -> str:
    """The hash of one prompt's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def prompt_set_sha256(prompts: Iterable[Prompt]) -> str:
    """The hash of what is sent: ids, turns and style, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(_stable(prompt.id, prompt.turns, prompt.style))
    return digest.hexdigest()


def load_prompt_set(ref: str, *, search: Sequence[Path]) -> PromptSet:
    """The set called *ref* in the folders of *search*, or the file at that path."""
    path = next((p for folder in search if (p := folder / f"{ref}.jsonl").is_file()), Path(ref))
    if not path.is_file():
        raise _missing(ref, search)
    sidecar = read_sidecar(path)
    prompts = tuple(read_set(path))
    name = sidecar.name if sidecar else bare_name(path.name)
    source = sidecar.source if sidecar else path.name
    return PromptSet(name, prompts, prompt_set_sha256(prompts), source, path)


def check(path: Path) -> int:
    """How many prompts the file at *path* holds, having read and checked every one."""
    return sum(1 for _ in read_set(path))


def read_set(path: Path) -> Iterator[Prompt]:
    """The prompts of a converted file, or of any file of a known layout that has no sidecar."""
    sidecar = read_sidecar(path)
    if sidecar is None:
        yield from (located.prompt for located in read_prompts(path))
        return
    for _, id, turns, category in _SetReading(path, sidecar):
        yield Prompt(id=id, turns=turns, category=category, style=sidecar.style)


class _SetReading:
    """The prompts of a converted file under the ids that its sidecar gives them."""

    column: str | None = None
    unit = "line"

    def __init__(self, path: Path, sidecar: Sidecar) -> None:
        self.path, self.sidecar = path, sidecar
        self.layout: str | None = sidecar.layout
        self.unkept: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Found]:
        path, sidecar = self.path, self.sidecar
        if file_sha256(path) != sidecar.sha256:
            beside = sidecar_path(path).name
            problem = f"the file was changed after conversion ({beside} has its hash)."
            raise PromptError(path, None, problem, hint=CONVERT_AGAIN)
        reader = Reader(path, layout=sidecar.layout)
        if sidecar.index is None:
            yield from reader
            return
        entries = iter(sidecar.index)
        for found in reader:
            entry = next(entries, None)
            if entry is None or (sidecar.layout != "genai-perf" and entry.id != found.id):
                raise PromptError(
                    path, found.line, "not in the sidecar's index.", hint=CONVERT_AGAIN
                )
            yield found._replace(id=entry.id, category=entry.category)
        if (left := next(entries, None)) is not None:
            problem = f"`{left.id}` is in the sidecar's index but not in the file."
            raise PromptError(path, None, problem, hint=CONVERT_AGAIN)


def find_source(
    ref: str,
    *,
    search: Sequence[Path],
    converted: bool,
    layout: str | None = None,
    column: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Source:
    """What *ref* names: a converted set with its ids, or what `resolve` knows.

    With *converted*, a public set's name means the set in the folders of *search*, if it is there.
    """
    if layout is None and column is None and (converted or ref not in PUBLIC):
        paths = [*(folder / f"{ref}.jsonl" for folder in search), Path(ref)]
        path = next((path for path in paths if path.is_file()), None)
        if path is not None and (sidecar := read_sidecar(path)) is not None:
            return _set_source(path, sidecar)
        ref = ref if path is None else str(path)
    return resolve(ref, layout=layout, column=column, say=say)


def _set_source(path: Path, sidecar: Sidecar) -> Source:
    return Source(
        name=sidecar.name,
        where=path,
        origin=sidecar.source,
        read=lambda _: _SetReading(path, sidecar),
        licence=sidecar.licence,
        turns=sidecar.turns_policy,
        style=sidecar.style,
    )


def write_set(
    folder: Path,
    name: str,
    prompts: Iterable[Found],
    *,
    sessions: bool,
    facts: Facts,
    style: Style = "chat",
) -> tuple[Summary, Written]:
    """Write NAME.jsonl and its sidecar, read back before they get their names.

    CannotHold, and nothing written, where *sessions* is False and a prompt has several turns.
    """
    layout: Literal["genai-perf", "genai-perf-sessions"]
    layout = "genai-perf-sessions" if sessions else "genai-perf"
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as drafts:
        draft, index = Path(drafts) / f"{name}.jsonl", Index(Path(drafts) / "index")
        with index:
            written = write_prompts(draft, layout, prompts, note=index.add)
        summary = Summary(
            **facts.model_dump(),
            name=name,
            sha256=file_sha256(draft),
            prompts=written.prompts,
            turns=written.turns,
            layout=layout,
            style=style,
        )
        needed = written.ids_lost or written.categories_lost
        write_sidecar(sidecar_path(draft), summary, index if needed else None)
        os.replace(draft, folder / draft.name)
        os.replace(sidecar_path(draft), sidecar_path(folder / draft.name))
    return summary, written


_ASCII = json.JSONEncoder()


def _stable(*parts: object) -> bytes:
    return _ASCII.encode(parts).encode() + b"\n"


def _missing(ref: str, search: Sequence[Path]) -> PromptError:
    if "/" in ref or ref != bare_name(ref):
        return PromptError(ref, None, "no such file")
    places = ", ".join(f"{folder}/" for folder in search)
    missing = f"no prompt set '{ref}'" + (f" in {places}" if places else "")
    if ref in PUBLIC:
        return PromptError(ref, None, f"{missing}; run `specbench convert {ref}`")
    there = {path.stem for folder in search for path in folder.glob("*.jsonl")}
    if like := difflib.get_close_matches(ref, sorted(there | PUBLIC.keys()), n=1):
        how = "" if like[0] in there else f" Then run `specbench convert {like[0]}`."
        return PromptError(ref, None, f"{missing}; did you mean '{like[0]}'?{how}")
    hint = f"`specbench convert FILE --name {ref}` makes one from a file of yours."
    return PromptError(ref, None, f"{missing}.", hint=hint)
