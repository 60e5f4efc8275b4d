"""Tables of prompts (CSV, parquet, the hub's): which column holds them, and their rows.

A row becomes a record of the layout csv or parquet: `prompt` or `turns`, and `id` and `category`
where the table has columns of these names. A table that has the columns of another layout
(`task_id` and `prompt`, say) keeps its rows as they are.
"""

import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from specbench.errors import PromptError
from specbench.prompts.fields import Record
from specbench.prompts.rows import EMPTY, Row, opened, text_lines

# columns that only another layout has
STRUCTURED = {"turns", "conversations", "messages", "task_id", "prompt_id", "session_id"}
USUAL = ("prompt", "text", "instruction", "question")
BATCH_ROWS = 1024
TO_NAME_IT = "Name the one with the prompts: --column NAME."


def as_row(column: str) -> Callable[[Mapping[str, object]], Record]:
    """What makes a record of the layout csv of a row whose prompts are in *column*."""

    def row(record: Mapping[str, object]) -> Record:
        value = record.get(column)
        made: Record = {"turns" if isinstance(value, list) else "prompt": value}
        for key in ("id", "category"):
            if key != column and record.get(key) not in (None, ""):
                made[key] = record[key]
        return made

    return row


def filled(record: Mapping[str, object]) -> Record:
    """Without the nulls that a table has where a line of a file would lack the key."""
    return {key: value for key, value in record.items() if value is not None}


def column_of(
    where: Path | str, columns: Sequence[str], texts: Iterable[str], column: str | None
) -> str | None:
    """The column with the prompts; None where the rows are of another layout.

    *texts* are the columns that hold text. A column of a usual name, or else the only one with
    text, needs no *column*.
    """
    there = ", ".join(columns)
    if column is not None:
        if column not in columns:
            raise PromptError(where, None, f"no column `{column}`; there are {there}")
        return column
    if STRUCTURED & set(columns):
        return None
    usual = [name for name in columns if name.lower() in USUAL]
    found = usual or [name for name in texts if name not in ("id", "category")]
    if len(found) == 1:
        return found[0]
    several = f"prompts could be in {' or '.join(found)}" if found else "no column of text"
    raise PromptError(where, None, f"{several}; there are {there}.", hint=TO_NAME_IT)


# CSV


def csv_column(path: Path, column: str | None) -> str | None:
    """The column of a CSV file that holds the prompts (see `column_of`)."""
    rows = _csv_records(path)
    header = next(rows)[1]
    _, first = next(rows, (0, [""] * len(header)))
    texts = [name for name, value in zip(header, first, strict=True) if not _is_number(value)]
    return column_of(path, header, texts, column)


def csv_rows(path: Path, column: str | None) -> Iterator[Row]:
    """The rows of a CSV file, by the physical line that each starts on."""
    rows = _csv_records(path)
    header = next(rows)[1]
    if column is None:
        for line, values in rows:
            yield line, filled(dict(zip(header, values, strict=True)))
        return
    prompt = header.index(column)
    more = [(key, header.index(key)) for key in ("id", "category") if key in header]
    others = [(key, place) for key, place in more if place != prompt]
    for line, values in rows:
        record: Record = {"prompt": values[prompt]}
        for key, place in others:
            if value := values[place]:
                record[key] = value
        yield line, record


def _csv_records(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The header, and then the rows, which have as many fields."""
    csv.field_size_limit(sys.maxsize)  # it is 128 KiB, of the whole process; a prompt has no limit
    columns, line = 0, 1
    with opened(path, kind="CSV") as file:
        # only "\n" ends a line, as everywhere here
        reader = csv.reader(TextIOWrapper(file, "utf-8-sig", newline="\n"), strict=True)
        try:
            for values in reader:
                if values:
                    columns = columns or len(_checked_header(path, line, values))
                    if len(values) != columns:
                        problem = f"{len(values)} fields, where the header has {columns}"
                        raise PromptError(path, line, problem)
                    yield line, values
                line = reader.line_num + 1
        except csv.Error as error:
            raise PromptError(path, line, f"not CSV: {error}") from error
        except UnicodeDecodeError:
            for _ in text_lines(path, kind="CSV"):
                pass  # it says on which line
            raise
    if not columns:
        raise PromptError(path, None, EMPTY)


def _checked_header(path: Path, line: int, header: list[str]) -> list[str]:
    if len(header) == 1 and any(mark in header[0] for mark in ";\t"):
        raise PromptError(path, line, "the header has no commas; separate the columns with commas")
    if twice := [name for name in header if header.count(name) > 1]:
        raise PromptError(path, line, f"the column `{twice[0]}` is there twice")
    return header


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """A header of the first record's keys, and every field in quotes."""
    with path.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, quoting=csv.QUOTE_ALL)
        header: list[str] = []
        for record in records:
            if not header:
                header = list(record)
                writer.writerow(header)
            writer.writerow(record.values())


# Parquet


def parquet_column(path: Path, column: str | None) -> str | None:
    """The column of a parquet file that holds the prompts (see `column_of`)."""
    from pyarrow import types

    schema = _parquet(path).schema_arrow

    def is_text(of: object) -> bool:
        if types.is_list(of) or types.is_large_list(of):
            of = of.value_type  # type: ignore[attr-defined]  # of lists
        return bool(types.is_string(of) or types.is_large_string(of))

    texts = [field.name for field in schema if is_text(field.type)]
    if column is None and schema.names == ["id", "category", "turns"]:
        column = "turns"  # a set of conversations that was written here
    return column_of(path, schema.names, texts, column)


def parquet_rows(path: Path, column: str | None) -> Iterator[Row]:
    """The rows of a parquet file, from 1, about a thousand in memory at a time."""
    record_of = as_row(column) if column is not None else filled
    number = 0
    for batch in _batches(path):
        for record in batch:
            number += 1
            yield number, record_of(record)
    if not number:
        raise PromptError(path, None, "no prompts: the table has no rows")


def _batches(path: Path) -> Iterator[list[dict[str, Any]]]:
    """The rows of a parquet file, some at a time; PromptError where a page of it is damaged."""
    from pyarrow import ArrowException

    batches = iter(_parquet(path).iter_batches(BATCH_ROWS))
    while True:
        try:
            rows: list[dict[str, Any]] = next(batches).to_pylist()
        except StopIteration:
            return
        except (OSError, ArrowException, ValueError) as error:  # bytes of a text that are no UTF-8
            raise PromptError(path, None, f"a damaged parquet file: {error}") from error
        yield rows


def _parquet(path: Path) -> Any:  # noqa: ANN401  (pyarrow has no types)
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path)
    except OSError as error:
        raise PromptError(path, None, f"cannot be read: {error.strerror or error}") from error
    except ArrowException as error:
        raise PromptError(path, None, f"not a parquet file: {error}") from error


def write_parquet(path: Path, records: Iterable[Record]) -> None:
    """A table of text columns (`turns`: lists of text), in row groups of about a thousand."""
    import pyarrow as arrow
    from pyarrow.parquet import ParquetWriter

    text = arrow.string()
    rows = iter(records)
    first = next(rows, None)
    if first is None:
        return
    schema = arrow.schema([(key, arrow.list_(text) if key == "turns" else text) for key in first])
    with ParquetWriter(path, schema) as out:
        batch = [first]
        for record in rows:
            batch.append(record)
            if len(batch) == BATCH_ROWS:
                out.write_table(arrow.Table.from_pylist(batch, schema=schema))
                batch = []
        out.write_table(arrow.Table.from_pylist(batch, schema=schema))
