"""`specbench what-if`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbench.cli.root import app
from specbench.cli.run import carry_out
from specbench.cli.shared import Results, examples, folder_of, own_command, run_ids, vanilla_of
from specbench.cli.terminal import say
from specbench.errors import UserError

if TYPE_CHECKING:
    from specbench.store import RunStore


@app.command(
    "what-if",
    epilog=examples(
        "specbench what-if --tau 2.5",
        "specbench what-if results/RUN --tau 2.5 --k 4",
        "specbench what-if --tau 2.5 --k 4 --method eagle --measure",
    ),
)
def what_if(
    run_folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="A run (default: the latest).", autocompletion=run_ids
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
    from specbench.analysis.curves import curves, estimates, refusals
    from specbench.render.estimates import as_json as to_json
    from specbench.render.estimates import as_text as to_text
    from specbench.render.read import measured_cases

    folder = folder_of(run_folder, results) if run_folder else stores.latest(results)
    store = stores.RunStore.open(folder)
    found = curves(measured_cases(store), baseline=vanilla_of(store))
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
    refused = refusals(timed)
    timed = [curve for curve in timed if curve.model and not curve.model.mixed]
    if not timed:
        raise UserError(
            f"no estimate for {'; '.join(refused)}.",
            hint="A mean step mixes both kinds, and how many there are of each changes with τ.",
        )
    for refusal in refused:
        say(f"no estimate for {refusal}.")
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
        say=say,
    )
    about = preparing.document(prepared, config_path=path, command=own_command())
    made = stores.RunStore.create(results, stores.new_run_id("what-if"), about)
    carry_out(prepared, made)
    say(f"See: specbench report {made.path}")
