"""The numbers of a case that another tool measured: from its requests, or from its own figures.

A tool's aggregates are shown as it gives them; only counts are put through our own definitions. What
it does not say is None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbench.analysis.hygiene import Flag
from specbench.analysis.metrics import Acceptance, CaseMetrics, undrafted_steps, without
from specbench.records import Imported

FIGURES = ("latency_ms", "ttft_ms", "tpot_ms", "tokens_per_s")


@dataclass(frozen=True)
class StatedAcceptance(Acceptance):
    """Acceptance that a tool gives as means, without the counts behind them."""

    stated_length: float | None = None
    stated_rate: float | None = None
    stated_positions: tuple[float, ...] | None = None

    @property
    def length(self) -> float | None:
        """As the tool says; the importer has put the bonus token in."""
        return self.stated_length

    @property
    def rate(self) -> float | None:
        """As the tool says, as a share."""
        return self.stated_rate

    @property
    def positions(self) -> tuple[float, ...] | None:
        """As the tool says."""
        return self.stated_positions


def without_lacking(metrics: CaseMetrics, imported: Imported) -> CaseMetrics:
    """*metrics* of imported requests without what their file does not hold."""
    lacking = [name for name in imported.lacks if name in FIGURES]
    if "tokens_per_s" in lacking:  # when requests were in flight is not known
        lacking.append("requests_per_s")
    return without(metrics, *lacking)


def stated_metrics(imported: Imported) -> CaseMetrics:
    """The numbers of a case of which only a tool's figures are known."""
    figures = imported.figures
    requests = round(figures.get("requests", 0))
    output = figures.get("output_tokens_total", requests * figures.get("output_tokens", 0))
    acceptance = _counted(imported, requests, round(output)) or _stated(figures)
    return CaseMetrics(
        requests=requests,
        failed=round(figures.get("failed", 0)),
        prompts=0,
        output_tokens=round(output),
        latency_ms=figures.get("latency_ms"),
        ttft_ms=figures.get("ttft_ms"),
        tpot_ms=figures.get("tpot_ms"),
        tokens_per_s=figures.get("tokens_per_s"),
        acceptance=acceptance,
        counted=None,
    )


def _counted(imported: Imported, requests: int, output: int) -> Acceptance | None:
    spent = imported.spent
    if spent is None or spent.drafts is None or spent.accepted is None:
        return None
    return Acceptance(
        source="imported",
        drafts=spent.drafts,
        draft_tokens=spent.draft_tokens or 0,
        accepted=spent.accepted,
        undrafted_steps=undrafted_steps(output, requests, spent.drafts, spent.accepted),
        per_position=spent.accepted_per_pos,
    )


def _stated(figures: Mapping[str, float]) -> Acceptance | None:
    length, rate = figures.get("acceptance_length"), figures.get("acceptance_rate")
    if length is None and rate is None:
        return None
    positions: list[float] = []
    while (share := figures.get(f"p_{len(positions) + 1}")) is not None:
        positions.append(share)
    return StatedAcceptance(
        source="imported",
        drafts=0,
        draft_tokens=0,
        accepted=0,
        undrafted_steps=0,
        per_position=None,
        stated_length=length,
        stated_rate=rate,
        stated_positions=tuple(positions) or None,
    )


def imported_flags(origins: Sequence[Imported]) -> list[Flag]:
    """That specbench did not measure this, and how the other tool's numbers were read."""
    found = []
    for one in dict.fromkeys((o.tool, o.version, o.file, o.notes) for o in origins):
        tool, version, file, notes = one
        said = " ".join(filter(None, (tool, version)))
        more = f" ({'; '.join(notes)})" if notes else ""
        found.append(Flag("imported", f"not measured by specbench: from {said}, {file}{more}"))
    return found
