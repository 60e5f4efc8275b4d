"""AIPerf's exports (0.13): raw records, records, or its summary alone.

    profile_export_raw.jsonl     a request a line with its stream (--export-level raw)
    profile_export.jsonl         a request a line with its metrics: no text; chunk times from TTFT and the
                                 gaps between chunks, where they are there
    profile_export_aiperf.json   means over requests

Acceptance is vLLM's own account of each request, k the most that a draft held by it. A request that
comes again for the same conversation and turn is another pass over it (cycle).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specbench.errors import ExchangeError
from specbench.interchange.found import (
    FoundCase,
    Told,
    common,
    drafted_at_most,
    in_flight,
    origin,
    speculation,
)
from specbench.interchange.genai_perf import (
    SAMPLING,
    WHY,
    joined,
    max_tokens_of,
    numbered,
    report_beside,
    summary_case,
)
from specbench.interchange.reading import Source
from specbench.interchange.shapes import (
    Count,
    Nanoseconds,
    Seconds,
    Shape,
    Text,
    attempted,
    possible,
    printable_utf8,
    shaped,
)
from specbench.load.aiperf import FIGURES, exchange_of
from specbench.load.tool_client import record_of
from specbench.records import Prompt, RequestRecord, SpecRequest

TOOL = "AIPerf"
MOST_TURNS = 10_000
Depth = Annotated[int, Field(ge=0, le=1000)]  # JSON's keys are text


class About(Shape):
    """A record's metadata."""

    conversation_id: Text | None = None
    session_num: Count = 0
    turn_index: Count | None = None
    request_start_ns: Nanoseconds
    request_end_ns: Nanoseconds
    benchmark_phase: Text = "profiling"
    was_cancelled: bool = False

    @property
    def prompt_id(self) -> str:
        """What tells its conversation from others."""
        return self.conversation_id or str(self.session_num)


class Acceptance(Shape):
    """AIPerf's engine-neutral account of a request's speculation."""

    acceptance_histogram: dict[Depth, Count]
    num_accepted_draft_tokens: Count
    num_draft_tokens: Count
    num_spec_steps: Count
    num_spec_tokens: Count | None = None
    per_step_accepted: list[Count] | None = None
    per_step_drafted: list[Count] | None = None


class Metric(Shape):
    """A value with its unit; times are in ms."""

    value: Seconds | list[Seconds]


class Problem(Shape):
    """Why a request failed."""

    type: Text | None = None
    message: Text | None = None


class Record(Shape):
    """A line of profile_export.jsonl."""

    metadata: About
    metrics: dict[str, Any]
    spec_decode_acceptance: Acceptance | None = None
    error: Problem | None = None


def claims_raw(value: Any) -> bool:  # noqa: ANN401
    """Whether *value* is a line of raw records."""
    return isinstance(value, dict) and "metadata" in value and "responses" in value


def claims_records(value: Any) -> bool:  # noqa: ANN401
    """Whether *value* is a line of records."""
    return isinstance(value, dict) and "metadata" in value and "metrics" in value


def claims_summary(value: Any) -> bool:  # noqa: ANN401
    """Whether *value* is AIPerf's summary rather than GenAI-Perf's."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("request_latency"), dict)
        and ("effective_concurrency" in value or "aiperf_version" in value)
    )


def read_summary(source: Source, told: Told) -> list[FoundCase]:
    """The one case of a summary, without requests.

    Raises:
        ExchangeError: it holds no figure; or k is not known.
    """
    return [summary_case(source, told, TOOL, FIGURES)]


def read_raw(source: Source, told: Told) -> list[FoundCase]:
    """The one case of raw records: everything that our own client would keep.

    Raises:
        ExchangeError: names the line; or k is not known.
    """
    records, prompts = [], []
    passes: dict[tuple[str, int], int] = {}
    for line, raw in source.documents:
        if not isinstance(raw, dict):
            raise ExchangeError(source.path, line, "is no JSON object.")
        about = shaped(About, raw.get("metadata"), source.path, line, TOOL)
        if about.benchmark_phase != "profiling":
            continue
        prompt = _prompt(source.path, line, about, raw.get("payload"))
        record = attempted(partial(_raw_record, raw, prompt), source.path, line, TOOL)
        if about.was_cancelled and record.ok:
            record = record.model_copy(update={"error": "cancelled"})
        records.append(numbered(record, _pass(passes, record)))
        prompts.append(prompt)
    payload = source.first.get("payload") if isinstance(source.first, dict) else None
    model = payload.get("model") if isinstance(payload, dict) else None
    return [
        _case(
            source,
            told,
            records,
            prompts,
            printable_utf8(model) if isinstance(model, str) else None,
        )
    ]


def read_records(source: Source, told: Told) -> list[FoundCase]:
    """The one case of profile_export.jsonl.

    Raises:
        ExchangeError: names the line and the key; or k is not known.
    """
    records, prompts, depths = [], [], set()
    passes: dict[tuple[str, int], int] = {}
    for line, value in source.documents:
        one = shaped(Record, value, source.path, line, TOOL)
        if one.metadata.benchmark_phase != "profiling":
            continue
        prompts.append(_prompt(source.path, line, one.metadata, None))
        record = _record(source.path, line, one)
        records.append(numbered(record, _pass(passes, record)))
        if one.spec_decode_acceptance and one.spec_decode_acceptance.num_spec_tokens:
            depths.add(one.spec_decode_acceptance.num_spec_tokens)
    return [_case(source, told, records, prompts, None, k=max(depths) if depths else None)]


def _case(
    source: Source,
    told: Told,
    records: Sequence[RequestRecord],
    prompts: Sequence[Prompt],
    model: str | None,
    k: int | None = None,
) -> FoundCase:
    if not records:
        raise ExchangeError(source.path, None, "holds no measured request.")
    how = speculation(
        source.path, told, k=drafted_at_most(records) if k is None else k, why_unknown=WHY
    )
    sampling = common(records)
    lacks = ("ttft_ms", "tpot_ms") if any(r.ok and len(r.chunk_ns) < 2 for r in records) else ()
    return FoundCase(
        method=how.method,
        k=how.k,
        imported=origin(source, TOOL, lacks=lacks, notes=how.notes),
        records=records,
        prompts=joined(prompts),
        report=report_beside(source, records, "_aiperf.json", TOOL, FIGURES),
        model=model,
        concurrency=in_flight(records),
        max_tokens=max_tokens_of(sampling),
        sampling=sampling,
    )


def _pass(passes: dict[tuple[str, int], int], record: RequestRecord) -> int:
    """Which pass over its prompt *record* is."""
    key = (record.prompt_id, record.turn)
    passes[key] = passes.get(key, -1) + 1
    return passes[key]


def _prompt(path: Path, line: int, about: About, payload: Any) -> Prompt:  # noqa: ANN401
    """The conversation as far as the request tells it."""
    turn = about.turn_index or 0
    if turn >= MOST_TURNS:
        raise ExchangeError(path, line, f"turn {turn} of a conversation cannot be.")
    turns = ["" for _ in range(turn + 1)]
    messages = payload.get("messages") if isinstance(payload, dict) else None
    said = [
        one["content"]
        for one in (messages if isinstance(messages, list) else [])
        if isinstance(one, dict)
        and one.get("role") == "user"
        and isinstance(one.get("content"), str)
    ]
    if len(said) == len(turns):
        turns = [printable_utf8(text) for text in said]
    return Prompt(id=about.prompt_id, turns=tuple(turns))


def _raw_record(raw: Mapping[str, Any], prompt: Prompt) -> RequestRecord:
    return possible(record_of(exchange_of(raw, prompt, timed=False), SAMPLING, 0))


def _record(path: Path, line: int, one: Record) -> RequestRecord:
    def number(name: str) -> float | None:
        given = one.metrics.get(name)
        value = shaped(Metric, given, path, line, TOOL).value if given is not None else None
        return None if isinstance(value, list) else value

    def gaps() -> list[float]:
        given = one.metrics.get("inter_chunk_latency")
        value = shaped(Metric, given, path, line, TOOL).value if given is not None else []
        return value if isinstance(value, list) else []

    about = one.metadata
    sent_ns, first_ms = about.request_start_ns, number("time_to_first_token")
    latency_ms, tokens = number("request_latency"), number("output_sequence_length")
    chunks: tuple[int, ...] = ()
    if first_ms is not None:
        chunks = tuple(sent_ns + round(ms * 1e6) for ms in accumulate([first_ms, *gaps()]))
    elif latency_ms is not None:
        chunks = (sent_ns + round(latency_ms * 1e6),)
    error = _error(one.error) or ("cancelled" if about.was_cancelled else None)
    if error is None and (not chunks or not tokens):
        error = "no output tokens"
    prompt_tokens = number("input_sequence_length")
    return RequestRecord(
        prompt_id=about.prompt_id,
        turn=about.turn_index or 0,
        sent_ns=sent_ns,
        end_ns=max(about.request_end_ns, *chunks, sent_ns),
        chunk_ns=chunks,
        prompt_tokens=None if prompt_tokens is None else round(prompt_tokens),
        output_tokens=None if tokens is None else round(tokens),
        prompt_sha256="",
        spec=_spec(path, line, one),
        error=error,
    )


def _error(problem: Problem | None) -> str | None:
    if problem is None:
        return None
    return ": ".join(filter(None, (problem.type, problem.message)))[:300] or "failed"


def _spec(path: Path, line: int, one: Record) -> SpecRequest | None:
    said = one.spec_decode_acceptance
    if said is None:
        return None
    drafted = said.per_step_drafted
    depth = max([said.num_spec_tokens or 0, *said.acceptance_histogram])
    if depth > 1000:
        raise ExchangeError(path, line, f"drafts of {depth} tokens cannot be.")
    return SpecRequest(
        drafts=sum(n > 0 for n in drafted) if drafted else said.num_spec_steps,
        draft_tokens=said.num_draft_tokens,
        accepted=said.num_accepted_draft_tokens,
        accepted_histogram=tuple(said.acceptance_histogram.get(n, 0) for n in range(depth + 1)),
        per_step_accepted=tuple(said.per_step_accepted) if said.per_step_accepted else None,
        per_step_drafted=tuple(drafted) if drafted else None,
    )
