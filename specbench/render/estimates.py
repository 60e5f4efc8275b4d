"""What `specbench what-if` prints."""

import json
from collections.abc import Sequence

from specbench.analysis.curves import Estimate
from specbench.render.columns import printable


def as_text(made: Sequence[Estimate]) -> str:
    """A line for each estimate, with what it follows from."""
    lines = []
    for one in made:
        at = one.condition
        lines.append(
            printable(
                f"{one.label} k={one.k} on {at.prompt_set} ({at.max_tokens} tokens, "
                f"{at.load}): τ = {one.tau:g} would be {one.speedup:.2f}x (estimated: a step "
                f"takes {one.step_ms:.1f} ms, vanilla {one.vanilla_ms:.1f} ms; "
                f"break-even τ = {one.step_ms / one.vanilla_ms:.2f})"
            )
        )
    return "\n".join(lines) + "\n"


def as_json(made: Sequence[Estimate]) -> str:
    """The same for scripts."""
    rows = [
        {
            "method": one.label,
            **one.condition._asdict(),
            "k": one.k,
            "tau": one.tau,
            "step_ms": one.step_ms,
            "vanilla_ms": one.vanilla_ms,
            "break_even_tau": one.step_ms / one.vanilla_ms,
            "estimated_speedup": one.speedup,
        }
        for one in made
    ]
    return json.dumps({"schema": 1, "estimates": rows}, indent=1, allow_nan=False) + "\n"
