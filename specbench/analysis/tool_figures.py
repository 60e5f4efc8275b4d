"""What a load generator of its own says of the requests that it sent, beside what we make of them.

Both start from the same requests, so a difference is one of definition or of counting tokens:
GenAI-Perf tokenizes the text again and takes one token for the first chunk, whatever it holds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specbench.analysis.metrics import acceptance_of_requests, latency_ms, tpot_ms, ttft_ms
from specbench.analysis.outlines import Request
from specbench.records import ToolReport

AGREE = 0.02  # a larger difference is shown


@dataclass(frozen=True)
class Beside:
    """One figure: the tool's mean over requests and ours of the same requests (ms, tokens, 1/s)."""

    tool: str
    version: str
    figure: str
    theirs: float
    ours: float

    @property
    def difference(self) -> float:
        """By what share theirs is larger."""
        return self.theirs / self.ours - 1

    @property
    def agrees(self) -> bool:
        """Whether nobody needs to be told."""
        return abs(self.difference) <= AGREE


def beside_ours(reports: Sequence[ToolReport], records: Iterable[Request]) -> tuple[Beside, ...]:
    """Every figure that both have, several runs of the tool weighted by their requests."""
    by_key = {record.key: record for record in records if record.ok} if reports else {}
    sums: dict[tuple[str, str, str], list[float]] = {}
    for report in reports:
        measured = [by_key[key] for key in report.keys if key in by_key]
        ours = _ours(measured) if len(measured) == len(report.keys) else {}
        for figure, theirs in report.figures.items():
            if figure in ours:
                total = sums.setdefault((report.tool, report.version, figure), [0.0, 0.0, 0.0])
                for at, value in enumerate((1.0, theirs, ours[figure])):
                    total[at] += value * len(measured)
    return tuple(
        Beside(*name, theirs=theirs / weight, ours=ours / weight)
        for name, (weight, theirs, ours) in sums.items()
        if ours
    )


def _ours(records: Sequence[Request]) -> dict[str, float]:
    """The same figures by our definitions; what one of the requests has not is left out."""
    if not records:
        return {}
    tokens = [record.output_tokens for record in records]
    values: dict[str, Sequence[float | None]] = {
        "latency_ms": [latency_ms(record) for record in records],
        "ttft_ms": [ttft_ms(record) for record in records],
        "tpot_ms": [tpot_ms(record) for record in records],
        "output_tokens": tokens,
    }
    found = {name: mean for name, of_each in values.items() if (mean := _mean(of_each)) is not None}
    span_s = (max(r.last_ns for r in records) - min(r.sent_ns for r in records)) / 1e9
    acceptance = acceptance_of_requests(records)
    if acceptance is not None and acceptance.length is not None:
        found["acceptance_length"] = acceptance.length
    if "output_tokens" in found and span_s > 0:
        found["tokens_per_s"] = found["output_tokens"] * len(records) / span_s
    return found


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
