"""An answer that was read, as the record of its request."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from specbench.load.sse import Answer, count
from specbench.records import Prompt, RequestRecord


def record_of(
    answer: Answer,
    *,
    prompt: Prompt,
    turn: int,
    start: int,
    due_ns: int | None,
    sent_ns: int,
    end_ns: int,
    sampling: Mapping[str, Any],
    prompt_sha256: str,
    problem: str | None,
) -> RequestRecord:
    """The same facts from every client; *problem* is what went wrong beside the answer itself."""
    tokens, source = answer.tokens
    usage = answer.usage or {}
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    said = count(usage.get("prompt_tokens"))
    return RequestRecord(
        prompt_id=prompt.id,
        turn=turn,
        category=prompt.category,
        start=start,
        due_ns=due_ns,
        sent_ns=sent_ns,
        end_ns=end_ns,
        chunk_ns=tuple(answer.chunk_ns),
        chunk_tokens=tuple(answer.chunk_tokens) if any(answer.chunk_tokens) else None,
        chunk_chars=tuple(map(len, answer.text)),
        prompt_tokens=answer.prompt_tokens if said is None else said,
        prompt_head=answer.prompt_head,
        output_tokens=tokens,
        token_source=source,
        cached_tokens=count(cached),
        finish_reason=_whole(answer.finish_reason),
        token_ids=tuple(answer.token_ids) or None,
        text=_whole("".join(answer.text)) or "",
        sampling=dict(sampling),
        prompt_sha256=prompt_sha256,
        spec=answer.spec,
        error=_whole(problem or answer.problem),
    )


def content_sha256(content: Any) -> str:  # noqa: ANN401  (messages, or the text of a completion)
    """The hash of what was sent as the prompt."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _whole(text: str | None) -> str | None:
    """Half a surrogate pair (a model can emit one) fits in no file: it becomes "?"."""
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8")
