"""Two runs beside each other as a terminal table, markdown or JSON."""

import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specbench.analysis.compare import WITHOUT_PACE, Change, Comparison, RowChange
from specbench.analysis.conditions import Judgement, percent
from specbench.analysis.snapshot import MEASURES, Snapshot
from specbench.render.columns import MISSING, printable

SCHEMA = 1  # of the JSON that `specbench compare --format json` prints
USUAL = ("speedup", "tpot_ms")  # what the table shows unless asked for more
HEADS = {
    "speedup": "speed-up",
    "tpot_ms": "TPOT ms",
    "ttft_ms": "TTFT ms",
    "latency_ms": "latency ms",
    "tokens_per_s": "tok/s",
    "goodput_per_s": "good/s",
    "acceptance_length": "τ",
}
COLUMNS = ("", "BASE", "NEW", "change", "95% interval", "verdict")


@dataclass(frozen=True)
class Result:
    """A comparison and what was asked of it; *measures* are those that people see."""

    comparison: Comparison
    judgements: Sequence[Judgement] = ()
    measures: Sequence[str] = USUAL

    @property
    def failed(self) -> list[Judgement]:
        """The conditions that the intervals support."""
        return [one for one in self.judgements if one.failed]

    def shown(self, row: RowChange) -> list[Change]:
        """The row's changes that people see: those asked for, and those that a condition is about."""
        asked = {*self.measures, *(one.condition.measure for one in self.judgements)}
        return [change for change in row.changes if change.measure in asked]


# --- what is said --------------------------------------------------------------------------------


def headline(result: Result) -> str:
    """The outcome in a sentence."""
    rows = [row for row in result.comparison.rows if row.base and row.new and not row.refused]
    counts = {
        v: sum(row.verdict == v for row in rows) for v in dict.fromkeys(r.verdict for r in rows)
    }
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    said = f"{_rows(len(rows))} compared" + (f": {told}" if told else "")
    if result.judgements:
        conditions = list(dict.fromkeys(one.condition.text for one in result.judgements))
        if result.failed:
            broken = list(dict.fromkeys(one.condition.text for one in result.failed))
            said = f"FAILED: {'; '.join(broken)}. {said}"
        else:
            open_ = sum(one.undecided for one in result.judgements)
            left = f" (undecided on {_rows(open_)})" if open_ else ""
            said = f"passed: {'; '.join(conditions)}{left}. {said}"
    return said + "."


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"


def judgement_lines(judgements: Iterable[Judgement]) -> list[str]:
    """Each condition on each row where it failed or the interval leaves it open; the rest counted."""
    everything = list(judgements)
    told = sorted((j for j in everything if j.failed or j.undecided), key=lambda j: not j.failed)
    lines = [f"{one.condition.text}: {one.row.row.name}: {one.text}" for one in told]
    clear = Counter(one.condition.text for one in everything if not (one.failed or one.undecided))
    lines += [f"{text}: shown not to be so on {_rows(count)}" for text, count in clear.items()]
    return [printable(line) for line in lines]


def remarks(result: Result) -> list[str]:
    """What is not comparable, missing, flagged; versions; what an interval leaves out."""
    comparison = result.comparison
    lines = []
    refused = Counter(why for row in comparison.rows for why in row.refused)
    lines += [f"not comparable ({_rows(count)}): {why}" for why, count in refused.items()]
    for row in comparison.rows:
        name = row.row.name
        if row.lost and row.new is not None:
            why = f": {row.new.problem}" if row.new.problem else ""
            lines.append(f"{name}: {row.new.missing} requests are missing in NEW{why}")
        flags = [("BASE", row.base), ("NEW", row.new)]
        lines += [f"{name}: {side}: {flag}" for side, one in flags if one for flag in one.flags]
    lines += [f"versions: {difference}" for difference in comparison.versions]
    lines += [f"note: {note}" for note in comparison.notes]
    lines += _of_intervals(comparison)
    return [printable(line) for line in lines]


def _of_intervals(comparison: Comparison) -> list[str]:
    changes = [change for row in comparison.rows for change in row.changes]
    lines = []
    if any(change.of_these_starts for change in changes):
        lines.append(
            "note: engines were started once on both sides, which does not tell what a start changes: "
            "times have no interval, and that of a speed-up is of these two starts (repeats: 2 tells)"
        )
    if any(change.measure not in WITHOUT_PACE and change.low is not None for change in changes):
        lines.append(
            "times hold the machine's pace of the day, which is in no interval; the speed-up, a ratio "
            "within each run, does not"
        )
    return lines


def sides(comparison: Comparison) -> list[str]:
    """What BASE and NEW are."""
    return [
        printable(f"{name}: {one.run}, {one.model} on {_hardware(one)}, vLLM {_vllm(one)}")
        for name, one in (("BASE", comparison.base), ("NEW", comparison.new))
    ]


def _vllm(one: Snapshot) -> str:
    return one.versions.get("vllm", "(not started there)")


def _hardware(one: Snapshot) -> str:
    gpus = one.hardware.get("gpus")
    if isinstance(gpus, list) and gpus:
        return ", ".join(str(gpu.get("name", "GPU")) for gpu in gpus if isinstance(gpu, dict))
    cpu, cores = one.hardware.get("cpu"), one.hardware.get("cores")
    return f"{cpu}, {cores} cores" if cpu else "hardware that is not known"


# --- formats -------------------------------------------------------------------------------------


def cells(change: Change) -> tuple[str, ...]:
    """A change as the cells of COLUMNS."""
    digits = 1 if change.measure in ("ttft_ms", "latency_ms", "tokens_per_s") else 2
    times = "x" if change.measure == "speedup" else ""
    interval = MISSING
    if change.low is not None and change.high is not None:
        interval = f"{percent(change.low)} to {percent(change.high)}"
    return (
        HEADS[change.measure],
        f"{change.base:,.{digits}f}{times}",
        f"{change.new:,.{digits}f}{times}",
        percent(change.change),
        interval,
        change.verdict,
    )


def title(row: RowChange) -> str:
    """A row's name; what keeps it from being compared; a question mark where a flag spoils it."""
    mark = " ?" if any(one.flags for one in (row.base, row.new) if one) else ""
    verdict = "" if row.changes else f": {row.verdict}"
    return printable(f"{row.row.name}{mark}{verdict}")


def as_table(result: Result, *, width: int = 80, colour: bool = False) -> str:
    """For a terminal: a heading a row, a line a measure; 80 columns are enough."""
    from rich.console import Console
    from rich.text import Text

    out = io.StringIO()
    console = Console(
        file=out, width=max(width, 80), force_terminal=colour, no_color=not colour, highlight=False
    )
    lines = [cells(change) for row in result.comparison.rows for change in result.shown(row)]
    wide = [max(map(len, column)) for column in zip(COLUMNS, *lines, strict=True)]
    console.print(Text(f"  {_aligned(COLUMNS, wide)}".rstrip(), style="bold"))
    for row in result.comparison.rows:
        console.print(Text(title(row), style="bold"))
        for change in result.shown(row):
            line = Text(f"  {_aligned(cells(change), wide)}".rstrip(), style=_style(change.verdict))
            console.print(line, no_wrap=True, crop=False, overflow="ignore")
    console.print()
    said = [headline(result), *judgement_lines(result.judgements), *sides(result.comparison)]
    for paragraph in (*said, *remarks(result)):
        console.print(Text(printable(paragraph)))
    return out.getvalue()


def _aligned(texts: Sequence[str], wide: Sequence[int]) -> str:
    left = (0, 4, 5)
    both = enumerate(zip(texts, wide, strict=True))
    return " ".join(t.ljust(w) if i in left else t.rjust(w) for i, (t, w) in both)


def _style(verdict: str) -> str:
    return {"better": "green", "worse": "red"}.get(verdict, "")


def escaped(text: str) -> str:
    """*text* in markdown: no table cell, HTML or mention comes of it."""
    text = (
        printable(text)
        .replace("\\", "\\\\")
        .replace("|", "\\|")
        .replace("`", "\\`")
        .replace("[", "\\[")
    )
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return text.replace("@", "@\N{WORD JOINER}").replace("#", "#\N{WORD JOINER}")


def as_markdown(result: Result) -> str:
    """For a pull request, an issue, a job's summary."""
    lines = [f"**{escaped(headline(result))}**", ""]
    lines += ["| row | measure | BASE | NEW | change | 95% interval | verdict |"]
    lines += ["| --- | --- | ---: | ---: | ---: | --- | --- |"]
    for row in result.comparison.rows:
        name = escaped(row.row.name)
        for change in result.shown(row):
            lines.append(f"| {name} | " + " | ".join(map(escaped, cells(change))) + " |")
        if not result.shown(row):
            lines.append(f"| {name} | | | | | | {escaped(row.verdict)} |")
    for heading, said in (
        ("Conditions", judgement_lines(result.judgements)),
        ("Remarks", [*sides(result.comparison), *remarks(result)]),
    ):
        if said:
            lines += ["", f"{heading}:", "", *(f"- {escaped(line)}" for line in said)]
    return "\n".join(lines) + "\n"


def as_json(result: Result) -> str:
    """For scripts: `schema`, `base`, `new`, `rows` (all measures), `conditions`, `failed`."""
    comparison = result.comparison
    document = {
        "schema": SCHEMA,
        "base": _side(comparison.base),
        "new": _side(comparison.new),
        "versions": comparison.versions,
        "notes": comparison.notes,
        "rows": [_row_record(row) for row in comparison.rows],
        "conditions": [
            {
                "condition": one.condition.text,
                "row": one.row.row.name,
                "failed": one.failed,
                "said": one.text,
            }
            for one in result.judgements
        ],
        "failed": bool(result.failed),
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _side(one: Snapshot) -> dict[str, Any]:
    return one.model_dump(mode="json", exclude={"rows", "setups"})


def _row_record(row: RowChange) -> dict[str, Any]:
    by_name = {change.measure: change for change in row.changes}
    return {
        "arm": row.row.arm,
        "method": row.row.method,
        "k": row.row.k,
        **row.row.condition._asdict(),
        "verdict": row.verdict,
        "refused": list(row.refused),
        "missing_in_new": row.lost,
        "flags": {
            "base": list(row.base.flags) if row.base else [],
            "new": list(row.new.flags) if row.new else [],
        },
        "changes": {
            name: {**asdict(by_name[name]), "verdict": by_name[name].verdict}
            for name in MEASURES
            if name in by_name
        },
    }
