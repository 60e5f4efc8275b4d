"""`specbench verify`."""

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.root import app
from specbench.cli.shared import (
    ConfigName,
    Datasets,
    Overrides,
    Results,
    examples,
    load_config,
    own_command,
)
from specbench.cli.terminal import say, stderr
from specbench.errors import EngineError, UserError
from specbench.interrupts import EXIT_INTERRUPTED


@app.command(
    epilog=examples(
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
    path, parsed = load_config(config, overrides)
    prepared = verifying.prepare(
        parsed,
        config_path=path,
        prompt_folders=(datasets, Path()),
        say=say,
        samples=samples,
        tolerance=tolerance,
    )
    document = preparing.document(prepared, config_path=path, command=own_command())
    run_id = stores.new_run_id(parsed.name or path.stem)
    store = stores.RunStore.create(results / verifying.FOLDER, run_id, document)
    try:
        with store, RunProgress(prepared.requests, 0, stderr()) as progress:
            verdict = verifying.verify(prepared, store, progress, tolerance=tolerance)
    except KeyboardInterrupt:
        say("specbench: interrupted; the engines are stopped")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(verdict.document(), indent=1))
    else:
        typer.echo("\n".join(verdict.lines()))
        say(f"The facts: {store.path}")
    if verdict.differs:
        raise typer.Exit(1)
    if verdict.unknown:
        arms = ", ".join(finding.arm for finding in verdict.unknown)
        raise EngineError(f"Not verified: {arms}.", hint=f"See the logs in {store.path}/engines.")
