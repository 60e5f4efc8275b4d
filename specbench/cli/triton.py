"""`specbench triton` and `specbench models`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specbench.cli.root import app
from specbench.cli.shared import Overrides, examples, load_config, one_of
from specbench.cli.terminal import say
from specbench.errors import UserError


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
    epilog=examples(
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
    epilog=examples(
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

    path, parsed = load_config(config, overrides)
    container = None if triton == "here" else versions.container(triton or versions.newest())
    takes = container.takes if container else versions.require_installed()
    planned = repository.plan_repository(
        parsed,
        arms_of(parsed),
        takes,
        config_path=path,
        names=_pairs("--name", names),
        resolve=partial(demo.resolve, say=say, build=not dry_run),
        in_container=container is not None,
    )
    for note in planned.notes:
        say(f"note: {note}")
    if dry_run:
        for model in planned.models:
            for file, text in model.files().items():
                typer.echo(f"{output / model.name / file}:\n{text}")
    else:
        where = container.triton if container else None
        writing.write(planned, output, config_path=path, triton=where, vllm=takes.vllm, force=force)
        models = ", ".join(model.name for model in planned.models)
        say(f"{output}: {models}; for vLLM {takes.vllm}" + (f" in Triton {where}" * bool(where)))
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
    epilog=examples(
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


models_app = typer.Typer(
    help="Checkpoints made fit for an engine.",
    epilog=examples(
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
    epilog=examples(
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

    done = eagle.convert(source, out, one_of("--to", to, eagle.LAYOUTS), target=target)
    for note in done.notes:
        say(f"note: {note}")
    if done.written is None:
        typer.echo(f"{source}: no conversion needed: {done.reason}")
    else:
        typer.echo(f"{done.written}: {done.tensors} tensors, {done.reason}")
