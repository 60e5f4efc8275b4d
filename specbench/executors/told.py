"""What a node tells the run that it measures for, a line of JSON each, and what it is told first."""

from typing import Literal

from pydantic import JsonValue

from specbench.failures import Failure
from specbench.records import CounterSpan, EngineFacts, Fact, Prompt, RequestRecord, ToolReport


class SentSet(Fact):
    """A prompt set by its content, as it is sent to the hosts."""

    prompts: tuple[Prompt, ...]
    sha256: str
    source: str
    available: int | None = None


class Order(Fact):
    """What all units of a run share. `config` holds the secrets of engine.env: it is not kept.

    `together` and `chosen_k` are what the plan hangs on (prepare.Earlier).
    """

    version: str
    config: dict[str, JsonValue]
    prompt_sets: dict[str, SentSet]
    together: int
    chosen_k: dict[str, tuple[int, ...]]


class Verdict(Fact):
    """A case's done.json."""

    status: Literal["ok", "failed", "partial"]
    problem: str | None = None
    failure: Failure | None = None


class Share(Fact):
    """One unit: the places of its stages in the plan, and the ids of its cases, which must agree.

    `starts` are the numbers that its arms' starts are to have, `measured` the requests of its cases
    that are in the run already, `verdicts` how those of its cases stand that were ended.
    """

    stages: tuple[int, ...]
    cases: tuple[str, ...]
    starts: dict[str, tuple[int, ...]]
    measured: dict[str, tuple[RequestRecord, ...]]
    verdicts: dict[str, Verdict]


class Hello(Fact):
    """Who measures the unit. `folder` is where, for as long as that takes."""

    host: str
    node: str
    version: str
    folder: str


class Start(Fact):
    """An arm's start that is about to be."""

    arm: str
    number: int


class Piece(Fact):
    """A file beside the facts: its path in the run's folder, its bytes in base64."""

    path: str
    data: str


class End(Fact):
    """The unit's process is over: its status (128 + signal), and the end of what it printed."""

    status: int
    log: str = ""


class Told(Fact):
    """One line: one of these. `case` is whose `request`, `counters`, `tool` or `verdict` it is.

    `reopened` is a case that is added to again, `refused` why nothing could be measured.
    """

    hello: Hello | None = None
    say: str | None = None
    waiting: str | None = None
    start: Start | None = None
    engine: EngineFacts | None = None
    case: str | None = None
    request: RequestRecord | None = None
    counters: CounterSpan | None = None
    tool: ToolReport | None = None
    verdict: Verdict | None = None
    reopened: str | None = None
    piece: Piece | None = None
    refused: str | None = None
    end: End | None = None

    @property
    def line(self) -> str:
        """As it is sent."""
        return self.model_dump_json(exclude_unset=True) + "\n"
