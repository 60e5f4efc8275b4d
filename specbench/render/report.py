"""A report as a terminal table, markdown, CSV or JSON."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from specbench.analysis.curves import Curve
from specbench.analysis.metrics import PERCENTILES
from specbench.analysis.rows import SCHEMA, Cost, Row
from specbench.analysis.scaling import scaling
from specbench.analysis.speedup import Question, Ratio
from specbench.errors import without_controls
from specbench.render.columns import (
    DOUBT,
    MISSING,
    Column,
    columns,
    deepest,
    known,
    percentile_columns,
    printable,
    speedup_text,
    this_set_text,
)
from specbench.render.sparkline import k_curves
from specbench.render.words import (
    beside_lines,
    curve_record,
    explanations,
    headlines,
    precision_lines,
    scaling_record,
)

# Dropped from a terminal table that is too narrow, in this order; before them p_k down to p_3.
EXPENDABLE = (
    "output_tokens",
    "acceptance_rate",
    "p_2",
    "p_1",
    "same",
    "total_time",
    "energy_per_token_j",
    "ttft_ms",
    "predicted",
    "this_set",
    "break_even",
    "requests",
    "latency_ms",
    "tpot_ms",
)


PERCENTILES_MEAN = (
    "p50, p90, p99: milliseconds under which so many of 100 requests are, linear between two; a dash "
    "where there are too few (p90 takes 10 requests, p99 takes 100) · lat.: latency · done/s: requests "
    "answered per second with a request in flight"
)
LOG_LINES = 12  # of a log's end, below the table and on the page
SHORT_DOUBT = " n.d.s."  # for DOUBT, where the table is too wide even without them


@dataclass(frozen=True)
class Findings:
    """All that a report says of a run: its rows, and what they come to.

    `by` names the parts that the rows are split into; the rest is of the whole. With `percentiles`
    there is a second table (CSV and JSON have them anyway).
    """

    rows: Sequence[Row]
    curves: Sequence[Curve] = ()
    by: str | None = None
    percentiles: bool = False

    @property
    def headlines(self) -> list[str]:
        """The answer in a sentence for each condition."""
        return headlines(self.rows) if self.by is None else []


def _engine_text(run: Mapping[str, Any]) -> str:
    if (run["config"].get("engine") or {}).get("kind") == "triton":
        return "Triton with the vLLM backend"
    return f"vLLM {run['vllm'] or '(not started here)'}"


def footer(run: Mapping[str, Any], shown: Sequence[Column]) -> list[str]:
    """What the columns mean and where the numbers come from, a line each."""
    if origin := run.get("imported"):
        return [_origin_text(run, origin), *_meanings(shown)]
    machine = run["machine"]
    gpus = ", ".join(gpu.get("name", "GPU") for gpu in machine["gpus"])
    hardware = gpus or f"{machine['cpu']}, {machine['cores']} cores"
    sampling = run["config"]["sampling"]
    sampled = f"temperature {sampling['temperature']:g}"
    sampled += ", ignore_eos" if sampling["ignore_eos"] else ""
    lines = [
        (
            f"{run['config']['model']} on {hardware}; {_engine_text(run)}; "
            f"{sampled}; {schedule_text(run)}; run {run['id']}"
        ),
    ]
    lines += _meanings(shown)
    lines.append(
        "speed-up: geometric mean over prompts of baseline/arm TPOT, with a 95% interval on prompts "
        "like these (prompts resampled)"
        + (
            "; on this set: for the whole prompt set (noise, restarts and those of its prompts that "
            "were not measured)"
            if any(column.key == "this_set" for column in shown)
            else ""
        )
        + "; each is of its row alone, the headline's are of all set-ups together (Bonferroni)"
    )
    return lines


def _origin_text(run: Mapping[str, Any], origin: Mapping[str, Any]) -> str:
    """Of a run that specbench did not measure: where it is from."""
    files = ", ".join(origin["files"])
    return printable(
        f"{run['config']['model']}; not measured by specbench but imported from {files} "
        f"({origin['from']}); run {run['id']}"
    )


def _meanings(shown: Sequence[Column]) -> list[str]:
    return [" · ".join(f"{c.head}: {c.meaning}" for c in shown if c.key in EXPLAINED)]


def schedule_text(run: Mapping[str, Any]) -> str:
    """How engines took turns, and what of the machine that leaves in a ratio."""
    schedule = run.get("schedule", run["config"]["schedule"])
    if schedule == "blocks" and run["config"].get("repeats", 1) == 1:
        return "schedule blocks, once: the machine's drift between them is in no interval"
    if run["config"].get("repeats", 1) == 1:
        return f"schedule {schedule}, one start each: how starts differ is in no interval"
    return f"schedule {schedule}"


EXPLAINED = {
    "ttft_ms",
    "tpot_ms",
    "tokens_per_s",
    "acceptance_length",
    "break_even",
    "acceptance_rate",
    "p_1",
    "predicted",
    "total_time",
    "energy_per_token_j",
}


def cell(column: Column, row: Row) -> str:
    """A cell for people; the speed-up comes with its interval."""
    match column.key:
        case "speedup":
            return speedup_text(row)
        case "this_set":
            return this_set_text(row)
        case _:
            return column.show(row)


def notes(rows: Sequence[Row]) -> list[str]:
    """Flags and failures, a line each, under the table."""
    lines = []
    for row in rows:
        where = " ".join(filter(None, (row.arm, row.prompt_set, row.part)))
        lines += [f"{where}: {flag.finding} [{flag.check}]" for flag in row.flags]
        if row.problem:
            lines.append(f"{where}: {row.problem.splitlines()[0]}")
        if row.speedup and (apart := row.speedup.asked_otherwise):
            lines.append(
                f"{where}: {apart} later turn{'s' if apart > 1 else ''} in no pair: the first answers "
                "differ, and with them what was asked"
            )
    return [printable(line) for line in lines]


def log_ends(rows: Sequence[Row]) -> list[str]:
    """The last lines of the logs of engines that failed: each once, under the first row it is of."""
    lines, seen = [], set()
    for row in rows:
        log = log_end(row.problem)
        if log and log not in seen:
            lines += [f"the end of the log of {row.arm}:", *(f"  {line}" for line in log)]
            seen.add(log)
    return [printable(line.expandtabs()) for line in lines]


def log_end(problem: str | None) -> tuple[str, ...]:
    """What of a case's *problem* is a log: all but its first line."""
    lines = (problem or "").splitlines()[1:]
    return tuple(line for line in lines if line.strip())[-LOG_LINES:]


def as_markdown(run: Mapping[str, Any], findings: Findings) -> str:
    """A table that pastes into a pull request."""
    rows = findings.rows
    shown = columns(rows)
    lines = [
        *(f"**{_escaped(line)}**\n" for line in findings.headlines),
        *_markdown_table(shown, rows),
    ]
    if findings.percentiles:
        lines += ["", *_markdown_table(percentile_columns(rows), rows), "", PERCENTILES_MEAN]
    lines += ["", *footer(run, shown)]
    if said := _said(run, findings):
        lines += ["", *(f"- {_escaped(line)}" for line in said)]
    if found := notes(rows):
        lines += ["", *(f"- {_escaped(note)}" for note in found)]
    return "\n".join(lines) + "\n"


def _markdown_table(shown: Sequence[Column], rows: Sequence[Row]) -> list[str]:
    return [
        "| " + " | ".join(column.head for column in shown) + " |",
        "|" + "|".join(" --- " if c.digits is None else " ---: " for c in shown) + "|",
        *("| " + " | ".join(_escaped(cell(c, row)) for c in shown) + " |" for row in rows),
    ]


def _said(run: Mapping[str, Any], findings: Findings) -> list[str]:
    asked = run["config"].get("precision")
    return [
        *precision_lines(asked, findings.rows),
        *beside_lines(findings.rows),
        *explanations(findings.rows, findings.curves),
    ]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def as_csv(run: Mapping[str, Any], findings: Findings) -> str:
    """All columns under their script names; an empty cell where there is nothing."""
    records = _records(findings.rows)
    for record in records:
        record["flags"] = "; ".join(flag["finding"] for flag in record["flags"])
        record["output_differences"] = len(record["output_differences"])
        record["hosts"] = "; ".join(record["hosts"])
        theirs = [f"{one['figure']}={one['theirs']:g}" for one in record["tool_figures"]]
        record["tool_figures"] = "; ".join(theirs)
    out = io.StringIO()
    writer = csv.DictWriter(
        out, fieldnames=list(records[0]) if records else [], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(records)
    return without_controls(out.getvalue())


def as_json(run: Mapping[str, Any], findings: Findings) -> str:
    """For scripts: `schema`, `run`, `rows`, `curves`, `concurrency`; null where there is nothing."""
    document = {
        "schema": SCHEMA,
        "run": {key: run[key] for key in ("id", "config", "machine", "vllm", "prompt_sets")},
        "headlines": findings.headlines,
        "split_by": findings.by,
        "rows": _records(findings.rows),
        "curves": [curve_record(curve) for curve in findings.curves],
        "concurrency": [scaling_record(one) for one in scaling(findings.rows)],
    }
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    # What is not printable stands inside of strings: escaped, it cannot move a terminal's cursor.
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


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
    ttft = row.speedup.ttft if row.speedup else None
    return {
        "arm": row.arm,
        "label": row.label,
        "method": row.method,
        "k": row.k,
        "prompt_set": row.prompt_set,
        "part": row.part,
        "max_tokens": row.max_tokens,
        "concurrency": row.concurrency,
        "repeats": row.repeats,
        "cycles": row.cycles,
        "status": row.status,
        "failure": row.failure,
        "hosts": list(row.hosts),
        "requests": known(row, metrics.requests),
        "failed": metrics.failed,
        "prompts": known(row, metrics.prompts),
        "output_tokens": known(row, metrics.output_tokens),
        "latency_ms": metrics.latency_ms,
        "ttft_ms": metrics.ttft_ms,
        "tpot_ms": metrics.tpot_ms,
        "tokens_per_s": metrics.tokens_per_s,
        "requests_per_s": metrics.requests_per_s,
        **{name: metrics.percentiles.get(name) for name in PERCENTILES},
        "acceptance_length": acceptance and acceptance.length,
        "acceptance_length_per_draft": acceptance and acceptance.length_per_draft,
        "acceptance_rate": acceptance and acceptance.rate,
        "acceptance_source": acceptance and acceptance.source,
        **{f"p_{i + 1}": positions[i] if i < len(positions) else None for i in range(depth)},
        **_cost_record(row),
        "outputs_compared": row.parity and row.parity.compared,
        "outputs_identical": row.parity and row.parity.identical,
        "output_differences": [
            {**asdict(one), "key": one.key._asdict()} for one in row.parity.differences
        ]
        if row.parity
        else [],
        "speedup": 1.0 if row.is_baseline else tpot and tpot.value,
        **_interval("speedup", tpot, "like_these"),
        **_interval("speedup_this_set", tpot, "this_set"),
        "noise_from": tpot and tpot.noise_from,
        "asked_otherwise": row.speedup and row.speedup.asked_otherwise,
        "latency_speedup": 1.0 if row.is_baseline else latency and latency.value,
        **_interval("latency_speedup", latency, "like_these"),
        "total_time_speedup": 1.0 if row.is_baseline else row.speedup and row.speedup.total_time,
        "ttft_speedup": 1.0 if row.is_baseline else ttft and ttft.value,
        "rate": row.rate,
        "goodput_per_s": row.goodput and row.goodput.per_s,
        "good_requests": row.goodput and row.goodput.good,
        "tool_figures": [asdict(one) for one in row.beside],
        **_machine_record(row),
        "flags": [{"check": flag.check, "finding": flag.finding} for flag in row.flags],
        "problem": row.problem,
    }


def _cost_record(row: Row) -> dict[str, Any]:
    names = [field.name for field in fields(Cost)]
    return {name: getattr(row.cost, name) if row.cost else None for name in names}


def _machine_record(row: Row) -> dict[str, Any]:
    """The machine meanwhile; nothing in it where nothing was sampled."""
    seen = row.meanwhile
    return {
        "energy_per_token_j": seen and seen.energy_per_token_j,
        "energy_source": seen and seen.energy_source,
        "power_w": seen and seen.power_w,
        "throttled_share": seen and seen.throttled_share,
        "max_temperature_c": seen and seen.max_temperature_c,
        "gpu_memory_bytes": seen and seen.gpu_memory_bytes,
        "clock_mhz": seen and seen.clock and seen.clock.mhz,
        "others_cores": seen and seen.others_cores,
        "stolen_cores": seen and seen.stolen_cores,
        "sampled_every_ms": seen and seen.resolution_ms,
    }


def _interval(name: str, ratio: Ratio | None, question: Question) -> dict[str, float | None]:
    interval = ratio.interval(question) if ratio else None
    return {
        f"{name}_low": interval.low if interval else None,
        f"{name}_high": interval.high if interval else None,
    }


def as_table(
    run: Mapping[str, Any], findings: Findings, *, width: int, colour: bool, plain: bool = False
) -> str:
    """A report for a terminal *width* columns wide; *plain* for one that knows ASCII only."""
    from rich.console import Console
    from rich.text import Text

    rows = findings.rows
    text, shown, is_short = table_alone(rows, width=width, colour=colour)
    wrapped = Console(file=(tail := io.StringIO()), width=width, force_terminal=False)
    if findings.percentiles:
        spread = percentile_columns(rows)
        second, _, _ = table_alone(rows, width=width, colour=colour, every=spread)
        text += f"\n{second}"
    if is_short:
        wrapped.print(Text(f"{SHORT_DOUBT.strip()}: {DOUBT.strip()}"))
    for line in k_curves(rows, plain=plain):
        wrapped.print(Text(line))
    if tail.tell():
        tail.write("\n")
    said = _said(run, findings)
    below = [*findings.headlines, *said, *footer(run, shown)]
    below += [PERCENTILES_MEAN] if findings.percentiles else []
    below += [*notes(rows), *log_ends(rows)]
    for line in below:
        wrapped.print(Text(line))
    return text + "\n" + tail.getvalue()


def table_alone(
    rows: Sequence[Row], *, width: int, colour: bool, every: Sequence[Column] | None = None
) -> tuple[str, Sequence[Column], bool]:
    """The table and its columns, dropped until it fits; whether its doubts had to be shortened too.

    Of *every* column given, else of those of a report.

    What is left then is never cut: on a terminal narrower than that it runs over the edge.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown: Sequence[Column] = columns(rows) if every is None else every
    texts = {c.key: [cell(c, row) for row in rows] for c in shown}
    deep = [f"p_{i}" for i in range(deepest(rows), 2, -1)]
    for key in ("", *deep, *EXPENDABLE):
        shown = [c for c in shown if c.key != key]
        if _width(shown, texts) <= width:
            break
    is_short = _width(shown, texts) > width and any(
        t.endswith(DOUBT) for t in texts.get("speedup", ())
    )
    if is_short:
        texts["speedup"] = [text.replace(DOUBT, SHORT_DOUBT) for text in texts["speedup"]]
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    for column in shown:
        number = column.digits is not None or column.key in ("k", "requests", "output_tokens")
        left = column.key == "speedup" or not number
        table.add_column(column.head, justify="left" if left else "right", no_wrap=True)
    previous = None
    for i, row in enumerate(rows):
        group = (row.condition, row.part)
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
    return out.getvalue(), shown, is_short


def _width(shown: Sequence[Column], texts: Mapping[str, Sequence[str]]) -> int:
    from rich.cells import cell_len

    wide = [max(map(cell_len, (c.head, *texts[c.key]))) for c in shown]
    return sum(wide) + len(wide) - 1


def _style(column: Column, row: Row) -> str:
    ratio = row.speedup.tpot if row.speedup else None
    if column.key != "speedup" or ratio is None or not ratio.shown or row.flags:
        return "bold" if row.is_baseline and column.key == "method" else ""
    return "green" if ratio.value > 1 else "red"


FORMATS: dict[str, Callable[[Mapping[str, Any], Findings], str]] = {
    "markdown": as_markdown,
    "csv": as_csv,
    "json": as_json,
}

__all__ = ["FORMATS", "MISSING", "as_table"]
