"""Where the time of a target step goes: verifying, drafting, the rest."""

from specbench.analysis.curves import Curve
from specbench.render.columns import MISSING
from specbench.render.html.figures import (
    FRAME_PX,
    ROW_PX,
    Absent,
    Figure,
    Scene,
    Trace,
    names_axis,
    number,
    plot_text,
)

SEEN_MS = 0.01  # a smaller part of a step is nothing that a bar shows
NEEDS_METRICS = "It takes vLLM's per-request metrics, and vanilla beside an arm that speculates."


def steps(scene: Scene) -> Figure | Absent:
    """Where the time of a target step goes: verifying, drafting, the rest."""
    curves = [c for c in scene.curves if c.condition == scene.condition and c.model]
    if not curves:
        return Absent("steps", f"The time of a step is not known. {NEEDS_METRICS}")
    bars = [bar for curve in curves for bar in _bars(curve)]
    first = curves[0].model
    assert first is not None
    names = ["vanilla", *(name for name, *_ in bars)]
    parts = {
        "vanilla's step": [first.vanilla_ms, *(0.0 for _ in bars)],
        "verify (T_v)": [0.0, *(bar[1] for bar in bars)],
        "draft (k·T_d)": [0.0, *(bar[2] for bar in bars)],
        "rest": [0.0, *(bar[3] if bar[3] > SEEN_MS else 0.0 for bar in bars)],
        "not divided (one k)": [0.0, *(bar[4] for bar in bars)],
    }
    shades = ("var(--m0)", "var(--m1)", "var(--m2)", "var(--m5)", "var(--soft)")
    shapes = ("", "", "/", "x", ".")
    measured = [first.vanilla_ms, *(bar[5] for bar in bars)]
    traces: list[Trace] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": list(range(len(names))),
            "x": values,
            "marker": {"color": shade, "pattern": {"shape": shape, "solidity": 0.2}},
            "hovertext": [
                plot_text(f"{one}: {name} {value:.1f} ms")
                for one, value in zip(names, values, strict=True)
            ],
            "hoverinfo": "text",
        }
        for (name, values), shade, shape in zip(parts.items(), shades, shapes, strict=True)
        if any(values)
    ]
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": "measured step",
            "y": list(range(len(names))),
            "x": measured,
            "marker": {
                "color": "var(--ink)",
                "symbol": "line-ns-open",
                "size": 16,
                "line": {"width": 2, "color": "var(--ink)"},
            },
            "hovertext": [
                plot_text(f"{one}: a step takes {value:.1f} ms")
                for one, value in zip(names, measured, strict=True)
            ],
            "hoverinfo": "text",
        }
    )
    return Figure(
        key="steps",
        says=f"A vanilla step takes {first.vanilla_ms:.1f} ms. "
        + " ".join(f"{name}: {total:.1f} ms." for name, *_, total in bars),
        traces=traces,
        layout={
            "barmode": "stack",
            "xaxis": {"title": {"text": "ms per target step"}, "rangemode": "tozero"},
            "yaxis": names_axis(names),
        },
        head=("set-up", "verify ms", "draft ms", "rest ms", "measured ms", "vanilla steps"),
        body=[
            (
                "vanilla",
                MISSING,
                MISSING,
                MISSING,
                number(first.vanilla_ms, 1),
                "1.00",
            ),
            *(
                (
                    name,
                    MISSING if whole else number(verify, 1),
                    MISSING if whole else number(draft, 1),
                    MISSING if whole else number(rest, 1),
                    number(total, 1),
                    number(total / first.vanilla_ms),
                )
                for name, verify, draft, rest, whole, total in bars
            ),
        ],
        height=FRAME_PX + ROW_PX * len(names),
    )


def _bars(curve: Curve) -> list[tuple[str, float, float, float, float, float]]:
    """Of each k: name, ms of verifying, drafting, the rest, of an undivided step, and all of it."""
    model = curve.model
    assert model is not None
    found = []
    for k, ms in sorted(model.step_ms.items()):
        name = f"{curve.label} k={k}"
        if model.line is None:
            found.append((name, 0.0, 0.0, 0.0, ms, ms))
        else:
            line = model.line
            found.append((name, line.verify_ms, k * line.draft_ms, ms - line.step_ms(k), 0.0, ms))
    return found
