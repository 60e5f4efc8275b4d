"""What would a head with this acceptance length give here? By a run's step times, or by trying.

vLLM's synthetic rejection sampling accepts drafts at a set rate whatever they say, so that a real
engine shows the speed of a head that does not exist yet. What it writes is noise, and its rows are
flagged: they never stand beside real ones as if they were.
"""

from typing import Any

from specbench.config import Config
from specbench.engines.installation import Installation
from specbench.errors import UserError

REFUSAL = "Synthetic acceptance not supported with CPU"  # an assertion in vLLM 0.32's CPU kernels
METHOD, LENGTH = "rejection_sample_method", "synthetic_acceptance_length"


def synthetic_config(
    config: Config, installation: Installation, *, label: str, k: int, tau: float
) -> Config:
    """*config* with one arm, *label* at *k*, held at *tau* tokens a step by vLLM.

    Raises:
        UserError: the config has no such arm, or this vLLM has no synthetic acceptance.
    """
    lacking = LENGTH not in installation.names.speculation_keys
    if lacking or _cpu_build_refuses(installation):
        build = "on a CPU " if not lacking else ""
        raise UserError(
            f"vLLM {installation.version} cannot hold acceptance at a set length {build}({LENGTH}).",
            hint="Leave out --measure: the estimate by step times needs no engine.",
        )
    chosen = [one for one in config.speculation if one.label == label]
    if not chosen:
        there = ", ".join(one.label for one in config.speculation) or "none"
        raise UserError(f"The run has no method {label!r}; there are: {there}.")
    options: dict[str, Any] = {**chosen[0].options, METHOD: "synthetic", LENGTH: tau}
    held = chosen[0].model_copy(
        update={"k": (k,), "options": options, "choose_k": False, "name": f"synthetic-{label}"}
    )
    return config.model_copy(
        update={"speculation": (held,), "name": "what-if", "repeats": 1, "precision": None}
    )


def _cpu_build_refuses(installation: Installation) -> bool:
    """Whether this build's sampling kernels would die of it, by what their source says."""
    if not installation.is_cpu:
        return False
    kernels = installation.package / "utils" / "cpu_triton_utils.py"
    try:
        return REFUSAL in kernels.read_text(encoding="utf-8")
    except OSError:
        return False
