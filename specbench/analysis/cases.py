"""The cases of a run as the analysis takes them, from whatever store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.analysis.metrics import last_attempts
from specbench.analysis.speedup import Key
from specbench.records import CounterSpan, EngineFacts, Prompt, RequestRecord

Condition = tuple[str, int, int]  # prompt set, max_tokens, concurrency
Requests = dict[Key, RequestRecord]


@dataclass(frozen=True)
class MeasuredCase:
    """One case as the store holds it.

    Arms with the same `label` differ in k only. `group` tells which arms were up together: a
    baseline that stands beside several groups of arms has a case in each. `set_size` is how many prompts the whole set has, of which `prompts` were to
    be sent; `engines` are the starts that answered, `sampling` what the config says.
    """

    arm: str
    method: str
    k: int
    prompt_set: str
    max_tokens: int
    concurrency: int
    repeat: int
    expected_requests: int
    records: Sequence[RequestRecord]
    spans: Sequence[CounterSpan]
    status: str
    problem: str | None = None
    label: str = ""
    group: int = 0
    set_size: int | None = None
    engines: Sequence[EngineFacts] = ()
    prompts: Sequence[Prompt] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)

    @property
    def condition(self) -> Condition:
        """What a case shares with those that it may be compared with."""
        return (self.prompt_set, self.max_tokens, self.concurrency)

    def keyed(self) -> Requests:
        """Its requests by what they share with another arm's, the last attempt at each."""
        return {
            Key(record.prompt_id, record.turn, self.repeat, record.cycle): record
            for record in last_attempts(self.records)
        }
