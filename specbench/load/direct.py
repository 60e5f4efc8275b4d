"""The streaming client of our own: conversations onto a wire, and what comes back into records.

Answers are taken apart when they have ended, in slices between which the wire is looked at, so
that no other stream's chunks wait for that.
"""

import json
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specbench.config import Load, Sampling
from specbench.load import http1, sse
from specbench.load.answers import content_sha256, record_of
from specbench.load.base import OnRecord
from specbench.load.clocks import STOPS, Clocks, Moment, happened_since, moment, read_clocks
from specbench.load.dialects import Dialect, OpenAI
from specbench.load.wire import Exchange, Wire, undisturbed, until
from specbench.records import Prompt, RequestRecord


@dataclass(eq=False)
class _Talk:
    """A conversation: the turn that is next or in flight, and everything said up to it."""

    prompt: Prompt
    max_tokens: int
    due_ns: int | None = None
    turn: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)
    body: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    prompt_sha256: str = ""
    exchange: Exchange = field(default_factory=lambda: Exchange(b""))
    began: Moment | None = None

    @property
    def is_last_turn(self) -> bool:
        return self.turn + 1 == len(self.prompt.turns)


class DirectClient:
    """Streaming chat completions (or completions), closed loop or at a rate.

    Connections live as long as the client, so that no measured request pays for a handshake.
    Times are `clock` in ns: `sent_ns` just before the request is written, `chunk_ns` when its bytes
    could be read. With `seed_of`, each prompt is sampled with a seed of its own; `arrival_seed`
    draws the arrivals of an open loop, the same for every `send`. A request during which the machine
    slept, or the run was stopped or frozen, fails: see `clocks`.
    """

    unit = "conversation"

    def __init__(
        self,
        *,
        url: str,
        served_model: str,
        api_key: str | None,
        sampling: Sampling,
        load: Load,
        start: int = 0,
        dialect: Dialect | None = None,
        seed_of: Callable[[Prompt], int] | None = None,
        arrival_seed: int = 0,
        clock: Callable[[], int] = time.perf_counter_ns,
        clocks: Callable[[], Clocks] = read_clocks,
    ) -> None:
        STOPS.listen()
        self._clocks = clocks
        self._dialect = dialect or OpenAI(served_model)
        self._sampling = sampling.body()
        self._start, self._seed_of, self._clock = start, seed_of, clock
        self._arrival_seed = arrival_seed
        self._site = http1.Site(url, api_key)
        self._wire = Wire(url, timeout_s=load.timeout_s, stall_s=load.stall_s, clock=clock)

    def close(self) -> None:
        """Close the connections."""
        self._wire.close()

    def send(
        self,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        concurrency: int,
        on_record: OnRecord,
        rate: float | None = None,
        folder: Path | None = None,
    ) -> None:
        """See LoadGenerator.send. With a *rate*, *concurrency* connections are opened beforehand.

        Except at concurrency 1, *on_record* is called in another thread, one call at a time: what
        it waits for (a disk, say) holds up no stream. All calls are over when this returns.
        """
        if not prompts:
            return
        talks = deque(self._talk(prompt, max_tokens) for prompt in prompts)
        limit = len(talks) if rate else min(concurrency, len(talks))
        self._wire.warm(min(concurrency, len(talks)))
        with undisturbed(), _Listener(on_record, aside=limit > 1) as listener:
            if rate:
                self._set_due(talks, rate)
            try:
                self._drive(talks, limit, listener)
            finally:
                self._wire.forget()

    def _set_due(self, talks: Sequence[_Talk], rate: float) -> None:
        """Poisson arrivals from now on: exponential gaps, on average 1 / *rate* seconds."""
        draw, due_ns = random.Random(self._arrival_seed), self._clock()
        for talk in talks:
            talk.due_ns = due_ns
            due_ns += round(draw.expovariate(rate) * 1e9)

    def _drive(self, waiting: deque[_Talk], limit: int, listener: "_Listener") -> None:
        """Keep up to *limit* conversations in flight until all are over and heard."""
        flying: dict[Exchange, _Talk] = {}
        hearing: deque[tuple[_Talk, Generator[None, None, bool]]] = deque()
        talking = 0

        def fly(talk: _Talk) -> None:
            flying[talk.exchange] = talk
            talk.began = moment(self._clocks)
            self._wire.start(talk.exchange)

        while waiting or flying or hearing:
            while waiting and talking < limit and (waiting[0].due_ns or 0) <= self._clock():
                talking += 1
                fly(waiting.popleft())
            due_ns = waiting[0].due_ns if waiting and talking < limit else None
            patience_s = None if due_ns is None else until(due_ns, self._clock())
            for exchange in self._wire.turn(0 if hearing else patience_s):
                talk = flying.pop(exchange)
                talking -= talk.is_last_turn  # the next one need not wait until this is heard
                hearing.append((talk, self._hear(talk, listener)))
            while hearing:
                talk, slices = hearing[0]
                if (goes_on := _next_slice(slices)) is not None:
                    hearing.popleft()
                    if goes_on:
                        fly(talk)
                    elif not talk.is_last_turn:
                        talking -= 1
                if flying or limit > 1:
                    break  # one slice, and back to the wire

    def _hear(self, talk: _Talk, listener: "_Listener") -> Generator[None, None, bool]:
        """Take an answer apart, slice by slice; whether the conversation goes on.

        It does with its next turn in place, whose prompt holds the engine's own answers.
        """
        exchange, reader = talk.exchange, self._dialect.reader(talk.body)
        problem = exchange.problem
        began_body = False
        try:
            for arrived_ns, piece in http1.body(exchange.pieces, whole=problem is None):
                began_body = True
                reader.feed(arrived_ns, piece)
                yield
        except http1.AnswerError as error:
            problem = problem or str(error)
        answer = reader.close() if began_body else sse.Answer(problem="the server sent nothing")
        record = self._record(talk, answer, problem)
        listener(record)
        if talk.is_last_turn or not record.ok:
            return False
        talk.messages.append({"role": "assistant", "content": record.text})
        talk.turn += 1
        self._ask(talk)
        return True

    def _talk(self, prompt: Prompt, max_tokens: int) -> _Talk:
        """A conversation whose first request lies ready."""
        talk = _Talk(prompt, max_tokens)
        self._ask(talk)
        return talk

    def _ask(self, talk: _Talk) -> None:
        """Make the request of the talk's turn."""
        prompt, text = talk.prompt, talk.prompt.turns[talk.turn]
        talk.messages.append({"role": "user", "content": text})
        talk.sampling = {"max_tokens": talk.max_tokens, **self._sampling}
        if self._seed_of is not None:
            talk.sampling["seed"] = self._seed_of(prompt)
        talk.body = self._dialect.body(prompt, talk.messages, talk.sampling)
        talk.prompt_sha256 = content_sha256(self._dialect.content(talk.body))
        path = self._dialect.path(prompt)
        talk.exchange = Exchange(self._site.post(path, json.dumps(talk.body).encode()))

    def _record(self, talk: _Talk, answer: sse.Answer, problem: str | None) -> RequestRecord:
        assert talk.began is not None
        problem = happened_since(talk.began, self._clocks) or problem
        return record_of(
            answer,
            prompt=talk.prompt,
            turn=talk.turn,
            start=self._start,
            due_ns=talk.due_ns if talk.turn == 0 else None,
            sent_ns=talk.exchange.sent_ns,
            end_ns=talk.exchange.end_ns,
            sampling=talk.sampling,
            prompt_sha256=talk.prompt_sha256,
            problem=problem,
        )


class _Listener:
    """Hands records to *on_record* in order: at once, or *aside* in a thread of their own."""

    def __init__(self, on_record: OnRecord, *, aside: bool) -> None:
        self._on_record = on_record
        self._thread = ThreadPoolExecutor(1, "on_record") if aside else None
        self._calls: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __call__(self, record: RequestRecord) -> None:
        if self._thread is None:
            self._on_record(record)
            return
        self._calls.append(self._thread.submit(self._on_record, record))
        while self._calls and self._calls[0].done():
            self._calls.popleft().result()  # raises here what it raised there

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """What was measured is kept, also when the sending broke off."""
        if self._thread is not None:
            self._thread.shutdown()
            for call in self._calls if exc is None else ():
                call.result()


def _next_slice(slices: Generator[None, None, bool]) -> bool | None:
    """Go on with *slices*; None while there are more, what they returned at the end."""
    try:
        next(slices)
    except StopIteration as end:
        return bool(end.value)
    return None
