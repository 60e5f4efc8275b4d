"""Answers in vLLM 0.32's wire format, made of nothing: what the null server sends, as bytes.

Recorded answers of a real vLLM lie in tests/data, and a test holds these against them.
"""

import functools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

# Common words, so that a tokenizer counts about one token each. The ids are nobody's.
WORDS = (" the", " sea", " and", " sky", " are", " blue", " in", " June")
FIRST_ID = 1000
CREATED_S = int(time.time())
HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
Json = dict[str, Any]


class Order(NamedTuple):
    """What a request asks for, as far as it shapes the answer."""

    is_chat: bool
    model: str
    tokens: int
    prompt_tokens: int
    streams: bool
    with_usage: bool
    with_ids: bool


def order_of(path: str, body: Mapping[str, Any]) -> Order:
    """The order in a request's *body*; a prompt's tokens are its words."""
    content = body.get("messages", body.get("prompt", ""))
    said = content if isinstance(content, str) else json.dumps(content)
    options = body.get("stream_options") or {}
    return Order(
        is_chat=path.endswith("/chat/completions"),
        model=str(body.get("model", "nothing")),
        tokens=max(1, int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)),
        prompt_tokens=max(1, len(said.split())),
        streams=bool(body.get("stream")),
        with_usage=bool(options.get("include_usage")),
        with_ids=bool(body.get("return_token_ids")),
    )


def counts(tokens: int, pattern: Sequence[int]) -> list[int]:
    """Tokens of each chunk: one in the first, as a prefill gives, then *pattern* over and over."""
    made, left, turn = [1], tokens - 1, 0
    while left > 0:
        made.append(min(left, pattern[turn % len(pattern)]))
        left -= made[-1]
        turn += 1
    return made


def sends(order: Order, per_chunk: Sequence[int], number: int) -> Iterator[bytes]:
    """What goes out for request *number*: a chunk at each beat, then the end of the stream.

    The end (usage, [DONE]) follows the last chunk at once. The first chunk holds the role too:
    vLLM sends that with the first token.
    """
    identity = b"%s-%016x" % (b"chatcmpl" if order.is_chat else b"cmpl", number)
    role = _framed(_role_event(order), identity) if order.is_chat else b""
    done = 0
    for count in per_chunk:
        is_last = done + count == order.tokens
        chunk = _framed(_token_event(order, done, count, is_last), identity)
        yield chunk if done else role + chunk
        done += count
    usage = _framed(_usage_event(order), identity) if order.with_usage else b""
    yield usage + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def whole(order: Order, number: int) -> bytes:
    """The answer to a request that does not stream, as a whole response."""
    text = "".join(WORDS[i % len(WORDS)] for i in range(order.tokens))
    said: Json = {"message": {"role": "assistant", "content": text}} if order.is_chat else {}
    said = said or {"text": text}
    body = {
        "id": f"chatcmpl-{number:016x}" if order.is_chat else f"cmpl-{number:016x}",
        "object": "chat.completion" if order.is_chat else "text_completion",
        "created": CREATED_S,
        "model": order.model,
        "choices": [{"index": 0, **said, "logprobs": None, "finish_reason": "length"}],
        "usage": _usage(order),
    }
    return page("application/json", json.dumps(body).encode())


def page(kind: str, body: bytes, status: str = "200 OK") -> bytes:
    """A response that is no stream."""
    head = f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-type: {kind}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _framed(parts: tuple[bytes, bytes], identity: bytes) -> bytes:
    """An event with its id put in, as one chunk of a chunked body."""
    before, after = parts
    return b"%x\r\n%b%b%b\r\n" % (len(before + identity + after), before, identity, after)


def _parts(event: Json) -> tuple[bytes, bytes]:
    """An event's bytes before and after its id."""
    before, after = json.dumps({"id": "\0", **event}, separators=(",", ":")).split("\\u0000", 1)
    return b"data: " + before.encode(), after.encode() + b"\n\n"


def _event(order: Order, choices: list[Json], **more: Any) -> tuple[bytes, bytes]:  # noqa: ANN401
    kind = "chat.completion.chunk" if order.is_chat else "text_completion"
    about = {"object": kind, "created": CREATED_S, "model": order.model}
    return _parts({**about, "choices": choices, **more})


def _token_event(order: Order, first: int, count: int, is_last: bool) -> tuple[bytes, bytes]:
    """Tokens *first* to *first* + *count*; words come round again, and so do these bytes."""
    is_opening = first == 0 and not order.is_chat and order.with_ids
    prompt = order.prompt_tokens if is_opening else 0
    alike = order._replace(tokens=0, prompt_tokens=prompt, with_usage=False)
    return _cached_token_event(alike, first % len(WORDS), count, is_last)


@functools.lru_cache(maxsize=4096)
def _cached_token_event(order: Order, first: int, count: int, is_last: bool) -> tuple[bytes, bytes]:
    places = [(first + i) % len(WORDS) for i in range(count)]
    text = "".join(WORDS[i] for i in places)
    choice: Json = {"index": 0}
    choice |= {"delta": {"content": text}} if order.is_chat else {"text": text}
    choice |= {"logprobs": None, "finish_reason": "length" if is_last else None}
    if is_last or not order.is_chat:
        choice["stop_reason"] = None
    if not order.is_chat:
        choice["prompt_token_ids"] = list(range(order.prompt_tokens)) or None
    choice["token_ids"] = [FIRST_ID + i for i in places] if order.with_ids else None
    return _event(order, [choice])


def _role_event(order: Order) -> tuple[bytes, bytes]:
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    ids = list(range(order.prompt_tokens)) if order.with_ids else None
    return _event(order, [choice], prompt_token_ids=ids, prompt_text=None)


def _usage_event(order: Order) -> tuple[bytes, bytes]:
    return _event(order, [], usage=_usage(order), system_fingerprint="null-server")


def _usage(order: Order) -> dict[str, int]:
    total = order.prompt_tokens + order.tokens
    return {
        "prompt_tokens": order.prompt_tokens,
        "total_tokens": total,
        "completion_tokens": order.tokens,
    }
