"""Commands, flags, help and exit codes. Nothing else exits or prints colour.

Exit codes: 0 done · 1 a regression was found · 2 the user's to mend · 3 an engine or load
generator failed (also when part of a sweep did) · 130 interrupted.

Heavy imports stay inside the commands: `specbench --help` must feel instant.
"""

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from specbench import __version__
from specbench.errors import EngineError, SpecbenchError, UserError

if TYPE_CHECKING:
    from specbench.config import Config
    from specbench.prepare import Prepared
    from specbench.store import RunStore

EXIT_INTERRUPTED = 130
Results = Annotated[
    Path, typer.Option("--results", envvar="SPECBENCH_RESULTS", help="Where runs are kept.")
]
Datasets = Annotated[
    Path, typer.Option("--datasets", envvar="SPECBENCH_DATASETS", help="Where prompt sets are.")
]

app = typer.Typer(
    name="specbench",
    help="Which speculative decoding set-up makes your model faster, by how much, and is it true?",
    epilog="A user's day: specbench convert humaneval; specbench run --config eagle_k5.yaml; "
    "specbench report",
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


# --- convert -------------------------------------------------------------------------------------


@app.command(
    epilog="Examples: specbench convert humaneval · specbench convert mt_bench --turns first · "
    "specbench convert question.jsonl --name mine · specbench convert hf:openai/openai_humaneval"
)
def convert(
    source: Annotated[str, typer.Argument(help="humaneval, mt_bench, a file, or hf:NAME[:SPLIT].")],
    name: Annotated[
        str | None, typer.Option(help="The set's name (default: the source's).")
    ] = None,
    turns: Annotated[
        str | None, typer.Option(help="first: only turn 1. all: play conversations in full.")
    ] = None,
    style: Annotated[
        str | None, typer.Option(help="chat (default) or completion: how it will be sent.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many prompts.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="With --limit: a random sample instead of the first.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--from", help="The source's layout, if it isn't recognised.")
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="With hf: the column that holds the prompts.")
    ] = None,
    allow_skips: Annotated[
        bool, typer.Option("--allow-skips", help="Write the good records even if some are bad.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only re-read a converted file and count its prompts.")
    ] = False,
    datasets: Datasets = Path("datasets"),
) -> None:
    """Write datasets/NAME.jsonl in GenAI-Perf's format, and a sidecar that says what it is."""
    from specbench.prompts import convert as converter
    from specbench.prompts import sets
    from specbench.prompts.sources import resolve

    if check:
        count = sets.check(Path(source))
        typer.echo(f"{source}: {count} prompts")
        return
    report = converter.convert(
        resolve(source, column=column, say=_say),
        out_dir=datasets,
        name=name,
        turns=_one_of("--turns", turns, ("first", "all")),
        style=_one_of("--style", style, ("chat", "completion")),
        limit=limit,
        seed=seed,
        layout=layout,
        allow_skips=allow_skips,
    )
    typer.echo(
        f"{report.path}: read {report.read}, wrote {report.written}, "
        f"skipped {len(report.skipped)} ({report.layout} from {report.sidecar.source})"
    )
    for skip in report.skipped:
        typer.echo(f"  line {skip.line}: {skip.reason}")
    for warning in report.warnings:
        _say(f"note: {warning}")


def _one_of(flag: str, value: str | None, allowed: tuple[str, ...]) -> Any:  # noqa: ANN401
    if value is not None and value not in allowed:
        raise UserError(f"{flag} {value}: write {' or '.join(allowed)}.")
    return value


# --- run -----------------------------------------------------------------------------------------


@app.command(
    epilog="Examples: specbench run --config eagle_k5.yaml · "
    "specbench run --config demo --set speculation.0.k=3 --dry-run · "
    "specbench run --resume results/20261130-101500-demo"
)
def run(
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="A config file, or the name of one.")
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. speculation.k=3."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every case and command line; start nothing.")
    ] = False,
    run_id: Annotated[
        str | None, typer.Option(help="The run's id (default: time and name).")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with an unfinished run instead of a new one.")
    ] = None,
    results: Results = Path("results"),
    datasets: Datasets = Path("datasets"),
) -> None:
    """Launch the engines of a config, send the prompts, keep what happened."""
    from specbench import prepare as preparing
    from specbench import run as story
    from specbench import store as stores
    from specbench.render.progress import RunProgress

    console = _stderr()
    if resume is not None:
        if config is not None or overrides or run_id:
            raise UserError("--resume goes on with a run's own config; leave out the others.")
        store = stores.RunStore.open(_run_folder(resume, results))
        config_of_run, prompts = preparing.stored(store)
        prepared = preparing.prepare(
            config_of_run,
            config_path=store.path / "run.json",
            prompt_folders=(),
            say=_say,
            stored_prompts=prompts,
        )
    else:
        path, parsed = _load_config(config, overrides)
        prepared = preparing.prepare(
            parsed, config_path=path, prompt_folders=(datasets, Path()), say=_say, dry=dry_run
        )
        if dry_run:
            _print_plan(prepared)
            return
        document = preparing.document(prepared, config_path=path, command=_command())
        name = parsed.name or path.stem
        store = stores.RunStore.create(results, run_id or stores.new_run_id(name), document)
    if dry_run:
        _print_plan(prepared)
        return
    done = sum(1 for case in prepared.plan.cases for _ in store.requests(case.id))
    try:
        with store, RunProgress(prepared.requests, done, console) as progress:
            status = story.execute(prepared, store, progress)
    except KeyboardInterrupt:
        raise Interrupted(store.path) from None
    typer.echo(str(store.path))
    if status != "ok":
        raise EngineError(
            f"Some cases of {store.path} were not measured in full.",
            hint=f"See `specbench report {store.path}`; go on with `specbench run --resume "
            f"{store.path}`.",
        )


class Interrupted(SpecbenchError):
    """Ctrl-C, TERM or HUP in the middle of a run."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self, path: Path) -> None:
        super().__init__(
            "Interrupted; the engines are stopped and everything measured is kept.",
            hint=f"Go on with: specbench run --resume {path}",
        )


def _load_config(name: str | None, overrides: list[str] | None) -> "tuple[Path, Config]":
    from specbench import config as configs

    if name is None:
        raise UserError("Name a config: specbench run --config demo.yaml (or --resume a run).")
    path = configs.find(name)
    return path, configs.load(path, overrides or ())


def _print_plan(prepared: "Prepared") -> None:
    """Every case, and the exact command line of every engine."""
    from specbench.engines.launch import shell_line

    plan = prepared.plan
    typer.echo(
        f"{len(plan.cases)} cases, {prepared.requests} requests, {plan.starts} engine starts"
    )
    for number, stage in enumerate(plan.stages, 1):
        typer.echo(f"\nstage {number}: {', '.join(arm.id for arm in stage.arms)}")
        for arm in stage.arms:
            if launch := prepared.launches.get(arm.id):
                typer.echo(f"  {arm.id}: {shell_line(launch)} --host 127.0.0.1 --port PORT")
        for round_ in stage.rounds:
            for case in round_:
                prompts = len(prepared.prompt_sets[case.prompt_set].prompts)
                typer.echo(f"  {case.id}: {prompts} prompts")


def _run_folder(given: Path, results: Path) -> Path:
    """A run's folder from a path or a bare id."""
    return given if given.exists() or len(given.parts) > 1 else results / given


# --- report --------------------------------------------------------------------------------------


@app.command(
    epilog="Examples: specbench report · specbench report results/RUN --by category · "
    "specbench report --format markdown"
)
def report(
    run_folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run (default: the latest).")
    ] = None,
    form: Annotated[
        str, typer.Option("--format", "-f", help="table, markdown, csv or json.")
    ] = "table",
    by: Annotated[str | None, typer.Option(help="category: a row for each category.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to a file instead.")
    ] = None,
    results: Results = Path("results"),
) -> None:
    """The table of a run: latency, throughput, acceptance length and speed-up of every arm."""
    from specbench import store as stores
    from specbench.analysis.rows import rows as make_rows
    from specbench.render import report as rendering
    from specbench.render.read import measured_cases

    _one_of("--format", form, ("table", *rendering.FORMATS))
    _one_of("--by", by, ("category",))
    folder = _run_folder(run_folder, results) if run_folder else stores.latest(results)
    store = stores.RunStore.open(folder)
    rows = make_rows(
        measured_cases(store),
        baseline=_baseline(store),
        by_category=by == "category",
        greedy=store.document["config"]["sampling"]["temperature"] == 0,
    )
    if form == "table":
        size, colour = _terminal()
        text = rendering.as_table(store.document, rows, width=size, colour=colour and not output)
    else:
        text = rendering.FORMATS[form](store.document, rows)
    if output is None:
        typer.echo(text, nl=False)
    else:
        stores.write_text(output, text)
    if store.status() is None:
        _say(f"{folder} is unfinished; go on with `specbench run --resume {folder}`.")


def _baseline(store: "RunStore") -> str | None:
    arms: list[str] = store.document["arms"]
    return "vanilla" if "vanilla" in arms else None


# --- the terminal --------------------------------------------------------------------------------


def _terminal() -> tuple[int, bool]:
    """Columns, and whether colour is wanted there."""
    import shutil

    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    # A file has no width to keep to: everything fits into 170.
    fallback = 80 if sys.stdout.isatty() else 170
    return shutil.get_terminal_size((fallback, 24)).columns, colour


def _stderr() -> Any:  # noqa: ANN401  (a rich Console; rich is not imported here)
    from rich.console import Console

    return Console(stderr=True)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _command() -> list[str]:
    from specbench.machine import command_line

    return command_line()


def _turn_signals_into_interrupts() -> None:
    """TERM and HUP stop a run as Ctrl-C does: engines down, facts kept."""

    def interrupt(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


def main() -> NoReturn:
    """The console script."""
    _turn_signals_into_interrupts()
    try:
        app()
        sys.exit(0)
    except SpecbenchError as error:
        if os.environ.get("SPECBENCH_DEBUG"):
            raise
        if isinstance(error, EngineError) and error.tail:
            _say(error.tail)
        _say(f"specbench: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _say("specbench: interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
