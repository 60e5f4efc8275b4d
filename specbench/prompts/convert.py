"""From a source to datasets/NAME.jsonl: nothing dropped in silence, nothing half-written."""

import random
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from specbench.errors import PromptError
from specbench.prompts.formats import Located, Skipped, prompts_in
from specbench.prompts.sets import Facts, Sidecar, sidecar_path, write_set
from specbench.prompts.sources import Source, TurnsPolicy, resolve
from specbench.records import Prompt, Style

REPLAY = (
    "from the second turn on, a prompt holds the engine's own answers: with greedy sampling "
    "two engines see the same prompt only where they gave the same answer"
)


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did: read N, wrote M, skipped K and why."""

    path: Path
    sidecar: Sidecar
    layout: str  # that of the source
    read: int
    skipped: tuple[Skipped, ...]
    warnings: tuple[str, ...]

    @property
    def written(self) -> int:
        """How many prompts the file holds."""
        return self.sidecar.prompts


@dataclass
class _Survey:
    """What the first reading of a source found; the second one writes."""

    good: int = 0
    layout: str = ""
    many_turns: bool = False
    skipped: list[Skipped] = field(default_factory=list)


@dataclass
class _Stripped:
    """Prompts that GenAI-Perf sends without their outer white space."""

    count: int = 0
    first: str = ""

    def counted(self, prompts: Iterable[Prompt]) -> Iterator[Prompt]:
        for prompt in prompts:
            if any(text != text.strip() for text in prompt.turns):
                self.first = self.first or prompt.id
                self.count += 1
            yield prompt


def convert(
    source: Source | Path | str,
    *,
    out_dir: Path,
    name: str | None = None,
    turns: TurnsPolicy | None = None,
    style: Style | None = None,
    limit: int | None = None,
    seed: int | None = None,
    layout: str | None = None,
    allow_skips: bool = False,
) -> ConversionReport:
    """Write a source as a prompt set; PromptError, and nothing written, if it cannot be whole.

    *limit* takes the first prompts, or a sample of them in their order when there is a *seed*.
    """
    source = source if isinstance(source, Source) else resolve(source)
    style = style or "chat"
    _check_numbers(source, limit, seed)
    path = _target(source, out_dir, name or source.name)
    take = limit if seed is None else None  # a sample has to know the whole
    found = _survey(source, layout, turns or source.turns, take)
    _refuse_losses(source, found, allow_skips=allow_skips)
    policy = turns or source.turns or "all"
    sessions = found.many_turns and policy == "all"
    if sessions and style == "completion":
        problem = "a raw completion has no second turn; choose --turns first, or --style chat"
        raise PromptError(source.where, None, problem)

    again = prompts_in(
        source.rows(), where=source.where, layout=layout, style=style, on_skip=_ignore
    )
    stripped = _Stripped()
    chosen = _chosen(again, found.good, _picked(found.good, limit, seed))
    if policy == "first":
        chosen = map(_first_turn, chosen)
    facts = Facts(
        source=source.origin,
        licence=source.licence,
        turns_policy=policy,
        limit=limit,
        seed=seed,
    )
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        prompts = stripped.counted(chosen)
        sidecar = write_set(out_dir, path.stem, prompts, sessions=sessions, facts=facts)
    except OSError as error:
        raise PromptError(path, None, f"cannot be written: {error.strerror or error}") from error
    return ConversionReport(
        path=path,
        sidecar=sidecar,
        layout=found.layout,
        read=found.good + len(found.skipped),
        skipped=tuple(found.skipped),
        warnings=tuple(_warnings(stripped, sidecar, limit)),
    )


def _check_numbers(source: Source, limit: int | None, seed: int | None) -> None:
    if limit is not None and limit < 1:
        raise PromptError(source.where, None, f"--limit is {limit}; it takes 1 or more")
    if seed is not None and limit is None:
        raise PromptError(source.where, None, "--seed draws a sample; say how large with --limit")


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


def _survey(
    source: Source, layout: str | None, turns: TurnsPolicy | None, take: int | None
) -> _Survey:
    found = _Survey()
    located = prompts_in(
        source.rows(), where=source.where, layout=layout, on_skip=found.skipped.append
    )
    for line, name, prompt in islice(located, take):
        found.good += 1
        found.layout = name
        if len(prompt.turns) > 1 and not found.many_turns:
            found.many_turns = True
            if turns is None:
                raise _undecided(source, line, len(prompt.turns))
    return found


def _undecided(source: Source, line: int, turns: int) -> PromptError:
    return PromptError(
        source.where,
        line,
        f"a conversation of {turns} turns; choose --turns first (only the first turn of each) or "
        "--turns all (replay: turn 2 is sent after each engine's own answer to turn 1, so "
        "engines that answer differently get different prompts).",
        hint="Turns are never made prompts of their own: they would lose what they refer to.",
    )


def _refuse_losses(source: Source, found: _Survey, *, allow_skips: bool) -> None:
    skips = found.skipped
    if not skips or (allow_skips and found.good):
        return
    lines = ", ".join(str(skip.line) for skip in skips[1:6])
    more = f"; {len(skips) - 1} more cannot be used (line {lines}{' …' if skips[6:] else ''})"
    problem = skips[0].reason + (more if lines else "")
    hint = "Mend the file, or pass --allow-skips to leave such records out."
    if not found.good:
        problem, hint = f"{problem}; no record can be used", "Is it the layout you meant?"
    raise PromptError(source.where, skips[0].line, f"{problem}.", hint=hint)


def _picked(good: int, limit: int | None, seed: int | None) -> Container[int]:
    if seed is None or limit is None or limit >= good:
        return range(good)
    return set(random.Random(seed).sample(range(good), limit))


def _chosen(located: Iterable[Located], good: int, picked: Container[int]) -> Iterator[Prompt]:
    """The picked ones of the *good* prompts that a second reading has to find again."""
    seen = 0
    for _, _, prompt in islice(located, good):
        if seen in picked:
            yield prompt
        seen += 1
    if seen != good:
        raise PromptError("source", None, "it changed while it was read; convert it again")


def _first_turn(prompt: Prompt) -> Prompt:
    return prompt.model_copy(update={"turns": prompt.turns[:1]})


def _ignore(skip: Skipped) -> None:
    """The survey has counted it."""


def _warnings(stripped: _Stripped, sidecar: Sidecar, limit: int | None) -> Iterator[str]:
    if stripped.count:
        yield (
            f"GenAI-Perf strips white space around prompts: it changes {stripped.count} of "
            f"{sidecar.prompts} here, `{stripped.first}` first"
        )
    if sidecar.turns > sidecar.prompts:
        yield REPLAY
    if limit is not None and limit > sidecar.prompts:
        yield f"--limit is {limit}, but there are only {sidecar.prompts} prompts"
