"""What the terminal is like, and what goes to standard error."""

import os
import sys
from contextlib import suppress
from typing import Any

import typer


def terminal() -> tuple[int, bool]:
    """Columns, and whether colour is wanted there."""
    import shutil

    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    # A file has no width to keep to: everything fits into 170.
    fallback = 80 if sys.stdout.isatty() else 170
    return shutil.get_terminal_size((fallback, 24)).columns, colour


def is_plain() -> bool:
    """Whether the terminal's encoding has no block characters."""
    try:
        "▁█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def stderr() -> Any:  # noqa: ANN401  (a rich Console; rich is not imported here)
    """Standard error, for progress that lasts."""
    from rich.console import Console

    from specbench.render.progress import Lasting

    lasting: Any = Lasting(sys.stderr)
    return Console(file=lasting)


def say(text: str) -> None:
    """On standard error, where text of servers, logs and files cannot move the cursor."""
    from specbench.errors import without_controls

    with suppress(OSError):  # a terminal that was closed, a pipe that nobody reads
        typer.echo(without_controls(text), err=True)
