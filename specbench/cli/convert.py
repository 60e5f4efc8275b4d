"""`specbench convert`."""

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.root import app
from specbench.cli.shared import Datasets, examples, one_of
from specbench.cli.terminal import say
from specbench.errors import UserError

SHOWN_SKIPS = 20


@app.command(
    epilog=examples(
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
    choice = Choice(one_of("--turns", turns, ("first", "all")), limit, seed, allow_skips)
    sent_as = one_of("--style", style, ("chat", "completion"))
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
        say=say,
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
        say(f"note: {warning}")
