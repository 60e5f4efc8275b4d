"""What a model.json says, and what is wrong with it for one vLLM."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench import vllm_names
from specbench.triton.drafts import Problem, draft_problems, folder_problems
from specbench.triton.places import Places
from specbench.triton.versions import FLAT, FLAT_KEYS, NESTED, Takes, release

SPECULATES = frozenset(
    {"speculative_config", "spec_method", "spec_model", "spec_tokens", *FLAT_KEYS}
)
NEEDS_DRAFT = ("eagle", "eagle3", "draft_model", "medusa", "mlp_speculator")


class BadJsonError(ValueError):
    """A model.json that cannot be looked into; *line* is the physical line, from 1."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


@dataclass(frozen=True)
class Said:
    """The engine arguments of a model.json."""

    text: str
    values: dict[str, Any]
    twice: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> "Said":
        """Raises BadJsonError: missing, no JSON, or no mapping."""
        twice: list[str] = []

        def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
            keys = [key for key, _ in found]
            twice.extend({key for key in keys if keys.count(key) > 1})
            return dict(found)

        try:
            text = path.read_text(encoding="utf-8")
            values = json.loads(text, object_pairs_hook=pairs)
        except FileNotFoundError:
            raise BadJsonError("is missing: vLLM's engine arguments stand there.") from None
        except json.JSONDecodeError as error:
            raise BadJsonError(f"not valid JSON: {error.msg}.", error.lineno) from None
        except (OSError, UnicodeDecodeError, RecursionError) as error:
            raise BadJsonError(f"cannot be read: {error}.") from None
        if not isinstance(values, dict):
            raise BadJsonError("should be a mapping of vLLM's engine arguments.", 1)
        return cls(text, values, tuple(twice))

    def line(self, key: str | None) -> int | None:
        """Where *key* stands first; of a.b where b does behind a, or else a."""
        at, line = 0, None
        for part in (key or "").split("."):
            found = re.compile(rf'"{re.escape(part)}"\s*:').search(self.text, at) if part else None
            if found is None:
                break
            at, line = found.end(), self.text.count("\n", 0, found.start()) + 1
        return line

    def count(self, key: str) -> int:
        """A whole number, 1 where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else 1


def problems(said: Said, takes: Takes, places: Places) -> Iterator[Problem]:
    """All that is wrong with the arguments for a vLLM that *takes* these."""
    for key in said.twice:
        yield "warning", key, "stands twice; the last one counts.", None
    for key in said.values:
        if key not in takes.engine_args:
            yield _unknown(key, said, takes)
    model = said.values.get("model")
    if model is None:
        yield "warning", "model", "is missing: vLLM would load its default model.", None
    elif not isinstance(model, str):
        yield "problem", "model", "should be a path or a hub id.", None
    else:
        yield from folder_problems("model", model, places)
    if said.values.get("disable_log_stats") is True:
        yield "note", "disable_log_stats", "vLLM's own statistics are off.", None
    nested = said.values.get("speculative_config")
    if nested is not None and not isinstance(nested, dict):
        hint = "In model.json it is written out, without quotes around it."
        yield "problem", "speculative_config", "should be a mapping.", hint
    elif nested is not None:
        yield from _nested(nested, said, takes, places)
    elif takes.is_flat or "speculative_model" in said.values:
        yield from _flat(said, takes, places)


def _unknown(key: str, said: Said, takes: Takes) -> Problem:
    """An argument that this vLLM does not know, with its new place."""
    if key == "speculative_config":
        hint = f"Write {', '.join(sorted(FLAT.values()))} as keys of their own."
        return "problem", key, f"vLLM {takes.short} does not know it yet.", hint
    if key in FLAT_KEYS and not takes.is_flat:
        now = NESTED[key]
        message = f"vLLM {takes.short} does not know it any more."
        if key == "speculative_model" and said.values[key] == "[ngram]":
            return "problem", key, message, 'Write "method": "ngram" in speculative_config.'
        hint = f"It is speculative_config.{now} now." if now else "It has no successor."
        return "problem", key, message, f"{hint}{_k_as_written(key, said)}"
    renamed: Mapping[str, str | None] = vllm_names.RENAMED_ENGINE_ARGS
    if key in renamed:
        now = renamed[key]
        hint = f"Write {now}." if now else "Leave it out: it has no successor."
        return "problem", key, f"vLLM {takes.short} does not know it any more.", hint
    hint = _meant(key, takes.engine_args) or "Leave it out."
    return "problem", key, f"vLLM {takes.short} has no such engine argument.", hint


def _meant(name: str, known: Collection[str]) -> str | None:
    close = vllm_names.nearest(name, known)
    return f"Did you mean {close}?" if close else None


def _k_as_written(key: str, said: Said) -> str:
    """The whole block, said once, with the key that names the draft."""
    if key != "speculative_model":
        return ""
    block = {"method": _guessed_method(said.values), "model": said.values[key]}
    for old, value in said.values.items():
        new = NESTED.get(old)
        if old in FLAT_KEYS and new is not None and old != key:
            block[new] = value
    return f' In all: "speculative_config": {json.dumps(block)}'


def _guessed_method(values: Mapping[str, Any]) -> str:
    name = str(values.get("speculative_model", "")).lower()
    if "eagle3" in name or "eagle-3" in name:
        return "eagle3"
    return "eagle" if "eagle" in name else "draft_model"


def _nested(
    block: Mapping[str, Any], said: Said, takes: Takes, places: Places
) -> Iterator[Problem]:
    """`speculative_config`."""
    for key in block:
        if takes.is_flat or key in takes.speculation_keys:
            continue
        where, message = f"speculative_config.{key}", f"vLLM {takes.short} has no such key there."
        if NESTED.get(key):
            yield "problem", where, message, f"Write {NESTED[key]}."
        elif key in NESTED:
            yield "problem", where, message, "Leave it out: it has no successor."
        else:
            yield "problem", where, message, _meant(key, takes.speculation_keys)
    method, draft = block.get("method"), block.get("model")
    if method is not None and not isinstance(method, str):
        yield "problem", "speculative_config.method", "should be a name.", None
        method = None
    elif method is None:
        hint = "Write it, so that vLLM does not guess from the draft's name."
        yield "warning", "speculative_config", "has no method.", hint
    elif method not in takes.methods and not takes.is_flat:
        meant = _meant(method, takes.methods)
        message = f"vLLM {takes.short} can't do {method}."
        yield "problem", "speculative_config.method", message, meant
    if method in NEEDS_DRAFT and not isinstance(draft, str):
        yield (
            "problem",
            "speculative_config.model",
            f"{method} needs a draft: path or hub id.",
            None,
        )
    model = said.values.get("model")
    yield from _k("speculative_config.num_speculative_tokens", block.get("num_speculative_tokens"))
    if isinstance(draft, str):
        yield from draft_problems("speculative_config.model", draft, method, model, takes, places)


def _flat(said: Said, takes: Takes, places: Places) -> Iterator[Problem]:
    """Speculation as engine arguments."""
    draft = said.values.get("speculative_model")
    if draft is None:
        for key in sorted(said.values.keys() & FLAT_KEYS):
            yield "problem", key, "does nothing without speculative_model.", None
        return
    model = said.values.get("model")
    yield from _k("num_speculative_tokens", said.values.get("num_speculative_tokens"))
    if draft == "[ngram]":
        if takes.is_flat and "ngram_prompt_lookup_max" not in said.values:
            yield "problem", "speculative_model", "[ngram] needs ngram_prompt_lookup_max.", None
        return
    if not isinstance(draft, str):
        yield "problem", "speculative_model", "should be a path or a hub id.", None
        return
    yield from draft_problems("speculative_model", draft, None, model, takes, places)
    if release(takes.vllm) < (0, 6) and said.values.get("use_v2_block_manager") is not True:
        hint = 'Write "use_v2_block_manager": true.'
        yield "problem", "speculative_model", f"vLLM {takes.short} needs its v2 blocks.", hint


def _k(key: str, k: object) -> Iterator[Problem]:
    if k is None:
        yield "problem", key, "is missing.", "Write how many tokens to draft, e.g. 3."
    elif not isinstance(k, int) or isinstance(k, bool) or k < 1:
        yield "problem", key, f"should be a whole number from 1, not {json.dumps(k)}.", None
