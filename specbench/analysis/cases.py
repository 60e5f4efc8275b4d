"""The cases of a run as the analysis takes them, from whatever store."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, TypeVar, overload

from specbench.analysis.calibration import Calibration
from specbench.analysis.metrics import is_later_attempt
from specbench.analysis.outlines import Request
from specbench.analysis.speedup import Key
from specbench.analysis.telemetry import Timeline
from specbench.records import (
    CounterSpan,
    EngineFacts,
    Imported,
    Prompt,
    ToolReport,
)

Requests = dict[Key, Request]


T = TypeVar("T")


class Joined(Sequence[T]):
    """Several sequences one after the other, without copying them."""

    def __init__(self, parts: Sequence[Sequence[T]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @overload
    def __getitem__(self, at: int) -> T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[T]: ...
    def __getitem__(self, at: int | slice) -> T | Sequence[T]:
        return list(self)[at]

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts)


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
    records: Sequence[Request]
    spans: Sequence[CounterSpan]
    status: str
    problem: str | None = None
    failure: str | None = None
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
        found: Requests = {}
        for record in self.records:
            key = Key(record.prompt_id, record.turn, self.repeat, record.cycle)
            if is_later_attempt(record, found.get(key)):
                found[key] = record
        return found
