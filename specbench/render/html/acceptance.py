"""Acceptance length against k, and acceptance by position in the draft."""

from specbench.analysis.rows import Row
from specbench.render.columns import MISSING
from specbench.render.html.figures import (
    Absent,
    Figure,
    Scene,
    Trace,
    arm_name,
    colour,
    dodges,
    k_axis,
    number,
    plot_name,
    plot_text,
    symbol,
)
from specbench.render.html.published import beside


def acceptance(scene: Scene) -> Figure | Absent:
    """Acceptance length against k, under the ceiling k + 1, beside what others published."""
    of_label = {
        label: known
        for label, rows in scene.of_label().items()
        if (known := [row for row in rows if row.k and _length(row) is not None])
    }
    if not of_label:
        return Absent("acceptance", "No arm that speculates says how many drafts were accepted.")
    rows = [row for known in of_label.values() for row in known]
    others = beside(scene.config, scene.condition.max_tokens)
    top = max(row.k for row in rows)
    traces: list[Trace] = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "ceiling, k + 1",
            "x": [0, top + 0.4],
            "y": [1, top + 1.4],
            "line": {"color": "var(--faint)", "dash": "dot", "width": 1.5},
            "hoverinfo": "skip",
        }
    ]
    shifts = dodges([[row.k for row in known] for known in of_label.values()])
    for (label, known), shift in zip(of_label.items(), shifts, strict=True):
        shade = colour(scene, label)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(known) > 1 else "markers",
                "name": plot_name(label),
                "x": [row.k + shift for row in known],
                "y": [_length(row) for row in known],
                "line": {"color": shade, "width": 2},
                "marker": {"color": shade, "size": 9, "symbol": symbol(scene, label)},
                "hovertext": [
                    plot_text(f"{arm_name(row)}: {number(_length(row))} tokens a step")
                    for row in known
                ],
                "hoverinfo": "text",
            }
        )
        if even := [row for row in known if row.cost and row.cost.break_even]:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers" if len(even) > 1 else "markers",
                    "name": plot_name(f"{label}, break-even"),
                    "x": [row.k + shift for row in even],
                    "y": [row.cost.break_even for row in even if row.cost],
                    "line": {"color": shade, "dash": "dash", "width": 1.2},
                    "marker": {"color": shade, "size": 8, "symbol": "line-ew-open"},
                    "hovertext": [
                        plot_text(f"{arm_name(row)} breaks even at {row.cost.break_even:.2f}")
                        for row in even
                        if row.cost and row.cost.break_even
                    ],
                    "hoverinfo": "text",
                }
            )
    for place, curve in enumerate(others):
        ks = [k for k in sorted(curve.acceptance_length) if k <= top + 2]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plot_text(f"published: {curve.name}"),
                "x": ks,
                "y": [curve.acceptance_length[k] for k in ks],
                "line": {"color": "var(--soft)", "dash": ("dashdot", "longdash")[place % 2]},
                "marker": {"color": "var(--soft)", "symbol": "x-thin-open", "size": 8},
                "hovertext": [
                    plot_text(f"{curve.name} k={k}: {curve.acceptance_length[k]:.2f}") for k in ks
                ],
                "hoverinfo": "text",
            }
        )
    ks = sorted({row.k for row in rows})
    best = max(rows, key=lambda row: _length(row) or 0)
    return Figure(
        key="acceptance",
        says=f"Acceptance length by k, at most k + 1. The largest is {number(_length(best))} tokens "
        f"a step, {arm_name(best)}."
        + (f" Beside it {len(others)} published curves." if others else ""),
        traces=traces,
        layout={
            "xaxis": k_axis(ks),
            "yaxis": {"title": {"text": "tokens per target step"}, "range": [0.9, None]},
        },
        head=("set-up", "tokens per step", "ceiling", "break-even", "share of drafts accepted"),
        body=[
            (
                arm_name(row),
                number(_length(row)),
                str(row.k + 1),
                number(row.cost.break_even if row.cost else None),
                _share(row),
            )
            for row in rows
        ]
        + [
            (f"published: {curve.name}, k={k}", number(length), str(k + 1), MISSING, MISSING)
            for curve in others
            for k, length in sorted(curve.acceptance_length.items())
        ],
    )


def _length(row: Row) -> float | None:
    return row.metrics.acceptance.length if row.metrics.acceptance else None


def _share(row: Row) -> str:
    rate = row.metrics.acceptance.rate if row.metrics.acceptance else None
    return MISSING if rate is None else f"{rate:.0%}"


def positions(scene: Scene) -> Figure | Absent:
    """p_i: the share of drafts whose position i was accepted."""
    known = [
        (row, row.metrics.acceptance.positions)
        for rows in scene.of_label().values()
        for row in rows
        if row.k and row.metrics.acceptance and row.metrics.acceptance.positions
    ]
    if not known:
        return Absent("positions", "No engine counted acceptance by position.")
    deepest = max(len(found) for _, found in known)
    top = {row.label: row.k for row, _ in known}
    traces: list[Trace] = []
    for row, found in known:
        whole, shade = row.k == top[row.label], colour(scene, row.label)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": plot_name(arm_name(row)),
                "x": list(range(1, len(found) + 1)),
                "y": list(found),
                "opacity": 1 if whole else 0.55,
                "line": {"color": shade, "width": 2.5 if whole else 1.2},
                "marker": {
                    "color": shade,
                    "size": 9 if whole else 6,
                    "symbol": symbol(scene, row.label),
                },
                "hovertext": [
                    plot_text(f"{arm_name(row)}: position {i} accepted in {share:.0%} of drafts")
                    for i, share in enumerate(found, 1)
                ],
                "hoverinfo": "text",
            }
        )
    return Figure(
        key="positions",
        says="Share of drafts accepted up to each position. "
        + " ".join(
            f"{arm_name(row)}: {', '.join(f'{share:.0%}' for share in found)}."
            for row, found in known
            if row.k == top[row.label]
        ),
        traces=traces,
        layout={
            "xaxis": {
                **k_axis([1, deepest]),
                "title": {"text": "position in the draft"},
            },
            "yaxis": {
                "title": {"text": "share accepted"},
                "tickformat": ".0%",
                "range": [0, 1.03],
            },
        },
        head=("set-up", *(f"p{i}" for i in range(1, deepest + 1))),
        body=[
            (
                arm_name(row),
                *(f"{share:.2f}" for share in found),
                *([MISSING] * (deepest - len(found))),
            )
            for row, found in known
        ],
    )
