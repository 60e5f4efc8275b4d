"""Where a container sees the models: local folders are mounted, hub ids come from the hub's cache."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MODELS = "/models"
HUB_CACHE = "/root/.cache/huggingface"
IS_PATH = re.compile(r"^(/|~|\.{1,2}(/|$))")


def is_local(ref: str) -> bool:
    """Whether *ref* means a folder of this machine and no hub id."""
    return bool(IS_PATH.match(ref)) or os.path.exists(ref)


def inside_name(folder: Path) -> str:
    """A folder's name as a part of a path that needs no quoting."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.name).strip("-.") or "model"


@dataclass
class Mounts:
    """The folders that a container needs, as they are asked for."""

    folders: dict[str, Path] = field(default_factory=dict)
    uses_hub: bool = False

    def inside(self, ref: str, *, prefix: str = "") -> str:
        """What *ref* is called inside; *prefix* stands before the name of a mounted folder."""
        if not is_local(ref):
            self.uses_hub = True
            return ref
        folder = Path(os.path.expanduser(ref)).absolute()
        root = _with_link_targets(folder)
        name = base = prefix + inside_name(folder)
        number = 2
        while self.folders.get(f"{MODELS}/{name}", root) != root:
            name, number = f"{base}-{number}", number + 1
        self.folders[f"{MODELS}/{name}"] = root
        below = folder.relative_to(root).as_posix()
        return f"{MODELS}/{name}" if below == "." else f"{MODELS}/{name}/{below}"


def _with_link_targets(folder: Path) -> Path:
    """The folder to mount so that the links in *folder* lead somewhere inside it.

    The hub's cache holds links from snapshots/ into blobs/ beside it.
    """
    targets = [str(target) for target in _link_targets(folder)]
    real = folder.resolve()
    if not targets or all(Path(target).is_relative_to(real) for target in targets):
        return folder
    return Path(os.path.commonpath([str(folder), *targets]))


def _link_targets(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path.resolve() for path in folder.iterdir() if path.is_symlink())
