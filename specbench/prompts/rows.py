"""Lines of a JSONL file as (physical line, object). What is refused here is not JSONL at all.

A reader for another container (CSV, parquet) is one function of a path and a line in READERS.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from gzip import GzipFile
from pathlib import Path
from typing import NamedTuple, NoReturn, cast

from specbench.errors import PromptError

Record = dict[str, object]

BOM = b"\xef\xbb\xbf"
GZIP = b"\x1f\x8b"
SAVE_AS_UTF8 = "Save it as UTF-8."
NOT_TEXT = {
    b"\xff\xfe": ("UTF-16, not UTF-8", SAVE_AS_UTF8),
    b"\xfe\xff": ("UTF-16, not UTF-8", SAVE_AS_UTF8),
    b"PAR1": ("a parquet file, not JSONL", "`hf:FOLDER` reads a folder of parquet files."),
    b"PK\x03\x04": ("a zip archive, not JSONL", "Unpack it first."),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed, not JSONL", "Unpack it first."),
}
ONE_A_LINE = "JSONL has one object a line"


class Row(NamedTuple):
    """One record and the physical line it stands on, from 1."""

    line: int
    record: Record


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def read_rows(path: Path) -> Iterator[Row]:
    """The records of a file, by its suffix; JSONL unless another reader knows the suffix."""
    return READERS.get(path.suffix.lower(), jsonl_rows)(path)


def jsonl_rows(path: Path) -> Iterator[Row]:
    """The objects of a JSONL file (gzip is unpacked), one line in memory at a time."""
    line, found = 0, False
    try:
        with path.open("rb") as file:
            head = file.peek(4)[:4]
            _refuse_binary(path, head)
            # only "\n" ends a line: text may hold U+2028 and the like
            for line, raw in enumerate(GzipFile(fileobj=file) if head[:2] == GZIP else file, 1):
                text = _decoded(path, line, raw.removeprefix(BOM) if line == 1 else raw).strip()
                if text:
                    yield Row(line, _object(path, line, text, first=not found))
                    found = True
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PromptError(path, line + 1 if line else None, f"cannot be read: {reason}") from error
    if not found:
        raise PromptError(path, None, "no prompts: the file is empty" if not line else BLANK)


BLANK = "no prompts: the file has only blank lines"
READERS: dict[str, Callable[[Path], Iterator[Row]]] = {".jsonl": jsonl_rows}


def _refuse_binary(path: Path, head: bytes) -> None:
    for magic, (what, hint) in NOT_TEXT.items():
        if head.startswith(magic):
            raise PromptError(path, None, f"the file is {what}.", hint=hint)
    if b"\0" in head and head[:2] != GZIP:
        raise PromptError(path, None, "the file is UTF-16 or binary, not UTF-8.", hint=SAVE_AS_UTF8)


def _decoded(path: Path, line: int, raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 (byte 0x{raw[error.start]:02x} at byte {error.start + 1})."
        raise PromptError(path, line, problem, hint=SAVE_AS_UTF8) from error


class _DuplicateKeyError(ValueError):
    pass


def _without_duplicates(pairs: list[tuple[str, object]]) -> Record:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return record


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates)


def _object(path: Path, line: int, text: str, *, first: bool) -> Record:
    if first and text.startswith("["):
        _refuse_array(path, line)
    try:
        value, end = _DECODER.raw_decode(text)
    except _DuplicateKeyError as error:
        raise PromptError(path, line, f"the key `{error}` is there twice") from error
    except json.JSONDecodeError as error:
        raise PromptError(path, line, _why_not_json(text, error)) from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 5,000 brackets
        raise PromptError(
            path, line, "JSON that nests too deep or has too long a number"
        ) from error
    if rest := text[end:].strip():
        raise PromptError(path, line, _what_follows(rest, end))
    if not isinstance(value, dict):
        raise PromptError(path, line, f"{kind(value)}, not an object; {ONE_A_LINE}")
    return cast(Record, value)


def _refuse_array(path: Path, line: int) -> NoReturn:
    hint = f"Write it one object a line: jq -c '.[]' {path.name} > lines.jsonl"
    raise PromptError(path, line, f"the file is one JSON array; {ONE_A_LINE}.", hint=hint)


def _why_not_json(text: str, error: json.JSONDecodeError) -> str:
    if error.pos >= len(text) or error.msg.startswith("Unterminated"):
        return f"the line ends inside the object (torn, or pretty-printed?); {ONE_A_LINE}"
    return f"not JSON: {error.msg} at character {error.pos + 1}"


def _what_follows(rest: str, end: int) -> str:
    if rest == ",":
        return f"a comma after the object; {ONE_A_LINE}"
    if rest.startswith(","):
        return f"two objects with a comma between them; {ONE_A_LINE}"
    return f"more after the object, from character {end + 1}; {ONE_A_LINE}"
