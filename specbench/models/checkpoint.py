"""The tensors of a checkpoint folder: read from any of its usual files, written whole or not at all.

Pickled files are read with `weights_only`: they cannot run code.
"""

import json
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from specbench.errors import StoreError, UserError

Tensors = dict[str, Any]  # torch's tensors: torch is imported where it is needed


def require_torch() -> None:
    """Raise UserError where torch or safetensors is missing."""
    try:
        import safetensors.torch  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"Converting needs {error.name}.", hint='Install it: pip install "specbench[demo]".'
        ) from None


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        UserError: missing, or no JSON mapping.
    """
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing.", hint="Name the folder of a checkpoint, downloaded whole."
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} should be a mapping.")
    return found


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: one, or the shards that an index names.

    Raises:
        UserError: there are none, or a shard is missing.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not found:
        raise UserError(
            f"{folder} holds no weights.", hint="It needs model.safetensors or pytorch_model.bin."
        )
    return found


def _shards(index: Path) -> list[Path]:
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        found = [index.parent / Path(name).name for name in sorted(names)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index} is no index of weights.") from None
    for path in found:
        if not path.is_file():
            raise UserError(f"{path} is missing; {index.name} names it.")
    return found


def read_tensors(
    folder: Path, wanted: Callable[[str], bool] = lambda _: True
) -> tuple[Tensors, dict[str, str]]:
    """The tensors whose names are *wanted*, and what the safetensors files say beside them.

    Raises:
        UserError: a file is no checkpoint, or holds more than tensors.
    """
    require_torch()
    tensors: Tensors = {}
    beside: dict[str, str] = {}
    for path in weight_files(folder):
        read = _safetensors if path.suffix == ".safetensors" else _pickled
        found, metadata = read(path, wanted)
        if twice := sorted(tensors.keys() & found.keys()):
            raise UserError(f"{path}: {twice[0]} stands in another file as well.")
        tensors |= found
        beside |= metadata
    return tensors, beside


def _safetensors(path: Path, wanted: Callable[[str], bool]) -> tuple[Tensors, dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if wanted(name)]  # noqa: SIM118  (no mapping)
            return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is not safetensors: {error}.", hint=_pointer(path)) from None


def _pickled(path: Path, wanted: Callable[[str], bool]) -> tuple[Tensors, dict[str, str]]:
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles that it refuses anyway
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} is not tensors alone, and anything else could run code: not loaded.",
            hint=_pointer(path) or "Get the checkpoint as safetensors.",
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise UserError(f"{path} is no checkpoint: {first}.", hint=_pointer(path)) from None
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise UserError(f"{path} should be a mapping of names to tensors.")
    return {name: tensor for name, tensor in found.items() if wanted(name)}, {}


def _pointer(path: Path) -> str | None:
    """What to do about a file that Git LFS has not replaced yet."""
    with path.open("rb") as file:
        is_pointer = file.read(20).startswith(b"version https://git-")
    return "It is a Git LFS pointer: run `git lfs pull` in its folder." if is_pointer else None


def write_checkpoint(
    out: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    pickled: bool = False,
    beside: Mapping[str, str] | None = None,
    also: Sequence[Path] = (),
) -> None:
    """A new folder *out* with config.json, one file of weights, and copies of the files *also*.

    Raises:
        UserError: *out* is there already.
        StoreError: the disk is full or read-only; nothing half-written stays.
    """
    require_torch()
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    out = out.absolute()
    if out.exists() and not (out.is_dir() and not os.listdir(out)):
        raise UserError(f"{out} is there already.", hint="Name a folder that is not, or empty it.")
    draft: Path | None = None
    # A pickle may hold one tensor under two names, or a view of a larger one; safetensors may not.
    own = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        draft.chmod(0o755)
        text = json.dumps(dict(config), indent=1) + "\n"
        (draft / "config.json").write_text(text, encoding="utf-8")
        if pickled:
            torch.save(own, draft / "pytorch_model.bin")
        else:
            metadata = {"format": "pt", **(beside or {})}
            save_file(own, draft / "model.safetensors", metadata=metadata)
            (draft / "model.safetensors").chmod(0o644)
        for path in also:
            shutil.copyfile(path, draft / path.name)
        for path in draft.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        draft.rename(out)
    except (OSError, SafetensorError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise StoreError(f"{out} can't be written: {why}.") from None
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
