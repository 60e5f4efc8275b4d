"""`specbench doctor` and `specbench calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.root import app
from specbench.cli.shared import Datasets, examples, numbers_of
from specbench.cli.terminal import say


@app.command(
    epilog=examples(
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
        typer.echo(f"perf_analyzer runs: {perf_analyzer.fix(say=say)}/perf_analyzer")
        return
    findings = []
    command = shlex.split(tritonserver or "")
    for finding in doctors.examine(datasets, tritonserver=command, without_noise=quick, say=say):
        findings.append(finding)
        if not as_json:
            typer.echo("\n".join(doctors.as_lines(finding)))
    if as_json:
        typer.echo(json.dumps([doctors.as_record(one) for one in findings], indent=1))
    if any(one.status == "problem" for one in findings):
        raise typer.Exit(2)


@app.command(
    epilog=examples(
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

    streams = [round(n) for n in numbers_of("--concurrency", concurrency, least=1)]
    gaps_ms = numbers_of("--gap-ms", gap_ms, least=0.1)
    loads = [(n, gap) for n in streams for gap in gaps_ms]
    found = calibrating.calibrate(loads, seconds=seconds)
    if as_json:
        typer.echo(found.model_dump_json(indent=1))
    else:
        typer.echo(calibrating.as_text(found), nl=False)
