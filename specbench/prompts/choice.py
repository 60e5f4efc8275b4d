"""Which of a source's prompts a conversion takes, and what it must not lose in silence."""

import random
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import islice

from specbench.errors import PromptError
from specbench.prompts.formats import Reading, Skipped
from specbench.prompts.layout import Found
from specbench.prompts.sources import Source, TurnsPolicy


@dataclass(frozen=True)
class Choice:
    """What the user asked for; *turns* None leaves conversations undecided.

    *limit* takes the first prompts, or a sample of them in their order when there is a *seed*.
    """

    turns: TurnsPolicy | None = None
    limit: int | None = None
    seed: int | None = None
    allow_skips: bool = False


class Chosen:
    """The chosen prompts of a source, in one reading (two for a sample, which has to know the whole).

    Each iteration begins anew. It ends in PromptError where records were lost that the user did
    not allow to be; `read`, `skipped` and `reading` tell of the latest one.
    """

    def __init__(self, source: Source, choice: Choice) -> None:
        if choice.limit is not None and choice.limit < 1:
            raise PromptError(source.where, None, f"--limit is {choice.limit}; it takes 1 or more")
        if choice.seed is not None and choice.limit is None:
            problem = "--seed draws a sample; say how large with --limit"
            raise PromptError(source.where, None, problem)
        self.source, self.choice = source, choice
        self.turns = choice.turns or source.turns
        self.skipped: list[Skipped] = []
        self.good = self._there = 0
        self.reading: Reading | None = None

    @property
    def read(self) -> int:
        """How many prompts and unusable records were met."""
        return self.good + len(self.skipped)

    @property
    def layout(self) -> str:
        """What the source was read as."""
        if self.reading is None:
            return ""
        column = f", column {self.reading.column}" if self.reading.column is not None else ""
        return f"{self.reading.layout}{column}"

    @property
    def policy(self) -> TurnsPolicy:
        """What is done with conversations; `all` where there are none."""
        return self.turns or "all"

    def __iter__(self) -> Iterator[Found]:
        picked = self._picked()
        take = self.choice.limit if picked is None else None
        for n, found in enumerate(islice(self._all(), take)):
            if len(found.turns) > 1:
                if self.turns is None:
                    raise self._undecided(found)
                if self.turns == "first":
                    found = found._replace(turns=found.turns[:1])
            if picked is None or n in picked:
                yield found
        if picked is not None and self.good != self._there:
            where = self.source.where
            raise PromptError(where, None, "it changed while it was read; convert it again")
        if not self.read:
            raise PromptError(self.source.where, None, "no prompts: there is not one record")
        self._refuse_losses()

    def _all(self) -> Iterator[Found]:
        self.skipped, self.good = [], 0
        self.reading = self.source.read(self.skipped.append)
        for found in self.reading:
            self.good += 1
            yield found

    def _picked(self) -> Container[int] | None:
        """The places of a sample's prompts."""
        limit, seed = self.choice.limit, self.choice.seed
        if seed is None or limit is None:
            return None
        self._there = sum(1 for _ in self._all())
        return set(random.Random(seed).sample(range(self._there), min(limit, self._there)))

    def _undecided(self, found: Found) -> PromptError:
        return PromptError(
            self.source.where,
            found.line,
            f"a conversation of {len(found.turns)} turns; choose --turns first (only the first "
            "turn of each) or --turns all (replay: turn 2 is sent after each engine's own answer "
            "to turn 1, so engines that answer differently get different prompts).",
            hint="Turns are never made prompts of their own: they would lose what they refer to.",
            unit=self.reading.unit if self.reading else "line",
        )

    def _refuse_losses(self) -> None:
        skips = self.skipped
        if not skips or (self.choice.allow_skips and self.good):
            return
        unit = self.reading.unit if self.reading else "line"
        lines = ", ".join(str(skip.line) for skip in skips[1:6])
        more = f"; {len(skips) - 1} more cannot be used ({unit} {lines}{' …' if skips[6:] else ''})"
        problem = skips[0].reason + (more if lines else "")
        hint = "Mend the file, or pass --allow-skips to leave such records out."
        if not self.good:
            problem, hint = f"{problem}; no record can be used", "Is it the layout you meant?"
        raise PromptError(self.source.where, skips[0].line, f"{problem}.", hint=hint, unit=unit)

    def notes(self) -> Iterator[str]:
        """What the user should know of the source and the choice."""
        unkept = self.reading.unkept if self.reading else {}
        if count := unkept.get("assistant", 0):
            yield f"answers of the assistant not kept: {count}, as each engine gives its own"
        if count := unkept.get("system", 0):
            yield f"system messages not kept: {count}, as a prompt set has no place for them"
        limit = self.choice.limit
        if limit is not None and limit > self.good:
            yield f"--limit is {limit}, but there are only {self.good} prompts"
