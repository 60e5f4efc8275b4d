"""The cases of a run as the analysis takes them, from whatever store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specbench.analysis.calibration import Calibration
from specbench.analysis.metrics import last_attempts
from specbench.analysis.speedup import Key
from specbench.analysis.telemetry import Timeline
from specbench.records import (
    CounterSpan,
    EngineFacts,
    Imported,
    Prompt,
    RequestRecord,
    ToolReport,
)

Requests = dict[Key, RequestRecord]


class Condition(NamedTuple):
    """What a case shares with those that it may be compared with.

    `rate` is in requests/s; None where requests are sent at a concurrency.
    """

    prompt_set: str
    max_tokens: int | None
    concurrency: int
    rate: float | None = None

    @property
    def load(self) -> str:
        """How requests are sent, in words."""
        return f"concurrency {self.concurrency}" if self.rate is None else f"{self.rate:g} req/s"


@dataclass(frozen=True)
class MeasuredCase:
    """One case as the store holds it.

    Arms with the same `label` differ in k only. `group` tells which arms were up together: a
    baseline that stands beside several groups of arms has a case in each. `set_size` is how many
    prompts the whole set has, of which `prompts` were to be sent; `engines` are the starts that answered, `sampling` and `limits` (of a good request, in
    ms by name) what the config says, `tools` the runs of a load generator of its own,
    `calibration` our own one's error on that machine, `imported` where a case that specbench did not
    measure is from, `timeline` what was sampled of the machine during the run.
    """

    arm: str
    method: str
    k: int
    prompt_set: str
    max_tokens: int | None
    concurrency: int
    repeat: int
    expected_requests: int
    records: Sequence[RequestRecord]
    spans: Sequence[CounterSpan]
    status: str
    problem: str | None = None
    label: str = ""
    group: int = 0
    rate: float | None = None
    set_size: int | None = None
    engines: Sequence[EngineFacts] = ()
    prompts: Sequence[Prompt] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    tools: Sequence[ToolReport] = ()
    calibration: Calibration | None = None
    imported: Imported | None = None
    timeline: Timeline | None = None

    @property
    def condition(self) -> Condition:
        """What a case shares with those that it may be compared with."""
        return Condition(self.prompt_set, self.max_tokens, self.concurrency, self.rate)

    def keyed(self) -> Requests:
        """Its requests by what they share with another arm's, the last attempt at each."""
        return {
            Key(record.prompt_id, record.turn, self.repeat, record.cycle): record
            for record in last_attempts(self.records)
        }
