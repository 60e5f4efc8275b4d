"""Acceptance lengths that others published, to stand beside those measured.

published.json holds them, each with its source. Only chains of drafts are there: a tree's
acceptance length (the EAGLE papers' τ) belongs to no k.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Published:
    """One curve: tokens per target step by k, bonus token included, of a target and its drafts.

    `max_tokens` is the output length it was measured with; None where the source does not say.
    """

    target: str
    drafts: tuple[str, ...]
    method: str
    name: str
    max_tokens: int | None
    acceptance_length: Mapping[int, float]
    source: str
    url: str


@cache
def everything() -> tuple[Published, ...]:
    """All published curves."""
    text = (files(__package__) / "published.json").read_text(encoding="utf-8")
    return tuple(
        Published(
            **{key: value for key, value in entry.items() if key not in _CONVERTED},
            drafts=tuple(entry["drafts"]),
            acceptance_length={int(k): float(v) for k, v in entry["acceptance_length"].items()},
        )
        for entry in json.loads(text)
    )


_CONVERTED = {"drafts", "acceptance_length"}


def beside(config: Mapping[str, Any], max_tokens: int | None) -> list[Published]:
    """The curves for the pairs of target and draft that *config* names.

    Of a source with several output lengths the one of *max_tokens*, else the longest.
    """
    pairs = {(one["method"], one.get("model")) for one in config.get("speculation", ())}
    known = [
        curve
        for curve in everything()
        if curve.target == config["model"]
        and any((curve.method, draft) in pairs for draft in curve.drafts)
    ]
    lengths = {curve.max_tokens for curve in known if curve.max_tokens is not None}
    wanted = max_tokens if max_tokens in lengths else max(lengths, default=None)
    return [curve for curve in known if curve.max_tokens in (None, wanted)]
