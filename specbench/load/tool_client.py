"""What GenAI-Perf and AIPerf have in common as load generators: a process for a whole prompt set.

The tool gets a file of prompts and sends them; its own export of every request becomes our
RequestRecords, so that every table and check works on them as on those of our own client.
"""

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specbench.config import Load, Sampling
from specbench.engines.process import Child, log_tail
from specbench.errors import EngineError, LoadError
from specbench.load import answers, sse
from specbench.load.base import OnRecord
from specbench.load.clocks import ClockWatch
from specbench.load.dialects import Dialect, OpenAI, dialect_for
from specbench.load.tools import Installed
from specbench.records import Prompt, RequestRecord, ToolReport

SLOW_START_S = 120  # what a tool may take before its first request and after its last
REDACTED = "<api key>"
TEXT_FILES = (".json", ".jsonl", ".log", ".csv", ".txt", ".yaml")
Message = dict[str, str]


@dataclass(frozen=True)
class Target:
    """The server that a client sends to; `tokenizer` is the target model's, a folder or a hub id.

    `triton_inputs` are what a model in Triton takes; None for an OpenAI-compatible server.
    """

    url: str
    served_model: str
    tokenizer: str
    api_key: str | None = field(default=None, repr=False)
    triton_inputs: frozenset[str] | None = None
    grpc_url: str | None = None

    def dialect(self) -> Dialect:
        """How it wants to be asked."""
        return dialect_for(self.served_model, self.tokenizer, self.triton_inputs)


@dataclass(frozen=True)
class Job:
    """One run of a tool: what to send and how, and the folder for its files.

    `turn` is the one turn of each prompt that is sent, `said` what was said before it by prompt id
    (chat messages); None where the tool plays whole conversations by itself.
    """

    prompts: Sequence[Prompt]
    max_tokens: int
    concurrency: int
    rate: float | None
    folder: Path
    turn: int | None = None
    said: Mapping[str, Sequence[Message]] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        """How many requests that is."""
        if self.turn is not None:
            return len(self.prompts)
        return sum(len(prompt.turns) for prompt in self.prompts)


@dataclass(frozen=True)
class Exchange:
    """One request as a tool exports it: which prompt and turn, the body, and the stream's pieces.

    `pieces` are (arrival ns, bytes) as server-sent events, on the clock of `sent_ns`; `due_ns` is
    when it should have been sent, where the tool says so.
    """

    prompt: Prompt
    turn: int
    body: Mapping[str, Any]
    sent_ns: int
    pieces: Sequence[tuple[int, bytes]]
    due_ns: int | None = None
    error: str | None = None


class ToolClient(ABC):
    """A LoadGenerator that runs *tool* for each `send`: once, or once for each turn.

    It is kept off the cores that engines compute on, which it would take time from.
    """

    unit = "set"
    turn_by_turn = False  # whether it has to be given each turn with the answers before it
    stamps_by_day = False  # whether its times are of the time of day, which can be set

    def __init__(
        self,
        tool: Installed,
        target: Target,
        *,
        sampling: Sampling,
        load: Load,
        start: int = 0,
        keep_off: frozenset[int] = frozenset(),
        waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.tool, self.target, self._start = tool, target, start
        self._cores = os.sched_getaffinity(0) - keep_off
        self.sampling, self.load, self._waiting = sampling.body(), load, waiting
        self.dialect = target.dialect()

    # --- what a tool is ---

    @abstractmethod
    def command(self, job: Job) -> tuple[list[str], dict[str, str]]:
        """Write the tool's input into the job's folder; its command line and environment."""

    @abstractmethod
    def exchanges(self, job: Job) -> Iterable[Exchange]:
        """Every request in the tool's export.

        Raises:
            LoadError: there is no export, or it cannot be read.
        """

    @abstractmethod
    def figures(self, job: Job) -> dict[str, float]:
        """The tool's own summary, by the names of ToolReport.figures; what it does not say is left out."""

    # --- what is common ---

    def send(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        concurrency: int,
        on_record: OnRecord,
        rate: float | None = None,
        folder: Path | None = None,
    ) -> list[ToolReport]:
        """See LoadGenerator.send; nothing is known of a request before the tool has ended.

        Raises:
            LoadError: the tool failed as a whole, or sent something else than it was given.
        """
        assert folder is not None, "a tool leaves files"
        turns = range(max(len(prompt.turns) for prompt in prompts)) if self.turn_by_turn else [None]
        said: dict[str, list[Message]] = {prompt.id: [] for prompt in prompts}
        reports = []
        for turn in turns:
            left = [p for p in prompts if turn is None or (turn < len(p.turns) and p.id in said)]
            if not left:
                break
            made = _next_folder(folder, self.tool.tool.name)
            job = Job(left, max_tokens, concurrency, rate, made, turn, said)
            report, records = self._carry_out(job)
            reports.append(report)
            for record in records:
                on_record(record)
            if turn is not None:
                said = _continued(said, left, records)
        return reports

    def _carry_out(self, job: Job) -> tuple[ToolReport, list[RequestRecord]]:
        """One run of the tool."""
        argv, env = self.command(job)
        began = time.monotonic()
        clocks = ClockWatch()
        try:
            self._run(job, argv, env, clocks)
        finally:
            self._redact(job.folder)
        records = [
            record_of(self._in_time(one, clocks), self.sampling, self._start, self.dialect)
            for one in self.exchanges(job)
        ]
        _each_once(job, records, self.tool.tool.name)
        report = ToolReport(
            tool=self.tool.tool.name,
            version=self.tool.version,
            argv=tuple(self._without_key(arg) for arg in argv),
            folder=job.folder.name,
            start=self._start,
            keys=tuple(record.key for record in records),
            wall_s=round(time.monotonic() - began, 3),
            figures=self.figures(job) if not clocks.jumps else {},  # they are of all requests
        )
        return report, records

    def _in_time(self, one: Exchange, clocks: ClockWatch) -> Exchange:
        """*one* on the clock of all records; failed if something happened to time during it."""
        times = [one.sent_ns, *(at for at, _ in one.pieces)]
        if one.due_ns is not None:
            times.append(one.due_ns)
        steps = self.stamps_by_day or one.due_ns is not None  # how late it was is by time of day
        found = clocks.around(min(times), max(times), by_day=self.stamps_by_day, steps=steps)
        if self.stamps_by_day:
            on = clocks.from_day_ns
            pieces = [(on(at), piece) for at, piece in one.pieces]
            due_ns = None if one.due_ns is None else on(one.due_ns)
            one = replace(one, sent_ns=on(one.sent_ns), pieces=pieces, due_ns=due_ns)
        return one if found is None else replace(one, error=found.told())

    def close(self) -> None:  # noqa: B027  (no tool has anything to do here)
        """Nothing to give up: the tool's process ends with `send`."""

    def _run(
        self, job: Job, argv: Sequence[str], env: Mapping[str, str], clocks: ClockWatch
    ) -> None:
        name, limit_s = self.tool.tool.name, self._limit_s(job)
        log = job.folder / f"{name}.log"
        began = time.monotonic()
        try:
            with Child(argv, log=log, cwd=job.folder, env=env, patience_s=5) as child:
                with suppress(OSError):  # what it starts stays there as well
                    os.sched_setaffinity(child.pid, self._cores)
                while (code := child.poll()) is None:
                    passed_s = time.monotonic() - began
                    if passed_s > limit_s:
                        raise LoadError(
                            f"{name} was not done after {limit_s:.0f} s.",
                            hint=f"Its log: {log}\n{self._without_key(log_tail(log, 5))}",
                        )
                    self._waiting(f"{name} sends {job.requests} requests ({passed_s:.0f} s)")
                    clocks.wait()
        except EngineError as error:  # the process could not be started
            raise LoadError(error.message) from None
        clocks.look()
        if code:
            raise LoadError(
                f"{name} ended with status {code}: {self.reason(log_tail(log, 400))}.",
                hint=f"Its log: {log}",
            )

    def reason(self, log: str) -> str:
        """The line of a failed run's *log* that says why: the last that speaks of an error."""
        lines = [" ".join(line.split()) for line in self._without_key(log).splitlines()]
        found = [line for line in lines if "error" in line.lower()] or lines
        return found[-1][:300] if found else "its log is empty"

    def _limit_s(self, job: Job) -> float:
        """A bound on the whole: every request may take load.timeout_s, but not all of them do."""
        waves = -(-job.requests // (job.concurrency if job.rate is None else 1))
        arrivals_s = job.requests / job.rate * 3 if job.rate else 0
        return SLOW_START_S + self.load.timeout_s * min(waves, 10) + waves * 10 + arrivals_s

    def _redact(self, folder: Path) -> None:
        """Take the server's key out of every file that the tool wrote it into."""
        if not self.target.api_key:
            return
        key = _broken_anywhere(self.target.api_key)
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix in TEXT_FILES:
                text = path.read_bytes()
                clean = re.sub(key.encode(), REDACTED.encode(), text)
                if clean != text:
                    path.write_bytes(clean)

    def _without_key(self, text: str) -> str:
        key = self.target.api_key
        return re.sub(_broken_anywhere(key), REDACTED, text) if key else text


def record_of(
    one: Exchange, sampling: Iterable[str], start: int, dialect: Dialect | None = None
) -> RequestRecord:
    """The request that *one* is; of its body the keys *sampling* and max_tokens are kept."""
    dialect = dialect or OpenAI("")
    one = _forwards(one)
    reader = dialect.reader(one.body)
    for arrived_ns, piece in one.pieces:
        reader.feed(arrived_ns, piece)
    answer = reader.close() if one.pieces else sse.Answer(problem="no answer")
    said = dialect.sampling(one.body)
    return answers.record_of(
        answer,
        prompt=one.prompt,
        turn=one.turn,
        start=start,
        due_ns=one.due_ns,
        sent_ns=one.sent_ns,
        end_ns=one.pieces[-1][0] if one.pieces else one.sent_ns,
        sampling={name: said[name] for name in ("max_tokens", *sampling) if name in said},
        prompt_sha256=answers.content_sha256(dialect.content(one.body)),
        problem=one.error,
    )


def _forwards(one: Exchange) -> Exchange:
    """*one*; where its times run backwards, none of them means anything, and it failed."""
    times = [one.sent_ns, *(at for at, _ in one.pieces)]
    if times == sorted(times):
        return one
    why = one.error or "the wall clock was set back during this request"
    pieces = [(one.sent_ns, piece) for _, piece in one.pieces]
    return replace(one, error=why, pieces=pieces, due_ns=None)


def means(summary: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """The means in a tool's *summary*, by our names; *names* is from its own to ours."""
    return {
        ours: float(summary[theirs]["avg"])
        for theirs, ours in names.items()
        if isinstance(summary.get(theirs), dict) and summary[theirs].get("avg") is not None
    }


def _broken_anywhere(key: str) -> str:
    """A pattern for *key* also where a log has broken it over two lines."""
    return r"\s*".join(re.escape(character) for character in key)


def _continued(
    said: Mapping[str, Sequence[Message]],
    prompts: Sequence[Prompt],
    records: Sequence[RequestRecord],
) -> dict[str, list[Message]]:
    """What has been said after another turn; a conversation whose turn failed ends."""
    answers = {record.prompt_id: record for record in records if record.ok}
    return {
        prompt.id: [
            *said[prompt.id],
            {"role": "user", "content": prompt.turns[record.turn]},
            {"role": "assistant", "content": record.text},
        ]
        for prompt in prompts
        if (record := answers.get(prompt.id)) is not None
    }


def _next_folder(folder: Path, name: str) -> Path:
    """NAME.N in *folder*, made: a resumed case runs the tool again."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{name}.{len(list(folder.glob(f'{name}.*')))}"
    made.mkdir()
    return made.absolute()


def _each_once(job: Job, records: Sequence[RequestRecord], name: str) -> None:
    """Refuse an export that holds a request twice: the counters would be around too much."""
    seen: set[tuple[str, int]] = set()
    for record in records:
        if (record.prompt_id, record.turn) in seen:
            raise LoadError(f"{name} sent turn {record.turn + 1} of {record.prompt_id} twice.")
        seen.add((record.prompt_id, record.turn))
    if not seen:
        raise LoadError(f"{name} measured none of {job.requests} requests.")
