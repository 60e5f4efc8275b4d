"""The first plot without a script: the same places as in its figures, and no text is markup."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.analysis.curves import curves
from specbench.analysis.rows import Row
from specbench.analysis.rows import rows as make_rows
from specbench.records import Prompt
from specbench.render.html import figures, page, still
from specbench.render.html.figures import Figure, plot_name, tpot_ratio
from specbench.render.read import measured_cases
from specbench.render.report import Findings
from specbench.store import RunStore

Made = Callable[..., RunStore]
PROMPTS = [Prompt(id=f"p/{i}", turns=(f"Say {i}",)) for i in range(8)]


def figure(xs: Sequence[float], ys: Sequence[float], name: str = "eagle", **more: Any) -> Figure:  # noqa: ANN401
    """A speed-up figure of one method between 0.5x and 2x, with intervals of 0.1 to each side."""
    trace: dict[str, Any] = {
        "mode": "lines+markers",
        "name": plot_name(name),
        "x": xs,
        "y": ys,
        "error_y": {"array": [0.1] * len(xs), "arrayminus": [0.1] * len(xs), "color": "var(--m1)"},
        "line": {"color": "var(--m1)", "width": 2},
        "marker": {"color": "var(--m1)", "symbol": "circle"},
        **more,
    }
    layout = {
        "xaxis": figures.k_axis([1, 3]),
        "yaxis": {"title": {"text": "speed-up"}, "ticksuffix": "x", "range": [0.5, 2.0]},
        "shapes": [figures.line_at_1()],
    }
    return Figure("speedup", "", [trace, {**trace, "mode": "lines"}], layout, (), ())


def parsed(drawn: Figure) -> ET.Element:
    return ET.fromstring(str(still.still(drawn)))


def markers(root: ET.Element) -> list[tuple[float, float]]:
    """Where markers stand, in shares from the left and from the bottom."""
    spots = [one for one in root.findall("./svg/svg") if one.find("path") is not None]
    return [(_share(one.attrib["x"]), 1 - _share(one.attrib["y"])) for one in spots]


def _share(text: str) -> float:
    return float(text.removesuffix("%")) / 100


def test_the_page_holds_every_speedup_at_its_place(made_run: Made) -> None:
    store = made_run(PROMPTS, say=lambda *_: "one two three four five six seven eight")
    cases = list(measured_cases(store))
    rows = make_rows(cases, baseline="vanilla", greedy=True)
    text = page(store, cases, Findings(rows, curves(cases, baseline="vanilla")))
    (drawn,) = re.findall(r'<div class="still".*?</svg></div>', text, re.DOTALL)
    timed = [row for row in rows if not row.is_baseline]
    spots = markers(ET.fromstring(drawn))
    assert [x for x, _ in spots] == pytest.approx([(row.k - 0.5) / 3 for row in timed], abs=1e-3)
    heights = [y for _, y in spots]
    values = [_value(row) for row in timed]
    assert (heights[1] > heights[0]) == (values[1] > values[0])
    shown = re.search(
        r'data-figure="speedup-0"[^>]*>\s*<div class="still" aria-hidden="true">', text
    )
    assert shown


def _value(row: Row) -> float:
    ratio = tpot_ratio(row)
    assert ratio is not None
    return ratio.value


def test_a_marker_stands_where_the_axes_put_it() -> None:
    spots = markers(parsed(figure([1, 2, 3], [0.5, 1.25, 2.0])))
    expected = [(1 / 6, 0), (1 / 2, 0.5), (5 / 6, 1)]
    assert [value for spot in spots for value in spot] == pytest.approx(
        [value for spot in expected for value in spot], abs=1e-4
    )


def test_an_interval_that_leaves_the_axis_ends_at_its_edge() -> None:
    root = parsed(figure([2], [1.0], error_y={"array": [9], "arrayminus": [0.25], "color": "red"}))
    bars = [one for one in root.findall("./svg/line") if "stroke:red" in one.attrib["style"]]
    assert [(bar.attrib["y1"], bar.attrib["y2"]) for bar in bars] == [("83.33%", "0.00%")] * 2


def test_a_flagged_marker_is_hollow() -> None:
    drawn = figure([1, 2], [1, 1], marker={"color": "red", "symbol": ["circle", "circle-open"]})
    styles = [path.attrib["style"] for path in parsed(drawn).findall("./svg/svg/path")]
    assert styles == ["fill:red", "fill:var(--page);stroke:red"]


def test_the_line_at_1_is_there_and_every_method_has_a_key() -> None:
    root = parsed(figure([1], [1.5]))
    assert any(
        line.attrib["y1"] == line.attrib["y2"] == "66.67%" and "dasharray" in line.attrib["style"]
        for line in root.findall("./svg/line")
    )
    assert len(root.findall("./div/span")) == 2


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=30))
def test_a_name_comes_out_as_it_is_in_the_legend_of_plotly(name: str) -> None:
    keys = parsed(figure([1], [1.5], name=name)).findall("./div/span")
    shown = "".join(keys[0].itertext()).removeprefix(" ")
    assert plot_name(shown) == plot_name(name)


@given(
    st.floats(-1e3, 1e3),
    st.floats(1e-3, 1e3),
    st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=5),
)
def test_whatever_the_numbers_all_is_within_the_plot(
    low: float, width: float, ys: list[float]
) -> None:
    made = figure(range(1, len(ys) + 1), ys)
    made.layout["yaxis"]["range"] = [low, low + width]
    for one in parsed(made).findall("./svg/*"):
        for name in ("x", "y", "x1", "x2", "y1", "y2"):
            if (at := one.attrib.get(name, "0")).endswith("%"):
                assert 0 <= float(at[:-1]) <= 100


@given(st.floats(-1e3, 1e3), st.floats(1e-3, 1e3))
def test_an_axis_has_a_few_marks_that_are_round(low: float, width: float) -> None:
    marks = still._marks(low, low + width)
    assert 2 <= len(marks) <= still.MOST_TICKS + 1
    assert all(low - 1e-6 <= mark <= low + width + 1e-6 for mark in marks)


def test_every_symbol_of_a_method_can_be_drawn() -> None:
    assert set(figures.SYMBOLS) == set(still.SYMBOL)
