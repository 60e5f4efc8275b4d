"""Answer files of EAGLE and Spec-Bench: a JSON line for each question.

    EAGLE       choices[i].idxs[turn]            index of the last verification, from 0: steps - 1
    Spec-Bench  choices[i].decoding_steps[turn]  verifications: steps
                choices[i].accept_lengths        tokens of each step of all turns, bonus included
    both        choices[i].new_tokens[turn]      tokens of all steps; wall_time[turn] in s, turns[turn]

Both count the token that a prefill gives with the first verification, and the last one's bonus token
not at all, so acceptance length = sum(new_tokens) / sum(steps), the bonus token included; accepted =
new_tokens - steps. How many tokens were drafted is not in the files. Tokens past an end are counted.
A turn is known as a whole: no TTFT, no TPOT. Choices are passes over the questions (cycles).
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from specbench.errors import ExchangeError
from specbench.interchange.found import (
    VANILLA,
    FoundCase,
    Speculated,
    Told,
    origin,
    speculation,
    unknown_text,
)
from specbench.interchange.reading import Source
from specbench.interchange.shapes import Seconds, Shape, Text, shaped
from specbench.records import Prompt, RequestRecord, SpecRequest

TEMPERATURE = re.compile(r"-temp(?:erature)?-([0-9]+(?:\.[0-9]+)?)$")
FAILED = "ERROR"  # what Spec-Bench writes as the answer when its generation raised
LACKS = ("ttft_ms", "tpot_ms")
Tokens = Annotated[int, Field(strict=True, ge=0, le=10**7)]
StepTokens = Annotated[int, Field(strict=True, ge=0, le=1001)]


class Choice(Shape):
    """One pass over a question's turns."""

    turns: list[Text]
    new_tokens: list[Tokens]
    wall_time: list[Seconds]
    idxs: list[Tokens] | None = None
    decoding_steps: list[Tokens] | None = None
    accept_lengths: list[StepTokens] | None = None


class Answer(Shape):
    """One question's line."""

    question_id: int | Text
    model_id: Text | None = None
    category: Text | None = None
    choices: list[Choice]


@dataclass(frozen=True)
class Turn:
    """One answer: tokens of all steps, and of each where that is known."""

    question: str
    category: str | None
    number: int
    choice: int
    text: str
    tokens: int
    wall_s: float
    steps: int
    lengths: tuple[int, ...] | None


def claims_eagle(value: Any) -> bool:  # noqa: ANN401
    """Whether *value* is a line of EAGLE's."""
    return _is_answer(value) and not claims_spec_bench(value)


def claims_spec_bench(value: Any) -> bool:  # noqa: ANN401
    """Whether *value* is a line of Spec-Bench's."""
    return _is_answer(value) and any(
        isinstance(one, dict) and ("decoding_steps" in one or "accept_lengths" in one)
        for one in value["choices"]
    )


def _is_answer(value: Any) -> bool:  # noqa: ANN401
    return (
        isinstance(value, dict)
        and "question_id" in value
        and isinstance(value.get("choices"), list)
    )


def read_eagle(source: Source, told: Told) -> list[FoundCase]:
    """The one case of an EAGLE answer file.

    Raises:
        ExchangeError: names the line and the key; or k is not known.
    """
    return _read(source, told, "EAGLE")


def read_spec_bench(source: Source, told: Told) -> list[FoundCase]:
    """The one case of a Spec-Bench answer file.

    Raises:
        ExchangeError: names the line and the key; or k is not known.
    """
    return _read(source, told, "Spec-Bench")


def _read(source: Source, told: Told, tool: str) -> list[FoundCase]:
    answers = {}  # the last line of a question counts: their own reorg_answer_file keeps that
    for line, value in source.documents:
        answer = shaped(Answer, value, source.path, line, tool)
        answers[str(answer.question_id)] = (line, answer)
    twice = len(source.documents) - len(answers)
    turns = [
        turn for line, answer in answers.values() for turn in _turns(source.path, line, answer)
    ]
    if not turns:
        raise ExchangeError(source.path, None, "holds no answer.")
    how = _speculation(source.path, told, tool, turns)
    notes = list(how.notes)
    if twice:
        notes.append(f"{twice} questions stand there again, the last one counts")
    notes.append("requests are set one after another, only their wall times are known")
    first = next(answer for _, answer in answers.values())
    name, sampling = _named(first.model_id)
    records = list(_records(turns, how.k, sampling))
    found = FoundCase(
        method=how.method,
        k=how.k,
        imported=origin(source, tool, lacks=LACKS, notes=notes),
        records=records,
        prompts=[
            Prompt(
                id=id,
                turns=unknown_text(max(len(choice.turns) for choice in answer.choices)),
                category=answer.category,
            )
            for id, (_, answer) in answers.items()
            if any(choice.turns for choice in answer.choices)
        ],
        model=name,
        sampling=sampling,
    )
    return [found]


def _turns(path: Path, line: int, answer: Answer) -> Iterator[Turn]:
    for number, choice in enumerate(answer.choices):
        steps = choice.decoding_steps
        if steps is None and choice.idxs is not None:
            steps = [last + 1 for last in choice.idxs]
        if steps is None:
            raise ExchangeError(path, line, "has neither `idxs` nor `decoding_steps`.")
        sizes = {len(choice.turns), len(choice.new_tokens), len(choice.wall_time), len(steps)}
        if len(sizes) > 1:
            raise ExchangeError(path, line, "its lists of turns are of several lengths.")
        steps, lengths = _by_turn(steps, choice.accept_lengths)
        for turn, text in enumerate(choice.turns):
            yield Turn(
                question=str(answer.question_id),
                category=answer.category,
                number=turn,
                choice=number,
                text=text,
                tokens=choice.new_tokens[turn],
                wall_s=choice.wall_time[turn],
                steps=steps[turn],
                lengths=lengths[turn] if lengths else None,
            )


def _by_turn(
    steps: list[int], lengths: list[int] | None
) -> tuple[list[int], list[tuple[int, ...]] | None]:
    """The steps of each turn, and the tokens of each step where they can be told apart by turn.

    Some of Spec-Bench's methods count their steps from 0.
    """
    if not lengths or min(lengths) < 1:
        return steps, None
    if len(lengths) == sum(steps) + len(steps):
        steps = [count + 1 for count in steps]
    if len(lengths) != sum(steps):
        return steps, None
    ends = [sum(steps[: turn + 1]) for turn in range(len(steps))]
    cut = [tuple(lengths[end - count : end]) for end, count in zip(ends, steps, strict=True)]
    return steps, cut


def _speculation(path: Path, told: Told, tool: str, turns: Sequence[Turn]) -> Speculated:
    if told.k is None and all(turn.tokens <= turn.steps for turn in turns):
        return Speculated(VANILLA, 0, ("one token a step: taken for vanilla, as no k was given",))
    hint = "does not say how many tokens were drafted (EAGLE: k is --depth + 1)."
    return speculation(path, told, k=None, method=None, why_unknown=hint)


def _named(model_id: str | None) -> tuple[str | None, dict[str, Any]]:
    """The name and the temperature that their scripts put behind it."""
    found = TEMPERATURE.search(model_id or "")
    if model_id is None or found is None:
        return model_id, {}
    return model_id[: found.start()] or model_id, {"temperature": float(found[1])}


def _records(turns: Iterable[Turn], k: int, sampling: Mapping[str, Any]) -> Iterator[RequestRecord]:
    at_ns = 0
    for turn in turns:
        took_ns = round(turn.wall_s * 1e9)
        error = _error(turn)
        yield RequestRecord(
            prompt_id=turn.question,
            turn=turn.number,
            category=turn.category,
            cycle=turn.choice,
            sent_ns=at_ns,
            end_ns=at_ns + took_ns,
            chunk_ns=() if error else (at_ns + took_ns,),  # the answer comes as a whole
            output_tokens=None if error else turn.tokens,
            text=turn.text,
            prompt_sha256="",
            sampling=dict(sampling) or None,
            spec=_spec(turn, k) if k and not error else None,
            error=error,
        )
        at_ns += took_ns


def _error(turn: Turn) -> str | None:
    if turn.text == FAILED:
        return "the tool failed here; its numbers are those of the turn before"
    if not turn.tokens or not turn.wall_s or not turn.steps:
        return "no tokens, no steps or no time"
    if turn.tokens < turn.steps:
        return f"{turn.tokens} tokens cannot come of {turn.steps} steps"
    return None


def _spec(turn: Turn, k: int) -> SpecRequest:
    accepted = tuple(length - 1 for length in turn.lengths) if turn.lengths else None
    histogram = None
    if accepted is not None:
        counts = Counter(accepted)
        histogram = tuple(counts[n] for n in range(max(k, *accepted) + 1))
    return SpecRequest(
        drafts=turn.steps,
        draft_tokens=None,
        accepted=sum(accepted) if accepted is not None else turn.tokens - turn.steps,
        accepted_histogram=histogram,
        per_step_accepted=accepted,
    )
