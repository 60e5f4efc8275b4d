"""The models that a model.json names: are they there, and do they fit each other and the vLLM?"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from specbench.triton.places import Places
from specbench.triton.versions import Takes

# level, key, message, hint
Problem = tuple[Literal["problem", "warning", "note"], str | None, str, str | None]


def folder_problems(key: str, ref: str, places: Places) -> Iterator[Problem]:
    """A path with nothing behind it; a hub id can't be looked at."""
    folder = places.of(ref)
    # os.path's functions take any text as a path.
    if folder is None or os.path.isfile(folder / "config.json"):
        return
    if os.path.isfile(folder):  # a GGUF
        return
    if os.path.isdir(folder):
        yield "problem", key, f"{folder} has no config.json: it is no model.", None
        return
    where = "" if str(folder) == ref else f" ({folder})"
    hint = f"If it is a container's, say which folder it is: --mount {_top(ref)}=FOLDER."
    yield "problem", key, f"{ref}{where} is not there.", hint if ref.startswith("/") else None


def _top(ref: str) -> str:
    parts = Path(ref).parts
    return str(Path(*parts[:2])) if len(parts) > 1 else ref


def draft_problems(
    key: str, ref: str, method: str | None, target: object, takes: Takes, places: Places
) -> Iterator[Problem]:
    """A draft that is not there, is of another kind, or of another target."""
    missing = list(folder_problems(key, ref, places))
    yield from missing
    folder = places.of(ref)
    if missing or folder is None:
        yield from _head(key, ref, None, method, takes)
        return
    config = _config(folder)
    yield from _head(key, ref, config, method, takes)
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if method == "eagle" and "eagle3" in architectures.lower():
        yield "warning", key, f"{folder} is an EAGLE-3 head.", "Write method eagle3."
    if method == "eagle3" and architectures and "eagle3" not in architectures.lower():
        yield "warning", key, f"{folder} is no EAGLE-3 head ({architectures}).", None
    theirs = places.of(str(target))
    sizes = (_hidden(_config(theirs)) if theirs else None, _hidden(config))
    is_head = method == "eagle" or "eagle" in ref.lower()
    if is_head and None not in sizes and sizes[0] != sizes[1]:
        message = f"the head is for hidden size {sizes[1]}, the target has {sizes[0]}."
        yield "problem", key, message, "Name the head of this target."


def _head(
    key: str, ref: str, config: Mapping[str, Any] | None, method: str | None, takes: Takes
) -> Iterator[Problem]:
    """What an old release needs of an EAGLE head."""
    is_head = method == "eagle" or (method is None and "eagle" in ref.lower())
    converted = config is not None and config.get("model_type") == "eagle"
    if not is_head or converted:
        return
    if not takes.loads_eagle_repo_heads:
        level: Literal["problem", "warning"] = "problem" if config else "warning"
        hint = "specbench models convert-eagle HEAD OUT --target TARGET"
        yield level, key, f"vLLM {takes.short} loads converted heads only:", hint
    elif takes.tells_eagle_by_its_path and "eagle-" not in ref.lower():
        message = f'vLLM {takes.short} takes {ref} for a draft model: its path has no "eagle-".'
        yield "warning", key, message, "Call its folder EAGLE-… and name it so."


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _hidden(config: Mapping[str, Any]) -> int | None:
    inner = config.get("model") if config.get("model_type") == "eagle" else None
    found = (inner if isinstance(inner, dict) else config).get("hidden_size")
    return found if isinstance(found, int) else None
