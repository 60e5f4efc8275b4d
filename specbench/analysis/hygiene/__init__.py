"""Is a number valid? What the checks look at; `checks` lists them all.

A check is a function from `CaseFacts` (one row's arm) or `PairFacts` (the two arms of a ratio) to a
finding in plain words, or None. A flagged number is shown with its flag and is no headline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.analysis.calibration import Calibration
from specbench.analysis.metrics import CaseMetrics
from specbench.analysis.outlines import Request
from specbench.analysis.speedup import Pair, Speedup
from specbench.analysis.telemetry import Meanwhile
from specbench.records import CounterSpan, EngineFacts, Prompt

AGREEMENT = 0.01  # two counts of the same thing may differ by this share


@dataclass(frozen=True)
class Flag:
    """One finding: the check's name and what it found."""

    check: str
    finding: str


@dataclass(frozen=True)
class CaseFacts:
    """One arm under one condition: what was planned, asked, answered and counted.

    `sampling` is what the config says (empty: not known, as are `prompts`, `engines` and
    `machine`), `engines` are the starts that answered, `machine` is what machine.facts() said,
    `calibration` the load client's own error just before, `meanwhile` what was sampled of the machine.
    """

    method: str
    k: int
    expected_requests: int
    records: Sequence[Request]
    spans: Sequence[CounterSpan]
    metrics: CaseMetrics
    max_tokens: int | None = None
    concurrency: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    prompts: Sequence[Prompt] = ()
    engines: Sequence[EngineFacts] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    calibration: Calibration | None = None
    meanwhile: Meanwhile | None = None

    @property
    def good(self) -> list[Request]:
        """The requests that count as measured."""
        return [record for record in self.records if record.ok]


@dataclass(frozen=True)
class PairFacts:
    """The two arms of a ratio, the requests that both answered, and the ratio.

    `apart` requests are in no pair because another host answered the baseline's.
    """

    baseline: CaseFacts
    arm: CaseFacts
    pairs: Sequence[Pair]
    speedup: Speedup
    apart: int = 0
