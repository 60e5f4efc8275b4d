"""NAME.meta.json, beside NAME.jsonl: what GenAI-Perf's format has no room for, and its hash.

The ids and categories of its index are one prompt a line, and never all in memory on writing.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Literal, Self

from pydantic import ValidationError

from specbench.errors import PromptError
from specbench.prompts.layout import Found
from specbench.prompts.sources import TurnsPolicy
from specbench.records import Fact, Style

FORMAT: Literal[1] = 1  # bump when a reader of old sidecars would misread new ones
CONVERT_AGAIN = "Convert it again, or delete the sidecar to read the file as it is."
_ASCII = json.JSONEncoder()


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


class Summary(Facts):
    """What NAME.meta.json says of the set as a whole."""

    format: Literal[1] = FORMAT
    name: str
    sha256: str  # of the bytes of NAME.jsonl
    prompts: int
    turns: int
    layout: Literal["genai-perf", "genai-perf-sessions"]
    style: Style


class Sidecar(Summary):
    """NAME.meta.json."""

    index: tuple[IndexEntry, ...] | None = None  # None: no categories, ids as the file gives them


class Index:
    """The entries of a sidecar's index, one a line of a file: they are not held in memory.

    Nothing is written as long as ids are the numbers of their prompts and there is no category.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.digest, self.entries, self.written = path, 0, 0, 0
        self._out = path.open("w", encoding="ascii", newline="\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def add(self, found: Found) -> None:
        """Append the entry of one prompt."""
        self.entries += 1
        if self.written or found.category is not None or found.id != str(self.entries):
            self.complete(self.entries - 1)
            self._write(found.id, found.category)

    def complete(self, entries: int) -> None:
        """Write what was left out of the first *entries*."""
        while self.written < entries:
            self._write(str(self.written + 1), None)

    def _write(self, id: str, category: str | None) -> None:
        before = ",\n" if self.written else ""
        said = "null" if category is None else _ASCII.encode(category)
        self._out.write(f'{before}    {{"id": {_ASCII.encode(id)}, "category": {said}}}')
        self.written += 1
        self.digest = hash((self.digest, id, category))


def write_sidecar(path: Path, summary: Summary, index: Index | None) -> None:
    """JSON with one prompt of the index a line, read back."""
    head = json.dumps(summary.model_dump(), indent=2, ensure_ascii=False)
    with path.open("w", encoding="utf-8", newline="\n") as out:
        if index is None:
            out.write(head + "\n")
        else:
            out.write(head[:-2] + ',\n  "index": [\n')
            with index.path.open(encoding="ascii") as entries:
                shutil.copyfileobj(entries, out)
            out.write("\n  ]\n}\n")
        out.flush()
        os.fsync(out.fileno())
    if index is not None and _index_digest(path) != index.digest:
        raise PromptError(path.name, None, "what was written does not read back the same")


def _index_digest(path: Path) -> int:
    digest, decode = 0, json.JSONDecoder().raw_decode
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith('    {"id": '):
                entry, _ = decode(line, 4)
                digest = hash((digest, entry["id"], entry["category"]))
    return digest


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
