"""Facts as measured, frozen and typed. Numbers derived from them live in `analysis`.

Times are integers in nanoseconds from `time.perf_counter_ns` of the process that sent the
requests. On Linux that is CLOCK_MONOTONIC, one clock for all processes until the machine restarts,
so that telemetry's times are on it too; wall-clock times are ISO 8601 strings in UTC.
"""

import operator
from array import array
from collections import Counter
from itertools import zip_longest
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

Style = Literal["chat", "completion"]
TokenSource = Literal["usage", "token_ids", "chunks"]
MOST = 2**63  # what a time in ns or a count of tokens stays below
# A count, or a difference or sum of some: no float is too small for it.
Whole = Annotated[int, Field(gt=-(2**80), lt=2**80)]
Count = Annotated[int, Field(ge=0, lt=MOST)]


class Fact(BaseModel):
    """A frozen record. Unknown keys are refused, so that a misspelt one cannot pass in silence, and
    so are NaN and infinity, which JSON has not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Prompt(Fact):
    """One conversation to send: its user turns in order (one for a single prompt).

    `style` says how it is sent: as chat messages, or as the text of a completion.
    """

    id: str
    turns: tuple[str, ...]
    category: str | None = None
    style: Style = "chat"


class SpecRequest(Fact):
    """vLLM's own account of speculation in one request (`metrics.speculative_decoding`).

    `per_step_accepted` and `per_step_drafted` have one entry per target step; a step without a
    draft counts as 0 drafted. Counted before the tokens past the end are trimmed.
    """

    drafts: int
    draft_tokens: int | None = None  # not known of some imported requests
    accepted: int
    accepted_histogram: tuple[int, ...] | None = None
    per_step_accepted: tuple[int, ...] | None = None
    per_step_drafted: tuple[int, ...] | None = None

    @property
    def last_accepted(self) -> int | None:
        """What the last step accepted; None where steps are not listed."""
        return self.per_step_accepted[-1] if self.per_step_accepted else None


def key_of(prompt_id: str, turn: int, start: int, cycle: int) -> str:
    """What tells a request from the others of its case."""
    again = f"~{cycle}" if cycle else ""
    return f"{prompt_id}#{turn}@{start}{again}"


class RequestRecord(Fact):
    """One request: what was sent, when each chunk arrived, what came back, or the error.

    A failed request keeps what it received before the error. `chunk_ns` are the arrival times of
    the chunks that carried output (a chunk holds several tokens under speculation);
    `chunk_tokens` their token counts where the server returned token ids; `chunk_chars` how many
    characters of `text` each brought; `prompt_head` the first token ids of the rendered prompt.
    `due_ns` is when the request should have been sent, where a rate set that. `start` is the EngineFacts.start that answered, `cycle` the
    pass over the prompt set (from 0; later passes come from `precision`). `sampling` is what the
    request's body said of sampling, as it was sent.
    """

    prompt_id: str
    turn: int = 0
    category: str | None = None
    start: int = 0
    cycle: int = 0
    due_ns: int | None = None
    sent_ns: int
    end_ns: int
    chunk_ns: tuple[int, ...] = ()
    chunk_tokens: tuple[int, ...] | None = None
    chunk_chars: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    prompt_head: tuple[int, ...] | None = None
    output_tokens: int | None = None
    token_source: TokenSource | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    text: str = ""
    prompt_sha256: str
    sampling: dict[str, JsonValue] | None = None
    spec: SpecRequest | None = None
    error: str | None = None

    @property
    def key(self) -> str:
        """What tells this request from the others of its case."""
        return key_of(self.prompt_id, self.turn, self.start, self.cycle)

    @property
    def ok(self) -> bool:
        """Whether this request counts as measured."""
        return self.error is None

    @property
    def impossible(self) -> str | None:
        """What in its figures no clock and no counter can have given; None where they can be."""
        times = (self.sent_ns, *self.chunk_ns)
        if any(map(operator.gt, times, times[1:])):
            return "times that run backwards"
        if self.ok and not self.chunk_ns:
            return "neither an answer nor an error"
        spec = self.spec
        counts = [self.turn, self.start, self.cycle, self.output_tokens, self.prompt_tokens]
        counts.append(self.cached_tokens)
        lists = [self.chunk_tokens, self.chunk_chars]
        if spec:
            counts += [spec.drafts, spec.draft_tokens, spec.accepted]
            lists += [spec.per_step_accepted, spec.per_step_drafted, spec.accepted_histogram]
        lists.append(tuple(n for n in counts if n is not None))
        if any(of and not 0 <= min(of) <= max(of) < MOST for of in lists):
            return "a count that can't be"
        at = (self.sent_ns, self.end_ns, self.due_ns or 0, *self.chunk_ns[-1:])
        return None if all(abs(ns) < MOST for ns in at) else "a time that can't be"

    # What the numbers need of its long lists, so that an outline can stand for it (analysis/outlines.py).

    @property
    def first_ns(self) -> int:
        """When the first chunk came. IndexError where none did."""
        return self.chunk_ns[0]

    @property
    def last_ns(self) -> int:
        """When the last chunk came. IndexError where none did."""
        return self.chunk_ns[-1]

    @property
    def chunks(self) -> int:
        """How many chunks carried output."""
        return len(self.chunk_ns)

    @property
    def together(self) -> int:
        """How many chunks carry the stamp of the first one besides it."""
        return self.chunk_ns.count(self.chunk_ns[0]) - 1 if self.chunk_ns else 0

    @property
    def first_tokens(self) -> int | None:
        """The tokens of the first chunk; None where they are not known."""
        return self.chunk_tokens[0] if self.chunk_tokens else None

    @property
    def later_sizes(self) -> tuple[tuple[int, int], ...] | None:
        """(tokens, how many chunks of so many) after the first; None where they are not known."""
        if self.chunk_tokens is None:
            return None
        return tuple(sorted(Counter(self.chunk_tokens[1:]).items()))

    @property
    def ids_hash(self) -> int | None:
        """Equal for equal token ids, in one process; None where there are none."""
        if not self.token_ids:
            return None
        try:
            return hash(array("q", self.token_ids).tobytes())
        except OverflowError:  # nobody's vocabulary
            return hash(str(self.token_ids))

    @property
    def prompt_hash(self) -> int:
        """Equal for equal prompts, in one process."""
        return hash(self.prompt_sha256)

    @property
    def text_hash(self) -> int:
        """Equal for equal texts, in one process."""
        return hash(self.text)

    @property
    def text_length(self) -> int:
        """Characters of the answer."""
        return len(self.text)

    def whole(self) -> "RequestRecord":
        """Itself: an outline reads it from its file."""
        return self


class EngineCounters(Fact):
    """An engine's cumulative counters at one moment; None where it does not expose one.

    Names and meaning are vLLM's (`/metrics`): `accepted` is counted before tokens past the end
    of a request are trimmed, `drafts` omits steps without a draft.
    """

    drafts: Whole | None = None
    draft_tokens: Whole | None = None
    accepted: Whole | None = None
    accepted_per_pos: tuple[Whole, ...] | None = None
    prompt_tokens: Whole | None = None
    generation_tokens: Whole | None = None
    requests: Whole | None = None
    prefix_cache_hits: Whole | None = None
    prefix_cache_queries: Whole | None = None
    preemptions: Whole | None = None  # requests put back, to be computed again
    process_start_s: Whole | None = None  # another value: another process counts there now

    def __sub__(self, before: "EngineCounters") -> "EngineCounters":
        """What was counted since *before*; None where there is no value now.

        A counter that was not there before started at 0: an engine creates some of its counters
        when they first count.
        """
        spent: dict[str, int | tuple[int, ...] | None] = {}
        for name in type(self).model_fields:
            now, then = getattr(self, name), getattr(before, name)
            if now is None:
                spent[name] = None
            elif name == "accepted_per_pos":
                pairs = zip_longest(now, then or (), fillvalue=0)
                spent[name] = tuple(a - b for a, b in pairs)
            else:
                spent[name] = now - (then or 0)
        return EngineCounters.model_validate(spent)

    def __add__(self, other: "EngineCounters") -> "EngineCounters":
        """Two differences together; None where neither side has a value."""
        total: dict[str, int | tuple[int, ...] | None] = {}
        for name in type(self).model_fields:
            a, b = getattr(self, name), getattr(other, name)
            if a is None or b is None:
                total[name] = b if a is None else a
            elif name == "accepted_per_pos":
                total[name] = tuple(map(sum, zip_longest(a, b, fillvalue=0)))
            else:
                total[name] = a + b
        return EngineCounters.model_validate(total)


class CounterSpan(Fact):
    """What the engine counted around some measured requests, or why it could not be read.

    `keys` are those of the requests inside (RequestRecord.key), `requests` how many they are.
    """

    requests: Whole
    keys: tuple[str, ...] = ()
    start: Whole = 0
    spent: EngineCounters | None = None
    problem: str | None = None


class ToolReport(Fact):
    """One run of a load generator that is a tool of its own, and what it says itself.

    `keys` are those of the requests that it measured, `folder` where its files are in the case's.
    `figures` are means over requests by our names, as the tool defines them: latency_ms, ttft_ms,
    tpot_ms, output_tokens (a request), tokens_per_s, requests, acceptance_length.
    """

    tool: str
    version: str
    argv: tuple[str, ...]
    folder: str
    start: int
    keys: tuple[str, ...]
    wall_s: float
    figures: dict[str, float] = {}


class Imported(Fact):
    """What another tool's file says of a case that specbench did not measure itself.

    `figures` are by our names, as that tool defines them: those of ToolReport.figures and failed,
    output_tokens_total, acceptance_rate, step_ms, p_1, p_2, …; `spent` its counts of drafts, where
    it gives counts. `lacks` are figures that must not be made from the requests, because the file
    does not hold what they hang on. `notes` say how its numbers were read.
    """

    tool: str
    version: str | None = None
    file: str
    sha256: str
    figures: dict[str, float] = {}
    spent: EngineCounters | None = None
    lacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class EngineFacts(Fact):
    """One start of one engine: enough to know what was measured and to start it again.

    When it was ready: `kv_cache_tokens` had room in its KV cache, `memory_bytes` of the host's
    memory were its processes' own, `weights_bytes` is what it says that loading took on its device
    (target and draft). None where it does not say. `machine` is its hardware (machine.hardware()),
    `host` that machine's name: None in old runs, and of a server that was already up.
    """

    arm: str
    start: int
    kind: str
    version: str | None
    url: str
    served_model: str
    argv: tuple[str, ...] | None  # None: a server that was already up
    env: dict[str, str] = {}
    pid: int | None = None
    startup_s: float | None = None
    kv_cache_tokens: Whole | None = None
    memory_bytes: Whole | None = None
    weights_bytes: Whole | None = None
    log: str | None = None
    machine: dict[str, JsonValue] = {}
    host: str | None = None
    started_at: str
    notes: tuple[str, ...] = ()


class GpuFacts(Fact):
    """One GPU as its driver names it, and its limits; None where it does not say."""

    index: Count
    name: str
    uuid: str
    driver: str
    power_limit_w: float | None = None
    max_sm_mhz: Count | None = None
    memory_bytes: Count | None = None


class TelemetrySession(Fact):
    """A start of the sampler: what it looks at, and two clocks read together.

    `at_ns` is on the requests' clock, which starts anew with each `boot_id`; `wall_ns` is since 1970.
    `gpu_problem` says why no GPU is sampled, `root_pid` below which process everything is ours.
    """

    boot_id: str | None
    at_ns: Count
    wall_ns: Count
    interval_s: float
    root_pid: Count
    cores: Count
    gpus: tuple[GpuFacts, ...] = ()
    gpu_problem: str | None = None
    has_rapl: bool = False


class GpuReading(Fact):
    """One GPU at one moment, as NVML says; None where it does not.

    `energy_j` counts since the driver was loaded. `slowed_by` is NVML's bit mask of what holds the
    clocks down, `busy` the share of time in which some kernel ran, `ours` whether a process of the
    run is on it.
    """

    index: Count
    at_ns: Count
    energy_j: float | None = None
    power_w: float | None = None
    sm_mhz: Count | None = None
    memory_mhz: Count | None = None
    temperature_c: Count | None = None
    slowed_by: Count | None = None
    memory_bytes: Count | None = None
    busy: float | None = None
    ours: bool | None = None


class OtherProcess(Fact):
    """CPU time that a process which is not ours took. By name only: command lines hold secrets."""

    pid: Count
    name: str
    cpu_s: float


class LoadScan(Fact):
    """Whose work the cores that the run may use did since `since_ns`, in seconds of CPU time.

    `busy_s` is all of it, `ours_s` that of the run's processes, `stolen_s` what a hypervisor took;
    `others` are the processes that took 2% of a core and more, on whatever core.
    """

    since_ns: Count
    ours_s: float
    others: tuple[OtherProcess, ...] = ()
    busy_s: float | None = None
    stolen_s: float | None = None


class TelemetrySample(Fact):
    """The machine at one moment.

    `rapl_j` is the energy of the CPU packages since the sampler started, `own_s` the sampler's own
    CPU time.
    """

    at_ns: Count
    gpus: tuple[GpuReading, ...] = ()
    rapl_j: float | None = None
    cpu_mhz: float | None = None
    load: LoadScan | None = None
    own_s: float | None = None


class TelemetryLine(Fact):
    """A line of telemetry.jsonl: one of the two."""

    session: TelemetrySession | None = None
    sample: TelemetrySample | None = None
