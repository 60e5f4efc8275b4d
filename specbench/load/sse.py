"""A stream of server-sent events, as OpenAI-compatible servers write them, to a RequestRecord.

Arrival times and bytes come first and are only looked at when the stream has ended, so that
parsing costs nothing between a read and its timestamp; piece by piece, so that a reader can look
after its other streams in between. Lines end at LF or CRLF only: a U+2028
inside a JSON string is text (str.splitlines, which httpx's line reader uses, would cut there).
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specbench.records import SpecRequest, TokenSource

PROMPT_HEAD = 8
MOST_TOKENS = 1 << 31  # more are no count


class BadStream(Exception):
    """A stream that is not a complete, successful answer; the message says why."""


@dataclass
class Answer:
    """What one stream said. `problem` is set when it is no complete, successful answer."""

    chunk_ns: list[int] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_head: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    spec: SpecRequest | None = None
    done: bool = False
    problem: str | None = None

    @property
    def tokens(self) -> tuple[int | None, TokenSource | None]:
        """Output tokens and who counted them: the server's usage where it is given."""
        if (said := count(self.usage.get("completion_tokens") if self.usage else None)) is not None:
            return said, "usage"
        if self.token_ids:
            return len(self.token_ids), "token_ids"
        return (len(self.chunk_ns), "chunks") if self.chunk_ns else (None, None)


Take = Callable[[Answer, int, Any], None]


class Reader:
    """Reads a stream piece by piece. Never raises on what a server sent: see Answer.problem.

    *take* puts one event into the answer (an OpenAI-compatible server's unless said). Without
    *ends_with_a_reason* a server does not say why it stopped, and a cut stream cannot be told.
    """

    def __init__(self, *, take: Take | None = None, ends_with_a_reason: bool = True) -> None:
        self._take, self._ends_with_a_reason = take or _take, ends_with_a_reason
        self._answer = Answer()
        self._rest: list[bytes] = []  # of a line that has not ended
        self._data: list[bytes] = []
        self._arrived_ns = 0

    def feed(self, arrived_ns: int, piece: bytes) -> None:
        """Take the next *piece*. A chunk's time is that of the piece that completed it."""
        self._arrived_ns = arrived_ns
        first, *lines = piece.split(b"\n")
        self._rest.append(first)
        if not lines:
            return
        lines.insert(0, b"".join(self._rest))
        self._rest = [lines.pop()]
        for line in map(bytes.rstrip, lines):
            if line.startswith(b"data:"):
                self._data.append(line[5:].lstrip())
            elif not line and self._data:
                self._event()

    def close(self) -> Answer:
        """The answer, now that all pieces are in."""
        rest = b"".join(self._rest)
        if rest.startswith(b"data:"):  # a last line that the server did not end
            self._data.append(rest[5:].strip())
        if self._data:
            self._event()
        if not self._ends_with_a_reason and self._answer.finish_reason is None:
            self._answer.finish_reason = "unknown"
        if self._answer.problem is None:
            try:
                _must_be_complete(self._answer)
            except BadStream as error:
                self._answer.problem = str(error)
        return self._answer

    def _event(self) -> None:
        """Take the event whose `data:` lines are all there, unless the stream is broken already."""
        data, self._data = b"\n".join(self._data).decode("utf-8", "replace"), []
        if self._answer.problem is not None:
            return
        if data == "[DONE]":
            self._answer.done = True
            return
        try:
            self._take(self._answer, self._arrived_ns, json.loads(data))
        except BadStream as error:
            self._answer.problem = str(error)
        except (ValueError, RecursionError) as error:
            self._answer.problem = f"the stream holds an event that is not JSON ({error})"


def read(pieces: Iterable[tuple[int, bytes]]) -> Answer:
    """The answer in *pieces*, pairs of (arrival in ns, bytes as they came)."""
    reader = Reader()
    for arrived_ns, piece in pieces:
        reader.feed(arrived_ns, piece)
    return reader.close()


def _take(answer: Answer, arrived_ns: int, event: Any) -> None:  # noqa: ANN401
    if not isinstance(event, dict):
        raise BadStream("the stream holds an event that is no JSON object")
    if (error := event.get("error")) is not None:
        message = error.get("message") if isinstance(error, dict) else error
        raise BadStream(f"the server sent an error inside the stream: {str(message)[:300]}")
    if isinstance(event.get("usage"), dict):
        answer.usage = event["usage"]
    if isinstance(event.get("metrics"), dict):
        answer.spec = spec_of(event["metrics"].get("speculative_decoding"))
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices:
        return
    choice = choices[0]
    if not isinstance(choice, dict):
        raise BadStream("the stream holds a choice that is no JSON object")
    head = event.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if isinstance(head, list) and answer.prompt_head is None:
        answer.prompt_tokens = len(head)
        answer.prompt_head = tuple(t for t in head[:PROMPT_HEAD] if isinstance(t, int))
    delta = choice.get("delta")
    said = _text(delta if isinstance(delta, dict) else choice)
    ids = choice.get("token_ids") or []
    ids = [token for token in ids if isinstance(token, int)] if isinstance(ids, list) else []
    if ids or said:
        answer.chunk_ns.append(arrived_ns)
        answer.chunk_tokens.append(len(ids))
        answer.token_ids += ids
        answer.text.append(said)
    if isinstance(choice.get("finish_reason"), str):
        answer.finish_reason = choice["finish_reason"]


def _text(source: Mapping[str, Any]) -> str:
    parts = [source.get(key) for key in ("reasoning", "reasoning_content", "content", "text")]
    return "".join(part for part in parts if isinstance(part, str))


def _must_be_complete(answer: Answer) -> None:
    if not answer.chunk_ns:
        raise BadStream("the server answered 200 but sent no token")
    if answer.finish_reason is None:
        raise BadStream("the stream was cut: it has no finish reason")
    if answer.usage is not None and answer.usage.get("completion_tokens") == 0:
        raise BadStream("the server's usage says 0 output tokens")


def spec_of(stats: Any) -> SpecRequest | None:  # noqa: ANN401
    """vLLM's `metrics.speculative_decoding` of one request; None when it is not there."""
    if not isinstance(stats, dict):
        return None
    drafted = _counts(stats.get("per_step_drafted"))
    drafts = sum(n > 0 for n in drafted) if drafted else count(stats.get("num_spec_steps"))
    draft_tokens = count(stats.get("num_draft_tokens"))
    accepted = count(stats.get("num_accepted_draft_tokens"))
    if drafts is None or draft_tokens is None or accepted is None:
        return None
    return SpecRequest(
        drafts=drafts,
        draft_tokens=draft_tokens,
        accepted=accepted,
        accepted_histogram=_counts(stats.get("acceptance_histogram")),
        per_step_accepted=_counts(stats.get("per_step_accepted")),
        per_step_drafted=drafted,
    )


def count(value: Any) -> int | None:  # noqa: ANN401
    """*value* where it can be how many tokens there are; None where a server says nonsense."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_TOKENS
    return int(value) if is_count else None


def _counts(values: Any) -> tuple[int, ...] | None:  # noqa: ANN401
    if isinstance(values, list) and all(count(value) is not None for value in values):
        return tuple(values)
    return None
