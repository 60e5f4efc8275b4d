"""Lines of text, and JSONL and JSON arrays out of them. What is refused here is no such file.

One line, or about a MiB of an array, is in memory at a time. gzip is unpacked.
"""

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from gzip import GzipFile
from pathlib import Path
from typing import IO, NoReturn, cast

from specbench.errors import PromptError
from specbench.prompts.fields import Record, kind

Row = tuple[int, Record]  # the physical line it starts on (or which item or row it is), from 1
GZIP = b"\x1f\x8b"
SAVE_AS_UTF8 = "Save it as UTF-8."
NOT_TEXT = {
    b"\xff\xfe": ("UTF-16", SAVE_AS_UTF8),
    b"\xfe\xff": ("UTF-16", SAVE_AS_UTF8),
    b"PAR1": ("a parquet file", "Name it .parquet, or pass --from parquet."),
    b"PK\x03\x04": ("a zip archive", "Unpack it first."),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "Unpack it first."),
}
ONE_A_LINE = "JSONL has one object a line"
TOO_MUCH = "JSON that nests too deep or has too long a number"


@contextmanager
def opened(path: Path, *, kind: str) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked; PromptError where they cannot be read or are no text."""
    try:
        with path.open("rb") as file:
            head = file.peek(4)[:4]
            _refuse_binary(path, head, kind)
            yield cast(IO[bytes], GzipFile(fileobj=file)) if head[:2] == GZIP else file
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PromptError(path, None, f"cannot be read: {reason}") from error


def text_lines(path: Path, *, kind: str) -> Iterator[tuple[int, str]]:
    """The lines of a UTF-8 file, from 1, each with its end; an empty file is an error."""
    line, blank = 0, True
    with opened(path, kind=kind) as file:
        # only "\n" ends a line: text may hold U+2028 and the like
        for line, raw in enumerate(file, 1):
            try:
                text = raw.decode()
            except UnicodeDecodeError as error:
                problem = f"not UTF-8 (byte 0x{raw[error.start]:02x} at byte {error.start + 1})."
                raise PromptError(path, line, problem, hint=SAVE_AS_UTF8) from error
            if blank:
                text = text.removeprefix("\ufeff") if line == 1 else text
                blank = not text.strip()
            yield line, text
    if blank:
        raise PromptError(path, None, BLANK if line else EMPTY)


BLANK = "no prompts: the file has only blank lines"
EMPTY = "no prompts: the file is empty"


def jsonl_rows(path: Path) -> Iterator[Row]:
    """The objects of a JSONL file."""
    first = True
    for line, text in text_lines(path, kind="JSONL"):
        try:
            record, end = DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            record, end = None, 0
        if text[end:] not in LINE_ENDS or type(record) is not dict:
            if not (text := text.strip()):
                continue
            record = _object(path, line, text, first=first)  # or what is wrong with it
        yield line, record
        first = False


LINE_ENDS = ("\n", "\r\n", "")


def plain_rows(path: Path) -> Iterator[Row]:
    """The lines of a text file that are not blank."""
    for line, text in text_lines(path, kind="text"):
        if text.strip():
            yield line, {"text": text.removesuffix("\n").removesuffix("\r")}


def _refuse_binary(path: Path, head: bytes, kind: str) -> None:
    for magic, (what, hint) in NOT_TEXT.items():
        if head.startswith(magic):
            raise PromptError(path, None, f"the file is {what}, not {kind}.", hint=hint)
    if b"\0" in head and head[:2] != GZIP:
        raise PromptError(path, None, "the file is UTF-16 or binary, not UTF-8.", hint=SAVE_AS_UTF8)


class DuplicateKeyError(ValueError):
    """A key that an object has twice: another reader may take the other value."""


def _without_duplicates(pairs: list[tuple[str, object]]) -> Record:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKeyError(next(key for key in keys if keys.count(key) > 1))
    return record


DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates)


def _object(path: Path, line: int, text: str, *, first: bool) -> Record:
    if first and text.startswith("["):
        _refuse_array(path, line)
    try:
        value, end = DECODER.raw_decode(text)
    except DuplicateKeyError as error:
        raise PromptError(path, line, f"the key `{error}` is there twice") from error
    except json.JSONDecodeError as error:
        raise PromptError(path, line, _why_not_json(text, error)) from error
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits, 5,000 brackets
        raise PromptError(path, line, TOO_MUCH) from error
    if rest := text[end:].strip():
        raise PromptError(path, line, _what_follows(rest, end))
    if not isinstance(value, dict):
        raise PromptError(path, line, f"{kind(value)}, not an object; {ONE_A_LINE}")
    return cast(Record, value)


def _refuse_array(path: Path, line: int) -> NoReturn:
    hint = "Name it .json to have it read as an array."
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
