"""A JSON array of objects, about a MiB of its text in memory at a time."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from specbench.errors import PromptError
from specbench.prompts.fields import Record
from specbench.prompts.rows import DECODER, SAVE_AS_UTF8, TOO_MUCH, DuplicateKeyError, Row, opened

CHUNK = 1 << 20
WHITE = " \t\n\r"


def is_array(path: Path) -> bool:
    """Whether the file begins as an array does (and not as JSONL)."""
    with opened(path, kind="JSON") as file:
        while chunk := file.read(CHUNK):
            if text := chunk.removeprefix(codecs.BOM_UTF8).lstrip():
                return text.startswith(b"[")
    return False


def array_rows(path: Path) -> Iterator[Row]:
    """The objects of an array, numbered from 1."""
    with opened(path, kind="JSON") as file:
        text, number = _Window(path, file), 0
        text.take("[", "not a JSON array")
        if text.next() == "]":
            raise PromptError(path, None, "no prompts: the array is empty")
        while True:
            number += 1
            yield number, text.object(number)
            if text.next() != ",":
                break
            text.take(",", "")
        text.take("]", f"no `,` or `]` after item {number} (a torn file?)")
        if text.next():
            raise PromptError(path, None, "more after the array")


class _Window:
    """The part of a text that is not read yet, as far as it was needed."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self.file = path, file
        self.text, self.at = "", 0
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def more(self) -> bool:
        """Read on: as much as is held, so that a long item costs no more than twice its length."""
        raw = self.file.read(max(CHUNK, len(self.text) - self.at))
        try:
            text = self.decoder.decode(raw, final=not raw)
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 (byte 0x{error.object[error.start]:02x})."
            raise PromptError(self.path, None, problem, hint=SAVE_AS_UTF8) from error
        self.text, self.at = self.text[self.at :] + text, 0
        return bool(raw)

    def next(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in WHITE:
                    return self.text[self.at]
                self.at += 1
            if not self.more():
                return ""

    def take(self, character: str, problem: str) -> None:
        if self.next() != character:
            raise PromptError(self.path, None, problem)
        self.at += 1

    def object(self, number: int) -> Record:
        """The object that begins here: item *number*."""
        if (begins := self.next()) != "{":
            raise _bad(self.path, number, f"not an object: it begins with `{begins}`")
        while True:
            try:
                return self._decoded(number)
            except json.JSONDecodeError as error:
                torn = error.msg.startswith("Unterminated")  # or a literal that is, at the end
                if not (torn or error.pos > len(self.text) - 16) or not self.more():
                    torn = torn or error.pos >= len(self.text)
                    raise _bad(self.path, number, _why(error, self.at, torn)) from error

    def _decoded(self, number: int) -> Record:
        value: Record
        try:
            value, self.at = DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError:
            raise
        except DuplicateKeyError as error:
            raise _bad(self.path, number, f"the key `{error}` is there twice") from error
        except (ValueError, RecursionError) as error:
            raise _bad(self.path, number, TOO_MUCH) from error
        return value


def _why(error: json.JSONDecodeError, start: int, torn: bool) -> str:
    if torn:
        return "the file ends inside the object (torn?)"
    return f"not JSON: {error.msg} at character {error.pos - start + 1} of the item"


def _bad(path: Path, number: int, problem: str) -> PromptError:
    return PromptError(path, number, problem, unit="item")
