"""The streaming client of our own: one connection a slot, each chunk stamped as it arrives."""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from specbench.config import Load, Sampling
from specbench.load import sse
from specbench.load.base import OnRecord
from specbench.records import Prompt, RequestRecord

MAX_ANSWER_BYTES = 64 << 20


class DirectClient:
    """Streaming chat completions (or completions) over httpx, at concurrency 1 or more.

    Connections and the event loop live as long as the client, so that no measured request pays
    for a handshake. Times are `clock` in ns: `sent_ns` before the request is written,
    `chunk_ns` as bytes are read. With `seed_of`, each prompt is sampled with a seed of its own.
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
        seed_of: Callable[[Prompt], int] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._model, self._sampling, self._load = served_model, sampling.body(), load
        self._start, self._seed_of, self._clock = start, seed_of, clock
        headers = {"accept": "text/event-stream", "accept-encoding": "identity"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._runner = asyncio.Runner()
        self._http = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(load.stall_s, connect=10, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            follow_redirects=False,
            trust_env=False,
            verify=url.startswith("https"),
        )

    def close(self) -> None:
        """Close the connections and the loop."""
        self._runner.run(self._http.aclose())
        self._runner.close()

    def send(
        self, prompts: Sequence[Prompt], *, max_tokens: int, concurrency: int, on_record: OnRecord
    ) -> None:
        """See LoadGenerator.send."""
        self._runner.run(self._send_all(list(prompts), max_tokens, concurrency, on_record))

    async def _send_all(
        self, prompts: list[Prompt], max_tokens: int, concurrency: int, on_record: OnRecord
    ) -> None:
        waiting = iter(prompts)

        async def slot() -> None:
            for prompt in waiting:  # shared: each slot takes the next conversation
                await self._converse(prompt, max_tokens, on_record)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(slot())

    async def _converse(self, prompt: Prompt, max_tokens: int, on_record: OnRecord) -> None:
        """All turns of one conversation; each turn's prompt holds the engine's own answers."""
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            content: list[dict[str, str]] | str = text if prompt.style == "completion" else messages
            record = await self._request(prompt, turn, content, max_tokens)
            on_record(record)
            if record.error is not None:
                return
            messages.append({"role": "assistant", "content": record.text})

    async def _request(
        self, prompt: Prompt, turn: int, content: list[dict[str, str]] | str, max_tokens: int
    ) -> RequestRecord:
        is_chat = not isinstance(content, str)
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        body: dict[str, Any] = {
            "model": self._model,
            ("messages" if is_chat else "prompt"): content,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "max_tokens": max_tokens,
            **self._sampling,
        }
        if self._seed_of is not None:
            body["seed"] = self._seed_of(prompt)
        payload = json.dumps(body).encode()
        pieces: list[tuple[int, bytes]] = []
        sent_ns = self._clock()
        problem = await self._stream(path, payload, pieces)
        end_ns = pieces[-1][0] if pieces and problem is None else self._clock()
        answer = sse.read(pieces) if pieces else sse.Answer(problem="the server sent nothing")
        tokens, source = answer.tokens
        usage = answer.usage or {}
        return RequestRecord(
            prompt_id=prompt.id,
            turn=turn,
            category=prompt.category,
            start=self._start,
            sent_ns=sent_ns,
            end_ns=end_ns,
            chunk_ns=tuple(answer.chunk_ns),
            chunk_tokens=tuple(answer.chunk_tokens) if answer.token_ids else None,
            prompt_tokens=_count(usage.get("prompt_tokens")),
            prompt_head=answer.prompt_head,
            output_tokens=tokens,
            token_source=source,
            cached_tokens=_count((usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
            finish_reason=answer.finish_reason,
            token_ids=tuple(answer.token_ids) or None,
            # Half a surrogate pair (a model can emit one) fits in no file: it becomes "?".
            text="".join(answer.text).encode("utf-8", "replace").decode("utf-8"),
            sampling={name: body[name] for name in ("max_tokens", *self._sampling)},
            prompt_sha256=hashlib.sha256(json.dumps(content).encode()).hexdigest(),
            spec=answer.spec,
            error=problem or answer.problem,
        )

    async def _stream(
        self, path: str, payload: bytes, pieces: list[tuple[int, bytes]]
    ) -> str | None:
        """Fill *pieces* with (arrival ns, bytes); the problem in words, or None."""
        headers = {"content-type": "application/json"}
        size = 0
        try:
            async with (
                asyncio.timeout(self._load.timeout_s),
                self._http.stream("POST", path, content=payload, headers=headers) as answer,
            ):
                if answer.status_code != 200:
                    return await _refusal(answer)
                if "content-encoding" in answer.headers:
                    return (
                        f"the server compressed its answer ({answer.headers['content-encoding']})"
                    )
                async for piece in answer.aiter_raw():
                    pieces.append((self._clock(), piece))
                    size += len(piece)
                    if size > MAX_ANSWER_BYTES:
                        return f"the answer is over {MAX_ANSWER_BYTES >> 20} MB"
        except TimeoutError:
            return f"no complete answer within {self._load.timeout_s:g} s (load.timeout_s)"
        except httpx.ReadTimeout:
            return f"no data for {self._load.stall_s:g} s (load.stall_s)"
        except httpx.HTTPError as error:
            what = "the stream was cut" if pieces else "the request failed"
            return f"{what}: {type(error).__name__}: {error}".rstrip(": ")
        return None


async def _refusal(answer: httpx.Response) -> str:
    """The error that a status other than 200 carries, at most its first 4 kB read."""
    body = b""
    async for piece in answer.aiter_raw():
        body += piece
        if len(body) > 4096:
            break
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:300].decode("utf-8", "replace").strip()
    return f"HTTP {answer.status_code}: {str(message)[:300]}"


def _count(value: Any) -> int | None:  # noqa: ANN401
    return value if isinstance(value, int) and value >= 0 else None
