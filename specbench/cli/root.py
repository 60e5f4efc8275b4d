"""The app that the commands add themselves to, and its exit codes."""

import os
import sys
from typing import Annotated, NoReturn

import typer

from specbench import __version__
from specbench.cli.shared import examples
from specbench.cli.terminal import say
from specbench.errors import EngineError, SpecbenchError
from specbench.interrupts import (
    EXIT_INTERRUPTED,
    leave,
    raise_interrupts,
    terminal_is_gone,
    was_interrupted,
)

app = typer.Typer(
    name="specbench",
    help="Which speculative decoding set-up makes your model faster, by how much, and is it true?",
    epilog=examples(
        "specbench convert humaneval",
        "specbench convert mt_bench",
        "specbench run --config eagle_k5.yaml",
        "specbench report",
        title="A user's day",
    ),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich's renderers takes twice as long as all the rest
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"specbench {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""
    if debug:
        os.environ["SPECBENCH_DEBUG"] = "1"


def main() -> NoReturn:
    """The console script."""
    raise_interrupts(within=_outcome.__code__)
    try:
        code = _outcome()
    except KeyboardInterrupt:  # before its first line, or while it said how it ended
        code = EXIT_INTERRUPTED
    leave(code)


def _outcome() -> int:
    """Do what the command line says; the exit code."""
    if was_interrupted():
        return EXIT_INTERRUPTED
    try:
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except SpecbenchError as error:
        if os.environ.get("SPECBENCH_DEBUG"):
            raise
        if isinstance(error, EngineError) and error.tail:
            say(error.tail)
        say(f"specbench: {error}")
        return EXIT_INTERRUPTED if was_interrupted() else error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (KeyboardInterrupt, Exception) as error:
        is_gone = isinstance(error, OSError) and terminal_is_gone()
        if not (is_gone or was_interrupted() or isinstance(error, KeyboardInterrupt)):
            raise
        say("specbench: interrupted")
        return EXIT_INTERRUPTED
    return 0
