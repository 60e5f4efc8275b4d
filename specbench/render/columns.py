"""The columns of a report: name, meaning, value, format. Every output format reads this list."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench.analysis.metrics import PERCENTS, percentile_name
from specbench.analysis.rows import Row
from specbench.failures import status_text

Value = str | int | float | None
MISSING = "–"
DOUBT = " no difference shown"


@dataclass(frozen=True)
class Column:
    """One column: `head` for people, `key` for scripts, `show` for a cell's text."""

    key: str
    head: str
    meaning: str
    value: Callable[[Row], Value]
    digits: int | None = None

    def show(self, row: Row) -> str:
        """The cell as text; a dash where there is nothing to say."""
        value = self.value(row)
        if value is None:
            return MISSING
        if isinstance(value, float):
            return f"{value:,.{self.digits or 0}f}"
        return printable(str(value))


def printable(text: str) -> str:
    """*text* without what moves a cursor or colours a terminal: names come from prompt files."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _speed(row: Row) -> Value:
    if row.is_baseline:
        return 1.0
    return row.speedup.tpot.value if row.speedup and row.speedup.tpot else None


def speedup_text(row: Row) -> str:
    """The speed-up with its interval and, where a flag spoils it, a question mark."""
    if row.is_baseline:
        return "1 (baseline)"
    ratio = row.speedup.tpot if row.speedup else None
    if ratio is None:
        return MISSING
    mark = "?" if row.flags else ""
    if (interval := ratio.like_these) is None:
        return f"{ratio.value:.2f}x{mark}"
    text = f"{ratio.value:.2f}x [{interval.low:.2f}, {interval.high:.2f}]{mark}"
    return text if ratio.shown else f"{text}{DOUBT}"


def this_set_text(row: Row) -> str:
    """The interval of the speed-up for the prompts that were measured."""
    ratio = row.speedup.tpot if row.speedup else None
    interval = ratio.this_set if ratio else None
    return f"[{interval.low:.2f}, {interval.high:.2f}]" if interval else MISSING


def _this_set(row: Row) -> Value:
    ratio = row.speedup.tpot if row.speedup else None
    return ratio.this_set.low if ratio and ratio.this_set else None


def _of_cost(name: str) -> Callable[[Row], Value]:
    def value(row: Row) -> Value:
        found: Value = getattr(row.cost, name) if row.cost and row.k else None
        return found

    return value


def _position(i: int) -> Column:
    def value(row: Row) -> Value:
        positions = row.metrics.acceptance.positions if row.metrics.acceptance else None
        return positions[i] if positions and i < len(positions) else None

    return Column(
        f"p_{i + 1}", f"p{i + 1}", f"share of drafts accepted at position {i + 1}", value, 2
    )


def _of_acceptance(name: str) -> Callable[[Row], Value]:
    def value(row: Row) -> Value:
        found = row.metrics.acceptance
        return getattr(found, name) if found and row.k else None

    return value


def known(row: Row, count: int) -> int | None:
    """A count; None where it is 0 because the file that it was imported from does not say."""
    return None if row.imported and not count else count


def _same(row: Row) -> Value:
    return f"{row.parity.identical}/{row.parity.compared}" if row.parity else None


def deepest(rows: Sequence[Row]) -> int:
    """The last draft position that any of *rows* knows about, from 1."""
    known = [r.metrics.acceptance.positions for r in rows if r.metrics.acceptance]
    return max((len(positions) for positions in known if positions), default=0)


NAMES = ("method", "arm", "k", "prompt_set", "part", "max_tokens", "concurrency", "rate")
SPREAD = {"ttft_ms": ("TTFT", 0), "tpot_ms": ("TPOT", 1), "latency_ms": ("lat.", 0)}


def percentile_columns(rows: Sequence[Row]) -> list[Column]:
    """The columns of a second table for *rows*: what names a row, then how its requests spread.

    Those that hold something. p90 and p99 are of the figure whose p50 they stand behind.
    """
    found = [column for column in columns(rows) if column.key in NAMES]
    found.append(
        Column(
            "requests_per_s",
            "done/s",
            "requests answered per second with a request in flight",
            lambda row: row.metrics.requests_per_s,
            2,
        )
    )
    for figure, (head, digits) in SPREAD.items():
        for percent in PERCENTS:
            key = percentile_name(figure, percent)
            name = f"{head} p{percent}" if percent == PERCENTS[0] else f"p{percent}"
            found.append(Column(key, name, f"{percent}% of requests took less", _of(key), digits))
    return [c for c in found if {c.value(row) for row in rows} != {None}]


def _of(percentile: str) -> Callable[[Row], Value]:
    return lambda row: row.metrics.percentiles.get(percentile)


def columns(rows: Sequence[Row]) -> list[Column]:
    """The columns for *rows*: those that hold something, in reading order."""
    everything = [
        Column("method", "method", "how drafts are made (vLLM's name)", lambda r: r.method),
        Column("arm", "arm", "the engine set-up", lambda r: r.arm),
        Column("k", "k", "num_speculative_tokens", lambda r: r.k),
        Column("prompt_set", "prompts", "the prompt set", lambda r: r.prompt_set),
        Column("part", "part", "the part of the requests", lambda r: r.part),
        Column("max_tokens", "max", "max_tokens of each request", lambda r: r.max_tokens),
        Column("concurrency", "conc", "requests in flight", lambda r: r.concurrency),
        Column("rate", "req/s", "requests due per second (Poisson arrivals)", lambda r: r.rate, 2),
        Column(
            "status",
            "status",
            "whether all of it was measured, else why not",
            lambda r: status_text(r.status, r.failure),
        ),
        Column("requests", "reqs", "requests measured", lambda r: known(r, r.metrics.requests)),
        Column("failed", "failed", "requests that failed", lambda r: r.metrics.failed),
        Column(
            "output_tokens",
            "tokens",
            "output tokens",
            lambda r: known(r, r.metrics.output_tokens),
        ),
        Column(
            "latency_ms", "latency ms", "mean request latency", lambda r: r.metrics.latency_ms, 0
        ),
        Column("ttft_ms", "TTFT ms", "mean time to first token", lambda r: r.metrics.ttft_ms, 0),
        Column(
            "tpot_ms",
            "TPOT ms",
            "mean time per output token after the first chunk: (latency - TTFT) / (tokens - those of the "
            "first chunk)",
            lambda r: r.metrics.tpot_ms,
            2,
        ),
        Column(
            "tokens_per_s",
            "tok/s",
            "output tokens per second with a request in flight",
            lambda r: r.metrics.tokens_per_s,
            1,
        ),
        Column(
            "goodput_per_s",
            "good/s",
            "requests per second that kept the limits of `goodput`",
            lambda r: r.goodput.per_s if r.goodput else None,
            2,
        ),
        Column(
            "acceptance_length",
            "τ",
            "acceptance length: tokens per target step, bonus token included",
            _of_acceptance("length"),
            2,
        ),
        Column("acceptance_rate", "rate", "accepted / drafted tokens", _of_acceptance("rate"), 2),
        Column(
            "break_even",
            "τ even",
            "break-even: the acceptance length at which it is as fast as vanilla, for drafts made at "
            "every step",
            _of_cost("break_even"),
            2,
        ),
        *(_position(i) for i in range(deepest(rows))),
        Column(
            "energy_per_token_j",
            "J/tok",
            "energy per output token",
            lambda r: r.meanwhile.energy_per_token_j if r.meanwhile else None,
            2,
        ),
        Column("same", "same", "outputs identical to the baseline's, token by token", _same),
        Column(
            "predicted",
            "predicted",
            "speed-up predicted from vanilla, k = 1 and the largest k alone",
            _of_cost("predicted_speedup"),
            2,
        ),
        Column(
            "total_time",
            "total",
            "all latencies of the baseline over all of the arm's",
            lambda r: r.speedup.total_time if r.speedup else None,
            2,
        ),
        Column("this_set", "on this set", "95% interval for the whole prompt set", _this_set, 2),
        Column("speedup", "speed-up", "baseline TPOT / TPOT, paired by prompt", _speed, 2),
    ]
    always = {"method", "k", "prompt_set", "requests", "latency_ms", "tokens_per_s", "speedup"}
    varied = {"max_tokens", "concurrency"}
    kept = []
    for column in everything:
        values = {column.value(row) for row in rows}
        if column.key == "arm":
            keep = any(row.arm not in (row.method, f"{row.method}-k{row.k}") for row in rows)
        elif column.key == "failed":
            keep = values != {0}
        elif column.key == "status":
            keep = not values <= {"ok", "unfinished"}
        elif column.key in varied:
            keep = len(values) > 1
        else:
            keep = column.key in always or values != {None}
        if keep:
            kept.append(column)
    return kept
