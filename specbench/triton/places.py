"""Where the paths in a model.json lie on this machine."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from specbench.errors import UserError
from specbench.triton.paths import IS_PATH


class Places:
    """Paths of a container and the folders behind them, as `docker run -v` pairs them."""

    def __init__(self, mounts: Mapping[str, str]) -> None:
        self.mounts = {PurePosixPath(inside): Path(path) for inside, path in mounts.items()}

    @classmethod
    def read(cls, pairs: list[str], known: Mapping[str, str] | None = None) -> "Places":
        """From `INSIDE=FOLDER` pairs, which stand over those that are *known*.

        Raises:
            UserError: a pair that is none.
        """
        found = dict(known or {})
        for pair in pairs:
            inside, equals, path = pair.partition("=")
            if not equals or not inside.startswith("/") or not path:
                raise UserError(f"--mount {pair}: write INSIDE=FOLDER, e.g. /hf-models=models")
            found[inside] = path
        return cls(found)

    def of(self, ref: str) -> Path | None:
        """The folder that the path *ref* is on this machine, there or not; None for a hub id."""
        inside = PurePosixPath(ref)
        for start, path in self.mounts.items():
            if inside.is_relative_to(start):
                return path / inside.relative_to(start)
        here = os.path.expanduser(ref)  # this and os.path.exists take any text, Path's do not
        if IS_PATH.match(ref) or os.path.exists(here) or ref.count("/") > 1:
            return Path(here)
        return None
