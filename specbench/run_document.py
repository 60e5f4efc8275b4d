"""What readers of a run folder trust of its run.json: names that become paths, values in tables.

specbench wrote it, but a zip, a merge or an editor may have been there since. Keys beyond these are
anyone's. A document that says nothing else than `format` and `id` is no run yet.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from specbench.errors import StoreError

LONGEST = 200  # bytes in the name of a file
DEEPEST = 50  # levels; a real one has about ten


def is_plain(name: str) -> bool:
    """Whether *name* can be a file's, and leads nowhere else."""
    fits = 0 < len(name.encode("utf-8", "replace")) <= LONGEST
    return fits and name not in (".", "..") and name.isprintable() and not {"/", "\\"} & set(name)


def _plain(name: str) -> str:
    if not is_plain(name):
        raise ValueError("can't be the name of a folder")
    return name


FolderName = Annotated[str, AfterValidator(_plain)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    """Strict: what is read afterwards is the document itself, where "1" is still text."""

    model_config = ConfigDict(extra="allow", strict=True)


class _Method(_Part):
    method: str
    k: Annotated[int, Field(ge=0, le=1000)]
    label: str = ""


class _Case(_Part):
    id: FolderName
    arm: FolderName
    prompt_set: FolderName
    max_tokens: Annotated[int, Field(gt=0, lt=2**53)] | None
    concurrency: Annotated[int, Field(gt=0, lt=2**53)]
    repeat: Count
    group: int = 0
    rate: Amount | None = None


class _PromptSet(_Part):
    sha256: str
    prompts: Count
    available: Count | None = None
    source: str | None = None


class _Sampling(_Part):
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    ignore_eos: bool | None


class _Goodput(_Part):
    model_config = ConfigDict(extra="forbid", strict=True)

    ttft_ms: Amount | None = None
    tpot_ms: Amount | None = None
    latency_ms: Amount | None = None


class _Precision(_Part):
    within: Annotated[float, Field(gt=0, lt=1)]
    of: Literal["this_set", "like_these"]


class _Speculation(_Part):
    method: str
    model: str | None = None
    k: list[int] | None = None


class _Engine(_Part):
    kind: str = "vllm"
    env: dict[str, str] = {}


class _Config(_Part):
    model: str
    schedule: str
    sampling: _Sampling
    engine: _Engine = _Engine()
    name: str | None = None
    repeats: Count = 1
    speculation: list[_Speculation] = []
    goodput: _Goodput | None = None
    precision: _Precision | None = None


class _Gpu(_Part):
    name: str = "GPU"


class _Machine(_Part):
    gpus: list[_Gpu]
    cpu: str | None
    cores: int | None
    packages: dict[str, str | None] | None = None


class _Origin(_Part):
    files: list[str]
    sha256: list[str]
    made_by: str = Field(alias="from")


class _Run(_Part):
    id: FolderName
    config: _Config
    arms: list[FolderName]
    methods: dict[FolderName, _Method]
    cases: list[_Case]
    prompt_sets: dict[FolderName, _PromptSet]
    machine: _Machine
    vllm: str | None
    order: list[list[str]] = []
    schedule: str | None = None
    room: str | None = None
    command: list[str] | None = None
    config_path: str | None = None
    imported: _Origin | None = None


def check(where: Path | str, document: Mapping[str, Any]) -> None:
    """Whether *document* is as a reader takes it; *where* is named in errors.

    Raises:
        StoreError: it lacks a key, or holds a value that no run has; names the key.
    """
    try:
        run = _Run.model_validate(document)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        raise _damaged(where, key, problem["msg"][0].lower() + problem["msg"][1:]) from None
    if lost := next((arm for arm in run.arms if arm not in run.methods), None):
        raise _damaged(where, "methods", f"has no {lost}, which is one of the arms")
    sampling = run.config.sampling
    if run.imported is None and None in (sampling.temperature, sampling.ignore_eos):
        raise _damaged(where, "config.sampling", "has no temperature or ignore_eos")
    for case in run.cases:
        if case.arm not in run.arms or case.prompt_set not in run.prompt_sets:
            raise _damaged(where, "cases", f"{case.id} is of an arm or a set that is not there")


def is_sound(value: object, depth: int = 0) -> bool:
    """Whether *value* is JSON of a sensible depth."""
    if depth > DEEPEST:
        return False
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(is_sound(one, depth + 1) for one in inner)


def _damaged(where: Path | str, key: str, problem: str) -> StoreError:
    return StoreError(
        f"{where}: `{key[:200]}`: {problem}.",
        hint="Something other than specbench wrote there; restore it or delete the run.",
    )
