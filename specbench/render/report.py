"""A report as a terminal table, markdown, CSV or JSON."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specbench.analysis.rows import SCHEMA, Row
from specbench.render.columns import MISSING, Column, columns, deepest, printable, speedup_text

# Dropped from a terminal table that is too narrow, in this order; before them p_k down to p_3.
EXPENDABLE = (
    "output_tokens",
    "acceptance_rate",
    "same",
    "p_2",
    "p_1",
    "ttft_ms",
    "requests",
    "latency_ms",
    "tpot_ms",
)


def footer(run: Mapping[str, Any], shown: Sequence[Column]) -> list[str]:
    """What the columns mean and where the numbers come from, a line each."""
    machine = run["machine"]
    gpus = ", ".join(gpu.get("name", "GPU") for gpu in machine["gpus"])
    hardware = gpus or f"{machine['cpu']}, {machine['cores']} cores"
    sampling = run["config"]["sampling"]
    sampled = f"temperature {sampling['temperature']:g}"
    sampled += ", ignore_eos" if sampling["ignore_eos"] else ""
    lines = [
        (
            f"{run['config']['model']} on {hardware}; vLLM {run['vllm'] or '(not started here)'}; "
            f"{sampled}; schedule {run['config']['schedule']}; run {run['id']}"
        ),
    ]
    meanings = [f"{c.head}: {c.meaning}" for c in shown if c.key in EXPLAINED]
    lines.append(" · ".join(meanings))
    lines.append(
        "speed-up: geometric mean over prompts of baseline/arm, 95% interval by a bootstrap over "
        "prompts (on prompts like these)"
    )
    return lines


EXPLAINED = {"ttft_ms", "tpot_ms", "tokens_per_s", "acceptance_length", "acceptance_rate", "p_1"}


def cell(column: Column, row: Row) -> str:
    """A cell for people; the speed-up comes with its interval."""
    return speedup_text(row) if column.key == "speedup" else column.show(row)


def notes(rows: Sequence[Row]) -> list[str]:
    """Flags and failures, a line each, under the table."""
    lines = []
    for row in rows:
        where = " ".join(filter(None, (row.arm, row.prompt_set, row.category)))
        lines += [f"{where}: {flag.finding} [{flag.check}]" for flag in row.flags]
        if row.problem:
            lines.append(f"{where}: {row.problem.splitlines()[0]}")
    return [printable(line) for line in lines]


def as_markdown(run: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """A table that pastes into a pull request."""
    shown = columns(rows)
    lines = [
        "| " + " | ".join(column.head for column in shown) + " |",
        "|" + "|".join(" --- " if c.digits is None else " ---: " for c in shown) + "|",
    ]
    for row in rows:
        lines.append("| " + " | ".join(_escaped(cell(c, row)) for c in shown) + " |")
    lines += ["", *footer(run, shown)]
    if found := notes(rows):
        lines += ["", *(f"- {_escaped(note)}" for note in found)]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def as_csv(run: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """All columns under their script names; an empty cell where there is nothing."""
    records = _records(rows)
    for record in records:
        record["flags"] = "; ".join(flag["finding"] for flag in record["flags"])
    out = io.StringIO()
    writer = csv.DictWriter(
        out, fieldnames=list(records[0]) if records else [], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def as_json(run: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The rows for scripts: `schema`, `run`, `rows`; null where there is nothing, never NaN."""
    document = {
        "schema": SCHEMA,
        "run": {key: run[key] for key in ("id", "config", "machine", "vllm", "prompt_sets")},
        "rows": _records(rows),
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows for scripts; all have the same keys."""
    depth = deepest(rows)
    return [_record(row, depth) for row in rows]


def _record(row: Row, depth: int) -> dict[str, Any]:
    metrics = row.metrics
    acceptance = metrics.acceptance if row.k else None
    positions = (acceptance and acceptance.positions) or ()
    tpot = row.speedup.tpot if row.speedup else None
    latency = row.speedup.latency if row.speedup else None
    return {
        "arm": row.arm,
        "method": row.method,
        "k": row.k,
        "prompt_set": row.prompt_set,
        "category": row.category,
        "max_tokens": row.max_tokens,
        "concurrency": row.concurrency,
        "repeats": row.repeats,
        "requests": metrics.requests,
        "failed": metrics.failed,
        "prompts": metrics.prompts,
        "output_tokens": metrics.output_tokens,
        "latency_ms": metrics.latency_ms,
        "ttft_ms": metrics.ttft_ms,
        "tpot_ms": metrics.tpot_ms,
        "tokens_per_s": metrics.tokens_per_s,
        "acceptance_length": acceptance and acceptance.length,
        "acceptance_length_per_draft": acceptance and acceptance.length_per_draft,
        "acceptance_rate": acceptance and acceptance.rate,
        "acceptance_source": acceptance and acceptance.source,
        **{f"p_{i + 1}": positions[i] if i < len(positions) else None for i in range(depth)},
        "outputs_compared": row.parity and row.parity.compared,
        "outputs_identical": row.parity and row.parity.identical,
        "speedup": 1.0 if row.is_baseline else tpot and tpot.value,
        "speedup_low": tpot and tpot.low,
        "speedup_high": tpot and tpot.high,
        "latency_speedup": 1.0 if row.is_baseline else latency and latency.value,
        "flags": [{"check": flag.check, "finding": flag.finding} for flag in row.flags],
        "problem": row.problem,
    }


def as_table(run: Mapping[str, Any], rows: Sequence[Row], *, width: int, colour: bool) -> str:
    """A table for a terminal *width* columns wide; columns are dropped until it fits."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = columns(rows)
    texts = {c.key: [cell(c, row) for row in rows] for c in shown}
    deep = [f"p_{i}" for i in range(deepest(rows), 2, -1)]
    for key in ("", *deep, *EXPENDABLE):
        shown = [c for c in shown if c.key != key]
        if _width(shown, texts) <= width:
            break
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for column in shown:
        number = column.digits is not None or column.key in ("k", "requests", "output_tokens")
        left = column.key == "speedup" or not number
        table.add_column(column.head, justify="left" if left else "right", no_wrap=True)
    previous = None
    for i, row in enumerate(rows):
        group = (row.prompt_set, row.category, row.max_tokens, row.concurrency)
        if previous not in (None, group):
            table.add_row()
        previous = group
        table.add_row(*(Text(texts[c.key][i], style=_style(c, row)) for c in shown))
    out = io.StringIO()
    console = Console(
        file=out,
        width=max(width, _width(shown, texts)),
        force_terminal=colour,
        no_color=not colour,
        highlight=False,
    )
    console.print(table)
    text = out.getvalue()
    wrapped = Console(file=(tail := io.StringIO()), width=width, force_terminal=False)
    for line in [*footer(run, shown), *notes(rows)]:
        wrapped.print(Text(line))
    return text + "\n" + tail.getvalue()


def _width(shown: Sequence[Column], texts: Mapping[str, Sequence[str]]) -> int:
    from rich.cells import cell_len

    wide = [max(map(cell_len, (c.head, *texts[c.key]))) for c in shown]
    return sum(wide) + len(wide) - 1


def _style(column: Column, row: Row) -> str:
    ratio = row.speedup.tpot if row.speedup else None
    if column.key != "speedup" or ratio is None or not ratio.shown or row.flags:
        return "bold" if row.is_baseline and column.key == "method" else ""
    return "green" if ratio.value > 1 else "red"


FORMATS: dict[str, Callable[[Mapping[str, Any], Sequence[Row]], str]] = {
    "markdown": as_markdown,
    "csv": as_csv,
    "json": as_json,
}

__all__ = ["FORMATS", "MISSING", "as_table"]
