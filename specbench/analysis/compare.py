"""Two runs, row by row: what changed, by how much, and is it more than two runs differ by anyway?

Per prompt the difference of logs, NEW - BASE; the change is the mean over prompts, so that prompts
cancel. What is left are engine starts (compiled kernels, memory layout, the day) and noise:

    change = new - base + (starts of NEW) - (starts of BASE) + noise

- Both engines started anew R times: the variance of a start is pooled over both runs, and the change
  gets a t interval (exact for few starts; Student 1908). A start's mean holds the noise too.
- The same for a speed-up, which is a ratio of two arms of one run: the machine's pace of the day is in
  both and cancels (a difference in differences). There all arms of a condition are pooled: their starts
  have the vanilla engine's part in common, a correlation of 1/2, so A arms tell as much as
  A / (1 + (A - 1) / 4) independent ones (Satterthwaite's freedom of a mean of correlated variances).
- One start on both sides says nothing of starts. A speed-up has an interval of prompts and noise alone
  then (speedup.ratio_of), and says so; a time has none, for a start takes times further than their noise
  (docs/compare.md has the figures).

A time (tpot_ms, …) holds the machine's pace of the day, which is in no interval.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from specbench.analysis.cases import Condition
from specbench.analysis.likeness import speculation, unlike, versions
from specbench.analysis.series import WHOLE_CASE, Series
from specbench.analysis.snapshot import MEASURES, Snapshot, SnapshotRow
from specbench.analysis.speedup import CONFIDENCE, Key, ratio_of

Verdict = Literal["better", "worse", "no difference shown", "no interval"]
SHARED_VARIANCE = 0.25  # square of the correlation 1/2 of two speed-ups over one baseline
RESOLUTION = 1e-4  # of a change: a pinned baseline's logs have four decimals
WITHOUT_PACE = ("speedup", "acceptance_length")  # that hardly feel how fast the machine is just now
FEWEST = 0.5  # of the prompts of a side that both must have measured


@dataclass(frozen=True)
class Change:
    """One measure of one row in both runs. `change`, `low` and `high` are shares: -0.06 is -6%.

    `prompts` were measured in both (0: the measure is of whole cases), `starts` are BASE's and NEW's.
    Where only one start stands on both sides, the interval is of these two starts.
    """

    measure: str
    base: float
    new: float
    change: float
    low: float | None
    high: float | None
    prompts: int
    starts: tuple[int, int]

    @property
    def verdict(self) -> Verdict:
        """Better or worse where the interval leaves out 0."""
        if self.low is None or self.high is None:
            return "no interval"
        if self.low <= 0 <= self.high:
            return "no difference shown"
        return "better" if (self.low > 0) == (MEASURES[self.measure] == "more") else "worse"

    @property
    def of_these_starts(self) -> bool:
        """Whether nothing says what another start of the engines would change."""
        return max(self.starts) < 2


@dataclass(frozen=True)
class RowChange:
    """One row in both runs. `refused` says why the two are not comparable."""

    base: SnapshotRow | None
    new: SnapshotRow | None
    changes: tuple[Change, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def row(self) -> SnapshotRow:
        """The row of the run that has it."""
        found = self.new or self.base
        assert found is not None
        return found

    @property
    def main(self) -> Change | None:
        """What the verdict goes by: the speed-up, or TPOT where there is none."""
        by_name = {change.measure: change for change in self.changes}
        return by_name.get("speedup") or by_name.get("tpot_ms")

    @property
    def lost(self) -> bool:
        """Whether NEW does not answer for what BASE has measured."""
        if self.base is None or not self.base.requests:
            return False
        return self.new is None or self.new.missing > self.base.missing or not self.new.requests

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.base is None:
            return "only in NEW"
        if self.new is None:
            return "only in BASE"
        if self.refused:
            return "not comparable"
        return self.main.verdict if self.main else "not measured"


@dataclass(frozen=True)
class Comparison:
    """Two runs beside each other; `versions` are those that differ, in words."""

    base: Snapshot
    new: Snapshot
    rows: tuple[RowChange, ...]
    versions: tuple[str, ...]
    notes: tuple[str, ...]


class _Starts(NamedTuple):
    """How far a start of the engines takes a figure: the variance of one, and how well it is known."""

    variance: float
    freedom: float


def compare(base: Snapshot, new: Snapshot, *, allowed: Iterable[str] = ()) -> Comparison:
    """All rows of both, BASE's order first. *allowed* unlikenesses (likeness.KINDS) are only noted."""
    there = {row.key: row for row in new.rows}
    pairs: list[tuple[SnapshotRow | None, SnapshotRow | None]] = [
        (row, there.pop(row.key, None)) for row in base.rows
    ]
    pairs += [(None, row) for row in there.values()]
    refused = {}
    notes: dict[str, None] = {}
    for one, other in pairs:
        if one and other:
            found = unlike(base, new, one, other)
            notes |= dict.fromkeys(why for kind, why in found if kind in set(allowed))
            refused[one.key] = tuple(why for kind, why in found if kind not in set(allowed))
    both = [(one, other) for one, other in pairs if one and other and not refused[one.key]]
    pooled = _pooled_speedups(both)
    rows = []
    for one, other in pairs:
        if one is None or other is None or refused[one.key]:
            rows.append(RowChange(one, other, refused=refused[one.key] if one and other else ()))
            continue
        changes = tuple(_changes(one, other, pooled.get(one.condition)))
        rows.append(RowChange(one, other, changes))
    notes |= dict.fromkeys(speculation(base, new))
    if base.schedule != new.schedule:
        notes[f"schedule: {base.schedule} in BASE, {new.schedule} in NEW"] = None
    return Comparison(base, new, tuple(rows), tuple(versions(base, new)), tuple(notes))


def _changes(base: SnapshotRow, new: SnapshotRow, speedups: _Starts | None) -> Iterable[Change]:
    for measure in MEASURES:
        one, other = base.series.get(measure), new.series.get(measure)
        if (
            one is None
            or other is None
            or not {measure} <= base.figures.keys() & new.figures.keys()
        ):
            continue
        shared = one.by_prompt.keys() & other.by_prompt.keys()
        if len(shared) < FEWEST * max(len(one.by_prompt), len(other.by_prompt)):
            continue
        starts = speedups if measure == "speedup" else _of_sides([(one, other)])
        change, low, high = difference(one, other, starts)
        if starts is None and measure not in WITHOUT_PACE:
            low = high = None
        yield Change(
            measure=measure,
            base=base.figures[measure],
            new=new.figures[measure],
            change=change,
            low=low,
            high=high,
            prompts=len(shared - {WHOLE_CASE}),
            starts=(len(one.starts), len(other.starts)),
        )


# --- the interval --------------------------------------------------------------------------------


def difference(
    base: Series, new: Series, starts: _Starts | None
) -> tuple[float, float | None, float | None]:
    """The change from *base* to *new* as a share, and its 95% interval (None: nothing tells)."""
    shared = sorted(base.by_prompt.keys() & new.by_prompt.keys())
    cells = {Key(p, 0, 0): new.by_prompt[p] - base.by_prompt[p] for p in shared}
    center = sum(cells.values()) / len(cells)
    if starts is not None:
        variance = max(starts.variance, _noise(base, new))
        error = math.sqrt(variance * (1 / len(base.starts) + 1 / len(new.starts)))
        half = _t_quantile(starts.freedom) * error
        half += RESOLUTION
        return math.expm1(center), math.expm1(center - half), math.expm1(center + half)
    ratio = ratio_of(cells, {}, set_size=None, seed=0)
    interval = ratio.like_these if ratio else None
    if interval is None:
        return math.expm1(center), None, None
    return math.expm1(center), interval.low - 1 - RESOLUTION, interval.high - 1 + RESOLUTION


def _noise(*sides: Series) -> float:
    """The variance that noise alone gives a start's mean: a few starts may agree by chance."""
    known = [one.noise**2 for one in sides if one.noise is not None]
    return sum(known) / len(known) if known else 0.0


def _of_sides(rows: Sequence[tuple[Series, Series]], shared: float = 0.0) -> _Starts | None:
    """What the starts of both sides say, pooled over *rows* whose variances share so much.

    None where no side of any was started twice.
    """
    known = [
        (squares, freedom) for squares, freedom in (_squares(pair) for pair in rows) if freedom
    ]
    if not known:
        return None
    variance = sum(squares / freedom for squares, freedom in known) / len(known)
    freedom = sum(freedom for _, freedom in known) / len(known)
    return _Starts(variance, freedom * len(known) / (1 + (len(known) - 1) * shared))


def _squares(pair: tuple[Series, Series]) -> tuple[float, int]:
    squares = sum(deviation**2 for side in pair for deviation in side.starts)
    return squares, sum(len(side.starts) - 1 for side in pair)


def _pooled_speedups(
    pairs: Sequence[tuple[SnapshotRow, SnapshotRow]],
) -> Mapping[Condition, _Starts]:
    """Of each condition what the starts of all its arms say of a speed-up."""
    of_condition: dict[Condition, list[tuple[Series, Series]]] = defaultdict(list)
    for one, other in pairs:
        if "speedup" in one.series and "speedup" in other.series:
            both = (one.series["speedup"], other.series["speedup"])
            of_condition[one.condition].append(both)
    found = {at: _of_sides(some, SHARED_VARIANCE) for at, some in of_condition.items()}
    return {at: starts for at, starts in found.items() if starts}


def _t_quantile(freedom: float) -> float:
    from scipy.special import stdtrit  # slow to import, and not needed by most commands

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
