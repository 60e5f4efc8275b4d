"""A figure without a script: what stands in its place until Plotly has run, and where it never does.

Plotly takes a second or more to load and draw. These few elements are painted with the text: places
are in percent of the area, so the browser fits them to any width, and colours are the page's own.
"""

import html
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from specbench.render.html.figures import Figure, Trace

DASH = {"dash": "9 7", "dot": "3 3"}
SYMBOL = {  # around 0, 0; as large as Plotly's of size 9
    "circle": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "square": "M-4.5 -4.5h9v9h-9z",
    "diamond": "M0 -5.8L5.8 0L0 5.8L-5.8 0z",
    "triangle-up": "M0 -5L5.2 3.6H-5.2z",
    "cross": "M-1.8 -5h3.6v3.2h3.2v3.6h-3.2v3.2h-3.6v-3.2h-3.2v-3.6h3.2z",
    "star": "M0 -6.3L1.5 -2H6L2.3 .8L3.7 5.1L0 2.5L-3.7 5.1L-2.3 .8L-6 -2H-1.5z",
}
MOST_TICKS = 8
AT_ONCE = "speedup"  # the key of the figure that is shown so: the first of the page


def still(figure: Figure) -> Markup:
    """*figure* as HTML: of scatter traces with y intervals, whose two axes are numbers with a range."""
    across, up = (_Axis(figure.layout[name]) for name in ("xaxis", "yaxis"))
    parts = [
        *_grid(across, up),
        *(part for shape in figure.layout["shapes"] for part in _shape(shape, across, up)),
        *(part for trace in figure.traces for part in _trace(trace, across, up)),
    ]
    keys = Markup("").join(map(_key, figure.traces)) if len(figure.traces) > 1 else ""
    return Markup(
        '<div class="still" aria-hidden="true"><div class="keys">{}</div><svg>{}</svg></div>'
    ).format(keys, Markup("").join(parts))


class _Axis:
    """A range of numbers and its marks."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self.low, self.high = map(float, about["range"])
        self.suffix: str = about.get("ticksuffix", "")
        self.title: str = about["title"]["text"]
        self.marks: Sequence[float] = about.get("tickvals") or _marks(self.low, self.high)

    def share(self, value: float) -> float:
        """Where *value* is, from 0 to 1; what lies beyond the range is at its end."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def x(self, value: float) -> str:
        """The place of *value* from the left."""
        return f"{100 * self.share(value):.2f}%"

    def y(self, value: float) -> str:
        """The place of *value* from the top."""
        return f"{100 * (1 - self.share(value)):.2f}%"


def _marks(low: float, high: float) -> list[float]:
    """Round numbers from *low* to *high*."""
    rough = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 5, 10) if power * one >= rough)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [round(i * step, 10) for i in range(first, last + 1)]


# --- parts ---------------------------------------------------------------------------------------


def _line(at: tuple[str, str, str, str], colour: str, more: str = "") -> Markup:
    x1, y1, x2, y2 = at
    return Markup('<line x1="{}" y1="{}" x2="{}" y2="{}" style="stroke:{};{}"/>').format(
        x1, y1, x2, y2, colour, more
    )


def _text(x: str, y: str, words: str, more: Markup) -> Markup:
    return Markup('<text x="{}" y="{}" {}>{}</text>').format(x, y, more, words)


def _grid(across: _Axis, up: _Axis) -> Iterator[Markup]:
    for value in across.marks:
        yield _line((across.x(value), "0", across.x(value), "100%"), "var(--line)")
        yield _text(across.x(value), "100%", f"{value:g}", Markup('dy="17" class="mid"'))
    for value in up.marks:
        yield _line(("0", up.y(value), "100%", up.y(value)), "var(--line)")
        yield _text("-6", up.y(value), f"{value:g}{up.suffix}", Markup('dy="4" class="end"'))
    for at in (("0", "0", "0", "100%"), ("0", "100%", "100%", "100%")):
        yield _line(at, "var(--faint)")
    yield _text("50%", "100%", across.title, Markup('dy="36" class="mid title"'))
    yield Markup(
        '<svg x="-43" y="50%"><text transform="rotate(-90)" class="mid title">{}</text></svg>'
    ).format(up.title)


def _shape(shape: Mapping[str, Any], across: _Axis, up: _Axis) -> Iterator[Markup]:
    """A line over the whole width, at a height."""
    if shape.get("xref") == "paper":
        y = up.y(shape["y0"])
        yield _line(("0", y, "100%", y), shape["line"]["color"], _stroke(shape["line"]))


def _trace(trace: Trace, across: _Axis, up: _Axis) -> Iterator[Markup]:
    spots = list(zip(trace["x"], trace["y"], strict=True))
    line = trace.get("line", {})
    if "lines" in trace["mode"]:
        for (x1, y1), (x2, y2) in itertools.pairwise(spots):
            at = (across.x(x1), up.y(y1), across.x(x2), up.y(y2))
            yield _line(at, line["color"], _stroke(line))
    if (bars := trace.get("error_y")) is not None:
        ends = zip(spots, bars["arrayminus"], bars["array"], strict=True)
        for (x, y), below, above in ends:
            at = (across.x(x), up.y(y - below), across.x(x), up.y(y + above))
            yield _line(at, bars["color"], "stroke-width:1.5")
    if "markers" in trace["mode"]:
        marker = trace["marker"]
        for (x, y), symbol in zip(spots, _each(marker["symbol"], len(spots)), strict=True):
            yield Markup('<svg x="{}" y="{}">{}</svg>').format(
                across.x(x), up.y(y), _symbol(symbol, marker["color"])
            )


def _symbol(name: str, colour: str) -> Markup:
    style = f"fill:var(--page);stroke:{colour}" if name.endswith("-open") else f"fill:{colour}"
    return Markup('<path d="{}" style="{}"/>').format(SYMBOL[name.removesuffix("-open")], style)


def _key(trace: Trace) -> Markup:
    """A trace in the legend."""
    line = trace.get("line", {})
    drawn = []
    if "lines" in trace["mode"]:
        drawn.append(_line(("0", "8", "30", "8"), line["color"], _stroke(line)))
    if "markers" in trace["mode"]:
        symbol = _symbol(_each(trace["marker"]["symbol"], 1)[0], trace["marker"]["color"])
        drawn.append(Markup('<svg x="15" y="8">{}</svg>').format(symbol))
    # names are escaped for Plotly already
    name = escape(html.unescape(trace["name"]))
    return Markup('<span><svg width="30" height="16">{}</svg> {}</span>').format(
        Markup("").join(drawn), name
    )


def _stroke(line: Mapping[str, Any]) -> str:
    dashes = f";stroke-dasharray:{DASH[line['dash']]}" if line.get("dash", "solid") in DASH else ""
    return f"stroke-width:{line['width']}{dashes}"


def _each(value: str | Iterable[str], count: int) -> list[str]:
    return [value] * count if isinstance(value, str) else list(value)[: max(count, 1)]
