"""Cases to AIPerf's records and summary (0.13), and to GenAI-Perf's profile_export.json (0.0.16)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from specbench.analysis.cases import MeasuredCase
from specbench.analysis.metrics import latency_ms, ttft_ms
from specbench.errors import ExchangeError
from specbench.records import Prompt, RequestRecord

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
UNITS = {"output_sequence_length": "tokens", "input_sequence_length": "tokens"}


def aiperf_records(case: MeasuredCase) -> Iterator[dict[str, Any]]:
    """The lines of a profile_export.jsonl."""
    numbers = {id: n for n, id in enumerate(dict.fromkeys(r.prompt_id for r in case.records))}
    lacks = case.imported.lacks if case.imported else ()
    for place, record in enumerate(one.whole() for one in case.keyed().values()):
        yield {
            "metadata": {
                "session_num": numbers[record.prompt_id],
                "x_request_id": f"specbench-{place}",
                "conversation_id": record.prompt_id,
                "turn_index": record.turn,
                "request_start_ns": record.sent_ns,
                "request_end_ns": record.end_ns,
                "worker_id": "specbench",
                "record_processor_id": "specbench",
                "benchmark_phase": "profiling",
                "was_cancelled": False,
            },
            "metrics": {
                name: {"value": value, "unit": UNITS.get(name, "ms")}
                for name, value in _metrics(record, lacks).items()
            },
            "spec_decode_acceptance": _acceptance(record, case.k) if record.ok else None,
            "error": None if record.ok else {"type": "specbench", "message": record.error},
        }


def _metrics(record: RequestRecord, lacks: Sequence[str]) -> dict[str, Any]:
    """By AIPerf's names and definitions; times in ms."""
    if not record.ok:
        return {}
    latency, first, tokens = latency_ms(record), ttft_ms(record), record.output_tokens
    found: dict[str, Any] = {
        "request_latency": latency,
        "output_sequence_length": tokens,
        "input_sequence_length": record.prompt_tokens,
    }
    if "ttft_ms" not in lacks:
        found["time_to_first_token"] = first
        if tokens and tokens > 1:
            found["inter_token_latency"] = (latency - first) / (tokens - 1)
        if len(record.chunk_ns) > 1:
            gaps = [(after - before) / 1e6 for before, after in pairwise(record.chunk_ns)]
            found["inter_chunk_latency"] = gaps
    return {name: value for name, value in found.items() if value is not None}


def _acceptance(record: RequestRecord, k: int) -> dict[str, Any] | None:
    """vLLM's account of the request, if it adds up as AIPerf demands."""
    spec = record.spec
    if spec is None or spec.accepted_histogram is None or not spec.draft_tokens:
        return None
    steps = sum(spec.accepted_histogram)
    accepted = sum(n * count for n, count in enumerate(spec.accepted_histogram))
    if not steps or accepted != spec.accepted:
        return None
    return {
        "engine": "vllm",
        "mean_acceptance_length": 1 + accepted / steps,
        "draft_acceptance_rate": accepted / spec.draft_tokens,
        "acceptance_histogram": {
            str(n): count for n, count in enumerate(spec.accepted_histogram) if count
        },
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": spec.draft_tokens,
        "num_spec_steps": steps,
        "num_spec_tokens": k,
        "completion_tokens": record.output_tokens,
    }


def aiperf_summary(case: MeasuredCase) -> dict[str, Any]:
    """The figures of a profile_export_aiperf.json that follow from the requests alone."""
    lacks = case.imported.lacks if case.imported else ()
    records = case.keyed().values()
    each: dict[str, list[float]] = {}
    for record in records:
        for name, value in _metrics(record.whole(), lacks).items():
            each.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    good = [record for record in records if record.ok]
    span_s = (max(r.last_ns for r in good) - min(r.sent_ns for r in good)) / 1e9
    found: dict[str, Any] = {
        name: {"unit": UNITS.get(name, "ms"), **_spread(values)} for name, values in each.items()
    }
    found["request_count"] = {"unit": "requests", "avg": float(len(good))}
    if span_s > 0:
        output = sum(record.output_tokens or 0 for record in good)
        found["output_token_throughput"] = {"unit": "tokens/sec", "avg": output / span_s}
        found["request_throughput"] = {"unit": "requests/sec", "avg": len(good) / span_s}
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    import numpy as np

    points = dict(zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True))
    return {
        "avg": float(np.mean(values)),
        **{f"p{at}": float(value) for at, value in points.items()},
        "min": float(min(values)),
        "max": float(max(values)),
        "std": float(np.std(values)),
    }


# --- GenAI-Perf -----------------------------------------------------------------------------------


def genai_perf_export(
    case: MeasuredCase, model: str, target: Path, notes: list[str]
) -> dict[str, Any]:
    """A profile_export.json: each good request's body and its stream, chunk by chunk.

    Raises:
        ExchangeError: nothing tells which chunk brought which text.
    """
    prompts = {prompt.id: prompt for prompt in case.prompts}
    requests: list[dict[str, Any]] = []
    answers: dict[tuple[str, int], list[str]] = {}  # what was said so far, by prompt and pass
    failed = 0
    for key, request in sorted(case.keyed().items()):
        record = request.whole()
        said = answers.setdefault((key.prompt_id, key.cycle), [])
        if not record.ok or len(said) != key.turn:
            failed += 1
            continue
        body = _body(prompts[record.prompt_id], record, said, model)
        requests.append(
            {
                "timestamp": record.sent_ns,
                "request_inputs": {"payload": json.dumps(body)},
                "response_timestamps": list(record.chunk_ns),
                "response_outputs": [
                    {"response": f"data: {json.dumps(event)}\n\n"}
                    for event in _events(record, target, chat="messages" in body)
                ],
            }
        )
        said.append(record.text)
    if failed:
        notes.append(f"{failed} requests are left out: they, or the turn before them, failed")
    load: dict[str, Any] = {"mode": "concurrency", "value": case.concurrency}
    if case.rate is not None:
        load = {"mode": "request_rate", "value": case.rate}
    requests.sort(key=lambda one: one["timestamp"])
    return {
        "experiments": [{"experiment": load, "requests": requests, "window_boundaries": []}],
        "version": "specbench",
        "service_kind": "openai",
        "endpoint": "v1/chat/completions",
    }


def _body(
    prompt: Prompt, record: RequestRecord, said: Sequence[str], model: str
) -> Mapping[str, Any]:
    sampling = record.sampling or {}
    if prompt.style == "completion":
        return {"model": model, "prompt": prompt.turns[0], "stream": True, **sampling}
    messages = []
    for asked, answer in zip(prompt.turns, said, strict=False):
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": prompt.turns[record.turn]})
    return {"model": model, "messages": messages, "stream": True, **sampling}


def _events(record: RequestRecord, target: Path, *, chat: bool) -> Iterator[dict[str, Any]]:
    chunks = len(record.chunk_ns)
    chars, tokens = record.chunk_chars, record.chunk_tokens
    if chars is None and chunks == 1:
        chars = (len(record.text),)
    if chars is None or len(chars) != chunks:
        raise ExchangeError(
            target,
            None,
            f"which chunk of {record.prompt_id!r} brought which text is not known.",
            hint="GenAI-Perf's file holds that; runs of load.client: direct have it.",
        )
    ends = list(accumulate(chars, initial=0))
    ids = list(record.token_ids or ())
    places = list(accumulate(tokens, initial=0)) if tokens and sum(tokens) == len(ids) else None
    for n in range(chunks):
        text = record.text[ends[n] : ends[n + 1]]
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        if places:
            choice["token_ids"] = ids[places[n] : places[n + 1]]
        if n == chunks - 1:
            choice["finish_reason"] = record.finish_reason or "length"
        yield {
            "object": "chat.completion.chunk" if chat else "text_completion",
            "choices": [choice],
        }
