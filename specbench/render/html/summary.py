"""The answer in figures, the flags, and the table of all rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specbench.analysis.rows import Row
from specbench.failures import status_text
from specbench.render.columns import Column, columns, printable
from specbench.render.html.figures import Scene, arm_name, interval_text, number, times
from specbench.render.report import cell, log_end
from specbench.render.words import fastest

MIB = 1 << 20
NAMED = 3  # rows that a finding names
COUNTS = ("k", "max_tokens", "concurrency", "requests", "failed", "output_tokens")
NAMES = ("method", "arm", "k", "prompt_set", "part", "max_tokens", "concurrency", "rate")
ANSWER = ("speedup", "this_set")


@dataclass(frozen=True)
class Flagged:
    """One finding of a check, and all the rows that it is about."""

    check: str
    finding: str
    where: str


def tiles(scene: Scene) -> list[tuple[str, str, str]]:
    """The chosen set-up in figures: name, value, what it is beside."""
    base = scene.baseline
    found = fastest(scene.rows)
    if found is None or base is None:
        return []
    row, ratio = found
    acceptance = row.metrics.acceptance
    tiles = [
        ("speed-up", times(ratio.value), f"95% {interval_text(ratio)}, {arm_name(row)}"),
        (
            "time per output token",
            f"{number(row.metrics.tpot_ms, 1)} ms",
            f"baseline {number(base.metrics.tpot_ms, 1)} ms",
        ),
        (
            "tokens per step",
            number(acceptance.length if acceptance else None),
            f"of at most {row.k + 1}",
        ),
        (
            "time to first token",
            f"{number(row.metrics.ttft_ms, 0)} ms",
            f"baseline {number(base.metrics.ttft_ms, 0)} ms",
        ),
    ]
    if row.parity:
        tiles.append(
            ("identical outputs", f"{row.parity.identical} of {row.parity.compared}", "greedy")
        )
    if row.cost and row.cost.memory_change_bytes is not None:
        tiles.append(
            ("memory", f"{row.cost.memory_change_bytes / MIB:+,.0f} MiB", "beside the baseline")
        )
    return tiles


def flagged(rows: Sequence[Row]) -> list[Flagged]:
    """What the checks found, the same finding once."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for flag in row.flags:
            where.setdefault((flag.check, flag.finding), []).append(_place(row))
    return [
        Flagged(check, printable(finding), _some(list(dict.fromkeys(places))))
        for (check, finding), places in where.items()
    ]


def _some(places: Sequence[str]) -> str:
    """The first of *places*, and how many there are besides; the table marks them all."""
    rest = len(places) - NAMED
    return "; ".join(places[:NAMED]) + (f" and {rest} more" if rest > 0 else "")


@dataclass(frozen=True)
class NotMeasured:
    """A row that was not measured in full: where, its status, why, and the end of a log."""

    where: str
    status: str
    why: str
    log: str


def problems(rows: Sequence[Row]) -> list[NotMeasured]:
    """What was not measured in full; the end of each log once."""
    seen, found = set(), []
    for row in rows:
        if row.problem and row.problem.strip():
            log = "\n".join(printable(line.expandtabs()) for line in log_end(row.problem))
            status = status_text(row.status, row.failure)
            why = printable(row.problem.splitlines()[0])
            found.append(NotMeasured(_place(row), status, why, "" if log in seen else log))
            seen.add(log)
    return found


def _place(row: Row) -> str:
    return printable(
        f"{row.arm} on {row.prompt_set}, {row.max_tokens} tokens, {row.condition.load}"
    )


def table(rows: Sequence[Row]) -> dict[str, Any]:
    """Every row with every column that says something."""
    shown = _speedup_early(columns(rows))
    numbers = {c.key for c in shown if c.digits is not None or c.key in COUNTS} - {"speedup"}
    return {
        "columns": shown,
        "numbers": numbers,
        "rows": [
            {
                "cells": [
                    {
                        "text": cell(column, row),
                        "sort": _sort_key(column, row),
                        "number": column.key in numbers,
                    }
                    for column in shown
                ],
                "flags": [(flag.check, printable(flag.finding)) for flag in row.flags],
                "problem": status_text(row.status, row.failure) if row.problem else "",
                "baseline": row.is_baseline,
            }
            for row in rows
        ],
    }


def _speedup_early(shown: Sequence[Column]) -> list[Column]:
    """The answer beside the names, where it is seen without scrolling."""
    names = [column for column in shown if column.key in NAMES]
    first = [column for column in shown if column.key in ANSWER]
    return [*names, *first[::-1], *(c for c in shown if c not in names and c not in first)]


def _sort_key(column: Column, row: Row) -> str:
    value = column.value(row)
    if value is None:
        return ""
    return printable(str(value))
