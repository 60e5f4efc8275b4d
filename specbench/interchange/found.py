"""What an importer finds in a file: cases with requests, or with a tool's own figures alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specbench.errors import ExchangeError
from specbench.interchange.reading import Source
from specbench.records import (
    CounterSpan,
    EngineCounters,
    Imported,
    Prompt,
    RequestRecord,
    ToolReport,
)

UNKNOWN = "unknown"
VANILLA = "vanilla"


@dataclass(frozen=True)
class Told:
    """What the user says of a file that does not say it itself."""

    k: int | None = None
    method: str | None = None
    model: str | None = None


@dataclass(frozen=True)
class FoundCase:
    """One case of another tool. Without `records` its numbers are `imported.figures`.

    `report` are the tool's figures of the very requests in `records`; `sampling` what is known of
    it. `label` names arms that differ in k only.
    """

    method: str
    k: int
    imported: Imported
    label: str = ""
    records: Sequence[RequestRecord] = ()
    prompts: Sequence[Prompt] = ()
    spans: Sequence[CounterSpan] = ()
    report: ToolReport | None = None
    model: str | None = None
    concurrency: int = 1
    rate: float | None = None
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arm(self) -> str:
        """The id of its engine set-up in the run."""
        return VANILLA if self.k == 0 else f"{self.label or self.method}-k{self.k}"


@dataclass(frozen=True)
class Speculated:
    """How drafts were made and how long, and how that is known."""

    method: str
    k: int
    notes: tuple[str, ...] = ()


def speculation(
    path: Path,
    told: Told,
    *,
    k: int | None,
    method: str | None = None,
    why_unknown: str,
    line: int | None = None,
) -> Speculated:
    """Method and k from what the file says and what the user says.

    Raises:
        ExchangeError: nobody says k, or the two say another one.
    """
    if k is None and told.k is None:
        raise ExchangeError(
            path,
            line,
            why_unknown,
            hint="Say how many tokens were drafted at a time: --k N, or --k 0 for none.",
        )
    if k is not None and told.k is not None and k != told.k:
        raise ExchangeError(path, line, f"says k = {k}, not {told.k}.", hint="Leave out --k.")
    known = k if k is not None else told.k
    assert known is not None
    notes = () if k is not None else (f"k = {known} was said by who imported it",)
    if known == 0:
        return Speculated(VANILLA, 0, notes)
    return Speculated(told.method or method or UNKNOWN, known, notes)


def origin(
    source: Source,
    tool: str,
    *,
    version: str | None = None,
    figures: Mapping[str, float] | None = None,
    spent: EngineCounters | None = None,
    lacks: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Imported:
    """Where a case is from."""
    return Imported(
        tool=tool,
        version=version,
        file=source.path.name.encode("utf-8", "replace").decode(),
        sha256=source.sha256,
        figures=dict(figures or {}),
        spent=spent,
        lacks=tuple(lacks),
        notes=tuple(notes),
    )


def in_flight(records: Sequence[RequestRecord]) -> int:
    """The most requests that were under way at once, at least 1."""
    moments = sorted(
        [(record.sent_ns, 1) for record in records] + [(record.end_ns, -1) for record in records]
    )
    most = now = 0
    for _, change in moments:  # at the same moment one ends before another begins
        now += change
        most = max(most, now)
    return max(1, most)


def drafted_at_most(records: Sequence[RequestRecord]) -> int | None:
    """k by vLLM's own account: the length of its histograms; None where it gives none."""
    lengths = {
        len(record.spec.accepted_histogram) - 1
        for record in records
        if record.spec and record.spec.accepted_histogram
    }
    return max(lengths) if lengths else None


def unknown_text(turns: int) -> tuple[str, ...]:
    """Turns of a prompt whose text the file does not hold."""
    return ("",) * turns


def common(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """The sampling that all requests share."""
    sent = [record.sampling for record in records if record.sampling is not None]
    if not sent or len(sent) < len(records):
        return {}
    return {k: v for k, v in sent[0].items() if all(k in one and one[k] == v for one in sent)}
