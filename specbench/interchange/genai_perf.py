"""GenAI-Perf's profile_export.json (every request with its stream), or its summary alone.

The file has no prompt ids: a prompt is called by the hash of its text, so that two runs pair, and a
request that says what an earlier one said is another pass over it (cycle). Whether drafts were made is
not in it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

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
from specbench.interchange.reading import Source, read_source
from specbench.interchange.shapes import attempted, possible, printable_utf8
from specbench.load.genai_perf import FIGURES, Sent, sent_requests
from specbench.load.tool_client import Exchange, means, record_of
from specbench.records import Prompt, RequestRecord, ToolReport

TOOL = "GenAI-Perf"
SAMPLING = ("temperature", "top_p", "top_k", "seed", "ignore_eos", "stop", "max_completion_tokens")
WHY = "does not say whether drafts were made."


def claims(value: Any) -> bool:  # noqa: ANN401
    """Whether *value* is a profile_export.json."""
    return isinstance(value, dict) and isinstance(value.get("experiments"), list)


def claims_summary(value: Any) -> bool:  # noqa: ANN401
    """Whether *value* is a summary without requests."""
    return isinstance(value, dict) and isinstance(value.get("request_latency"), dict)


def read(source: Source, told: Told) -> list[FoundCase]:
    """A case for each experiment.

    Raises:
        ExchangeError: it is not as GenAI-Perf writes it; or k is not known.
    """
    found = []
    for experiment in source.first["experiments"]:
        alone = {"experiments": [experiment]}
        sent = attempted(partial(sent_requests, alone), source.path, None, TOOL)
        if sent:
            about = experiment.get("experiment")
            found.append(_case(source, about if isinstance(about, dict) else {}, sent, told))
    if not found:
        raise ExchangeError(source.path, None, "holds no request.")
    return found


def read_summary(source: Source, told: Told) -> list[FoundCase]:
    """The one case of a summary, without requests.

    Raises:
        ExchangeError: it holds no figure; or k is not known.
    """
    return [summary_case(source, told, TOOL, FIGURES)]


def summary_case(source: Source, told: Told, tool: str, names: Mapping[str, str]) -> FoundCase:
    """A case of a tool's means alone."""
    figures = attempted(lambda: _bounded(means(source.first, names)), source.path, None, tool)
    if not figures:
        raise ExchangeError(source.path, None, "holds none of the figures that are read.")
    how = speculation(source.path, told, k=None, why_unknown=WHY)
    notes = (*how.notes, "the tool's figures, no requests")
    return FoundCase(
        method=how.method,
        k=how.k,
        imported=origin(source, tool, figures=figures, notes=notes),
    )


def _bounded(figures: dict[str, float]) -> dict[str, float]:
    if not all(0 <= value < 1e12 for value in figures.values()):
        raise ValueError("a mean that cannot be")
    return figures


def _case(
    source: Source, experiment: Mapping[str, Any], sent: Sequence[Sent], told: Told
) -> FoundCase:
    exchanges = attempted(lambda: list(_exchanges(sent)), source.path, None, TOOL)
    records = attempted(lambda: list(_records(exchanges)), source.path, None, TOOL)
    prompts = joined([one.prompt for one, _ in exchanges])
    how = speculation(source.path, told, k=drafted_at_most(records), why_unknown=WHY)
    value = experiment.get("value")
    rate = experiment.get("mode") == "request_rate" and isinstance(value, int | float)
    sampling = common(records)
    return FoundCase(
        method=how.method,
        k=how.k,
        imported=origin(source, TOOL, notes=how.notes),
        records=records,
        prompts=prompts,
        report=report_beside(source, records, "_genai_perf.json", TOOL, FIGURES),
        model=_model(sent),
        concurrency=in_flight(records),
        rate=float(value) if rate and value is not None and 0 < value < 1e6 else None,
        max_tokens=max_tokens_of(sampling),
        sampling=sampling,
    )


def _records(exchanges: Sequence[tuple[Exchange, int]]) -> Iterator[RequestRecord]:
    for one, cycle in exchanges:
        yield numbered(possible(record_of(one, SAMPLING, 0)), cycle)


def _exchanges(sent: Sequence[Sent]) -> Iterator[tuple[Exchange, int]]:
    """Requests with their prompts, and which pass over the prompt each is."""
    passes: dict[tuple[str, int], int] = {}
    for sent_ns, body, pieces in sorted(sent, key=lambda one: one[0]):
        said = _said(body)
        turn = len(said) - 1
        id = hashlib.sha256(said[0].encode()).hexdigest()[:12]
        style = "chat" if "messages" in body else "completion"
        prompt = Prompt.model_validate({"id": id, "turns": said, "style": style})
        cycle = passes.get((id, turn), 0)
        passes[id, turn] = cycle + 1
        yield Exchange(prompt, turn, body, sent_ns, pieces), cycle


def _said(body: Mapping[str, Any]) -> tuple[str, ...]:
    """What the user said, turn by turn."""
    messages = body.get("messages")
    if messages is None:
        if "text_input" in body:
            raise ValueError("a request to Triton itself, whose answers are not read here")
        return (printable_utf8(_text(body["prompt"])),)
    said = [_text(one["content"]) for one in messages if one["role"] == "user"]
    if not said:
        raise ValueError("a request without a message of the user")
    return tuple(map(printable_utf8, said))


def _text(content: Any) -> str:  # noqa: ANN401
    return content if isinstance(content, str) else json.dumps(content)


def joined(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Each prompt once, with the most turns that were sent of it."""
    longest: dict[str, Prompt] = {}
    for prompt in prompts:
        if prompt.id not in longest or len(longest[prompt.id].turns) < len(prompt.turns):
            longest[prompt.id] = prompt
    return list(longest.values())


def numbered(record: RequestRecord, cycle: int) -> RequestRecord:
    """*record* as a request of that pass."""
    return record.model_copy(update={"cycle": cycle}) if cycle else record


def max_tokens_of(sampling: Mapping[str, Any]) -> int | None:
    """The one length limit that all requests had."""
    value = sampling.get("max_tokens", sampling.get("max_completion_tokens"))
    return value if isinstance(value, int) and 0 < value < 10**9 else None


def _model(sent: Sequence[Sent]) -> str | None:
    name = sent[0][1].get("model")
    return printable_utf8(name) if isinstance(name, str) else None


def report_beside(
    source: Source,
    records: Sequence[RequestRecord],
    suffix: str,
    tool: str,
    names: Mapping[str, str],
) -> ToolReport | None:
    """The tool's own means of these requests, if its summary stands beside the file."""
    stem = source.path.name.removesuffix(source.path.suffix).removesuffix("_raw")
    path = source.path.with_name(stem + suffix)
    if not path.is_file():
        return None
    summary = read_source(path)
    figures = attempted(lambda: _bounded(means(summary.first, names)), path, None, tool)
    return ToolReport(
        tool=tool,
        version="(version not known)",
        argv=(),
        folder="",
        start=0,
        keys=tuple(record.key for record in records if record.ok),
        wall_s=0,
        figures=figures,
    )
