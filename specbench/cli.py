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
ConfigName = Annotated[
    str | None, typer.Option("--config", "-c", help="A config file, or the name of one.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. speculation.k=3."),
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
    config: ConfigName = None,
    overrides: Overrides = None,
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
    from specbench import store as stores

    if resume is not None:
        if config is not None or overrides or run_id:
            raise UserError("--resume goes on with a run's own config; leave out the others.")
        store = stores.RunStore.open(_run_folder(resume, results))
        config_of_run, earlier = preparing.stored(store)
        prepared = preparing.prepare(
            config_of_run,
            config_path=store.path / "run.json",
            prompt_folders=(),
            say=_say,
            earlier=earlier,
            dry=dry_run,
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
    _carry_out(prepared, store)


def _carry_out(prepared: "Prepared", store: "RunStore") -> None:
    """Do what *store* lacks of the run, say where it is; EngineError where a part failed."""
    from specbench import run as story
    from specbench.render.progress import RunProgress

    done = sum(1 for case in prepared.plan.cases for _ in store.requests(case.id))
    try:
        with store, RunProgress(prepared.requests, done, _stderr()) as progress:
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
        f"{len(plan.cases)} cases, {prepared.requests} requests, {plan.starts} engine starts; "
        f"{plan.schedule}, {plan.together} engines up at once"
        + (f" ({prepared.room})" if prepared.room else "")
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
    if chooses := [one.label for one in prepared.config.speculation if one.choose_k]:
        typer.echo(f"\nand then the best k of {' and '.join(chooses)}, beside the baseline")


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
    by: Annotated[
        str | None,
        typer.Option(
            help="Split rows by category, turn, length (of prompts) or position (of output)."
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 if any row is flagged or unmeasured.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to a file instead.")
    ] = None,
    results: Results = Path("results"),
) -> None:
    """The table of a run: latency, throughput, acceptance length and speed-up of every arm."""
    from specbench import store as stores
    from specbench.analysis.curves import curves
    from specbench.analysis.rows import rows as make_rows
    from specbench.analysis.slices import WAYS
    from specbench.render import report as rendering
    from specbench.render.read import measured_cases

    _one_of("--format", form, ("table", *rendering.FORMATS))
    folder = _run_folder(run_folder, results) if run_folder else stores.latest(results)
    store = stores.RunStore.open(folder)
    cases = list(measured_cases(store))
    rows = make_rows(
        cases,
        baseline=_baseline(store),
        by=_one_of("--by", by, WAYS),
        greedy=store.document["config"]["sampling"]["temperature"] == 0,
    )
    found = [] if by else curves(cases, baseline=_baseline(store))
    findings = rendering.Findings(rows, found, by)
    if form == "table":
        size, colour = _terminal()
        text = rendering.as_table(
            store.document, findings, width=size, colour=colour and not output
        )
    else:
        text = rendering.FORMATS[form](store.document, findings)
    if output is None:
        typer.echo(text, nl=False)
    else:
        stores.write_text(output, text)
    if store.status() is None:
        _say(f"{folder} is unfinished; go on with `specbench run --resume {folder}`.")
    flagged = [row for row in rows if row.flags or row.problem]
    if strict and flagged:
        _say(f"{len(flagged)} of {len(rows)} rows are flagged (--strict).")
        raise typer.Exit(1)


# --- what-if -------------------------------------------------------------------------------------


@app.command(
    "what-if",
    epilog="Examples: specbench what-if --tau 2.5 · specbench what-if results/RUN --tau 2.5 --k 4 · "
    "specbench what-if --tau 2.5 --k 4 --method eagle --measure",
)
def what_if(
    run_folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run (default: the latest).")
    ] = None,
    tau: Annotated[
        float, typer.Option(help="Acceptance length: tokens per target step, bonus included.")
    ] = ...,  # type: ignore[assignment]  # typer's mark for an option that must be given
    k: Annotated[
        int | None, typer.Option(min=1, help="At this k (default: each k that was measured).")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="Of this method only (default: each of the run).")
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Start engines whose acceptance is held there (vLLM's synthetic)."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    results: Results = Path("results"),
) -> None:
    """The speed-up that a head's claimed acceptance length would give on this machine."""
    from specbench import store as stores
    from specbench.analysis.curves import curves, estimates
    from specbench.render.estimates import as_json as to_json
    from specbench.render.estimates import as_text as to_text
    from specbench.render.read import measured_cases

    folder = _run_folder(run_folder, results) if run_folder else stores.latest(results)
    store = stores.RunStore.open(folder)
    found = curves(measured_cases(store), baseline=_baseline(store))
    if method is not None:
        there = list(dict.fromkeys(curve.label for curve in found))
        found = [curve for curve in found if curve.label == method]
        if not found:
            raise UserError(
                f"{folder} has no method {method}.", hint=f"It has: {', '.join(there)}."
            )
    timed = [curve for curve in found if curve.model]
    if not timed:
        raise UserError(
            f"{folder} does not tell the time of a step.",
            hint="It takes vanilla and a speculative arm, with per-request metrics.",
        )
    made = estimates(timed, tau, k)
    if not made:
        deepest = max(one for curve in timed if curve.model for one in curve.model.step_ms)
        raise UserError(
            f"{tau:g} tokens a step cannot be at any k that was measured (1 to {deepest}).",
            hint="A step emits 1 to k + 1 tokens; give --k for another k.",
        )
    if not (measure and as_json):
        typer.echo(to_json(made) if as_json else to_text(made), nl=False)
    if measure:
        _measure_synthetic(store, results, sorted({one.label for one in made}), tau, k)


def _measure_synthetic(
    store: "RunStore", results: Path, labels: list[str], tau: float, k: int | None
) -> None:
    """A run of its own, whose acceptance is held at *tau*."""
    from specbench import prepare as preparing
    from specbench import store as stores
    from specbench import whatif
    from specbench.engines.installation import require_installation

    if k is None or len(labels) > 1:
        raise UserError(
            "--measure takes one arm.",
            hint=f"Give --k, and --method (one of {', '.join(labels)}).",
        )
    config, earlier = preparing.stored(store)
    if config.engine.url or config.load.client == "replay":
        raise UserError("--measure starts engines; this run started none.")
    installation = require_installation(config.engine)
    held = whatif.synthetic_config(config, installation, label=labels[0], k=k, tau=tau)
    path = store.path / "run.json"
    prepared = preparing.prepare(
        held,
        config_path=path,
        prompt_folders=(),
        earlier=preparing.Earlier(earlier.prompt_sets),
        say=_say,
    )
    about = preparing.document(prepared, config_path=path, command=_command())
    made = stores.RunStore.create(results, stores.new_run_id("what-if"), about)
    _carry_out(prepared, made)
    _say(f"See: specbench report {made.path}")


def _baseline(store: "RunStore") -> str | None:
    arms: list[str] = store.document["arms"]
    return "vanilla" if "vanilla" in arms else None


# --- verify --------------------------------------------------------------------------------------


@app.command(
    epilog="Examples: specbench verify --config demo · "
    "specbench verify --config demo --set sampling.temperature=1 --samples 400 --json"
)
def verify(
    config: ConfigName = None,
    overrides: Overrides = None,
    samples: Annotated[
        int | None,
        typer.Option(min=20, help="Temperature > 0: samples of each prompt (default: 200)."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Temperature 0: share of outputs that may differ (float32: 0)."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    results: Results = Path("results"),
    datasets: Datasets = Path("datasets"),
) -> None:
    """Does speculation leave alone what is said? Exit 1 if an arm differs from vanilla."""
    import json

    from specbench import prepare as preparing
    from specbench import store as stores
    from specbench import verify as verifying
    from specbench.render.progress import RunProgress

    if config is None:
        raise UserError("Name a config: specbench verify --config demo.yaml.")
    path, parsed = _load_config(config, overrides)
    prepared = verifying.prepare(
        parsed,
        config_path=path,
        prompt_folders=(datasets, Path()),
        say=_say,
        samples=samples,
        tolerance=tolerance,
    )
    document = preparing.document(prepared, config_path=path, command=_command())
    run_id = stores.new_run_id(parsed.name or path.stem)
    store = stores.RunStore.create(results / verifying.FOLDER, run_id, document)
    try:
        with store, RunProgress(prepared.requests, 0, _stderr()) as progress:
            verdict = verifying.verify(prepared, store, progress, tolerance=tolerance)
    except KeyboardInterrupt:
        _say("specbench: interrupted; the engines are stopped")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(verdict.document(), indent=1))
    else:
        typer.echo("\n".join(verdict.lines()))
        _say(f"The facts: {store.path}")
    if verdict.differs:
        raise typer.Exit(1)
    if verdict.unknown:
        arms = ", ".join(finding.arm for finding in verdict.unknown)
        raise EngineError(f"Not verified: {arms}.", hint=f"See the logs in {store.path}/engines.")


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
