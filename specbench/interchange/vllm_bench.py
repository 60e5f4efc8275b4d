"""`vllm bench serve --save-result` (0.32, vllm/benchmarks/serve.py): one JSON object a run.

Always: means over requests (mean_ttft_ms, mean_tpot_ms = (latency - TTFT) / (tokens - 1)),
output_throughput (tokens / the whole duration), and of speculation the difference of two scrapes of
/metrics: 1 + accepted / drafts (bonus token included), the rate in percent, p_i unconditional; newer
versions give the counts too. With --save-detailed also each request's start, TTFT, gaps between chunks,
lengths and text: those become requests. k is the number of positions. Prompts are not in the file.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from specbench.errors import ExchangeError
from specbench.interchange.found import (
    FoundCase,
    Speculated,
    Told,
    origin,
    speculation,
    unknown_text,
)
from specbench.interchange.reading import Source
from specbench.interchange.shapes import Count, Number, Seconds, Shape, Text, shaped
from specbench.records import (
    CounterSpan,
    EngineCounters,
    Prompt,
    RequestRecord,
    ToolReport,
)

TOOL = "vllm bench serve"
MEANS = {"mean_ttft_ms": "ttft_ms", "mean_tpot_ms": "tpot_ms", "mean_e2el_ms": "latency_ms"}
COMPARED = (
    "ttft_ms",
    "tpot_ms",
    "latency_ms",
    "output_tokens",
)  # its throughput has idle time in it


def _none_if_unbounded(value: Any) -> Any:  # noqa: ANN401
    return None if value == "inf" else value


class Result(Shape):
    """One run's file."""

    completed: Count
    failed: Count | None = None
    model_id: Text | None = None
    max_concurrency: Count | None = None
    request_rate: Annotated[Number | None, BeforeValidator(_none_if_unbounded)] = None
    duration: Seconds | None = None
    total_output_tokens: Count | None = None
    output_throughput: Number | None = None
    mean_ttft_ms: Number | None = None
    mean_tpot_ms: Number | None = None
    mean_e2el_ms: Number | None = None
    spec_decode_acceptance_rate: Number | None = None
    spec_decode_acceptance_length: Number | None = None
    spec_decode_num_drafts: Count | None = None
    spec_decode_draft_tokens: Count | None = None
    spec_decode_accepted_tokens: Count | None = None
    spec_decode_per_position_acceptance_rates: list[Number] | None = None
    start_times: list[Seconds] | None = None
    ttfts: list[Seconds] | None = None
    itls: list[list[Seconds]] | None = None
    input_lens: list[Count] | None = None
    output_lens: list[Count] | None = None
    generated_texts: list[Text] | None = None
    errors: list[Text | None] | None = None

    @property
    def detailed(self) -> bool:
        """Whether every request is in it."""
        needed = (self.start_times, self.ttfts, self.itls, self.output_lens)
        return all(needed) and any(self.output_lens or ())


def claims(value: Any) -> bool:  # noqa: ANN401
    """Whether *value* is such a result."""
    return isinstance(value, dict) and "completed" in value and "output_throughput" in value


def read(source: Source, told: Told) -> list[FoundCase]:
    """A case for each result in the file (--append-result puts several there).

    Raises:
        ExchangeError: names the line and the key.
    """
    return [
        _case(source, line, shaped(Result, value, source.path, line, TOOL), told)
        for line, value in source.documents
    ]


def _case(source: Source, line: int, result: Result, told: Told) -> FoundCase:
    how = _speculation(source.path, line, result, told)
    records = _requests(source.path, line, result) if result.detailed else []
    figures, spent = _figures(result), _counts(result)
    notes = list(how.notes)
    if not records:
        notes.append("the tool's figures, no requests")
    if spent is None and "acceptance_length" in figures:
        notes.append("acceptance is per draft: steps without a draft are not known")
    open_loop = result.request_rate is not None and result.max_concurrency is None
    requests = result.completed + (result.failed or 0)
    return FoundCase(
        method=how.method,
        k=how.k,
        imported=origin(source, TOOL, figures={} if records else figures, spent=spent, notes=notes),
        records=records,
        prompts=[Prompt(id=r.prompt_id, turns=unknown_text(1)) for r in records],
        spans=_spans(records, spent),
        report=_report(records, figures),
        model=result.model_id,
        concurrency=result.max_concurrency or max(1, requests),
        rate=result.request_rate if open_loop else None,
    )


def _speculation(path: Path, line: int, result: Result, told: Told) -> Speculated:
    positions = result.spec_decode_per_position_acceptance_rates
    if positions:
        return speculation(path, told, k=len(positions), why_unknown="", line=line)
    if result.spec_decode_acceptance_length is None and told.k is None:
        note = "no speculative counters in it: taken for vanilla"
        return Speculated("vanilla", 0, (note,))
    why = "has no acceptance per position, which would tell k."
    return speculation(path, told, k=None, why_unknown=why, line=line)


def _figures(result: Result) -> dict[str, float]:
    """Its figures by our names."""
    found: dict[str, float] = {"requests": result.completed}
    said: dict[str, float | None] = {
        **{ours: getattr(result, theirs) for theirs, ours in MEANS.items()},
        "failed": result.failed,
        "tokens_per_s": result.output_throughput,
        "output_tokens_total": result.total_output_tokens,
        "acceptance_length": result.spec_decode_acceptance_length,
    }
    if result.total_output_tokens is not None and result.completed:
        said["output_tokens"] = result.total_output_tokens / result.completed
    if result.spec_decode_acceptance_rate is not None:
        said["acceptance_rate"] = result.spec_decode_acceptance_rate / 100
    for place, share in enumerate(result.spec_decode_per_position_acceptance_rates or (), 1):
        said[f"p_{place}"] = share
    return found | {name: value for name, value in said.items() if value is not None}


def _counts(result: Result) -> EngineCounters | None:
    drafts = result.spec_decode_num_drafts
    if drafts is None or result.spec_decode_accepted_tokens is None:
        return None
    rates = result.spec_decode_per_position_acceptance_rates
    return EngineCounters(
        drafts=drafts,
        draft_tokens=result.spec_decode_draft_tokens,
        accepted=result.spec_decode_accepted_tokens,
        accepted_per_pos=tuple(round(rate * drafts) for rate in rates) if rates else None,
    )


def _requests(path: Path, line: int, result: Result) -> list[RequestRecord]:
    starts, firsts = result.start_times or [], result.ttfts or []
    gaps, lengths = result.itls or [], result.output_lens or []
    lists = (
        starts,
        firsts,
        gaps,
        lengths,
        result.input_lens,
        result.generated_texts,
        result.errors,
    )
    if len({len(one) for one in lists if one is not None}) != 1:
        raise ExchangeError(path, line, "its lists of requests are of several lengths.")
    return [
        _request(
            place,
            starts[place],
            [firsts[place], *gaps[place]],
            lengths[place],
            result.input_lens[place] if result.input_lens else None,
            result.generated_texts[place] if result.generated_texts else "",
            result.errors[place] if result.errors else None,
        )
        for place in range(len(starts))
    ]


def _request(
    place: int,
    start_s: float,
    gaps_s: Sequence[float],
    tokens: int,
    prompt_tokens: int | None,
    text: str,
    error: str | None,
) -> RequestRecord:
    sent_ns = round(start_s * 1e9)
    chunks = tuple(sent_ns + round(after * 1e9) for after in accumulate(gaps_s)) if tokens else ()
    return RequestRecord(
        prompt_id=str(place),
        sent_ns=sent_ns,
        end_ns=chunks[-1] if chunks else sent_ns,
        chunk_ns=chunks,
        prompt_tokens=prompt_tokens,
        output_tokens=tokens or None,
        text=text,
        prompt_sha256="",
        error=error or (None if tokens else "no output tokens"),
    )


def _spans(records: Sequence[RequestRecord], spent: EngineCounters | None) -> list[CounterSpan]:
    if not records or spent is None:
        return []
    return [CounterSpan(requests=len(records), keys=tuple(r.key for r in records), spent=spent)]


def _report(records: Sequence[RequestRecord], figures: dict[str, float]) -> ToolReport | None:
    """Its means, to stand beside ours of the same requests."""
    if not records:
        return None
    return ToolReport(
        tool=TOOL,
        version="(version not known)",
        argv=(),
        folder="",
        start=0,
        keys=tuple(record.key for record in records if record.ok),
        wall_s=0,
        figures={name: figures[name] for name in COMPARED if name in figures},
    )
