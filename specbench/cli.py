"""Commands, flags, help and exit codes. Nothing else exits or prints colour.

Exit codes: 0 done · 1 a regression was found · 2 the user's to mend · 3 an engine or load
generator failed (also when part of a sweep did) · 130 interrupted.

Heavy imports stay inside the commands: `specbench --help` must feel instant.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from specbench import __version__
from specbench.errors import EngineError, FailedFast, SpecbenchError, UserError
from specbench.interrupts import (
    EXIT_INTERRUPTED,
    leave,
    raise_interrupts,
    terminal_is_gone,
    was_interrupted,
)

if TYPE_CHECKING:
    from specbench.config import Config
    from specbench.executors.on_ray import RayCluster
    from specbench.prepare import Prepared
    from specbench.store import RunStore


def _run_ids(ctx: typer.Context, incomplete: str) -> list[str]:
    """For the shell: the ids of runs."""
    folder = Path(ctx.params.get("results") or os.environ.get("SPECBENCH_RESULTS") or "results")
    ids = {path.parent.name for path in folder.glob("*/run.json")}
    return sorted(id for id in ids if id.startswith(incomplete))


def _config_names(incomplete: str) -> list[str]:
    """For the shell: the names of configs, here and shipped."""
    here = Path(__file__).parent
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
        autocompletion=_config_names,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. speculation.k=3."),
]


def _examples(*commands: str, title: str = "Examples") -> str:
    """The end of a command's help: a line each. tests/test_help_examples.py runs all of them."""
    return "\n".join(["\b", f"{title}:", *(f"  {command}" for command in commands)])


app = typer.Typer(
    name="specbench",
    help="Which speculative decoding set-up makes your model faster, by how much, and is it true?",
    epilog=_examples(
        "specbench convert humaneval",
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


# --- convert -------------------------------------------------------------------------------------

SHOWN_SKIPS = 20


@app.command(
    epilog=_examples(
        "specbench convert humaneval",
        "specbench convert mt_bench --turns first",
        "specbench convert question.jsonl --turns all --name mine",
        "specbench convert prompts.csv --column body",
        "specbench convert ShareGPT.json --turns first --limit 500 --seed 1 --allow-skips",
        "specbench convert hf:openai/openai_humaneval",
        "specbench convert mt_bench --to eagle -o mt_bench_question.jsonl",
        "specbench convert humaneval --to vllm-bench --output-tokens 256 -o he.jsonl",
    )
)
def convert(
    source: Annotated[
        str, typer.Argument(help="humaneval, mt_bench, a set, a file, or hf:NAME[:SPLIT].")
    ],
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
        str | None, typer.Option(help="Of a table or JSON: the column that holds the prompts.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="Write another layout instead of a set: eagle, mt-bench-prompts, humaneval, "
            "sharegpt, genai-perf, genai-perf-sessions, aiperf, aiperf-multi-turn, "
            "mooncake-trace, vllm-bench, text, csv or parquet."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="With --to: the file to write.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="With --to: the output length to ask for.")
    ] = None,
    allow_skips: Annotated[
        bool, typer.Option("--allow-skips", help="Write the good records even if some are bad.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only re-read a converted file and count its prompts.")
    ] = False,
    datasets: Datasets = Path("datasets"),
) -> None:
    """Write datasets/NAME.jsonl in GenAI-Perf's format, and a sidecar that says what it is.

    With --to and -o: a file in another tool's layout. docs/prompts.md has all of them.
    """
    from specbench.prompts import convert as converter
    from specbench.prompts import sets
    from specbench.prompts.choice import Choice

    if check:
        count = sets.check(Path(source))
        typer.echo(f"{source}: {count} prompts")
        return
    choice = Choice(_one_of("--turns", turns, ("first", "all")), limit, seed, allow_skips)
    sent_as = _one_of("--style", style, ("chat", "completion"))
    if to is None and (output is not None or output_tokens is not None):
        raise UserError("-o and --output-tokens are for a layout; name it with --to.")
    if to is not None and (output is None or name is not None or style is not None):
        raise UserError("--to writes a file: name it with -o; --name and --style are a set's.")
    found = sets.find_source(
        source,
        search=(datasets,),
        converted=to is not None,
        layout=layout,
        column=column,
        say=_say,
    )
    report: converter.ConversionReport
    if to is None or output is None:
        report = converter.convert(found, choice, out_dir=datasets, name=name, style=sent_as)
    else:
        report = converter.export(found, output, to, choice, tokens=output_tokens)
    typer.echo(
        f"{report.path}: read {report.read}, wrote {report.written}, "
        f"skipped {len(report.skipped)} ({report.layout} from {report.source}"
        + (f", written as {report.written_as})" if to is not None else ")")
    )
    for skip in report.skipped[:SHOWN_SKIPS]:
        typer.echo(f"  {report.unit} {skip.line}: {skip.reason}")
    if (more := len(report.skipped) - SHOWN_SKIPS) > 0:
        typer.echo(f"  and {more} more")
    for warning in report.warnings:
        _say(f"note: {warning}")


def _one_of(flag: str, value: str | None, allowed: tuple[str, ...]) -> Any:  # noqa: ANN401
    if value is not None and value not in allowed:
        raise UserError(f"{flag} {value}: write {' or '.join(allowed)}.")
    return value


# --- run -----------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "specbench run --config eagle_k5.yaml",
        "specbench run --config demo --set speculation.0.k=3 --dry-run",
        "specbench run --resume results/20261130-101500-demo",
        "specbench run --config demo --fail-fast",
    )
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
    fail_fast: Annotated[
        bool,
        typer.Option("--fail-fast", help="End the run with the first case that fails (exit 3)."),
    ] = False,
    executor: Annotated[
        str, typer.Option(help="local, or ray: spread over a Ray cluster (docs/fan_out.md).")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="With --executor ray: HOST:PORT (default: the one here).")
    ] = None,
    results: Results = Path("results"),
    datasets: Datasets = Path("datasets"),
) -> None:
    """Launch the engines of a config, send the prompts, keep what happened."""
    from dataclasses import replace

    from specbench import prepare as preparing
    from specbench import store as stores

    cluster = _cluster(executor, address)
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
        _connect(cluster, config_of_run, dry=dry_run)
    else:
        path, parsed = _load_config(config, overrides)
        prepared = preparing.prepare(
            parsed, config_path=path, prompt_folders=(datasets, Path()), say=_say, dry=dry_run
        )
        _connect(cluster, parsed, dry=dry_run)
        if dry_run:
            _print_plan(prepared, cluster)
            return
        document = preparing.document(prepared, config_path=path, command=_command())
        name = parsed.name or path.stem
        prompts = {name: found.prompts for name, found in prepared.prompt_sets.items()}
        run_id = run_id or stores.new_run_id(name)
        store = stores.RunStore.create(results, run_id, document, prompts)
    if dry_run:
        _print_plan(prepared, cluster)
        return
    _carry_out(replace(prepared, fail_fast=fail_fast), store, cluster)


def _cluster(executor: str, address: str | None) -> "RayCluster | None":
    """Where a run is spread to, not connected yet; None for here."""
    if _one_of("--executor", executor, ("local", "ray")) == "local":
        if address is not None:
            raise UserError("--address is a cluster's; it goes with --executor ray.")
        return None
    from specbench.executors.on_ray import RayCluster

    return RayCluster(address)


def _connect(cluster: "RayCluster | None", config: "Config", *, dry: bool) -> None:
    """Refuse what can't be spread, and see that there is a cluster before anything is written."""
    if cluster is not None:
        from specbench.executors.units import check

        check(config)
        if not dry:
            cluster.connect()


def _carry_out(
    prepared: "Prepared", store: "RunStore", cluster: "RayCluster | None" = None
) -> None:
    """Do what *store* lacks of the run, say where it is; EngineError where a part failed."""
    from contextlib import nullcontext

    from specbench import run as story
    from specbench.render.progress import RunProgress

    done = sum(1 for case in prepared.plan.cases for _ in store.requests(case.id))
    try:
        with (
            cluster or nullcontext(),
            store,
            RunProgress(prepared.requests, done, _stderr()) as progress,
        ):
            if cluster is None:
                _calibrate(prepared, store)
                status = story.execute(prepared, store, progress)
            else:
                status = story.execute(prepared, store, progress, cluster.executor)
    except (KeyboardInterrupt, Exception) as error:
        if was_interrupted() or isinstance(error, KeyboardInterrupt):
            raise Interrupted(store.path) from None
        if isinstance(error, FailedFast):
            typer.echo(str(store.path))
        raise
    with suppress(OSError):  # how it ended matters more than that somebody reads where it is
        typer.echo(str(store.path))
    if status != "ok":
        raise EngineError(
            f"Some cases of {store.path} were not measured in full.",
            hint=f"See `specbench report {store.path}`; go on with `specbench run --resume "
            f"{store.path}`.",
        )


def _calibrate(prepared: "Prepared", store: "RunStore") -> None:
    """Note what our own client's error is on this machine just now: a second.

    SPECBENCH_CALIBRATION=off leaves it out, and with it the check that looks at it.
    """
    from specbench.calibrate import quick_calibration

    config = prepared.config
    wanted = os.environ.get("SPECBENCH_CALIBRATION") != "off"
    if wanted and config.load.client == "direct" and "calibration" not in store.document:
        measured = quick_calibration((1, config.in_flight))
        store.amend({"calibration": measured.model_dump(mode="json")})


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


def _print_plan(prepared: "Prepared", cluster: "RayCluster | None" = None) -> None:
    """Every case, and the exact command line of every engine; what a cluster's nodes are asked for."""
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
    if cluster is not None:
        from specbench.executors.units import needs_of, units_of

        typer.echo("")
        for unit in units_of(plan):
            places = ", ".join(str(place + 1) for place in unit.stages)
            typer.echo(f"{unit}: stage {places} on one host, with {needs_of(prepared, unit)}")


def _run_folder(given: Path, results: Path) -> Path:
    """A run's folder from a path or a bare id."""
    return given if given.exists() or len(given.parts) > 1 else results / given


# --- report --------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "specbench report",
        "specbench report results/RUN --by category",
        "specbench report --format markdown",
        "specbench report --format html -o report.html",
        "specbench report --watch",
    )
)
def report(
    run_folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="A run (default: the latest).", autocompletion=_run_ids
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
    from specbench.analysis.rows import rows as make_rows
    from specbench.analysis.slices import WAYS
    from specbench.render import report as rendering
    from specbench.render.read import measured_cases

    _one_of("--format", form, ("table", *rendering.FORMATS, "html"))
    if form == "html":
        _check_html(by, output)
    folder = _run_folder(run_folder, results) if run_folder else stores.latest(results)
    store = stores.RunStore.open(folder)
    if watch:
        if form != "table" or output is not None or strict:
            raise UserError("--watch redraws the table; leave out --format, --output and --strict.")
        if sys.stdout.isatty():
            _watch(folder, _one_of("--by", by, WAYS))
            return
        _say("--watch needs a terminal; this is the table once.")
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
            store.document,
            findings,
            width=size,
            colour=colour and not output,
            plain=output is None and _is_plain(),
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
        _say(f"{folder} is unfinished; go on with `specbench run --resume {folder}`.")
    flagged = [row for row in rows if row.flags or row.problem]
    if strict and flagged:
        _say(f"{len(flagged)} of {len(rows)} rows are flagged (--strict).")
        raise typer.Exit(1)


def _watch(folder: Path, by: Any) -> None:  # noqa: ANN401  (a slices.By)
    """The table again and again, and then why no more."""
    from rich.console import Console

    from specbench.render import watch as watching

    def draw(store: "RunStore") -> str:
        width, colour = _terminal()
        return watching.view(
            store,
            by=by,
            baseline=_baseline(store),
            width=width,
            colour=colour,
            plain=_is_plain(),
        )

    os.nice(10)  # what it takes of the CPU, it takes from the run
    _say(watching.watch(folder, draw, Console(no_color=not _terminal()[1], highlight=False)))


def _check_html(by: str | None, output: Path | None) -> None:
    """Refuse what makes no sense of a page."""
    if by is not None:
        raise UserError("--by is for the other formats: the page shows every split; leave it out.")
    if output is None and sys.stdout.isatty():
        raise UserError("A page is 5 MB of HTML; write it to a file: -o report.html.")


# --- compare -------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
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

    _one_of("--format", form, ("table", "markdown", "json", "junit", "github"))
    for kind in allow or ():
        _one_of("--allow", kind, ALLOWABLE)
    conditions = [conditioning.parse(text) for text in fail_if or ()]
    sides = [
        baselines.read(_run_folder(side, results) if side else stores.latest(results))
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
        size, colour = _terminal()
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


# --- baseline ------------------------------------------------------------------------------------

baseline_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=_examples("specbench baseline save results/RUN -o baselines/nightly.json"),
)
app.add_typer(baseline_app, name="baseline", help="Pin a run as a small file to compare with.")


@baseline_app.command(
    epilog=_examples(
        "specbench baseline save results/RUN -o baselines/nightly.json",
        "specbench baseline save RUN -o baselines/nightly.json --replace",
    )
)
def save(
    run_folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="A run (default: the latest).", autocompletion=_run_ids
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
    folder = _run_folder(run_folder, results) if run_folder else stores.latest(results)
    store = stores.RunStore.open(folder)
    kept = baselines.of_run(store)
    if not any(row.requests for row in kept.rows):
        raise UserError(f"{folder} has measured nothing yet; a baseline would say nothing.")
    baselines.save(kept, output, replace=replace)
    typer.echo(f"{output}: {len(kept.rows)} rows of {kept.run}")
    for row in kept.rows:
        spoiled = [*row.flags, *([f"{row.missing} requests are missing"] if row.missing else [])]
        for why in spoiled:
            _say(f"note: {row.name}: {why}")


# --- what-if -------------------------------------------------------------------------------------


@app.command(
    "what-if",
    epilog=_examples(
        "specbench what-if --tau 2.5",
        "specbench what-if results/RUN --tau 2.5 --k 4",
        "specbench what-if --tau 2.5 --k 4 --method eagle --measure",
    ),
)
def what_if(
    run_folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="A run (default: the latest).", autocompletion=_run_ids
        ),
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
    epilog=_examples(
        "specbench verify --config demo",
        "specbench verify --config demo --set sampling.temperature=1 --samples 400 --json",
    )
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


# --- doctor --------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "specbench doctor",
        "specbench doctor --json",
        "specbench doctor --fix-perf-analyzer",
    )
)
def doctor(
    fix_perf_analyzer: Annotated[
        bool,
        typer.Option(
            "--fix-perf-analyzer",
            help="Make GenAI-Perf's perf_analyzer run on an older glibc (a newer C library in a "
            "folder of ours, from this machine's package mirror).",
        ),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the 5 s in which the machine is watched.")
    ] = False,
    tritonserver: Annotated[
        str | None,
        typer.Option(help="Try this tritonserver too (default: the one on PATH, if any)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    datasets: Datasets = Path("datasets"),
) -> None:
    """What is here and what is missing, with what to do about it. Exit 2 if there is a problem."""
    import json
    import shlex

    from specbench import doctor as doctors
    from specbench.load import perf_analyzer

    if fix_perf_analyzer:
        typer.echo(f"perf_analyzer runs: {perf_analyzer.fix(say=_say)}/perf_analyzer")
        return
    findings = []
    command = shlex.split(tritonserver or "")
    for finding in doctors.examine(datasets, tritonserver=command, without_noise=quick, say=_say):
        findings.append(finding)
        if not as_json:
            typer.echo("\n".join(doctors.as_lines(finding)))
    if as_json:
        typer.echo(json.dumps([doctors.as_record(one) for one in findings], indent=1))
    if any(one.status == "problem" for one in findings):
        raise typer.Exit(2)


# --- calibrate -----------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "specbench calibrate",
        "specbench calibrate --concurrency 1,8 --gap-ms 2 --json",
    )
)
def calibrate(
    concurrency: Annotated[str, typer.Option(help="Streams at once, e.g. 1,64.")] = "1,64",
    gap_ms: Annotated[str, typer.Option(help="Milliseconds between chunks, e.g. 1,5.")] = "1,5,20",
    seconds: Annotated[float, typer.Option(min=0.1, help="For each pair of the two.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The load client's own error on this machine, against a server that knows its times."""
    from specbench import calibrate as calibrating

    streams = [round(n) for n in _numbers("--concurrency", concurrency, least=1)]
    gaps_ms = _numbers("--gap-ms", gap_ms, least=0.1)
    loads = [(n, gap) for n in streams for gap in gaps_ms]
    found = calibrating.calibrate(loads, seconds=seconds)
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
    else:
        typer.echo(calibrating.as_text(found), nl=False)


def _numbers(flag: str, text: str, *, least: float) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(least <= number < 1e6 for number in numbers):
        raise UserError(f"{flag} {text}: write numbers from {least:g} up, e.g. {flag} 1,5.")
    return numbers


# --- triton --------------------------------------------------------------------------------------


class _WriteUnlessNamed(TyperGroup):
    """`specbench triton CONFIG` is `specbench triton write CONFIG`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401  (click's)
        if args and args[0] not in {*self.commands, "-h", "--help"}:
            args = ["write", *args]
        return super().parse_args(ctx, args)


triton_app = typer.Typer(
    cls=_WriteUnlessNamed,
    help="A Triton model repository: written from a config (specbench triton CONFIG -o DIR), or "
    "checked (specbench triton check DIR).",
    epilog=_examples(
        "specbench triton eagle_k5.yaml -o model_repository/",
        "specbench triton check model_repository/",
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(triton_app, name="triton")
TritonVersion = Annotated[
    str | None,
    typer.Option(
        "--triton", metavar="YY.MM", help="For this container, e.g. 25.02; here: for our own vLLM."
    ),
]


@triton_app.command(
    "write",
    epilog=_examples(
        "specbench triton eagle_k5.yaml -o model_repository/",
        "specbench triton eagle_k5.yaml -o model_repository/ --triton 25.02",
        "specbench triton demo -o model_repository/ --name vanilla=base --name eagle=fast",
    ),
)
def triton_write(
    config: Annotated[str, typer.Argument(help="A config file, or the name of one.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The model repository to write.")
    ],
    triton: TritonVersion = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="ARM=NAME", help="What an arm's model is called."),
    ] = None,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be written; write nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace models of the same names, whoever wrote them.")
    ] = False,
) -> None:
    """One model per arm, and the docker command that serves them (default: the newest container)."""
    from functools import partial

    from specbench import demo
    from specbench.sweep import arms_of
    from specbench.triton import repository, versions, writing

    path, parsed = _load_config(config, overrides)
    container = None if triton == "here" else versions.container(triton or versions.newest())
    takes = container.takes if container else versions.require_installed()
    planned = repository.plan_repository(
        parsed,
        arms_of(parsed),
        takes,
        config_path=path,
        names=_pairs("--name", names),
        resolve=partial(demo.resolve, say=_say, build=not dry_run),
        in_container=container is not None,
    )
    for note in planned.notes:
        _say(f"note: {note}")
    if dry_run:
        for model in planned.models:
            for file, text in model.files().items():
                typer.echo(f"{output / model.name / file}:\n{text}")
    else:
        where = container.triton if container else None
        writing.write(planned, output, config_path=path, triton=where, vllm=takes.vllm, force=force)
        models = ", ".join(model.name for model in planned.models)
        _say(f"{output}: {models}; for vLLM {takes.vllm}" + (f" in Triton {where}" * bool(where)))
    if container:
        typer.echo(writing.docker_line(planned, output, container, env=parsed.engine.env))
    else:
        typer.echo(writing.server_line(planned, output))


def _pairs(flag: str, given: list[str] | None) -> dict[str, str]:
    found = {}
    for pair in given or ():
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise UserError(f"{flag} {pair}: write ARM=NAME, e.g. {flag} eagle=my_model.")
        found[key] = value
    return found


@triton_app.command(
    "check",
    epilog=_examples(
        "specbench triton check model_repository/",
        "specbench triton check model_repository/ --triton 25.02 --mount /hf-models=/data/models",
    ),
)
def triton_check(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A model repository.")],
    triton: TritonVersion = None,
    mounts: Annotated[
        list[str] | None,
        typer.Option("--mount", metavar="INSIDE=FOLDER", help="Where a container's path is here."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What would not load, and what would not compare. Exit 2 if there is a problem.

    For the container it was written for, else the vLLM that is installed here, or --triton.
    """
    import json

    from specbench.triton import check, places, versions, writing

    mark = writing.mark_of(folder) or {}
    wanted = triton or mark.get("triton")
    if wanted == "here":
        takes = versions.require_installed()
    else:
        here = None if wanted else versions.installed()
        takes = here or versions.container(wanted or versions.newest()).takes
    where = places.Places.read(mounts or [], mark.get("mounts", {}))
    found = check.check(folder, takes, where)
    if as_json:
        typer.echo(json.dumps(found.document(), indent=1))
    else:
        for finding in found.findings:
            typer.echo(finding.as_line())
        verdict = "nothing" if found.loads else "what is marked `problem`"
        typer.echo(
            f"{folder}: {len(found.models)} models, read as vLLM {takes.short} would: {verdict} "
            "would keep them from loading"
        )
    if not found.loads:
        raise typer.Exit(2)


# --- models --------------------------------------------------------------------------------------

models_app = typer.Typer(
    help="Checkpoints made fit for an engine.",
    epilog=_examples(
        "specbench models convert-eagle EAGLE-LLaMA3-Instruct-8B EAGLE-converted --target "
        "Meta-Llama-3-8B-Instruct"
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(models_app, name="models")


@models_app.callback()
def models_options() -> None:
    """Checkpoints made fit for an engine."""


@models_app.command(
    "convert-eagle",
    epilog=_examples(
        "specbench models convert-eagle EAGLE-LLaMA3-Instruct-8B EAGLE-converted --target "
        "Meta-Llama-3-8B-Instruct",
        "specbench models convert-eagle EAGLE-converted EAGLE-again --to current",
    ),
)
def convert_eagle(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The head's folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    to: Annotated[
        str, typer.Option(help="vllm-0.7 (and older), current, or eagle (the EAGLE repository).")
    ] = "vllm-0.7",
    target: Annotated[
        Path | None,
        typer.Option(help="The target's folder: what the head lacks is taken from there."),
    ] = None,
) -> None:
    """An EAGLE head for vLLM before 0.7.3 (Triton up to 25.02), or back again."""
    from specbench.models import eagle

    done = eagle.convert(source, out, _one_of("--to", to, eagle.LAYOUTS), target=target)
    for note in done.notes:
        _say(f"note: {note}")
    if done.written is None:
        typer.echo(f"{source}: no conversion needed: {done.reason}")
    else:
        typer.echo(f"{done.written}: {done.tensors} tensors, {done.reason}")


# --- runs ----------------------------------------------------------------------------------------

runs_app = typer.Typer(
    help="Keep runs: list, show, delete, export as one .zip, import one.",
    epilog=_examples(
        "specbench runs list",
        "specbench runs show RUN",
        "specbench runs export RUN -o run.zip",
        "specbench runs import run.zip",
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(runs_app, name="runs")
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's id or folder.", autocompletion=_run_ids),
]


@runs_app.command(
    "list",
    epilog=_examples(
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
        _say(f"There is no run in {results}/.")


@runs_app.command(
    "show",
    epilog=_examples(
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
    epilog=_examples(
        "specbench runs delete RUN",
        "specbench runs delete RUN OTHER --yes",
    ),
)
def runs_delete(
    run_names: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Ids or folders.", autocompletion=_run_ids),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    results: Results = Path("results"),
) -> None:
    """Delete runs, after asking. A run that is being written to is refused."""
    from specbench import runs as keeping

    folders = list(dict.fromkeys(keeping.folder_of(results, name) for name in run_names))
    if not yes:
        for line in keeping.as_lines([keeping.summary(folder) for folder in folders]):
            _say(line)
        many = f"these {len(folders)} runs" if len(folders) > 1 else "this run"
        if not _confirmed(f"Delete {many} for good?"):
            raise UserError("Nothing was deleted.")
    for folder in folders:
        keeping.delete(results, folder)
        typer.echo(f"deleted {folder}")


@runs_app.command(
    "export",
    epilog=_examples(
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
    epilog=_examples(
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


def _confirmed(question: str) -> bool:
    """What the user says; UserError where there is nobody to ask."""
    try:
        return bool(typer.confirm(question, default=False, err=True))
    except typer.Abort:
        raise UserError("Nobody answered.", hint="Give --yes to go on without asking.") from None


# --- other tools' files --------------------------------------------------------------------------


@app.command(
    "import",
    epilog=_examples(
        "specbench import bench.json",
        "specbench import eagle.jsonl --k 5 --method eagle --baseline vanilla.jsonl",
        "specbench import artifacts/profile_export.jsonl --name aiperf-night",
    ),
)
def import_results(
    file: Annotated[
        Path, typer.Argument(help="A tool's results: a file, or a folder of artifacts.")
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="If it isn't recognised: vllm-bench, genai-perf, genai-perf-summary, aiperf, "
            "aiperf-raw, aiperf-summary, eagle, spec-bench or sglang.",
        ),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option(
            min=0, max=1000, help="Tokens drafted at a time, where the file doesn't say (0: none)."
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="How they were drafted: eagle, eagle3, ngram, ….")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The served model.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="The same tool's results without speculation.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The run's name (default: the file's).")] = None,
    results: Results = Path("results"),
) -> None:
    """A run folder of another tool's results, with what they hold and null for the rest.

    EAGLE's --depth D drafts k = D + 1, SGLang's --speculative-num-draft-tokens N at topk 1 k = N - 1.
    docs/runs.md says how every figure is read.
    """
    from specbench.interchange.found import Told
    from specbench.interchange.importing import import_file

    made = import_file(
        file,
        results=results,
        told=Told(k, method, model),
        kind=kind,
        name=name,
        baseline=baseline,
        command=_command(),
    )
    typer.echo(str(made.path))
    what = f"{made.requests} requests" if made.requests else "its own figures, no requests"
    _say(f"{made.kind}: {', '.join(made.arms)}: {what}")


@app.command(
    "export",
    epilog=_examples(
        "specbench export RUN --to eagle --arm eagle-k5 -o answers.jsonl",
        "specbench export RUN --to aiperf --arm vanilla -o profile_export.jsonl",
    ),
)
def export_results(
    run_name: RunName,
    to: Annotated[str, typer.Option("--to", help="spec-bench, eagle, aiperf or genai-perf.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    arm: Annotated[str | None, typer.Option(help="The arm, where the run has several.")] = None,
    case: Annotated[
        str | None, typer.Option(help="A case's id, where the arm has several.")
    ] = None,
    results: Results = Path("results"),
) -> None:
    """One arm's requests as another tool's file; what it can't hold is said."""
    from specbench import runs as keeping
    from specbench.interchange.exporting import export
    from specbench.store import RunStore

    store = RunStore.open(keeping.folder_of(results, run_name))
    done = export(store, to, output, arm=arm, case=case)
    typer.echo(f"{', '.join(map(str, done.paths))}: {done.count} written")
    for note in done.notes:
        _say(f"note: {note}")


# --- init ----------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "specbench init",
        "specbench init --yes",
        "specbench init --model Qwen/Qwen3-8B --method eagle3 --prompts humaneval --yes -o q.yaml",
    )
)
def init(
    model: Annotated[str | None, typer.Option(help="The model that is served.")] = None,
    method: Annotated[
        str | None, typer.Option(help="How tokens are drafted: METHOD, or METHOD DRAFT.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompt sets or files, with commas.")] = None,
    k: Annotated[str, typer.Option(help="Draft lengths to try.")] = "1,3,5",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The config (default: by its answers).")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Take the defaults, ask nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file.")] = False,
    datasets: Datasets = Path("datasets"),
) -> None:
    """A first config from three answers: which model, how tokens are drafted, which prompts."""
    from specbench import init as starting

    model = _answer(model, "Which model is served?", starting.DEFAULT_MODEL, yes)
    if method is None and not yes:
        for head in starting.heads_for(model):
            _say(f"  {head.method} {head.model} ({head.source})")
    drafted = _answer(method, "How are tokens drafted?", starting.suggested(model), yes)
    said = _answer(prompts, "Which prompts?", ",".join(starting.DEFAULT_PROMPTS), yes)
    way, draft = starting.drafting(drafted, model)
    lengths = tuple(dict.fromkeys(round(n) for n in _numbers("--k", k, least=1)))
    answers = starting.Answers(model, way, draft, starting.prompt_names(said), lengths)
    target = output or Path("configs" if Path("configs").is_dir() else "", answers.file_name)
    if target.exists() and not overwrite:
        if yes:
            raise UserError(f"{target} is there already.", hint="Give --overwrite, or another -o.")
        overwrite = _confirmed(f"Replace {target}?")
    starting.write(answers, target, overwrite=overwrite)
    typer.echo(str(target))
    for name in starting.missing_sets(answers.prompts, (datasets, Path())):
        _say(f"Then: specbench convert {name}")
    _say(f"Then: specbench run --config {target}")


def _answer(given: str | None, question: str, default: str, yes: bool) -> str:
    """What was given, else what the user says, else the default."""
    if given is not None or yes:
        return (given or default).strip()
    try:
        return str(typer.prompt(question, default=default, err=True)).strip()
    except typer.Abort:
        raise UserError("Nobody answered.", hint="Give --yes to take the defaults.") from None


# --- the terminal --------------------------------------------------------------------------------


def _terminal() -> tuple[int, bool]:
    """Columns, and whether colour is wanted there."""
    import shutil

    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    # A file has no width to keep to: everything fits into 170.
    fallback = 80 if sys.stdout.isatty() else 170
    return shutil.get_terminal_size((fallback, 24)).columns, colour


def _is_plain() -> bool:
    """Whether the terminal's encoding has no block characters."""
    try:
        "▁█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return True
    return False


def _stderr() -> Any:  # noqa: ANN401  (a rich Console; rich is not imported here)
    from rich.console import Console

    from specbench.render.progress import Lasting

    lasting: Any = Lasting(sys.stderr)
    return Console(file=lasting)


def _say(text: str) -> None:
    """On standard error, where text of servers, logs and files cannot move the cursor."""
    from specbench.errors import without_controls

    with suppress(OSError):  # a terminal that was closed, a pipe that nobody reads
        typer.echo(without_controls(text), err=True)


def _command() -> list[str]:
    from specbench.machine import command_line

    return command_line()


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
            _say(error.tail)
        _say(f"specbench: {error}")
        return EXIT_INTERRUPTED if was_interrupted() else error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (KeyboardInterrupt, Exception) as error:
        is_gone = isinstance(error, OSError) and terminal_is_gone()
        if not (is_gone or was_interrupted() or isinstance(error, KeyboardInterrupt)):
            raise
        _say("specbench: interrupted")
        return EXIT_INTERRUPTED
    return 0
