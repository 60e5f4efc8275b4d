"""What a prompt set is on disk: NAME.jsonl as GenAI-Perf reads it, beside NAME.meta.json.

The sidecar holds what GenAI-Perf's format has no room for (ids, categories, where it came from),
and the hash of the file it belongs to.
"""

import difflib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from specbench.errors import PromptError
from specbench.fetch import file_sha256
from specbench.prompts.formats import read_prompts
from specbench.prompts.sources import PUBLIC, TurnsPolicy
from specbench.records import Fact, Prompt, Style

FORMAT: Literal[1] = 1  # bump when a reader of old sidecars would misread new ones
CONVERT_AGAIN = "Convert it again, or delete the sidecar to read the file as it is."
# what str.splitlines() breaks at and JSON does not escape
LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\u0085\u2028\u2029"}


class IndexEntry(Fact):
    """What a line (or session) of the file is, in the file's order."""

    id: str
    category: str | None = None


class Facts(Fact):
    """Where a set came from and what was chosen in converting it."""

    source: str  # a hub id, a package with its version and file, or a file's name
    licence: str | None = None
    turns_policy: TurnsPolicy = "all"
    seed: int | None = None
    limit: int | None = None


class Sidecar(Facts):
    """NAME.meta.json."""

    format: Literal[1] = FORMAT
    name: str
    sha256: str  # of the bytes of NAME.jsonl
    prompts: int
    turns: int
    layout: Literal["genai-perf", "genai-perf-sessions"]
    style: Style
    index: tuple[IndexEntry, ...] | None = None  # None: no categories, ids as the file gives them


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
    name = sidecar.name if sidecar else path.name.removesuffix(".gz").removesuffix(".jsonl")
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
    if file_sha256(path) != sidecar.sha256:
        problem = f"the file was changed after conversion ({sidecar_path(path).name} has its hash)."
        raise PromptError(path, None, problem, hint=CONVERT_AGAIN)
    located = read_prompts(path, layout=sidecar.layout, style=sidecar.style)
    if sidecar.index is None:
        yield from (prompt for _, _, prompt in located)
        return
    entries = iter(sidecar.index)
    for line, _, prompt in located:
        entry = next(entries, None)
        if entry is None or (sidecar.layout != "genai-perf" and entry.id != prompt.id):
            raise PromptError(path, line, "not in the sidecar's index.", hint=CONVERT_AGAIN)
        yield prompt.model_copy(update={"id": entry.id, "category": entry.category})
    if (left := next(entries, None)) is not None:
        problem = f"`{left.id}` is in the sidecar's index but not in the file."
        raise PromptError(path, None, problem, hint=CONVERT_AGAIN)


def write_set(
    folder: Path, name: str, prompts: Iterable[Prompt], *, sessions: bool, facts: Facts
) -> Sidecar:
    """Write NAME.jsonl and its sidecar, read back before they get their names."""
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as drafts:
        draft = Path(drafts) / f"{name}.jsonl"
        written = hashlib.sha256()
        sidecar = _write_draft(draft, prompts, written.update, sessions=sessions, facts=facts)
        read = hashlib.sha256()
        for prompt in read_set(draft):
            read.update(_everything(prompt))
        if read.digest() != written.digest():
            raise PromptError(draft.name, None, "what was written does not read back the same")
        os.replace(draft, folder / draft.name)
        os.replace(sidecar_path(draft), sidecar_path(folder / draft.name))
    return sidecar


def _write_draft(
    path: Path,
    prompts: Iterable[Prompt],
    note: Callable[[bytes], None],
    *,
    sessions: bool,
    facts: Facts,
) -> Sidecar:
    index: list[tuple[str, str | None]] = []
    turns, style, plain = 0, None, True
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for prompt in prompts:
            style = style or prompt.style
            turns += len(prompt.turns)
            index.append((prompt.id, prompt.category))
            plain &= prompt.category is None and (sessions or prompt.id == str(len(index)))
            note(_everything(prompt))
            out.writelines(_lines(prompt, sessions=sessions))
        out.flush()
        os.fsync(out.fileno())
    if style is None:
        raise PromptError(path.name, None, "there is not one prompt to write")
    sidecar = Sidecar(
        **facts.model_dump(),
        name=path.stem,
        sha256=file_sha256(path),
        prompts=len(index),
        turns=turns,
        layout="genai-perf-sessions" if sessions else "genai-perf",
        style=style,
        index=None if plain else tuple(IndexEntry(id=id, category=c) for id, c in index),
    )
    with sidecar_path(path).open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(_sidecar_lines(sidecar))
        out.flush()
        os.fsync(out.fileno())
    return sidecar


def sidecar_path(path: Path) -> Path:
    """NAME.meta.json for NAME.jsonl."""
    return path.with_name(f"{path.name.removesuffix('.jsonl')}.meta.json")


def read_sidecar(path: Path) -> Sidecar | None:
    """The sidecar of the file at *path*, where it has one."""
    beside = sidecar_path(path)
    if path.suffix != ".jsonl" or not beside.is_file():
        return None
    try:
        return Sidecar.model_validate_json(beside.read_bytes())
    except (OSError, ValidationError) as error:
        problem = f"not a sidecar of format {FORMAT}{_first_problem(error)}."
        raise PromptError(beside, None, problem, hint=CONVERT_AGAIN) from error


def _first_problem(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return f": {error.strerror}"
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    return f": `{key}`: {first['msg']}" if key else f": {first['msg']}"


_AS_IT_IS = json.JSONEncoder(ensure_ascii=False)
_ASCII = json.JSONEncoder()


def _stable(*parts: object) -> bytes:
    return _ASCII.encode(parts).encode() + b"\n"


def _everything(prompt: Prompt) -> bytes:
    return repr((prompt.id, prompt.turns, prompt.style, prompt.category)).encode()


def _lines(prompt: Prompt, *, sessions: bool) -> Iterator[str]:
    """GenAI-Perf's line of a prompt, or its lines of a session: a delay on all but the last."""
    last = len(prompt.turns) - 1
    if last and not sessions:
        raise ValueError(f"{prompt.id} has {last + 1} turns; it needs a file of sessions")
    for n, text in enumerate(prompt.turns):
        keys: dict[str, object] = {"session_id": prompt.id} if sessions else {}
        keys["text"] = text
        if n < last:
            keys["delay"] = 0
        yield _AS_IT_IS.encode(keys).translate(LINE_BREAKS) + "\n"


def _sidecar_lines(sidecar: Sidecar) -> Iterator[str]:
    """JSON with one prompt of the index a line."""
    head = json.dumps(sidecar.model_dump(exclude={"index"}), indent=2, ensure_ascii=False)
    if sidecar.index is None:
        yield head + "\n"
        return
    yield head.removesuffix("\n}") + ',\n  "index": [\n'
    for n, entry in enumerate(sidecar.index, start=1):
        yield f"    {json.dumps(entry.model_dump())}{',' if n < len(sidecar.index) else ''}\n"
    yield "  ]\n}\n"


def _missing(ref: str, search: Sequence[Path]) -> PromptError:
    if "/" in ref or ref.endswith((".jsonl", ".json", ".gz")):
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
