"""SGLang's scripts/playground/bench_speculative.py: a JSON line for each set-up, aggregates only.

    batch_size         requests in flight: concurrency here
    steps              tokens drafted in a chain: k (0, with topk and num_draft_tokens: no speculation)
    num_draft_tokens   nodes verified, the root included: k + 1 at topk 1, so it is not k
    acc_length         the server's avg_spec_accept_length: tokens per target step since it started, the
                       bonus token included (accepted + batch size a forward pass), the token of a
                       prefill not, the script's warm-up batch too
    step_time          20th percentile, in s; speed = acc_length / step_time, of one request

So TPOT is step_time / acc_length. It holds no requests, and not how many there were.
"""

from typing import Annotated, Any

from pydantic import Field

from specbench.errors import ExchangeError
from specbench.interchange.found import VANILLA, FoundCase, Told, origin
from specbench.interchange.reading import Source
from specbench.interchange.shapes import Count, Number, Seconds, Shape, shaped

TOOL = "SGLang bench_speculative"
K = Annotated[int, Field(strict=True, ge=0, le=1000)]


class Line(Shape):
    """One set-up."""

    batch_size: Annotated[Count, Field(ge=1)]
    steps: K
    topk: Count
    num_draft_tokens: Count
    acc_length: Number
    step_time: Seconds
    completion_tokens: Number | None = None


def claims(value: Any) -> bool:  # noqa: ANN401
    """Whether *value* is such a line."""
    return isinstance(value, dict) and {"batch_size", "steps", "acc_length"} <= value.keys()


def read(source: Source, told: Told) -> list[FoundCase]:
    """A case for each line.

    Raises:
        ExchangeError: names the line and the key.
    """
    return [
        _case(source, number, shaped(Line, value, source.path, number, TOOL), told)
        for number, value in source.documents
    ]


def _case(source: Source, number: int, line: Line, told: Told) -> FoundCase:
    if told.k is not None and told.k != line.steps:
        raise ExchangeError(
            source.path, number, f"steps is {line.steps}, not {told.k}.", hint="Leave out --k."
        )
    figures = {"step_ms": line.step_time * 1e3}
    notes = ["the server's figures since its start, its warm-up batch included, no requests"]
    if line.steps:
        figures["acceptance_length"] = line.acc_length
    if line.acc_length:
        figures["tpot_ms"] = line.step_time * 1e3 / line.acc_length
    if line.completion_tokens is not None:
        figures["output_tokens"] = line.completion_tokens
    method = (told.method or "eagle") if line.steps else VANILLA
    label = method
    if line.topk > 1:
        label = f"{method}-topk{line.topk}-n{line.num_draft_tokens}"
        notes.append(f"a tree of {line.num_draft_tokens - 1} drafted tokens, {line.topk} a level")
    elif line.steps and line.num_draft_tokens != line.steps + 1:
        notes.append(f"num_draft_tokens is {line.num_draft_tokens}, not k + 1")
    return FoundCase(
        method=method,
        k=line.steps,
        label=label,
        imported=origin(source, TOOL, figures=figures, notes=notes),
        concurrency=line.batch_size,
    )
