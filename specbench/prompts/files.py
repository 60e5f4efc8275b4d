"""Files of records, whatever they are made of: which kind a file is, its records, and writing them.

A kind is known by the file's suffix (`.gz` after it is fine, but for parquet). What has none of
these suffixes is JSONL.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic_core import to_json

from specbench.errors import PromptError
from specbench.prompts import tables
from specbench.prompts.arrays import array_rows, is_array
from specbench.prompts.fields import Record
from specbench.prompts.layout import Container
from specbench.prompts.layouts import LAYOUTS
from specbench.prompts.rows import Row, jsonl_rows, plain_rows

SUFFIXES: dict[Container, str] = {
    "jsonl": ".jsonl",
    "json": ".json",
    "text": ".txt",
    "csv": ".csv",
    "parquet": ".parquet",
}
# what str.splitlines() breaks at and JSON does not escape
LINE_BREAKS = {c: f"\\u{ord(c):04x}" for c in "\u0085\u2028\u2029"}
TABLES = ("csv", "parquet", "parquet-turns")


class Rows(NamedTuple):
    """The records of a source: `layout` is None where each record has to tell it."""

    rows: Iterator[Row]
    layout: str | None
    column: str | None = None  # of a table: the one with the prompts
    unit: str = "line"  # what Row.line counts


def open_rows(path: Path, *, layout: str | None = None, column: str | None = None) -> Rows:
    """The records of a file, lazily; *layout* and *column* are what the user said."""
    container = container_of(path, layout)
    find = column is not None or layout in (None, *TABLES)
    if container == "csv":
        column = tables.csv_column(path, column) if find else None
        return Rows(tables.csv_rows(path, column), _of(layout, column, "csv"), column)
    if container == "parquet":
        column = tables.parquet_column(path, column) if find else None
        rows = tables.parquet_rows(path, column)
        return Rows(rows, _of(layout, column, "parquet"), column, "row")
    if container == "text":
        if column is not None:
            raise PromptError(path, None, "a text file has no columns; leave out --column")
        return Rows(plain_rows(path), layout or "text")
    rows, unit = (array_rows(path), "item") if container == "json" else (jsonl_rows(path), "line")
    if column is None:
        return Rows(rows, layout, None, unit)
    return Rows(_of_column(path, rows, column, unit), layout or "column", column, unit)


def _of_column(path: Path, rows: Iterator[Row], column: str, unit: str) -> Iterator[Row]:
    record_of, checked = tables.as_row(column), False
    for line, record in rows:
        if not checked and column not in record:
            problem = f"no column `{column}`; there are {', '.join(record)}"
            raise PromptError(path, line, problem, unit=unit)
        checked = True
        yield line, record_of(record)


def _of(layout: str | None, column: str | None, table: str) -> str | None:
    return layout if layout is not None or column is None else table


def bare_name(name: str) -> str:
    """A file's name without the suffixes that are known here."""
    bare = name.removesuffix(".gz")
    return bare.removesuffix(next((end for end in SUFFIXES.values() if bare.endswith(end)), ""))


def container_of(path: Path, layout: str | None = None) -> Container:
    """What a file is made of, by the layout that the user named, else by its name."""
    known = LAYOUTS[layout].containers if layout in LAYOUTS else ()
    if known and known[0] in ("text", "csv", "parquet"):
        return known[0]
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    container: Container
    container = next((kind for kind, end in SUFFIXES.items() if end == suffix), "jsonl")
    if container == "json":
        return "json" if is_array(path) else "jsonl"
    return "jsonl" if known and container == "text" else container


# Writing


def write_records(path: Path, container: Container, records: Iterable[Record]) -> None:
    """Write a file of records, on disk when this returns."""
    WRITERS[container](path, records)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def json_line(record: Record) -> bytes:
    """JSON that is one line for every reader, however it splits lines; without its end."""
    line = to_json(record)  # a few times faster than json, which reads it back
    if line.isascii():
        return line
    text = line.decode()
    for character, escape in LINE_BREAKS.items():
        if character in text:
            text = text.replace(character, escape)
            line = text.encode()
    return line


def _write_jsonl(path: Path, records: Iterable[Record]) -> None:
    with path.open("wb") as out:
        out.writelines(json_line(record) + b"\n" for record in records)


def _write_array(path: Path, records: Iterable[Record]) -> None:
    with path.open("wb") as out:
        before = b"[\n"
        for record in records:
            out.write(before + json_line(record))
            before = b",\n"
        out.write(b"\n]\n")


def _write_text(path: Path, records: Iterable[Record]) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as out:
        out.writelines(f"{record['text']}\n" for record in records)


WRITERS: dict[Container, Callable[[Path, Iterable[Record]], None]] = {
    "jsonl": _write_jsonl,
    "json": _write_array,
    "text": _write_text,
    "csv": tables.write_csv,
    "parquet": tables.write_parquet,
}
