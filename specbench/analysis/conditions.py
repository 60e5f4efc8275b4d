"""What a comparison must not find: `--fail-if "speedup < -3%"`, and whether the interval supports it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from specbench.analysis.compare import Change, Comparison, RowChange
from specbench.analysis.snapshot import MEASURES
from specbench.errors import UserError
from specbench.vllm_names import nearest

FORM = re.compile(r"\s*([A-Za-z_/ -]*?)\s*(<=?|>=?)\s*([+\-−]?\s*\d+(?:\.\d+)?)\s*(%?)\s*")
MISSING = "missing"


@dataclass(frozen=True)
class Condition:
    """A measure's change beyond `threshold` (a share) in one direction; or `missing` rows.

    `text` is what the user wrote.
    """

    text: str
    measure: str
    below: bool = True
    threshold: float = 0.0

    def holds_of(self, value: float) -> bool:
        """Whether a change of *value* is beyond the threshold."""
        return value < self.threshold if self.below else value > self.threshold


@dataclass(frozen=True)
class Judgement:
    """One condition on one row, in words. `failed` only where the whole interval is beyond it.

    `undecided`: the interval lies on both sides of the threshold, or there is none.
    """

    condition: Condition
    row: RowChange
    failed: bool
    text: str
    undecided: bool = False


def parse(text: str) -> Condition:
    """A condition as the command line has it.

    Raises:
        UserError: it is not of the form "MEASURE < -3%", or there is no such measure.
    """
    if text.strip() == MISSING:
        return Condition(text, MISSING)
    example = 'write e.g. "speedup < -3%", "tpot_ms > +5%" or "missing"'
    found = FORM.fullmatch(text)
    if found is None:
        raise UserError(f'--fail-if "{text}": not a condition;', hint=f"{example}.")
    measure, sign, number, percent = found.groups()
    if measure not in MEASURES:
        close = nearest(measure, (*MEASURES, MISSING))
        meant = f"did you mean {close}?" if close else f"known: {', '.join(MEASURES)}, {MISSING}."
        raise UserError(f'--fail-if "{text}": there is no {measure or "measure"};', hint=meant)
    if not percent:
        raise UserError(
            f'--fail-if "{text}": the change is in percent;', hint=f'write "{text.strip()}%".'
        )
    number = number.replace(" ", "")
    share = float(number.replace("−", "-")) / 100
    return Condition(f"{measure} {sign} {number}%", measure, sign.startswith("<"), share)


def judge(comparison: Comparison, conditions: Sequence[Condition]) -> list[Judgement]:
    """Every condition on every row that it can be asked of.

    Raises:
        UserError: a condition can be asked of none: passing it would say nothing.
    """
    found = []
    for condition in conditions:
        of_this = [
            judgement
            for row in comparison.rows
            if (judgement := _judge(condition, row)) is not None
        ]
        if not of_this:
            why = why_none(comparison) if condition.measure != MISSING else "BASE measured nothing"
            raise UserError(
                f"{condition.text}: {why or f'no row has {condition.measure} in both'}."
            )
        found += of_this
    return found


def _judge(condition: Condition, row: RowChange) -> Judgement | None:
    if condition.measure == MISSING:
        return _missing(condition, row) if row.base and row.base.requests else None
    for change in row.changes:
        if change.measure == condition.measure:
            return _judgement(condition, row, change)
    return None


def _missing(condition: Condition, row: RowChange) -> Judgement:
    if row.new is None:
        text = "failed: NEW does not have this row"
    elif row.lost:
        why = f" ({row.new.problem})" if row.new.problem else ""
        text = f"failed: {row.new.missing} requests are missing in NEW{why}"
    elif row.refused:
        text = f"failed: not comparable: {row.refused[0]}"
    else:
        text = "not failed: measured in NEW as in BASE"
    return Judgement(condition, row, text.startswith("failed"), text)


def _judgement(condition: Condition, row: RowChange, change: Change) -> Judgement:
    limit = f"{100 * condition.threshold:+.6g}%".replace("-", "−")
    beyond = "below" if condition.below else "above"
    if change.low is None or change.high is None:
        text = f"not failed: {percent(change.change)} without an interval shows nothing"
        return Judgement(condition, row, failed=False, text=text, undecided=True)
    interval = f"interval {percent(change.low)} to {percent(change.high)}"
    if change.of_these_starts:
        interval += " (of one start a side)"
    least, most = change.low, change.high
    if condition.below:
        least, most = most, least
    if condition.holds_of(least):
        return Judgement(
            condition, row, failed=True, text=f"failed: {interval} is {beyond} {limit}"
        )
    if condition.holds_of(most):
        text = f"not failed: the {interval} does not exclude {limit}"
        return Judgement(condition, row, failed=False, text=text, undecided=True)
    text = f"not failed: {interval} is not {beyond} {limit}"
    return Judgement(condition, row, failed=False, text=text)


def percent(share: float) -> str:
    """A change as people read it: −6.1%."""
    return f"{share:+.1%}".replace("-", "−").replace("+0.0%", "0.0%").replace("−0.0%", "0.0%")


def why_none(comparison: Comparison) -> str | None:
    """Why the two runs have not one row that could be compared; None if they have."""
    if any(row.changes for row in comparison.rows):
        return None
    refused = next((row.refused[0] for row in comparison.rows if row.refused), None)
    if refused:
        return refused
    if any(row.base and row.new for row in comparison.rows):
        return "what they have in common is not measured in both"
    return "the two have no row in common"
