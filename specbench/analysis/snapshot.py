"""What a comparison takes of a run: its figures, their logs prompt by prompt, and its set-up.

Small enough to be kept in a repository (baseline.py writes it), enough to pair prompts years later.
"""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, JsonValue

from specbench.analysis.cases import Condition
from specbench.analysis.series import Series
from specbench.records import Fact

# What is compared, and which way is better.
MEASURES: Mapping[str, Literal["more", "less"]] = {
    "speedup": "more",
    "tpot_ms": "less",
    "ttft_ms": "less",
    "latency_ms": "less",
    "tokens_per_s": "more",
    "goodput_per_s": "more",
    "acceptance_length": "more",
}


class SnapshotRow(Fact):
    """One arm under one condition. `figures` are by the names of MEASURES; the row's own units.

    `speedup_interval` is that on this prompt set; `prompt_tokens` are those of all first turns as
    the server counted them; `missing` requests were planned and have no answer.
    """

    arm: str
    method: str
    k: int
    prompt_set: str
    max_tokens: int | None = None
    concurrency: int
    rate: float | None = None
    is_baseline: bool = False
    requests: int
    missing: int = 0
    prompt_tokens: int | None = None
    figures: dict[str, float]
    speedup_interval: tuple[float, float] | None = None
    flags: tuple[str, ...] = ()
    problem: str | None = None
    series: dict[str, Series]

    @property
    def condition(self) -> Condition:
        """What it shares with the rows that it may be compared with."""
        return Condition(self.prompt_set, self.max_tokens, self.concurrency, self.rate)

    @property
    def key(self) -> tuple[str, Condition]:
        """What tells it from the other rows of its run, and finds it in another."""
        return self.arm, self.condition

    @property
    def name(self) -> str:
        """What people call it."""
        at = self.condition
        length = f"{at.max_tokens} tokens, " if at.max_tokens else ""
        return f"{self.arm} on {at.prompt_set} ({length}{at.load})"


class PromptsUsed(Fact):
    """A prompt set as a run sent it: the hash of the prompts, and how many."""

    sha256: str
    prompts: int
    source: str | None = None


class Setup(Fact):
    """What engines were started with apart from their speculation; absolute paths by their name."""

    arms: tuple[str, ...]
    values: dict[str, str]


class Snapshot(Fact):
    """A run as far as another can be compared with it.

    `hardware` is that of machine.facts() without versions, which are in `versions`; `speculation` is
    what the config says of each label, without its k.
    """

    run: str
    model: str
    prompt_sets: dict[str, PromptsUsed]
    sampling: dict[str, JsonValue]
    schedule: str
    client: str
    hardware: dict[str, JsonValue]
    versions: dict[str, str]
    speculation: dict[str, dict[str, JsonValue]] = Field(default_factory=dict)
    setups: tuple[Setup, ...]
    rows: tuple[SnapshotRow, ...]
