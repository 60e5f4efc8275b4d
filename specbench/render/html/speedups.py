"""Speed-up against k, measured with its interval and predicted."""

from collections.abc import Sequence

from specbench.analysis.rows import Row
from specbench.render.html.figures import (
    Absent,
    Figure,
    Scene,
    Trace,
    arm_name,
    colour,
    dodges,
    error_bars,
    interval_text,
    k_axis,
    line_at_1,
    plot_name,
    plot_text,
    span,
    symbol,
    times,
    tpot_ratio,
)


def speedup(scene: Scene) -> Figure | Absent:
    """Speed-up against k, measured with its interval and predicted."""
    of_label = {
        label: timed
        for label, rows in scene.of_label().items()
        if (timed := [row for row in rows if tpot_ratio(row)])
    }
    if not of_label:
        return Absent(
            "speedup",
            "No arm was measured beside a baseline, so there is no speed-up. Leave `baseline: true` "
            "in the config.",
        )
    predicted = {c.label: c.predicted for c in scene.curves if c.condition == scene.condition}
    traces: list[Trace] = []
    shifts = dodges([[row.k for row in rows] for rows in of_label.values()])
    for (label, rows), shift in zip(of_label.items(), shifts, strict=True):
        traces.append(_measured(scene, label, rows, shift))
        if at_k := predicted.get(label):
            ks = sorted(at_k)
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": plot_name(f"{label}, predicted"),
                    "x": [k + shift for k in ks],
                    "y": [at_k[k].speedup for k in ks],
                    "line": {"color": colour(scene, label), "dash": "dash", "width": 1.5},
                    "opacity": 0.8,
                    "hovertext": [
                        plot_text(f"{label} k={k}: {at_k[k].speedup:.2f}x predicted") for k in ks
                    ],
                    "hoverinfo": "text",
                }
            )
    rows = [row for rows in of_label.values() for row in rows]
    best = max(rows, key=_value)
    expected = [at.speedup for of_k in predicted.values() for at in of_k.values()]
    seen = span([tpot_ratio(row) for row in rows], expected)
    return Figure(
        key="speedup",
        says=f"Speed-up over the baseline by k. The largest is {times(_value(best))}, "
        f"{arm_name(best)}, 95% interval {interval_text(tpot_ratio(best))}.{seen.note}",
        traces=traces,
        layout={
            "xaxis": k_axis([row.k for row in rows]),
            "yaxis": seen.axis,
            "shapes": [line_at_1()],
        },
        head=("set-up", "speed-up", "prompts like these", "this prompt set", "predicted", "flags"),
        body=[
            (
                arm_name(row),
                times(_value(row)),
                interval_text(tpot_ratio(row)),
                interval_text(tpot_ratio(row), this_set=True),
                times(row.cost.predicted_speedup if row.cost else None),
                ", ".join(flag.check for flag in row.flags) or "none",
            )
            for row in rows
        ],
    )


def _measured(scene: Scene, label: str, rows: Sequence[Row], shift: float) -> Trace:
    shade, mark = colour(scene, label), symbol(scene, label)
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(rows) > 1 else "markers",
        "name": plot_name(label),
        "x": [row.k + shift for row in rows],
        "y": [_value(row) for row in rows],
        "error_y": error_bars([tpot_ratio(row) for row in rows]) | {"color": shade},
        "line": {"color": shade, "width": 2},
        "marker": {
            "color": shade,
            "size": 9,
            "symbol": [f"{mark}-open" if row.flags else mark for row in rows],
        },
        "hovertext": [
            plot_text(
                f"{arm_name(row)}: {times(_value(row))}, 95% {interval_text(tpot_ratio(row))}"
                + (
                    f" — flagged: {', '.join(flag.check for flag in row.flags)}"
                    if row.flags
                    else ""
                )
            )
            for row in rows
        ],
        "hoverinfo": "text",
    }


def _value(row: Row) -> float:
    ratio = tpot_ratio(row)
    return ratio.value if ratio else 1.0
