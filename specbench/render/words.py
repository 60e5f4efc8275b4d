"""What the numbers come to, in sentences, and as records for scripts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specbench.analysis.cases import Condition
from specbench.analysis.curves import Curve
from specbench.analysis.precision import QUESTIONS
from specbench.analysis.rows import Row, is_sound
from specbench.analysis.scaling import Scaling, scaling
from specbench.analysis.speedup import Question, Ratio
from specbench.render.columns import printable

GIB, MIB = 1 << 30, 1 << 20
FEWEST_PROMPTS = 8  # of fewer, the share of resamples that agree means little
NAMED = 3  # set-ups that a headline says are not shown


# --- the answer ----------------------------------------------------------------------------------


def headlines(rows: Sequence[Row]) -> list[str]:
    """For each condition: which set-up makes it faster, by how much, and how sure that is.

    A flagged ratio is no headline, nor is one whose interval holds 1. It is the interval that holds
    for all set-ups of the condition together: of many that change nothing, one is often shown alone.
    """
    conditions: dict[Condition, list[Row]] = {}
    for row in rows:
        conditions.setdefault(row.condition, []).append(row)
    tokens_vary = len({condition.max_tokens for condition in conditions}) > 1
    loads_vary = len({condition.load for condition in conditions}) > 1
    lines = []
    for condition, of_condition in conditions.items():
        where = condition.prompt_set
        where += f" at {condition.max_tokens} tokens" if tokens_vary else ""
        where += f" at {condition.load}" if loads_vary else ""
        if any(row.speedup and row.speedup.tpot for row in of_condition):
            lines.append(printable(_headline(where, of_condition)))
    return lines


def fastest(rows: Sequence[Row]) -> tuple[Row, Ratio] | None:
    """Of one condition's rows the fastest that is shown to be faster than the baseline, unflagged."""
    return max(_shown(_compared(rows)), key=lambda pair: pair[1].value, default=None)


def _compared(rows: Iterable[Row]) -> list[tuple[Row, Ratio]]:
    return [(row, ratio) for row in rows if row.speedup and (ratio := row.speedup.tpot)]


def _shown(arms: Sequence[tuple[Row, Ratio]]) -> list[tuple[Row, Ratio]]:
    """Those of all *arms* tried that are shown to be faster, whichever of them is asked about."""
    tried = [(row, ratio, ratio.among(len(arms))) for row, ratio in arms if is_sound(row)]
    return [(row, ratio) for row, ratio, interval in tried if interval and interval.low > 1]


def _headline(where: str, rows: Sequence[Row]) -> str:
    arms = _compared(rows)
    if not any(ratio.like_these for _, ratio in arms):
        return f"{where}: one prompt has no interval, so nothing is shown."
    shown = _shown(arms)
    if not shown:
        return f"{where}: no set-up of {len(arms)} is shown to be faster{_why_none(arms)}."
    row, ratio = max(shown, key=lambda pair: pair[1].value)
    parts = [_rank(len(shown), len(arms)), _together(ratio, len(arms))]
    if row.parity:
        parts.append(f"outputs identical on {row.parity.identical} of {row.parity.compared}")
    parts += _above(ratio, arms, shown)
    return f"{where}: {_name(row)} is {_times(row, ratio)} ({'; '.join(parts)})."


def _name(row: Row) -> str:
    return f"{row.label} k={row.k}" if row.k else row.arm


def _times(row: Row, ratio: Ratio) -> str:
    """By TPOT, and what that comes to for whole requests."""
    said = f"{ratio.value:.2f}x as fast by TPOT"
    latency, total = (row.speedup.latency, row.speedup.total_time) if row.speedup else (None, None)
    if latency is not None:
        return f"{said}, {latency.value:.2f}x by latency"
    return said if total is None else f"{said}, {total:.2f}x by total time"


def _rank(shown: int, arms: int) -> str:
    if arms == 1:
        return "the only set-up"
    if shown == 1:
        return f"the only one of {arms} set-ups that is shown to be faster"
    return f"the fastest of the {shown} that are shown to be faster, of {arms} set-ups"


def _together(ratio: Ratio, arms: int) -> str:
    said = "95% intervals" if arms == 1 else f"95% intervals of all {arms} together"
    on = []
    if like := ratio.among(arms):
        on.append(f"on prompts like these {like.low:.2f} to {like.high:.2f}")
    if these := ratio.among(arms, "this_set"):
        on.append(f"on this prompt set {these.low:.2f} to {these.high:.2f}")
    return f"{said} {', '.join(on)}"


def _above(
    best: Ratio, arms: Sequence[tuple[Row, Ratio]], shown: Sequence[tuple[Row, Ratio]]
) -> list[str]:
    """What measured faster than the best that is shown, and is not shown itself."""
    apart = [(row, ratio) for row, ratio in arms if is_sound(row) and (row, ratio) not in shown]
    above = sorted(
        ((ratio.value, _name(row)) for row, ratio in apart if ratio.value > best.value),
        reverse=True,
    )
    if not above:
        return []
    said = [f"{name} {value:.2f}x" for value, name in above[:NAMED]]
    more = f" and {len(above) - NAMED} more" if len(above) > NAMED else ""
    return [f"measured faster but not shown: {', '.join(said)}{more}"]


def _why_none(arms: Sequence[tuple[Row, Ratio]]) -> str:
    """What besides wide intervals keeps every set-up from being shown."""
    why = []
    if flagged := sum(not is_sound(row) for row, _ in arms):
        why.append(f"{flagged} {'is' if flagged == 1 else 'are'} flagged")
    alone = sum(is_sound(row) and bool(ratio.shown) and ratio.value > 1 for row, ratio in arms)
    if alone:
        why.append(f"{alone} would be, had no other been tried")
    return f" ({', '.join(why)})" if why else ""


def precision_lines(asked: Mapping[str, Any] | None, rows: Sequence[Row]) -> list[str]:
    """How well each speed-up is known, beside what the config's `precision` *asked* for."""
    if not asked:
        return []
    question: Question = asked["of"]
    lines = []
    for row in rows:
        ratio = row.speedup.tpot if row.speedup and row.part is None else None
        interval = ratio.interval(question) if ratio else None
        if interval is None:
            continue
        reached = "reached" if interval.half_width <= asked["within"] else "not reached"
        lines.append(
            printable(
                f"{row.arm} on {row.prompt_set}: ±{interval.half_width:.1%} {QUESTIONS[question]} "
                f"after {row.cycles} passes (±{asked['within']:.1%} asked for: {reached})"
            )
        )
    return lines


SHORT = {"latency_ms": "latency", "ttft_ms": "TTFT", "tpot_ms": "TPOT", "tokens_per_s": "tok/s"}


def beside_lines(rows: Sequence[Row]) -> list[str]:
    """Where a load generator's own figures are not ours: those over 2% apart, or that none is."""
    lines, tools = [], set()
    for row in rows:
        tools |= {f"{one.tool} {one.version}" for one in row.beside}
        apart = [one for one in row.beside if not one.agrees]
        if apart:
            said = ", ".join(
                f"{SHORT.get(one.figure, one.figure)} {one.theirs:.4g} against {one.ours:.4g} here "
                f"({one.difference:+.1%})"
                for one in apart
            )
            lines.append(f"{row.arm} on {row.prompt_set}: {apart[0].tool} itself says {said}")
    if tools and not lines:
        lines.append(f"{' and '.join(sorted(tools))}: its own figures are these within 2%")
    return [printable(line) for line in lines]


# --- why -----------------------------------------------------------------------------------------


def explanations(rows: Sequence[Row], curves: Sequence[Curve]) -> list[str]:
    """Outputs that differ, best k, step times, prediction, concurrency and costs, a line each."""
    several = [curve for curve in curves if curve.model and len(curve.model.step_ms) > 1]
    lines = [*_difference_lines(rows), *_source_lines(rows)]
    lines += [_curve_line(curve) for curve in several if curve.best]
    lines += [_scaling_line(one) for one in scaling(rows)]
    lines += [*_cost_lines(rows), *_machine_lines(rows)]
    return [printable(line) for line in lines]


def _source_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Said where acceptance is no count of the engine's."""
    found = (row.metrics.acceptance for row in rows if row.k)
    if any(acceptance and acceptance.source == "chunks" for acceptance in found):
        yield (
            "τ and p are from chunks: the server counts no drafts, so tokens per streamed chunk after the "
            "first are taken for tokens per step (up to k tokens a request short, where its end cuts a step)"
        )


def _difference_lines(rows: Iterable[Row]) -> Iterator[str]:
    """Where outputs part from the baseline's, and what is said there the first time."""
    for row in rows:
        first = row.parity.earliest if row.parity else None
        if row.parity and first:
            example = first.told("the baseline", row.arm)
            yield f"{row.arm} on {row.prompt_set}: {row.parity.told()} (e.g. {example})"


def _curve_line(curve: Curve) -> str:
    best, model = curve.best, curve.model
    assert best is not None
    assert model is not None
    at = curve.condition
    where = f"{curve.label} on {at.prompt_set} ({at.max_tokens} tokens, {at.load})"
    if best.share is None or best.prompts < FEWEST_PROMPTS:
        certain = "too few prompts to say how sure"
    else:
        certain = f"{best.share:.0%} of resamples of {best.prompts} prompts agree"
    certain += ", every k is flagged" if best.flagged else ""
    if best.k:
        mark = "?" if best.flagged else ""
        said = f"best k = {best.k} of those measured ({best.speedup:.2f}x{mark}, {certain})"
    else:
        said = f"vanilla is faster than every k measured ({certain})"
    if model.line and model.verify_overhead is not None and model.draft_cost is not None:
        said += (
            f"; in vanilla steps of {model.vanilla_ms:.1f} ms a verification takes "
            f"{model.verify_overhead:.2f} and a drafted token {model.draft_cost:.2f}"
        )
    if curve.predicted_best is not None and curve.predicted_best.k:
        found = curve.predicted_best
        said += f"; predicted best k = {found.k} ({found.speedup:.2f}x, predicted)"
    return f"{where}: {said}"


def _scaling_line(one: Scaling) -> str:
    by = ", ".join(f"{at}: {speed:.2f}x (k={k})" for at, (k, speed) in one.best.items())
    said = str(one.crossing) if one.crossing else "pays at every concurrency measured"
    ready = [list(entry) for entry in one.schedule]
    return (
        f"{one.label} on {one.prompt_set} by concurrency: {by}; {said}; for vLLM's dynamic "
        f"speculation: num_speculative_tokens_per_batch_size: {ready}"
    )


def _cost_lines(rows: Iterable[Row]) -> Iterator[str]:
    """What speculation takes: once for each arm, since its engines serve all its rows."""
    seen = set()
    for row in rows:
        cost = row.cost
        if cost is None or not row.k or row.arm in seen:
            continue
        seen.add(row.arm)
        parts = []
        if cost.memory_change_bytes is not None:
            parts.append(f"{cost.memory_change_bytes / MIB:+,.0f} MiB of memory")
        if cost.kv_cache_change is not None and cost.kv_cache_tokens is not None:
            parts.append(
                f"KV cache {cost.kv_cache_change:+.0%} (room for {cost.kv_cache_tokens:,.0f} tokens)"
            )
        if cost.startup_s is not None:
            parts.append(f"start-up {cost.startup_s:.0f} s")
        ttft = row.speedup.ttft if row.speedup else None
        if ttft:
            parts.append(f"TTFT x{1 / ttft.value:.2f} on {row.prompt_set}")
        if parts:
            yield f"{row.arm} costs: {', '.join(parts)}"


SOURCES = {
    "gpu counter": "the GPU's energy counter",
    "gpu power": "the GPU's power, a mean over a second",
    "cpu counter": "the CPU packages' energy counter, all that the machine does included",
}


def _machine_lines(rows: Iterable[Row]) -> Iterator[str]:
    """The machine during the requests, over all rows: energy, clock, heat, others."""
    seen = [row.meanwhile for row in rows if row.meanwhile]
    if not seen:
        return
    parts = []
    if powers := [one.power_w for one in seen if one.power_w is not None]:
        sources = {SOURCES[one.energy_source] for one in seen if one.energy_source}
        parts.append(f"power {_range(powers, ',.0f')} W ({' and '.join(sorted(sources))})")
    if clocks := [one.clock.mhz for one in seen if one.clock]:
        parts.append(f"clock {_range(clocks, ',.0f')} MHz")
    if heat := [one.max_temperature_c for one in seen if one.max_temperature_c is not None]:
        parts.append(f"up to {max(heat):.0f} °C")
    if shares := [one.throttled_share for one in seen if one.throttled_share is not None]:
        parts.append(f"throttled in {_range(shares, '.0%')} of samples")
    if memory := [one.gpu_memory_bytes for one in seen if one.gpu_memory_bytes is not None]:
        parts.append(f"up to {max(memory) / GIB:,.1f} GiB of GPU memory in use")
    if others := [one.others_cores for one in seen if one.others_cores is not None]:
        parts.append(f"others took {_range(others, '.2f')} cores")
    if parts:
        yield f"the machine meanwhile: {', '.join(parts)}; a sample every {seen[0].resolution_ms:,.0f} ms"


def _range(values: Sequence[float], form: str) -> str:
    """The least to the most, once where they read the same."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


# --- for scripts ---------------------------------------------------------------------------------


def curve_record(curve: Curve) -> dict[str, Any]:
    """A curve as JSON takes it."""
    model = curve.model
    return {
        "label": curve.label,
        "method": curve.method,
        **curve.condition._asdict(),
        "vanilla_step_ms": model.vanilla_ms if model else None,
        "step_ms": {str(k): ms for k, ms in model.step_ms.items()} if model else {},
        "tokens_per_step": {str(k): tau for k, tau in model.tau.items()} if model else {},
        "verify_ms": model.line.verify_ms if model and model.line else None,
        "draft_ms": model.line.draft_ms if model and model.line else None,
        "line_residual": model.line.residual if model and model.line else None,
        "steps_mixed": model.mixed if model else None,
        "best": asdict(curve.best) if curve.best else None,
        "predicted": {str(k): asdict(point) for k, point in curve.predicted.items()},
        "predicted_best": asdict(curve.predicted_best) if curve.predicted_best else None,
        "not_predicted": curve.not_predicted,
    }


def scaling_record(one: Scaling) -> dict[str, Any]:
    """What concurrency does, as JSON takes it."""
    return {
        "label": one.label,
        "prompt_set": one.prompt_set,
        "max_tokens": one.max_tokens,
        "best": [
            {"concurrency": at, "k": k, "speedup": speed} for at, (k, speed) in one.best.items()
        ],
        "crossing_concurrency": one.crossing.concurrency if one.crossing else None,
        "already_slower": one.crossing.already if one.crossing else None,
        "num_speculative_tokens_per_batch_size": [list(entry) for entry in one.schedule],
    }
