"""A row of a report's table as tests need it: of nothing measured, unless they say so."""

from typing import Any

from specbench.analysis.metrics import CaseMetrics
from specbench.analysis.rows import Row

NOTHING = CaseMetrics(0, 0, 0, 0, None, None, None, None, None, None)


def plain_row(k: int, **more: Any) -> Row:  # noqa: ANN401  (any field of a row)
    """Vanilla's (k = 0), or that of EAGLE at *k*."""
    method = "eagle" if k else "vanilla"
    facts: dict[str, Any] = {
        "arm": f"eagle-k{k}" if k else "vanilla",
        "label": method,
        "method": method,
        "k": k,
        "prompt_set": "he",
        "part": None,
        "max_tokens": 24,
        "concurrency": 1,
        "repeats": 1,
        "cycles": 1,
        "metrics": NOTHING,
        "speedup": None,
        "is_baseline": not k,
        "flags": (),
        "problem": None,
    }
    return Row(**(facts | more))
