"""Does speculation still pay as concurrency grows?"""

from collections.abc import Sequence

from specbench.analysis.rows import Row
from specbench.analysis.scaling import Scaling
from specbench.render.columns import MISSING, printable
from specbench.render.html.figures import (
    Absent,
    Figure,
    Scene,
    Trace,
    colour,
    line_at_1,
    plot_name,
    plot_text,
    span,
    symbol,
)


def concurrency(scene: Scene, found: Sequence[Scaling], rows: Sequence[Row]) -> Figure | Absent:
    """The speed-up of each method's best k as concurrency grows, and where it stops paying.

    *found* and *rows* are of all conditions.
    """
    here = [one for one in found if (one.prompt_set, one.max_tokens) == scene.condition[:2]]
    at = {row.concurrency for row in rows if row.condition[:2] == scene.condition[:2]}
    if not here and scene.condition.rate is not None:
        return Absent("concurrency", "Requests came at a rate here, so concurrency is not set.")
    if not here and len(at) > 1:
        return Absent(
            "concurrency",
            "No method has an unflagged speed-up at more than one concurrency; flagged ones are "
            "in the table.",
        )
    if not here:
        return Absent(
            "concurrency",
            "Measured at one concurrency. With `concurrency: [1, 4, 16]` in the config this shows "
            "where speculation stops paying.",
        )
    traces: list[Trace] = []
    shapes, notes = [line_at_1()], []
    for one in here:
        shade = colour(scene, one.label)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plot_name(one.label),
                "x": list(one.best),
                "y": [speed for _, speed in one.best.values()],
                "line": {"color": shade, "width": 2},
                "marker": {"color": shade, "size": 9, "symbol": symbol(scene, one.label)},
                "hovertext": [
                    plot_text(f"{one.label} k={k} at {c}: {speed:.2f}x")
                    for c, (k, speed) in one.best.items()
                ],
                "hoverinfo": "text",
            }
        )
        if one.crossing and not one.crossing.already:
            x = one.crossing.concurrency
            shapes.append(
                {
                    "type": "line",
                    "x0": x,
                    "x1": x,
                    "yref": "paper",
                    "y0": 0,
                    "y1": 1,
                    "line": {"color": shade, "width": 1, "dash": "dash"},
                }
            )
        said = str(one.crossing) if one.crossing else "pays at every concurrency measured"
        notes.append(printable(f"{one.label} {said}."))
    ticks = sorted({c for one in here for c in one.best})
    return Figure(
        key="concurrency",
        says=f"Speed-up of the best k by concurrency. {' '.join(notes)}",
        traces=traces,
        layout={
            "xaxis": {
                "title": {"text": "concurrency, requests in flight"},
                "type": "log",
                "tickmode": "array",
                "tickvals": ticks,
                "ticktext": [str(tick) for tick in ticks],
            },
            "yaxis": span([], [speed for one in here for _, speed in one.best.values()]).axis,
            "shapes": shapes,
        },
        head=("method", *(f"at {tick}" for tick in ticks), "stops paying"),
        body=[
            (
                printable(one.label),
                *(
                    f"{one.best[tick][1]:.2f}x (k={one.best[tick][0]})"
                    if tick in one.best
                    else MISSING
                    for tick in ticks
                ),
                str(one.crossing) if one.crossing else "not in what was measured",
            )
            for one in here
        ],
    )
