"""Cases to the answer files that `answers` reads, with their counting (see there).

EAGLE's new_tokens are all steps' tokens (steps + accepted), so that sum(new_tokens) / sum(idx + 1) is the
acceptance length; the token of the prefill is not among them. Spec-Bench has the steps' tokens in
accept_lengths, and new_tokens are those that were received.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.analysis.cases import MeasuredCase
from specbench.analysis.metrics import latency_ms, undrafted_steps
from specbench.analysis.outlines import Request
from specbench.errors import ExchangeError
from specbench.records import RequestRecord

Line = dict[str, Any]


def answer_lines(
    cases: Sequence[MeasuredCase], model: str, tool: str, target: Path, notes: list[str]
) -> Iterator[Line]:
    """A line for each prompt; *notes* gets what was left out.

    Raises:
        ExchangeError: nothing tells the steps of a request.
    """
    case = cases[0]
    _refuse_without_steps(cases, target, needs_each=tool == "Spec-Bench")
    named = f"{model}-{case.arm}"
    temperature = case.sampling.get("temperature")
    if temperature is not None:
        named += f"-temperature-{float(temperature)}"
    left_out = 0
    passes = [_passes(one) for one in cases]
    for prompt in case.prompts:
        choices = [
            _choice([one.whole() for one in requests], case.k, tool)
            for of_case in passes
            for requests in of_case.get(prompt.id, {}).values()
            if len(requests) == len(prompt.turns) and all(map(_is_whole, requests))
        ]
        if not choices:
            left_out += 1
            continue
        line: Line = {"question_id": _number(prompt.id)}
        if tool == "Spec-Bench" or prompt.category is not None:
            line["category"] = prompt.category or "none"
        line["model_id"] = named
        line["choices"] = [{"index": i, **choice} for i, choice in enumerate(choices)]
        yield line
    if left_out:
        notes.append(f"{left_out} prompts are left out: a turn failed or has one token only")
    notes.append("when chunks came (TTFT, TPOT) is not in its file")
    if tool == "EAGLE":
        notes.append("new_tokens is without the token of the prefill, as EAGLE counts")


def _refuse_without_steps(cases: Sequence[MeasuredCase], target: Path, *, needs_each: bool) -> None:
    if not cases[0].k:
        return
    for record in (record for case in cases for record in case.records if record.ok):
        if record.spec is None:
            raise ExchangeError(
                target,
                None,
                f"the steps of {record.prompt_id!r} are not known (no per-request metrics).",
                hint="Such a file holds them; run with a vLLM that gives them, or export to aiperf.",
            )
        spec = record.spec
        if needs_each and spec.last_accepted is None and not spec.accepted_histogram:
            raise ExchangeError(
                target,
                None,
                f"what each step of {record.prompt_id!r} accepted is not known.",
                hint="EAGLE's file holds sums only: --to eagle.",
            )


def _passes(case: MeasuredCase) -> dict[str, dict[int, list[Request]]]:
    """The turns of each pass over each prompt."""
    found: dict[str, dict[int, list[Request]]] = {}
    for key, request in sorted(case.keyed().items()):
        found.setdefault(key.prompt_id, {}).setdefault(key.cycle, []).append(request)
    return found


def _is_whole(record: Request) -> bool:
    return record.ok and (record.output_tokens or 0) > 1


def _choice(records: Sequence[RequestRecord], k: int, tool: str) -> Mapping[str, Any]:
    counted = [_steps(record, k) for record in records]
    wall_s = [latency_ms(record) / 1e3 for record in records]
    texts = [record.text for record in records]
    if tool == "EAGLE":
        return {
            "turns": texts,
            "idxs": [len(lengths) - 1 for lengths in counted],
            "new_tokens": [sum(lengths) for lengths in counted],
            "wall_time": wall_s,
        }
    return {
        "turns": texts,
        "decoding_steps": [len(lengths) for lengths in counted],
        "new_tokens": [record.output_tokens for record in records],
        "wall_time": wall_s,
        "accept_lengths": [length for lengths in counted for length in lengths],
    }


def _steps(record: RequestRecord, k: int) -> list[int]:
    """Tokens of each step; in the order of their number where the steps' own order is not known."""
    output, spec = record.output_tokens or 0, record.spec
    if k == 0 or spec is None:
        return [1] * output
    drafts, accepted = spec.drafts, spec.accepted
    undrafted = undrafted_steps(output, 1, drafts, accepted)
    if spec.per_step_accepted is not None:
        each = [1 + count for count in spec.per_step_accepted]
        return each + [1] * max(0, drafts + undrafted - len(each))
    if spec.accepted_histogram is not None:
        each = [1 + n for n, count in enumerate(spec.accepted_histogram) for _ in range(count)]
        return each + [1] * max(0, drafts + undrafted - len(each))
    spread, rest = divmod(accepted, drafts) if drafts else (0, 0)
    return [1 + spread + (step < rest) for step in range(drafts)] + [1] * undrafted


def _number(id: str) -> str | int:
    """The number that an id is, where that is all it is: their scripts sort by it."""
    return int(id) if id.isascii() and id.isdigit() and str(int(id[:15])) == id else id
