"""The speed-up in the parts of a run: by category, turn, prompt length, place in the output."""

from collections.abc import Sequence
from typing import Any

from specbench.analysis.cases import Joined
from specbench.analysis.rows import Row
from specbench.analysis.rows import rows as make_rows
from specbench.analysis.slices import By
from specbench.analysis.slices import parts as parts_of
from specbench.render.columns import printable
from specbench.render.html.figures import (
    FRAME_PX,
    ROW_PX,
    Absent,
    Figure,
    Scene,
    Trace,
    arm_name,
    colour,
    error_bars,
    interval_text,
    line_at_1,
    names_axis,
    number,
    plot_name,
    plot_text,
    span,
    symbol,
    times,
    tpot_ratio,
)

PARTS: dict[By, str] = {
    "category": "category",
    "turn": "turn of the conversation",
    "length": "length of the prompt",
}


def by_part(scene: Scene, by: By) -> Figure | Absent:
    """Bars of the speed-up in each part of the requests, of each method's fastest k."""
    records = Joined([case.records for cases in scene.cases.values() for case in cases])
    if len(parts_of(by, records)) < 2:
        return Absent(by, f"All requests are of one {PARTS[by]}.")
    chosen, parts = _split(scene, by)
    names = list(dict.fromkeys(map(_part, parts)))
    if not chosen:
        return Absent(by, "There is no speed-up to divide.")
    traces: list[Trace] = []
    for arm in chosen:
        found = {_part(row): row for row in parts if row.arm == arm.arm and tpot_ratio(row)}
        shown = [name for name in names if name in found]
        ratios = [tpot_ratio(found[name]) for name in shown]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": plot_name(arm_name(arm)),
                "y": [names.index(name) for name in shown],
                "x": [ratio.value if ratio else None for ratio in ratios],
                "error_x": error_bars(ratios) | {"color": "var(--ink)"},
                "marker": {"color": colour(scene, arm.label)},
                "hovertext": [
                    plot_text(
                        f"{name}, {arm_name(arm)}: {times(ratio.value if ratio else None)}, "
                        f"95% {interval_text(ratio)}"
                    )
                    for name, ratio in zip(shown, ratios, strict=True)
                ],
                "hoverinfo": "text",
            }
        )
    seen = span(map(tpot_ratio, parts))
    return Figure(
        key=by,
        says=f"Speed-up by {PARTS[by]}. {_extremes(chosen[0], parts)}{seen.note}",
        traces=traces,
        layout={
            "barmode": "group",
            "xaxis": seen.axis | {"range": [0, seen.high]},
            "yaxis": names_axis(names),
            "shapes": [line_at_1(vertical=True)],
        },
        **_part_table(parts),
        height=FRAME_PX + (ROW_PX - 8) * (len(names) + 1) * max(1, len(chosen)),
    )


def by_position(scene: Scene) -> Figure | Absent:
    """Speed-up over the position in the output, of each method's fastest k."""
    chosen, parts = _split(scene, "position")
    names = list(dict.fromkeys(row.part for row in parts if row.part is not None))
    if not chosen or not names:
        return Absent(
            "position",
            "The tokens of a chunk are not known, so neither is the time of a position. "
            "It takes an engine that returns token ids.",
        )
    traces: list[Trace] = []
    for arm in chosen:
        rows = [row for row in parts if row.arm == arm.arm and tpot_ratio(row)]
        ratios = [tpot_ratio(row) for row in rows]
        shade = colour(scene, arm.label)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plot_name(arm_name(arm)),
                "x": [_bin_name(row) for row in rows],
                "y": [ratio.value if ratio else None for ratio in ratios],
                "error_y": error_bars(ratios) | {"color": shade},
                "line": {"color": shade, "width": 2},
                "marker": {"color": shade, "size": 9, "symbol": symbol(scene, arm.label)},
                "hovertext": [
                    plot_text(
                        f"{_part(row)}, {arm_name(arm)}: {times(ratio.value if ratio else None)}, "
                        f"95% {interval_text(ratio)}"
                    )
                    for row, ratio in zip(rows, ratios, strict=True)
                ],
                "hoverinfo": "text",
            }
        )
    seen = span(map(tpot_ratio, parts))
    return Figure(
        key="position",
        says=f"Speed-up by position in the output. {_extremes(chosen[0], parts)}{seen.note}",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "output tokens"}, "type": "category"},
            "yaxis": seen.axis,
            "shapes": [line_at_1()],
        },
        **_part_table(parts),
    )


def _split(scene: Scene, by: By) -> tuple[list[Row], list[Row]]:
    """Each method's fastest k, and the rows of their parts."""
    chosen = scene.fastest()
    arms = [row.arm for row in chosen]
    baseline = scene.baseline
    if not chosen or baseline is None:
        return [], []
    cases = [case for arm in (baseline.arm, *arms) for case in scene.cases[arm]]
    parts = [row for row in make_rows(cases, baseline=baseline.arm, by=by) if not row.is_baseline]
    return chosen, parts


def _part(row: Row) -> str:
    """The name of a row's part; some requests of a set may have no category."""
    return "none given" if row.part is None else row.part


def _bin_name(row: Row) -> str:
    return plot_text((row.part or "all").removeprefix("tokens "))


def _extremes(arm: Row, parts: Sequence[Row]) -> str:
    timed = [
        (ratio.value, _part(row))
        for row in parts
        if row.arm == arm.arm and (ratio := tpot_ratio(row))
    ]
    if not timed:
        return ""
    (low, worst), (high, best) = min(timed), max(timed)
    return printable(
        f"{arm_name(arm)}: most on {best} ({high:.2f}x), least on {worst} ({low:.2f}x)."
    )


def _part_table(parts: Sequence[Row]) -> dict[str, Any]:
    return {
        "head": ("part", "set-up", "prompts", "speed-up", "prompts like these", "tokens per step"),
        "body": [
            (
                printable(_part(row)),
                arm_name(row),
                str(row.metrics.prompts),
                times(ratio.value if (ratio := tpot_ratio(row)) else None),
                interval_text(tpot_ratio(row)),
                number(row.metrics.acceptance.length if row.metrics.acceptance else None),
            )
            for row in parts
        ],
    }
