"""`specbench import` and `specbench export`: other tools' files."""

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.root import app
from specbench.cli.shared import Results, RunName, examples, own_command
from specbench.cli.terminal import say


@app.command(
    "import",
    epilog=examples(
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
        command=own_command(),
    )
    typer.echo(str(made.path))
    what = f"{made.requests} requests" if made.requests else "its own figures, no requests"
    say(f"{made.kind}: {', '.join(made.arms)}: {what}")


@app.command(
    "export",
    epilog=examples(
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
        say(f"note: {note}")
