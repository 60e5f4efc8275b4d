"""From a source to a file: nothing dropped in silence, nothing half-written.

`convert` makes a prompt set (datasets/NAME.jsonl and its sidecar), `export` a file of any layout.
"""

import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specbench.errors import PromptError
from specbench.prompts.choice import Choice, Chosen
from specbench.prompts.formats import Skipped
from specbench.prompts.layouts import LAYOUTS
from specbench.prompts.sets import write_set
from specbench.prompts.sidecar import Facts, Summary, sidecar_path
from specbench.prompts.sources import Source
from specbench.prompts.writing import CannotHold, Written, container_for, write_prompts
from specbench.records import Style

REPLAY = (
    "from the second turn on, a prompt holds the engine's own answers: with greedy sampling "
    "two engines see the same prompt only where they gave the same answer"
)
EMPTY_ANSWERS = (
    "an empty answer follows each turn, as `vllm bench` reads no conversation without one; give "
    "it --sharegpt-output-len"
)
WIDER = {"parquet": "parquet-turns"}  # where a set of conversations goes instead
TARGETS = tuple(name for name in LAYOUTS if name not in ("column", *WIDER.values()))
ALL = Choice()


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did: read N, wrote M, skipped K and why."""

    path: Path
    source: str
    layout: str  # that of the source
    written_as: str
    read: int
    written: int
    skipped: tuple[Skipped, ...]
    unit: str  # what Skipped.line counts
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class SetReport(ConversionReport):
    """The same of a prompt set, and what its sidecar says."""

    sidecar: Summary


def convert(
    source: Source,
    choice: Choice = ALL,
    *,
    out_dir: Path,
    name: str | None = None,
    style: Style | None = None,
) -> SetReport:
    """Write a source as a prompt set; PromptError, and nothing written, if it cannot be whole."""
    style = style or source.style
    chosen = Chosen(source, choice)
    path = _target(source, out_dir, name or source.name)
    facts = Facts(
        source=source.origin,
        licence=source.licence,
        turns_policy=chosen.policy,
        limit=choice.limit,
        seed=choice.seed,
    )
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        sidecar, written = _write_set(chosen, path, facts, style)
    except OSError as error:
        raise _unwritable(path, error) from error
    replay = [REPLAY] if written.turns > written.prompts else []
    notes = [*written.notes(), *replay, *chosen.notes()]
    return SetReport(**vars(_report(chosen, path, written, notes)), sidecar=sidecar)


def _write_set(chosen: Chosen, path: Path, facts: Facts, style: Style) -> tuple[Summary, Written]:
    """In sessions, where the first conversation is met; until then it is taken for single prompts."""
    try:
        return write_set(path.parent, path.stem, chosen, sessions=False, facts=facts, style=style)
    except CannotHold as wide:
        if style == "completion":
            problem = "a raw completion has no second turn; choose --turns first, or --style chat"
            raise PromptError(chosen.source.where, None, problem) from wide
        return write_set(path.parent, path.stem, chosen, sessions=True, facts=facts, style=style)


def _target(source: Source, out_dir: Path, name: str) -> Path:
    """NAME.jsonl, where that would replace nothing but an earlier conversion."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        problem = "not a name for a set: letters, digits and . _ - make one"
        raise PromptError(name, None, problem)
    path = out_dir / f"{name}.jsonl"
    if path.exists() and isinstance(source.where, Path) and path.samefile(source.where):
        raise PromptError(path, None, "the source itself would be replaced; choose another --name")
    if path.exists() and not sidecar_path(path).is_file():
        problem = "is there and was not made by convert (it has no sidecar); choose another --name"
        raise PromptError(path, None, problem)
    return path


def export(
    source: Source, path: Path, layout: str, choice: Choice, *, tokens: int | None = None
) -> ConversionReport:
    """Write a source to a new file of a *layout*, asking for *tokens* where it has a place for it.

    PromptError, and nothing written, where the layout has no place for what is in the prompts;
    ids, categories and the style that it cannot hold are in the report's warnings.
    """
    if layout not in TARGETS:
        there = ", ".join(TARGETS)
        raise PromptError(path, None, f"no layout `{layout}` to write; there are {there}")
    if tokens is not None and not LAYOUTS[layout].lengths:
        problem = f"{layout} has no place for output lengths; leave out --output-tokens"
        raise PromptError(path, None, problem)
    container_for(path, layout)
    if path.exists():
        raise PromptError(path, None, "is there already; remove it, or choose another --output")
    chosen = Chosen(source, choice)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as drafts:
            draft = Path(drafts) / path.name
            try:
                written = write_prompts(draft, layout, chosen, tokens=tokens)
            except CannotHold:
                if layout not in WIDER:
                    raise
                draft.unlink(missing_ok=True)
                written = write_prompts(draft, WIDER[layout], chosen, tokens=tokens)
            os.replace(draft, path)
    except CannotHold as lost:
        raise _refused(source, lost) from lost
    except OSError as error:
        raise _unwritable(path, error) from error
    notes = [*written.notes(), *_lost(written, source.style), *chosen.notes()]
    return _report(chosen, path, written, notes)


def _refused(source: Source, lost: CannotHold) -> PromptError:
    turns = len(lost.found.turns) > 1
    holding = [name for name in TARGETS if LAYOUTS[WIDER.get(name, name)].turns]
    return PromptError(
        source.where,
        None,
        f"`{lost.found.id}` cannot be written as {lost.layout}: it {lost.why}.",
        hint=(
            f"--turns first keeps the first of each; --to {' or '.join(holding)} holds all."
            if turns
            else "--to genai-perf and vllm-bench hold any text, and humaneval its id too."
        ),
    )


def _lost(written: Written, style: Style) -> Iterator[str]:
    """What the layout has no place for, and a reader of the file can do without."""
    name = written.layout
    if written.ids_lost:
        yield f"{name} has no place for ids: {written.ids_lost} not kept"
    if written.categories_lost:
        yield f"{name} has no place for categories: {written.categories_lost} not kept"
    if style != "chat":
        yield f"{name} does not say that the prompts are raw completions"
    if name == "sharegpt":
        yield EMPTY_ANSWERS


def _report(chosen: Chosen, path: Path, written: Written, warnings: list[str]) -> ConversionReport:
    return ConversionReport(
        path=path,
        source=chosen.source.origin,
        layout=chosen.layout,
        written_as=written.layout,
        read=chosen.read,
        written=written.prompts,
        skipped=tuple(chosen.skipped),
        unit=chosen.reading.unit if chosen.reading else "line",
        warnings=tuple(warnings),
    )


def _unwritable(path: Path, error: OSError) -> PromptError:
    return PromptError(path, None, f"cannot be written: {error.strerror or error}")
