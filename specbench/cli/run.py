"""`specbench run`."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.cli.root import app
from specbench.cli.shared import (
    ConfigName,
    Datasets,
    Overrides,
    Results,
    examples,
    folder_of,
    load_config,
    one_of,
    own_command,
)
from specbench.cli.terminal import say, stderr
from specbench.errors import EngineError, FailedFast, SpecbenchError, UserError
from specbench.interrupts import EXIT_INTERRUPTED, was_interrupted

if TYPE_CHECKING:
    from specbench.config import Config
    from specbench.executors.on_ray import RayCluster
    from specbench.prepare import Prepared
    from specbench.store import RunStore


@app.command(
    epilog=examples(
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
        store = stores.RunStore.open(folder_of(resume, results))
        config_of_run, earlier = preparing.stored(store)
        prepared = preparing.prepare(
            config_of_run,
            config_path=store.path / "run.json",
            prompt_folders=(),
            say=say,
            earlier=earlier,
            dry=dry_run,
        )
        _connect(cluster, config_of_run, dry=dry_run)
    else:
        path, parsed = load_config(config, overrides)
        prepared = preparing.prepare(
            parsed, config_path=path, prompt_folders=(datasets, Path()), say=say, dry=dry_run
        )
        _connect(cluster, parsed, dry=dry_run)
        if dry_run:
            _print_plan(prepared, results / (run_id or "RUN"), cluster)
            return
        document = preparing.document(prepared, config_path=path, command=own_command())
        name = parsed.name or path.stem
        prompts = {name: found.prompts for name, found in prepared.prompt_sets.items()}
        run_id = run_id or stores.new_run_id(name)
        store = stores.RunStore.create(results, run_id, document, prompts)
    if dry_run:
        _print_plan(prepared, store.path, cluster)
        return
    for line in _found(prepared):
        say(line)
    carry_out(replace(prepared, fail_fast=fail_fast), store, cluster)


def _cluster(executor: str, address: str | None) -> "RayCluster | None":
    """Where a run is spread to, not connected yet; None for here."""
    if one_of("--executor", executor, ("local", "ray")) == "local":
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


def carry_out(prepared: "Prepared", store: "RunStore", cluster: "RayCluster | None" = None) -> None:
    """Do what *store* lacks of the run, say where it is; EngineError where a part failed."""
    from contextlib import nullcontext

    from specbench import run as story
    from specbench.render.progress import RunProgress

    done = sum(1 for case in prepared.plan.cases for _ in store.requests(case.id))
    try:
        with (
            cluster or nullcontext(),
            store,
            RunProgress(prepared.requests, done, stderr()) as progress,
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


def _found(prepared: "Prepared") -> list[str]:
    """What a run says first: which vLLM was found, and what to know before anything starts."""
    return [prepared.vllm, *(f"note: {note}" for note in prepared.notes)]


def _print_plan(prepared: "Prepared", folder: Path, cluster: "RayCluster | None" = None) -> None:
    """Every case, and the exact command line of every engine; what a cluster's nodes are asked for.

    *folder* is the run's, which is not made.
    """
    plan = prepared.plan
    for line in _found(prepared):
        typer.echo(line)
    typer.echo(
        f"{len(plan.cases)} cases, {prepared.requests} requests, {plan.starts} engine starts; "
        f"{plan.schedule}, {plan.together} engines up at once"
        + (f" ({prepared.room})" if prepared.room else "")
    )
    if _in_triton(prepared) and prepared.config.engine.server:
        typer.echo(f"\nTriton: {_triton_line(prepared, folder)}")
    for number, stage in enumerate(plan.stages, 1):
        typer.echo(f"\nstage {number}: {', '.join(arm.id for arm in stage.arms)}")
        for arm in stage.arms:
            if started := _started(prepared, arm.id):
                typer.echo(f"  {arm.id}: {started}")
        for round_ in stage.rounds:
            for case in round_:
                prompts = len(prepared.prompt_sets[case.prompt_set].prompts)
                typer.echo(f"  {case.id}: {prompts} prompts")
    if chooses := [one.label for one in prepared.config.speculation if one.choose_k]:
        typer.echo(f"\nand then the best k of {' and '.join(chooses)}, beside the baseline")
    if cluster is not None:
        _print_units(prepared)


def _print_units(prepared: "Prepared") -> None:
    """What a cluster's nodes are asked for."""
    from specbench.executors.units import needs_of, units_of

    typer.echo("")
    for unit in units_of(prepared.plan):
        places = ", ".join(str(place + 1) for place in unit.stages)
        typer.echo(f"{unit}: stage {places} on one host, with {needs_of(prepared, unit)}")


def _in_triton(prepared: "Prepared") -> bool:
    config = prepared.config
    return config.engine.kind == "triton" and config.load.client != "replay"


def _started(prepared: "Prepared", arm: str) -> str | None:
    """The command line of an arm's engine, or its model in Triton; None where nothing is started."""
    from specbench.engines.launch import shell_line

    if _in_triton(prepared):
        return _triton_model(prepared, arm)
    launch = prepared.launches.get(arm)
    return f"{shell_line(launch)} --host 127.0.0.1 --port PORT" if launch else None


def _triton_line(prepared: "Prepared", folder: Path) -> str:
    """What starts the run's tritonserver; its ports are free ones that are found then."""
    from dataclasses import replace

    from specbench.engines.launch import shell_line
    from specbench.engines.triton import REPOSITORY, server_argv

    command, repository = prepared.config.engine.server, folder / REPOSITORY
    argv = server_argv(
        command, repository, http="HTTP_PORT", grpc="GRPC_PORT", metrics="METRICS_PORT"
    )
    return shell_line(replace(next(iter(prepared.launches.values())), argv=argv))


def _triton_model(prepared: "Prepared", arm: str) -> str:
    """The model of an arm: its name, and its model.json where the run writes it."""
    import json

    name, launch = prepared.model_names[arm], prepared.launches.get(arm)
    if launch is None:
        return f"model {name}, as the server has it"
    return f"model {name}, {name}/1/model.json: {json.dumps(dict(launch.model_json))}"
