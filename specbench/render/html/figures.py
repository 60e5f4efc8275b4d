"""What every figure of the page has: traces for Plotly, and the same figures in a table.

A colour is a CSS variable ("var(--m1)"); the page puts in the value of the light or dark theme.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.analysis.cases import Condition, MeasuredCase
from specbench.analysis.curves import Curve
from specbench.analysis.rows import Row, best_of
from specbench.analysis.speedup import Ratio
from specbench.render.columns import MISSING, printable

Trace = dict[str, Any]
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
LEAST_ROOM = 0.5  # of an axis of speed-ups, for intervals beyond the values
LONGEST = 34  # characters of a name in a legend or beside a bar
ROW_PX, FRAME_PX = 30, 120  # of a figure with a bar a row: a row, and all around


@dataclass(frozen=True)
class Figure:
    """One figure. `says` is its text alternative, `head` and `body` all that it shows in words.

    `height` is in CSS pixels.
    """

    key: str
    says: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any]
    head: Sequence[str]
    body: Sequence[Sequence[str]]
    height: int = 380


@dataclass(frozen=True)
class Absent:
    """A figure that this run has no facts for: why, and what to do to get it."""

    key: str
    why: str


@dataclass(frozen=True)
class Scene:
    """One condition of a run: what was measured under it.

    `labels` are the run's speculative methods in order (their place gives them their colour),
    `rows` the whole arms, baseline first; `cases` by arm.
    """

    condition: Condition
    labels: Sequence[str]
    rows: Sequence[Row]
    curves: Sequence[Curve]
    cases: Mapping[str, Sequence[MeasuredCase]]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The condition in words."""
        at = self.condition
        return printable(f"{at.prompt_set}, {at.max_tokens} tokens, {at.load}")

    @property
    def baseline(self) -> Row | None:
        """The row that others are compared with."""
        return next((row for row in self.rows if row.is_baseline), None)

    @property
    def others(self) -> list[Row]:
        """Every row but the baseline's."""
        return [row for row in self.rows if not row.is_baseline]

    def of_label(self) -> dict[str, list[Row]]:
        """The rows besides the baseline by method, each by k."""
        found: dict[str, list[Row]] = {}
        for row in sorted(self.others, key=lambda row: row.k):
            found.setdefault(row.label, []).append(row)
        known = [label for label in self.labels if label in found]
        return {label: found.pop(label) for label in known} | found

    def fastest(self) -> list[Row]:
        """Of each method the k with the largest speed-up, those that are flagged only if none is."""
        found = (best_of(of_label) for of_label in self.of_label().values())
        return [row for row in found if row is not None]


def tpot_ratio(row: Row) -> Ratio | None:
    """The speed-up of a row that has one."""
    return row.speedup.tpot if row.speedup else None


def arm_name(row: Row) -> str:
    """A set-up as people call it."""
    name = f"{row.label} k={row.k}" if row.k else row.arm
    return printable(name)


def plot_text(text: str) -> str:
    """*text* for Plotly, which takes some HTML for markup: names come from prompt files."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def plot_name(text: str) -> str:
    """A name for a legend or an axis, cut where it would take the plot's room."""
    return plot_text(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")


def names_axis(names: Sequence[str]) -> dict[str, Any]:
    """An axis with a bar for each of *names* from the top down: their places are 0, 1, ..."""
    return {
        "tickmode": "array",
        "tickvals": list(range(len(names))),
        "ticktext": [plot_name(name) for name in names],
        "range": [len(names) - 0.5, -0.5],
        "zeroline": False,
        "showgrid": False,
    }


def colour(scene: Scene, label: str) -> str:
    """The colour of a method: the same in all figures, grey for what does not speculate."""
    return f"var(--m{_place(scene, label)})"


def symbol(scene: Scene, label: str) -> str:
    """The marker of a method, for those who see no colours."""
    return SYMBOLS[_place(scene, label) - 1]


def _place(scene: Scene, label: str) -> int:
    """From 1; 0 for what does not speculate."""
    return scene.labels.index(label) % len(SYMBOLS) + 1 if label in scene.labels else 0


def dodges(series: Sequence[Sequence[int]], width: float = 0.09) -> list[float]:
    """How far to the side each series stands, so that intervals at the same k stay apart."""
    at = [k for ks in series for k in set(ks)]
    if len(at) == len(set(at)):
        return [0.0] * len(series)
    return [(place - (len(series) - 1) / 2) * width for place in range(len(series))]


def error_bars(ratios: Sequence[Ratio | None]) -> dict[str, Any]:
    """The intervals on prompts like these, as Plotly's error bars; none where there is none."""
    up, down = [], []
    for ratio in ratios:
        interval = ratio.like_these if ratio else None
        up.append(interval.high - ratio.value if interval and ratio else 0)
        down.append(ratio.value - interval.low if interval and ratio else 0)
    return {
        "type": "data",
        "symmetric": False,
        "array": up,
        "arrayminus": down,
        "thickness": 1.5,
        "width": 4,
    }


@dataclass(frozen=True)
class Span:
    """The range of an axis of speed-ups. `note` says so where it cuts off an interval."""

    low: float
    high: float
    note: str = ""

    @property
    def axis(self) -> dict[str, Any]:
        """As Plotly takes it."""
        return {
            "title": {"text": "speed-up"},
            "ticksuffix": "x",
            "range": [self.low, self.high],
        }


def span(ratios: Iterable[Ratio | None], more: Iterable[float] = ()) -> Span:
    """All of *ratios*, of *more* values and the 1 in sight, with their intervals.

    Of an interval that is much wider than all these are apart only a part is in sight: it would
    leave no room to tell them apart.
    """
    known = [ratio for ratio in ratios if ratio is not None]
    values = [1.0, *more, *(ratio.value for ratio in known)]
    low, high = min(values), max(values)
    ends = [i for ratio in known if (i := ratio.like_these)]
    room = max(LEAST_ROOM, high - low)
    ends_low = min([low, *(interval.low for interval in ends)])
    ends_high = max([high, *(interval.high for interval in ends)])
    cut = ends_low < low - room or ends_high > high + room
    low, high = max(ends_low, low - room), min(ends_high, high + room)
    edge = 0.06 * (high - low) or 0.1
    note = " An interval reaches beyond the plot; the table has its ends." if cut else ""
    return Span(low - edge, high + edge, note)


def interval_text(ratio: Ratio | None, *, this_set: bool = False) -> str:
    """An interval for a table."""
    interval = (ratio.this_set if this_set else ratio.like_these) if ratio else None
    return f"{interval.low:.2f} to {interval.high:.2f}" if interval else MISSING


def times(value: float | None) -> str:
    """A speed-up for a table."""
    return MISSING if value is None else f"{value:.2f}x"


def number(value: float | None, digits: int = 2) -> str:
    """A figure for a table."""
    return MISSING if value is None else f"{value:,.{digits}f}"


def line_at_1(*, vertical: bool = False) -> dict[str, Any]:
    """The line between faster and slower than the baseline."""
    line = {"color": "var(--faint)", "width": 1.5, "dash": "dot"}
    if vertical:
        return {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": line}
    return {"type": "line", "y0": 1, "y1": 1, "xref": "paper", "x0": 0, "x1": 1, "line": line}


def k_axis(ks: Sequence[int]) -> dict[str, Any]:
    """An axis of numbers of drafted tokens."""
    low, high = min(ks, default=0), max(ks, default=1)
    return {
        "title": {"text": "k, drafted tokens per step"},
        "tickmode": "array",
        "tickvals": list(range(low, high + 1)) if high - low < 16 else sorted(set(ks)),
        "range": [low - 0.5, high + 0.5],
        "zeroline": False,
    }
