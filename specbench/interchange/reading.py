"""A file of another tool to its JSON values, each with the line that it starts on."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from specbench.errors import ExchangeError

MOST_BYTES = 512 << 20
# What a folder of artifacts is read by: the file with the most in it first.
IN_A_FOLDER = (
    "profile_export_raw.jsonl",
    "profile_export.jsonl",
    "profile_export.json",
    "*_genai_perf.json",
    "*_aiperf.json",
)


@dataclass(frozen=True)
class Source:
    """A file and what stands in it: `documents` are (line, JSON value), at least one."""

    path: Path
    documents: list[tuple[int, Any]]
    sha256: str

    @property
    def first(self) -> Any:  # noqa: ANN401  (what JSON holds is any value)
        """The first value, by which the tool is known."""
        return self.documents[0][1]


def read_source(path: Path) -> Source:
    """The file at *path* (of a folder: the one with the most in it), as JSON or as JSON lines.

    Raises:
        ExchangeError: it is not there, is empty, too large, not UTF-8 or not JSON; names the line.
    """
    if path.is_dir():
        path = _in_folder(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ExchangeError(path, None, f"over {MOST_BYTES >> 20} MiB; cut it into parts.")
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ExchangeError(path, None, f"cannot be read: {why}.") from None
    return Source(path, _documents(path, raw), hashlib.sha256(raw).hexdigest())


def _in_folder(folder: Path) -> Path:
    for pattern in IN_A_FOLDER:
        found = sorted(folder.rglob(pattern))
        if len(found) > 1:
            names = ", ".join(str(one.relative_to(folder)) for one in found[:5])
            raise ExchangeError(folder, None, f"several runs ({names}).", hint="Name one file.")
        if found:
            return found[0]
    raise ExchangeError(
        folder, None, "a folder without a profile_export.", hint="Name the file to import."
    )


def _documents(path: Path, raw: bytes) -> list[tuple[int, Any]]:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ExchangeError(path, line, f"not UTF-8 text ({error.reason}).") from None
    if not text.strip():
        raise ExchangeError(path, None, "is empty.")
    try:
        whole = parsed(text)
        return [(1, one) for one in whole] if isinstance(whole, list) and whole else [(1, whole)]
    except ValueError as error:
        lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        if len(lines) == 1:
            raise ExchangeError(path, lines[0][0], f"not JSON: {error}.") from None
    found = []
    for number, one in lines:
        try:
            found.append((number, parsed(one)))
        except ValueError as error:
            raise ExchangeError(path, number, f"not JSON: {error}.") from None
    return found


def parsed(text: str) -> Any:  # noqa: ANN401
    """The JSON value that *text* is.

    Raises:
        ValueError: it is none, is nested too deep, or holds NaN or Infinity.
    """
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
