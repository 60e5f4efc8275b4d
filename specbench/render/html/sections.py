"""The sections of the page in reading order: what each shows and how to read it."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench.analysis.rows import Row
from specbench.analysis.scaling import scaling
from specbench.render.html import acceptance, concurrency, parts, requests, speedups, step_time
from specbench.render.html.figures import Absent, Figure, Scene

Draw = Callable[[Scene], Figure | Absent]


@dataclass(frozen=True)
class Section:
    """A part of the page: its title (`short` in the list of sections), how to read its figures, and
    what draws them.
    """

    key: str
    short: str
    title: str
    reading: str
    draws: Sequence[Draw]


SECTIONS = (
    Section(
        key="speedup",
        short="Speed-up",
        title="Speed-up against k",
        reading=(
            "How many times as fast as the baseline an output token comes, at each number of drafted "
            "tokens. Bars are 95% intervals on prompts like these; a hollow marker is flagged. Dashed: "
            "what vanilla, k = 1 and the largest k alone predict."
        ),
        draws=(speedups.speedup,),
    ),
    Section(
        key="acceptance",
        short="Acceptance",
        title="Acceptance length against k",
        reading=(
            "Tokens that a step of the target emits, its bonus token included. No more than k + 1 are "
            "possible (dotted). Below its break-even line an arm is slower than vanilla."
        ),
        draws=(acceptance.acceptance,),
    ),
    Section(
        key="positions",
        short="Positions",
        title="Acceptance by position (p_i)",
        reading=(
            "Share of all drafts in which position i was accepted. Where it falls off, drafting "
            "further costs time and brings nothing. The thick line is each method's largest k."
        ),
        draws=(acceptance.positions,),
    ),
    Section(
        key="steps",
        short="Step time",
        title="Where the time of a step goes",
        reading=(
            "A step of the target under speculation verifies k drafted tokens at once (T_v) after "
            "drafting them one by one (k·T_d); both are the line through the measured steps, and "
            "the rest is what that line leaves over. The upright mark is the step as measured."
        ),
        draws=(step_time.steps,),
    ),
    Section(
        key="parts",
        short="Kinds",
        title="Kinds of prompts",
        reading=(
            "The speed-up within each part of the requests, of each method's fastest k, with 95% "
            "intervals."
        ),
        draws=(
            lambda scene: parts.by_part(scene, "category"),
            lambda scene: parts.by_part(scene, "turn"),
            lambda scene: parts.by_part(scene, "length"),
        ),
    ),
    Section(
        key="position",
        short="Along the output",
        title="Along the output",
        reading=("The speed-up of the tokens at each distance from the beginning of the answer."),
        draws=(parts.by_position,),
    ),
    Section(
        key="prompt",
        short="By prompt",
        title="Prompt by prompt",
        reading=(
            "Every prompt's own speed-up, from the smallest to the largest. How far they spread is "
            "what another set of prompts may do to the headline."
        ),
        draws=(requests.by_prompt,),
    ),
    Section(
        key="times",
        short="Latency",
        title="Latency and time to first token",
        reading=(
            "The share of requests that took at most so long. A line further left is faster; set-ups "
            "other than the fastest are off until you choose them in the legend."
        ),
        draws=tuple(
            functools.partial(requests.distribution, measure=measure)
            for measure in ("latency", "ttft", "tpot")
        ),
    ),
)


def sections_of(rows: Sequence[Row]) -> list[Section]:
    """The sections of a run's page, in order; *rows* are those of all its conditions."""
    scaled = scaling(rows)
    return [
        *SECTIONS,
        Section(
            key="concurrency",
            short="Concurrency",
            title="As concurrency grows",
            reading=(
                "The speed-up of each method's best k with more requests in flight. Batches fill "
                "the hardware, and speculation stops paying where the line falls below 1."
            ),
            draws=(functools.partial(concurrency.concurrency, found=scaled, rows=rows),),
        ),
    ]
