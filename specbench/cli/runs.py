"""`specbench runs`."""

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.root import app
from specbench.cli.shared import Results, RunName, confirmed, examples, run_ids
from specbench.cli.terminal import say
from specbench.errors import UserError

runs_app = typer.Typer(
    help="Keep runs: list, show, delete, export as one .zip, import one.",
    epilog=examples(
        "specbench runs list",
        "specbench runs show RUN",
        "specbench runs export RUN -o run.zip",
        "specbench runs import run.zip",
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(runs_app, name="runs")


@runs_app.command(
    "list",
    epilog=examples(
        "specbench runs list",
        "specbench runs list --json --results nightly",
    ),
)
def runs_list(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    results: Results = Path("results"),
) -> None:
    """Every run: id, when it began, config, status, arms, requests, size."""
    import json

    from specbench import runs as keeping

    found = keeping.list_runs(results)
    if as_json:
        typer.echo(json.dumps([one.record() for one in found], indent=1))
    elif found:
        typer.echo("\n".join(keeping.as_lines(found)))
    else:
        say(f"There is no run in {results}/.")


@runs_app.command(
    "show",
    epilog=examples(
        "specbench runs show RUN",
        "specbench runs show RUN --json",
    ),
)
def runs_show(
    run_name: RunName,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    results: Results = Path("results"),
) -> None:
    """How a run came to be, and the state of each of its cases."""
    import json

    from specbench import runs as keeping

    about = keeping.details(keeping.folder_of(results, run_name))
    if as_json:
        typer.echo(json.dumps(about, indent=1))
    else:
        typer.echo("\n".join(keeping.details_lines(about)))


@runs_app.command(
    "delete",
    epilog=examples(
        "specbench runs delete RUN",
        "specbench runs delete RUN OTHER --yes",
    ),
)
def runs_delete(
    run_names: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Ids or folders.", autocompletion=run_ids),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    results: Results = Path("results"),
) -> None:
    """Delete runs, after asking. A run that is being written to is refused."""
    from specbench import runs as keeping

    folders = list(dict.fromkeys(keeping.folder_of(results, name) for name in run_names))
    if not yes:
        for line in keeping.as_lines([keeping.summary(folder) for folder in folders]):
            say(line)
        many = f"these {len(folders)} runs" if len(folders) > 1 else "this run"
        if not confirmed(f"Delete {many} for good?"):
            raise UserError("Nothing was deleted.")
    for folder in folders:
        keeping.delete(results, folder)
        typer.echo(f"deleted {folder}")


@runs_app.command(
    "export",
    epilog=examples(
        "specbench runs export RUN -o run.zip",
    ),
)
def runs_export(
    run_name: RunName,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .zip to write.")],
    results: Results = Path("results"),
) -> None:
    """A run as one .zip, for another machine's `specbench runs import`."""
    from specbench import archive
    from specbench import runs as keeping

    count = archive.export_zip(keeping.folder_of(results, run_name), output)
    typer.echo(f"{output}: {count} files, {keeping.size_text(output.stat().st_size)}")


@runs_app.command(
    "import",
    epilog=examples(
        "specbench runs import run.zip",
    ),
)
def runs_import(
    file: Annotated[Path, typer.Argument(help="A .zip of `specbench runs export`.")],
    results: Results = Path("results"),
) -> None:
    """A run from a .zip. It is looked through first, and is there whole or not at all."""
    from specbench import archive

    typer.echo(str(archive.import_zip(file, results)))
