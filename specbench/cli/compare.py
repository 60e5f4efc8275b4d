"""`specbench compare` and `specbench baseline`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.root import app
from specbench.cli.shared import Results, examples, folder_of, one_of, run_ids
from specbench.cli.terminal import say, terminal
from specbench.errors import UserError


@app.command(
    epilog=examples(
        "specbench compare results/MONDAY results/TUESDAY",
        "specbench compare baselines/nightly.json --fail-if 'speedup < -3%' --fail-if missing",
        "specbench compare BASE NEW --format github --junit compare.xml",
    )
)
def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="A run, or a pinned baseline.")],
    new: Annotated[
        Path | None, typer.Argument(metavar="[NEW]", help="Another one (default: the latest run).")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Exit 1 where the whole 95% interval is beyond it: 'speedup < -3%', "
            "'tpot_ms > +5%', …; or 'missing'.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(help="Compare in spite of other: sampling, args or hardware."),
    ] = None,
    form: Annotated[
        str, typer.Option("--format", "-f", help="table, markdown, json, junit or github.")
    ] = "table",
    everything: Annotated[
        bool, typer.Option("--all", help="Show every measure, not the speed-up and TPOT alone.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to a file instead.")
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Write JUnit XML too, to this file.")
    ] = None,
    results: Results = Path("results"),
) -> None:
    """Two runs, row by row: better, worse or no difference shown. Exit 1 on a regression."""
    from specbench import baseline as baselines
    from specbench import store as stores
    from specbench.analysis import compare as comparing
    from specbench.analysis import conditions as conditioning
    from specbench.analysis.likeness import ALLOWABLE
    from specbench.analysis.snapshot import MEASURES
    from specbench.render import ci
    from specbench.render import compare as rendering

    one_of("--format", form, ("table", "markdown", "json", "junit", "github"))
    for kind in allow or ():
        one_of("--allow", kind, ALLOWABLE)
    conditions = [conditioning.parse(text) for text in fail_if or ()]
    sides = [
        baselines.read(folder_of(side, results) if side else stores.latest(results))
        for side in (base, new)
    ]
    comparison = comparing.compare(sides[0], sides[1], allowed=allow or ())
    result = rendering.Result(
        comparison,
        conditioning.judge(comparison, conditions),
        tuple(MEASURES) if everything else rendering.USUAL,
    )
    if junit is not None:
        stores.write_text(junit, ci.as_junit(result))
    if form == "github":
        _tell_github(ci.annotations(result), ci.summary(result), output)
    else:
        size, colour = terminal()
        text = {
            "table": lambda: rendering.as_table(
                result, width=size, colour=colour and output is None
            ),
            "markdown": lambda: rendering.as_markdown(result),
            "json": lambda: rendering.as_json(result),
            "junit": lambda: ci.as_junit(result),
        }[form]()
        if output is None:
            typer.echo(text, nl=False)
        else:
            stores.write_text(output, text)
    if result.failed:
        raise typer.Exit(1)
    if not any(row.changes for row in comparison.rows):
        raise UserError(f"Nothing was compared: {conditioning.why_none(comparison)}.")


def _tell_github(annotations: str, summary: str, output: Path | None) -> None:
    """Annotations go to the log, the summary to the job's page (without one: to the log too)."""
    from specbench import store as stores

    page = os.environ.get("GITHUB_STEP_SUMMARY")
    if output is not None:
        stores.write_text(output, summary)
    if page:
        try:
            with Path(page).open("a", encoding="utf-8") as file:
                file.write(summary)
        except OSError as error:
            raise UserError(f"GITHUB_STEP_SUMMARY={page}: {error.strerror}.") from None
    elif output is None:
        typer.echo(summary, nl=False)
    typer.echo(annotations, nl=False)


baseline_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=examples("specbench baseline save results/RUN -o baselines/nightly.json"),
)
app.add_typer(baseline_app, name="baseline", help="Pin a run as a small file to compare with.")


@baseline_app.command(
    epilog=examples(
        "specbench baseline save results/RUN -o baselines/nightly.json",
        "specbench baseline save RUN -o baselines/nightly.json --replace",
    )
)
def save(
    run_folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="A run (default: the latest).", autocompletion=run_ids
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file: baselines/NAME.json.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Put it in the place of an earlier baseline.")
    ] = False,
    results: Results = Path("results"),
) -> None:
    """Write a run's figures, and what pairs its prompts later, into one small JSON file."""
    from specbench import baseline as baselines
    from specbench import store as stores

    if output is None:
        raise UserError("Name the file: specbench baseline save RUN -o baselines/NAME.json.")
    folder = folder_of(run_folder, results) if run_folder else stores.latest(results)
    store = stores.RunStore.open(folder)
    kept = baselines.of_run(store)
    if not any(row.requests for row in kept.rows):
        raise UserError(f"{folder} has measured nothing yet; a baseline would say nothing.")
    baselines.save(kept, output, replace=replace)
    typer.echo(f"{output}: {len(kept.rows)} rows of {kept.run}")
    for row in kept.rows:
        spoiled = [*row.flags, *([f"{row.missing} requests are missing"] if row.missing else [])]
        for why in spoiled:
            say(f"note: {row.name}: {why}")
