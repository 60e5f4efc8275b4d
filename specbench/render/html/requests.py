"""What differs from prompt to prompt and from request to request."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from specbench.analysis.cases import MeasuredCase, Requests
from specbench.analysis.hosts import hosts_of, on_one_host
from specbench.analysis.metrics import held_up, latency_ms, tpot_ms, ttft_ms
from specbench.analysis.outlines import Request
from specbench.analysis.speedup import Key, pairs_of
from specbench.render.columns import printable
from specbench.render.html.figures import (
    DASHES,
    Absent,
    Figure,
    Scene,
    Trace,
    arm_name,
    colour,
    line_at_1,
    number,
    plot_name,
    plot_text,
    span,
    symbol,
)

MOST_DOTS, MOST_STEPS = 600, 120  # that a figure draws of an arm; more look no different
QUANTILES = (0.1, 0.5, 0.9, 0.99)


# --- prompts --------------------------------------------------------------------------------------


def by_prompt(scene: Scene) -> Figure | Absent:
    """The speed-up of every prompt, in order, of each method's fastest k."""
    traces: list[Trace] = []
    body: list[Sequence[str]] = []
    says = []
    for arm in scene.fastest():
        found = sorted(prompt_speedups(*paired(scene, arm.arm)).items(), key=lambda pair: pair[1])
        if not found:
            continue
        values = [value for _, value in found]
        kept = _thinned(len(found), MOST_DOTS)
        slower = sum(value < 1 for value in values)
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": plot_name(arm_name(arm)),
                "x": [(i + 0.5) / len(found) for i in kept],
                "y": [values[i] for i in kept],
                "marker": {
                    "color": colour(scene, arm.label),
                    "symbol": symbol(scene, arm.label),
                    "size": 6,
                    "opacity": 0.8,
                },
                "hovertext": [
                    plot_text(f"{found[i][0]}: {values[i]:.2f}x, {arm_name(arm)}") for i in kept
                ],
                "hoverinfo": "text",
            }
        )
        low, half, high = np.quantile(values, (0.1, 0.5, 0.9))
        says.append(f"{arm_name(arm)}: slower on {slower} of {len(values)} prompts.")
        body.append(
            (
                arm_name(arm),
                str(len(values)),
                str(slower),
                f"{values[0]:.2f}x ({printable(found[0][0])})",
                *(f"{value:.2f}x" for value in (low, half, high)),
                f"{values[-1]:.2f}x ({printable(found[-1][0])})",
            )
        )
    if not traces:
        return Absent("prompt", "No prompt was answered by the baseline and another arm.")
    return Figure(
        key="prompt",
        says=f"Speed-up of every prompt, in order. {' '.join(says)}",
        traces=traces,
        layout={
            "xaxis": {
                "title": {"text": "share of prompts"},
                "tickformat": ".0%",
                "range": [-0.01, 1.01],
            },
            "yaxis": span([], [value for trace in traces for value in trace["y"]]).axis,
            "shapes": [line_at_1()],
        },
        head=("set-up", "prompts", "slower", "least", "10%", "median", "90%", "most"),
        body=body,
    )


def paired(scene: Scene, arm: str) -> tuple[Mapping[Key, Request], Requests]:
    """The requests of the baseline that stood beside *arm* (on its host), and those of *arm*."""
    own = scene.cases[arm]
    groups = {case.group for case in own}
    baseline = scene.baseline
    beside = [
        case for case in (scene.cases[baseline.arm] if baseline else ()) if case.group in groups
    ]
    theirs, ours = _together(beside), _together(own)
    hosts = hosts_of(beside[0].engines) if beside else {}
    return on_one_host(theirs, ours, hosts, hosts_of(own[0].engines)), ours


def _together(cases: Sequence[MeasuredCase]) -> Requests:
    if len(cases) == 1:
        return cases[0].keyed()
    return {key: record for case in cases for key, record in case.keyed().items()}


def prompt_speedups(
    baseline: Mapping[Key, Request], arm: Mapping[Key, Request]
) -> dict[str, float]:
    """Baseline / arm TPOT of each prompt, geometric mean over its turns, repeats and passes."""
    logs: dict[str, list[float]] = {}
    for key, base, other in pairs_of(baseline, arm):
        a, b = tpot_ms(base), tpot_ms(other)
        if a and b:
            logs.setdefault(key.prompt_id, []).append(math.log(a / b))
    return {prompt: math.exp(sum(found) / len(found)) for prompt, found in logs.items()}


def _thinned(count: int, most: int) -> list[int]:
    """Places in *count* things that are evenly apart: all of them, or *most*, ends included."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


# --- distributions --------------------------------------------------------------------------------


def _known_ttft(record: Request) -> float | None:
    return None if held_up(record) else ttft_ms(record)


MEASURES: dict[str, tuple[str, Callable[[Request], float | None]]] = {
    "latency": ("latency of a request", latency_ms),
    "ttft": ("time to the first token", _known_ttft),
    "tpot": ("time per output token after the first", tpot_ms),
}


def distribution(scene: Scene, measure: str) -> Figure | Absent:
    """The share of requests that took at most so long (ECDF), a line an arm."""
    title, of = MEASURES[measure]
    shown = {row.arm for row in scene.fastest()} | {row.arm for row in scene.rows if not row.k}
    traces: list[Trace] = []
    body = []
    rank: dict[str, int] = {}
    for row in scene.rows:
        values = np.sort(list(_values(scene.cases[row.arm], of)))
        if not len(values):
            continue
        place = rank[row.label] = rank.get(row.label, -1) + 1
        at = _thinned(len(values), MOST_STEPS)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": plot_name(arm_name(row)),
                "x": [round(float(values[i]), 3) for i in (0, *at)],
                "y": [0, *(round((i + 1) / len(values), 5) for i in at)],
                "line": {
                    "color": colour(scene, row.label),
                    "dash": DASHES[place % len(DASHES)],
                    "shape": "hv",
                    "width": 2,
                },
                "visible": True if row.arm in shown or not shown else "legendonly",
                "hovertemplate": "%{y:.0%} within %{x:,.0f} ms",
            }
        )
        marks = np.quantile(values, QUANTILES)
        body.append((arm_name(row), str(len(values)), *(number(float(mark), 1) for mark in marks)))
    if not traces:
        return Absent(measure, "No request was measured.")
    named = {arm_name(row) for row in scene.rows if row.arm in shown}
    medians = " ".join(
        f"{name}: median {half} ms." for name, _, _, half, *_ in body if name in named
    )
    return Figure(
        key=measure,
        says=f"Share of requests by {title}. {medians}",
        traces=traces,
        layout={
            "xaxis": {"title": {"text": f"{title}, ms"}, "rangemode": "tozero"},
            "yaxis": {
                "title": {"text": "share of requests"},
                "tickformat": ".0%",
                "range": [0, 1.03],
            },
        },
        head=("set-up", "requests", *(f"{share:.0%}" for share in QUANTILES)),
        body=body,
    )


def _values(
    cases: Sequence[MeasuredCase], of: Callable[[Request], float | None]
) -> Iterator[float]:
    for case in cases:
        for record in case.keyed().values():
            if record.ok and (value := of(record)) is not None:
                yield value
