"""`specbench init`."""

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.root import app
from specbench.cli.shared import Datasets, confirmed, examples, numbers_of
from specbench.cli.terminal import say
from specbench.errors import UserError


@app.command(
    epilog=examples(
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
            say(f"  {head.method} {head.model} ({head.source})")
    drafted = _answer(method, "How are tokens drafted?", starting.suggested(model), yes)
    said = _answer(prompts, "Which prompts?", ",".join(starting.DEFAULT_PROMPTS), yes)
    way, draft = starting.drafting(drafted, model)
    lengths = tuple(dict.fromkeys(round(n) for n in numbers_of("--k", k, least=1)))
    answers = starting.Answers(model, way, draft, starting.prompt_names(said), lengths)
    target = output or Path("configs" if Path("configs").is_dir() else "", answers.file_name)
    if target.exists() and not overwrite:
        if yes:
            raise UserError(f"{target} is there already.", hint="Give --overwrite, or another -o.")
        overwrite = confirmed(f"Replace {target}?")
    starting.write(answers, target, overwrite=overwrite)
    typer.echo(str(target))
    for name in starting.missing_sets(answers.prompts, (datasets, Path())):
        say(f"Then: specbench convert {name}")
    say(f"Then: specbench run --config {target}")


def _answer(given: str | None, question: str, default: str, yes: bool) -> str:
    """What was given, else what the user says, else the default."""
    if given is not None or yes:
        return (given or default).strip()
    try:
        return str(typer.prompt(question, default=default, err=True)).strip()
    except typer.Abort:
        raise UserError("Nobody answered.", hint="Give --yes to take the defaults.") from None
