"""What several commands take or do: options, completions, the ends of help pages."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.errors import UserError

if TYPE_CHECKING:
    from specbench.config import Config
    from specbench.store import RunStore


def run_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """For the shell: the ids of runs."""
    folder = Path(ctx.params.get("results") or os.environ.get("SPECBENCH_RESULTS") or "results")
    ids = {path.parent.name for path in folder.glob("*/run.json")}
    return sorted(id for id in ids if id.startswith(incomplete))


def config_names(incomplete: str) -> list[str]:
    """For the shell: the names of configs, here and shipped."""
    here = Path(__file__).parents[1]
    folders = (Path("configs"), here / "shipped_configs", here.parent / "configs")
    names = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    return sorted(name for name in names if name.startswith(incomplete))


Results = Annotated[
    Path, typer.Option("--results", envvar="SPECBENCH_RESULTS", help="Where runs are kept.")
]
Datasets = Annotated[
    Path, typer.Option("--datasets", envvar="SPECBENCH_DATASETS", help="Where prompt sets are.")
]
ConfigName = Annotated[
    str | None,
    typer.Option(
        "--config",
        "-c",
        help="A config file, or the name of one.",
        autocompletion=config_names,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. speculation.k=3."),
]
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's id or folder.", autocompletion=run_ids),
]


def examples(*commands: str, title: str = "Examples") -> str:
    """The end of a command's help: a line each. tests/test_help_examples.py runs all of them."""
    return "\n".join(["\b", f"{title}:", *(f"  {command}" for command in commands)])


def one_of(flag: str, value: str | None, allowed: tuple[str, ...]) -> Any:  # noqa: ANN401
    """*value*, if it is one of what *flag* allows (or was not given); UserError if not."""
    if value is not None and value not in allowed:
        raise UserError(f"{flag} {value}: write {' or '.join(allowed)}.")
    return value


def numbers_of(flag: str, text: str, *, least: float) -> list[float]:
    """The numbers, with commas between, that were given for *flag*; UserError where they are none."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(least <= number < 1e6 for number in numbers):
        raise UserError(f"{flag} {text}: write numbers from {least:g} up, e.g. {flag} 1,5.")
    return numbers


def load_config(name: str | None, overrides: list[str] | None) -> "tuple[Path, Config]":
    """The config of that name and where it is; UserError where there is none."""
    from specbench import config as configs

    if name is None:
        raise UserError("Name a config: specbench run --config demo.yaml (or --resume a run).")
    path = configs.find(name)
    return path, configs.load(path, overrides or ())


def folder_of(given: Path, results: Path) -> Path:
    """A run's folder from a path or a bare id."""
    return given if given.exists() or len(given.parts) > 1 else results / given


def vanilla_of(store: "RunStore") -> str | None:
    """The arm that a run's speed-ups are over, if it has one."""
    arms: list[str] = store.document["arms"]
    return "vanilla" if "vanilla" in arms else None


def confirmed(question: str) -> bool:
    """What the user says; UserError where there is nobody to ask."""
    try:
        return bool(typer.confirm(question, default=False, err=True))
    except typer.Abort:
        raise UserError("Nobody answered.", hint="Give --yes to go on without asking.") from None


def own_command() -> list[str]:
    """Our own command line, for the record."""
    from specbench.machine import command_line

    return command_line()
