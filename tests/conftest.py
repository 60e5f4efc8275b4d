"""What several test files build: one request as it was measured."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specbench.records import RequestRecord


@pytest.fixture
def record() -> Callable[..., RequestRecord]:
    """A request in round numbers: sent at 0, times in ms, one token a chunk unless said."""

    def build(
        prompt: str = "a",
        *,
        sent: float = 0,
        chunks: Sequence[float] = (100, 200),
        tokens: int | None = None,
        **more: Any,  # noqa: ANN401  (any field of the record)
    ) -> RequestRecord:
        facts: dict[str, Any] = {
            "prompt_id": prompt,
            "sent_ns": round(sent * 1e6),
            "end_ns": round((chunks[-1] if chunks else sent + 1) * 1e6),
            "chunk_ns": tuple(round(ms * 1e6) for ms in chunks),
            "output_tokens": len(chunks) if tokens is None else tokens,
            "token_source": "usage",
            "finish_reason": "length",
            "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(),
        }
        return RequestRecord.model_validate(facts | more)

    return build
