"""`specbench report`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench.cli.root import app
from specbench.cli.shared import Results, examples, folder_of, one_of, run_ids, vanilla_of
from specbench.cli.terminal import is_plain, say, terminal
from specbench.errors import UserError

if TYPE_CHECKING:
    from specbench.store import RunStore


@app.command(
    epilog=examples(
        "specbench report",
        "specbench report results/RUN --by category",
        "specbench report --percentiles",
        "specbench report --format markdown",
        "specbench report --format html -o report.html",
        "specbench report --watch",
    )
)
def report(
    run_folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="A run (default: the latest).", autocompletion=run_ids
        ),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", "-f", help="table, markdown, csv, json or html.")
    ] = "table",
    by: Annotated[
        str | None,
        typer.Option(
            help="Split rows by category, turn, length (of prompts) or position (of output)."
        ),
    ] = None,
    percentiles: Annotated[
        bool,
        typer.Option(
            "--percentiles", help="A second table: p50, p90, p99 (CSV and JSON have them anyway)."
        ),
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 if any row is flagged or unmeasured.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to a file instead.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Redraw beside a run in progress, until it is done.")
    ] = False,
    results: Results = Path("results"),
) -> None:
    """The table of a run: latency, throughput, acceptance length and speed-up of every arm."""
    from specbench import store as stores
    from specbench.analysis.curves import curves
    from specbench.analysis.rows import choices
    from specbench.analysis.rows import rows as make_rows
    from specbench.analysis.slices import WAYS
    from specbench.render import report as rendering
    from specbench.render.read import measured_cases

    one_of("--format", form, ("table", *rendering.FORMATS, "html"))
    if form == "html":
        _check_html(by, output, percentiles)
    folder = folder_of(run_folder, results) if run_folder else stores.latest(results)
    store = stores.RunStore.open(folder)
    if watch:
        if form != "table" or output is not None or strict or percentiles:
            raise UserError(
                "--watch redraws the table; leave out --format, --output, --percentiles and --strict."
            )
        if sys.stdout.isatty():
            _watch(folder, one_of("--by", by, WAYS))
            return
        say("--watch needs a terminal; this is the table once.")
    cases = list(measured_cases(store))
    rows = make_rows(
        cases,
        baseline=vanilla_of(store),
        by=one_of("--by", by, WAYS),
        greedy=store.document["config"]["sampling"]["temperature"] == 0,
    )
    found = [] if by else curves(cases, baseline=vanilla_of(store), chosen=choices(rows))
    findings = rendering.Findings(rows, found, by, percentiles)
    if form == "table":
        size, colour = terminal()
        text = rendering.as_table(
            store.document,
            findings,
            width=size,
            colour=colour and not output,
            plain=output is None and is_plain(),
        )
    elif form == "html":
        from specbench.render.html import page

        text = page(store, cases, findings)
    else:
        text = rendering.FORMATS[form](store.document, findings)
    if output is None:
        typer.echo(text, nl=False)
    else:
        stores.write_text(output, text)
    if store.status() is None:
        say(f"{folder} is unfinished; go on with `specbench run --resume {folder}`.")
    flagged = [row for row in rows if row.flags or row.problem]
    if strict and flagged:
        say(f"{len(flagged)} of {len(rows)} rows are flagged (--strict).")
        raise typer.Exit(1)


def _watch(folder: Path, by: Any) -> None:  # noqa: ANN401  (a slices.By)
    """The table again and again, and then why no more."""
    from rich.console import Console

    from specbench.render import watch as watching

    def draw(store: "RunStore") -> str:
        width, colour = terminal()
        return watching.view(
            store,
            by=by,
            baseline=vanilla_of(store),
            width=width,
            colour=colour,
            plain=is_plain(),
        )

    os.nice(10)  # what it takes of the CPU, it takes from the run
    say(watching.watch(folder, draw, Console(no_color=not terminal()[1], highlight=False)))


def _check_html(by: str | None, output: Path | None, percentiles: bool = False) -> None:
    """Refuse what makes no sense of a page."""
    if by is not None:
        raise UserError("--by is for the other formats: the page shows every split; leave it out.")
    if percentiles:
        raise UserError("--percentiles is a table for the other formats; leave it out.")
    if output is None and sys.stdout.isatty():
        raise UserError("A page is 5 MB of HTML; write it to a file: -o report.html.")
