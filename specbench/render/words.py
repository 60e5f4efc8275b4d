"""What the numbers come to, in sentences, and as records for scripts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specbench.analysis.cases import Condition
from specbench.analysis.curves import Curve
from specbench.analysis.precision import QUESTIONS
from specbench.analysis.rows import Row
from specbench.analysis.scaling import Scaling, scaling
from specbench.analysis.speedup import Question, Ratio
from specbench.render.columns import printable

GIB, MIB = 1 << 30, 1 << 20


# --- the answer ----------------------------------------------------------------------------------


def headlines(rows: Sequence[Row]) -> list[str]:
    """For each condition: which set-up makes it faster, by how much, and how sure that is.

    A flagged ratio is no headline, nor is one whose interval holds 1.
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
    arms = [(row, row.speedup.tpot) for row in rows if row.speedup and row.speedup.tpot]
    sound = [(row, ratio) for row, ratio in arms if not row.flags and row.problem is None]
    shown = [(row, ratio) for row, ratio in sound if ratio.shown and ratio.value > 1]
    return max(shown, key=lambda pair: pair[1].value, default=None)


def _headline(where: str, rows: Sequence[Row]) -> str:
    arms = [(row, row.speedup.tpot) for row in rows if row.speedup and row.speedup.tpot]
    sound = [row for row, _ in arms if not row.flags and row.problem is None]
    found = fastest(rows)
    of = f"best of {len(arms)} set-ups" if len(arms) > 1 else "the only set-up"
    if not any(ratio.like_these for _, ratio in arms):
        return f"{where}: one prompt has no interval, so nothing is shown."
    if found is None:
        if len(sound) < len(arms):
            return (
                f"{where}: no set-up is shown to be faster ({len(arms) - len(sound)} are flagged)."
            )
        return f"{where}: no set-up of {len(arms)} is shown to be faster."
    row, ratio = found
    parts = []
    if ratio.like_these:
        like = ratio.like_these
        parts.append(f"95% interval on prompts like these {like.low:.2f} to {like.high:.2f}")
    if ratio.this_set:
        parts.append(f"on this prompt set {ratio.this_set.low:.2f} to {ratio.this_set.high:.2f}")
    if row.parity:
        parts.append(f"outputs identical on {row.parity.identical} of {row.parity.compared}")
    return (
        f"{where}: {row.label} k={row.k} is {ratio.value:.2f}x as fast ({', '.join([*parts, of])})."
    )


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
    certain = (
        f", {best.share:.0%} of resamples of {best.prompts} prompts agree"
        if best.share is not None
        else ""
    )
    if best.k:
        said = f"best k = {best.k} of those measured ({best.speedup:.2f}x{certain})"
    else:
        said = "vanilla is faster than every k measured"
        said += f" ({certain.lstrip(', ')})" if certain else ""
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
