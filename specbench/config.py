"""What a file in configs/ may say. No other module reads YAML.

A config names a target, the speculative methods to try on it and the prompts to send; every
list in it is an axis of the sweep. `load` turns a file into a frozen `Config` or raises a
`ConfigError` that names the file and the key.
"""

import difflib
import math
import os
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    StrictInt,
    ValidationError,
    field_validator,
    model_validator,
)

from specbench import vllm_names
from specbench.errors import ConfigError
from specbench.records import Style


def _listed(value: Any) -> Any:  # noqa: ANN401  (what YAML holds is any value)
    """One value of an axis stands for a list of one."""
    return value if isinstance(value, list | tuple) else [value]


N = TypeVar("N", int, float)


def _no_repeats(values: Sequence[N]) -> Sequence[N]:
    if len(set(values)) != len(values):
        raise ValueError("a value stands twice in the list")
    return values


def _no_switch(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, bool):
        raise ValueError("should be a number")  # noqa: TRY004  (pydantic takes ValueErrors)
    return value


# The upper bounds are far beyond use: they keep a slip of the finger from planning for ever.
PositiveInt = Annotated[StrictInt, Field(gt=0, le=1_000_000)]
Seed = Annotated[StrictInt, Field(ge=0, lt=2**63)]
Number = Annotated[float, BeforeValidator(_no_switch)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=60)]
Axis = Annotated[tuple[PositiveInt, ...], BeforeValidator(_listed), Field(min_length=1)]
KAxis = Annotated[
    tuple[Annotated[StrictInt, Field(ge=0, le=1000)], ...],
    BeforeValidator(_listed),
    Field(min_length=1),
]


OPEN_LOOP_BATCH = 8  # requests that an engine batches under a `rate`; others wait in its queue


class Strict(BaseModel):
    """A mapping whose every key is known: a misspelt key must not change a number in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Speculation(Strict):
    """One method and its axis of k. Keys beyond these are vLLM's, and go to it as they are.

    `extra` holds keys that specbench does not know (a newer vLLM's): they are not checked.
    `k: auto` measures k = 1 and `k_max`, predicts every k between and measures the best of them; it
    is short for `k: [1, k_max]` with `choose_k: true`.
    """

    method: str
    model: str | None = None
    k: KAxis
    k_max: Annotated[StrictInt, Field(ge=2, le=1000)] = 5
    choose_k: StrictBool = False
    name: Name | None = None
    options: dict[str, JsonValue] = {}
    extra: dict[str, JsonValue] = {}

    @model_validator(mode="before")
    @classmethod
    def _gather_vllm_keys(cls, data: Any) -> Any:  # noqa: ANN401
        if not isinstance(data, Mapping):
            return data
        own = {key: value for key, value in data.items() if key in cls.model_fields}
        passed = {key: value for key, value in data.items() if key not in cls.model_fields}
        options = own.get("options", {})
        if not isinstance(options, Mapping):
            raise ValueError("options should be a mapping of vLLM's keys")  # noqa: TRY004
        renamed, known = vllm_names.RENAMED_SPECULATION, vllm_names.known().speculation_keys
        for key in (*passed, *options):
            if key in renamed:
                raise ValueError(_renamed(key, renamed[key]))
            if key in cls.model_fields:
                raise ValueError(f"write {key} beside `method`, not in `options`")
            if key not in known:
                raise ValueError(_unknown(str(key), {*cls.model_fields, *known}, renamed))
        if own.get("k") == "auto":
            own |= {"k": [1, own.get("k_max", cls.model_fields["k_max"].default)], "choose_k": True}
        return {**own, "options": {**options, **passed}}

    @field_validator("extra")
    @classmethod
    def _extra_is_beyond(cls, extra: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for key in ("method", "model", "num_speculative_tokens"):
            if key in extra:
                raise ValueError(f"{key} would change what the row says; write method, model and k")
        return extra

    @field_validator("method")
    @classmethod
    def _known_method(cls, method: str) -> str:
        if method in ("vanilla", "none"):
            raise ValueError("vanilla is the baseline and is added by itself; or write k: 0")
        known = vllm_names.known().methods
        if method not in known:
            close = vllm_names.nearest(method, known)
            meant = f"did you mean {close!r}?" if close else f"known: {', '.join(sorted(known))}"
            raise ValueError(f"vLLM has no method {_short(method)}; {meant}")
        return method

    @field_validator("k")
    @classmethod
    def _each_k_once(cls, k: tuple[int, ...]) -> tuple[int, ...]:
        _no_repeats(k)
        return k

    @model_validator(mode="after")
    def _draft_named(self) -> "Speculation":
        if self.choose_k and not vllm_names.drafts_are_chains(self.method):
            raise ValueError(
                f"k: auto predicts from k_max, but the drafts of {self.method} are no chains, of "
                "which the first tokens are what a smaller k drafts; list the k to measure"
            )
        parallel = self.options.get("parallel_drafting") or self.extra.get("parallel_drafting")
        if self.choose_k and parallel:
            raise ValueError("k: auto needs drafts made one after the other (parallel_drafting)")
        if self.choose_k and (min(self.k) != 1 or len(self.k) < 2):
            raise ValueError("choose_k needs k = 1 and a larger one to predict from")
        if self.model is None and self.method in ("eagle", "eagle3", "draft_model", "medusa"):
            raise ValueError(f"method {self.method} needs `model`: the path or hub id of its draft")
        return self

    @property
    def label(self) -> str:
        """What its arms are called by, before their k."""
        return self.name or self.method

    def vllm_config(self, k: int) -> dict[str, Any]:
        """The `speculative_config` that vLLM gets at this k (k > 0)."""
        own: dict[str, Any] = {"method": self.method}
        if self.model is not None:
            own["model"] = self.model
        return {**own, "num_speculative_tokens": k, **self.options, **self.extra}


class Sampling(Strict):
    """What every request says about sampling; all of it is always sent and recorded.

    A server applies the model's own generation_config to what a client leaves out, so nothing is
    left out. `top_k: 0` and `top_p: 1` switch the two off.
    """

    temperature: Number = Field(default=0.0, ge=0)
    top_p: Number = Field(default=1.0, gt=0, le=1)
    top_k: StrictInt = Field(default=0, ge=-1)
    seed: Seed = 0
    ignore_eos: StrictBool = False
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_listed)] = ()

    def body(self) -> dict[str, Any]:
        """The sampling part of a request's JSON body."""
        return {**self.model_dump(), "stop": list(self.stop) or None}


def _words(value: Any) -> Any:  # noqa: ANN401
    return shlex.split(value) if isinstance(value, str) else value


class Engine(Strict):
    """What serves the target: a vLLM that specbench starts, or a server already up at `url`.

    With `kind: triton` it is a Triton server with the vLLM backend: `server` is the command that
    starts it, or `url` (and `grpc_url`) one that is up. Its models are loaded one by one;
    `models` names them by arm where they are not called as `specbench triton` calls them.
    """

    kind: Literal["vllm", "triton"] = "vllm"
    server: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    models: dict[str, str] = {}
    grpc_url: str | None = None
    url: str | None = Field(default=None, pattern=r"^https?://")
    served_model: str | None = None
    api_key_env: str | None = None
    python: Path | None = None
    args: dict[str, JsonValue] = {}
    extra_args: dict[str, JsonValue] = {}
    env: dict[str, str] = {}
    startup_timeout_s: Number = Field(default=1800, gt=0)
    prefork: StrictBool = (
        True  # CPU builds: import vLLM once, fork the engines (engines/prefork.py)
    )

    @field_validator("args")
    @classmethod
    def _known_args(cls, args: dict[str, JsonValue]) -> dict[str, JsonValue]:
        renamed, known = vllm_names.RENAMED_ENGINE_ARGS, vllm_names.known().engine_args
        checked: dict[str, JsonValue] = {}
        for written, value in args.items():
            key = _field_name(written)
            if key in ("model", "host", "port", "served_model_name", "api_key"):
                raise ValueError(f"specbench sets {key} itself; leave it out")
            if key == "hf_token":
                raise ValueError("hf_token would be in the process list; export HF_TOKEN instead")
            if key in ("speculative_config", "spec_method", "spec_model", "spec_tokens"):
                raise ValueError(f"{key} would speculate in the baseline too; use `speculation`")
            if key in renamed:
                raise ValueError(_renamed(key, renamed[key]))
            if key not in known:
                problem = _unknown(written, known, renamed)
                raise ValueError(f"{problem} Or put it in engine.extra_args")
            if key in checked:
                raise ValueError(f"{key} stands twice, in two spellings")
            checked[key] = value
        return checked

    @model_validator(mode="after")
    def _one_way_to_get_a_server(self) -> "Engine":
        if self.kind == "triton" and bool(self.server) == bool(self.url):
            raise ValueError(
                "kind: triton needs `server` (the command that starts tritonserver) or `url` (one "
                "that is up), one of them"
            )
        if self.kind != "triton" and (self.server or self.models or self.grpc_url):
            raise ValueError("server, models and grpc_url go with kind: triton")
        if "@" in urlsplit(self.url or "").netloc:
            raise ValueError("a user or password in the url would be kept; see engine.api_key_env")
        if self.url and (self.args or self.extra_args or self.env):
            raise ValueError("a server that is already up (url) takes no args, extra_args or env")
        return self


class Load(Strict):
    """How the prompts are sent: by our own client, by a tool, or played back from a `tape`.

    GenAI-Perf and AIPerf run in environments of their own, made on first use; `command` names one
    that is there already. A replay (of a run folder) starts no engine; `tape_speed` 1.0 keeps the
    recorded pace, none is as fast as it goes.
    """

    client: Literal["direct", "genai-perf", "aiperf", "replay"] = "direct"
    command: Path | None = None
    tape: Path | None = None
    tape_speed: Number | None = Field(default=None, gt=0)
    warmup: StrictInt = Field(default=2, ge=0, le=10_000)
    warmup_tokens: PositiveInt = 32
    timeout_s: Number = Field(default=600, gt=0)
    stall_s: Number = Field(default=120, gt=0)

    @model_validator(mode="after")
    def _tape_for_a_replay(self) -> "Load":
        if (self.client == "replay") != (self.tape is not None):
            raise ValueError("client: replay and tape: RUN-FOLDER go together")
        if self.command is not None and not self.is_tool:
            raise ValueError("command is the program of client: genai-perf or aiperf")
        return self

    @property
    def is_tool(self) -> bool:
        """Whether a process of its own sends the prompts, a whole set at a time."""
        return self.client in ("genai-perf", "aiperf")


class PromptSetRef(Strict):
    """A converted set (datasets/NAME.jsonl) or a prompt file, and how much of it to send.

    `limit` takes the first prompts, or a random sample in file order when `seed` is given.
    """

    set: str = Field(min_length=1)
    limit: StrictInt | None = Field(default=None, gt=0)
    seed: Seed | None = None
    style: Style | None = None
    turns: Literal["first", "all"] | None = None


def _precision(value: Any) -> Any:  # noqa: ANN401
    return {"within": value} if isinstance(value, int | float) else value


class Precision(Strict):
    """Go on sending prompts until every arm's speed-up is known this well.

    `within` is the half-width of its 95% interval as a share (0.02: ±2%), `of` the question: on
    this prompt set, or on prompts like these. It ends at `max_cycles` passes over the prompts too.
    """

    within: Number = Field(gt=0, lt=1)
    of: Literal["this_set", "like_these"] = "this_set"
    max_cycles: Annotated[StrictInt, Field(ge=1, le=10_000)] = 10


class Limits(Strict):
    """What a request must keep to count as good: at most so many milliseconds, all that are given."""

    ttft_ms: Number | None = Field(default=None, gt=0)
    tpot_ms: Number | None = Field(default=None, gt=0)
    latency_ms: Number | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_at_least(self) -> "Limits":
        if not self.model_dump(exclude_none=True):
            raise ValueError("needs ttft_ms, tpot_ms or latency_ms")
        return self


def _prompt_refs(value: Any) -> Any:  # noqa: ANN401
    return [{"set": item} if isinstance(item, str) else item for item in _listed(value)]


class Config(Strict):
    """A whole config file."""

    name: Name | None = None
    description: str | None = None
    model: str = Field(min_length=1)
    speculation: Annotated[tuple[Speculation, ...], BeforeValidator(_listed)] = ()
    baseline: StrictBool = True
    prompts: Annotated[tuple[PromptSetRef, ...], BeforeValidator(_prompt_refs), Field(min_length=1)]
    max_tokens: Axis = (256,)
    concurrency: Axis = (1,)
    rate: Annotated[
        tuple[Annotated[Number, Field(gt=0, le=100_000)], ...], BeforeValidator(_listed)
    ] = ()
    goodput: Limits | None = None
    repeats: PositiveInt = 1
    sampling: Sampling = Sampling()
    engine: Engine = Engine()
    load: Load = Load()
    schedule: Literal["auto", "interleaved", "blocks"] = "auto"
    precision: Annotated[Precision | None, BeforeValidator(_precision)] = None
    seed: Seed = 0

    @field_validator("max_tokens", "concurrency", "rate")
    @classmethod
    def _each_value_once(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        _no_repeats(values)
        return values

    @model_validator(mode="after")
    def _aiperf_needs_an_openai_server(self) -> "Config":
        if self.engine.kind == "triton" and self.load.client == "aiperf":
            raise ValueError(
                "load.client: aiperf is for OpenAI-compatible servers; Triton takes direct or genai-perf"
            )
        return self

    @model_validator(mode="after")
    def _closed_or_open_loop(self) -> "Config":
        if self.rate and "concurrency" in self.model_fields_set:
            raise ValueError(
                "rate sends requests when they are due, however many are in flight; concurrency "
                "sends one when another ends: write one of the two"
            )
        if self.rate and self.precision:
            raise ValueError("precision needs pairs sent in turns: concurrency, not rate")
        return self

    @property
    def is_attached(self) -> bool:
        """Whether one vLLM that is up already is all that there is to measure."""
        return self.engine.url is not None and self.engine.kind == "vllm"

    @property
    def in_flight(self) -> int:
        """The most requests that an engine is to work on at once."""
        return OPEN_LOOP_BATCH if self.rate else max(self.concurrency)

    @model_validator(mode="after")
    def _precision_needs_pairs(self) -> "Config":
        if self.precision and self.schedule == "blocks":
            raise ValueError("precision needs pairs as they come: schedule: interleaved or auto")
        chooses = any(one.choose_k for one in self.speculation)
        for asked, name in ((self.precision, "precision"), (chooses, "k: auto")):
            if asked and (not self.baseline or self.is_attached or not self.speculation):
                raise ValueError(f"{name} is about speed-ups: it needs the baseline beside an arm")
        return self

    @model_validator(mode="after")
    def _one_arm_behind_a_url(self) -> "Config":
        if self.is_attached:
            arms = sum(len(s.k) for s in self.speculation)
            if arms > 1:
                raise ValueError(
                    "a server that is already up (engine.url) is one arm: "
                    "name at most one method with one k (what that server runs)"
                )
        return self


# --- reading -------------------------------------------------------------------------------------


MOST_BYTES, DEEPEST = 64 << 10, 50  # larger ones take PyYAML, which is slow, a second


class _ConfigLoader(yaml.SafeLoader):
    """YAML 1.1's safe loader without its traps.

    A key written twice, an anchor (an alias can stand for billions of values), .inf and .nan are
    errors; a date stays the text that was written.
    """

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None:
            raise _refused("anchors and aliases are not taken, write it out", event.start_mark)
        if self.depth >= DEEPEST:
            raise _refused("nested too deep", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _refused(problem: str, mark: Any) -> yaml.MarkedYAMLError:  # noqa: ANN401  (yaml's, untyped)
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def _finite(loader: _ConfigLoader, node: yaml.ScalarNode) -> float:
    value = loader.construct_yaml_float(node)
    if not math.isfinite(value):
        raise _refused(f"{node.value} is not a number to measure with", node.start_mark)
    return value


def _whole(loader: _ConfigLoader, node: yaml.ScalarNode) -> int:
    try:
        return int(loader.construct_yaml_int(node))
    except ValueError:  # of thousands of digits, or none (0x_, 0b_)
        raise _refused(f"{_short(node.value)} is not a number", node.start_mark) from None


def _as_written(loader: _ConfigLoader, node: yaml.ScalarNode) -> str:
    return str(node.value)


def _unique_mapping(loader: _ConfigLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str | int | float | bool | None):
            raise _refused("a key must be plain text", key_node.start_mark)
        if key in seen:
            raise _refused(f"the key {_short(key)} stands twice", key_node.start_mark)
        seen.add(key)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_ConfigLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
_ConfigLoader.add_constructor("tag:yaml.org,2002:float", _finite)
_ConfigLoader.add_constructor("tag:yaml.org,2002:int", _whole)
_ConfigLoader.add_constructor("tag:yaml.org,2002:timestamp", _as_written)


def _parsed(text: str) -> Any:  # noqa: ANN401
    """The value that *text* is.

    Raises:
        yaml.YAMLError: it is none; nothing else is raised.
    """
    try:
        return yaml.load(text, Loader=_ConfigLoader)
    except RecursionError:
        raise yaml.YAMLError("nested too deep") from None
    except ValueError as error:  # an integer of thousands of digits
        raise yaml.YAMLError(str(error)) from None


def find(ref: str, *, folders: Sequence[Path] = (Path("configs"),)) -> Path:
    """The config file that *ref* means: a path, else a name in *folders*, else a shipped one.

    Raises:
        ConfigError: nothing is there; names what is.
    """
    given = Path(ref)
    if os.path.isfile(ref):  # unlike Path.is_file, it takes any text
        return given
    name = ref if ref.endswith((".yaml", ".yml")) else f"{ref}.yaml"
    places = [*folders, *shipped_folders()]
    if given.name == ref:
        for folder in places:
            if os.path.isfile(folder / name):
                return folder / name
    there = sorted({path.stem for folder in places for path in folder.glob("*.yaml")})
    close = difflib.get_close_matches(given.stem, there, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]}?" if close else f"There are: {', '.join(there) or 'none'}."
    raise ConfigError(ref, None, "no such config file here, in configs/ or shipped.", hint=hint)


def shipped_folders() -> list[Path]:
    """Where the package keeps its configs: inside a wheel, or beside it in a checkout."""
    package = Path(str(resources.files("specbench")))
    places = (package / "shipped_configs", package.parent / "configs")
    return [folder for folder in places if folder.is_dir()][:1]


def load(path: Path, overrides: Iterable[str] = ()) -> Config:
    """Read the config at *path*; *overrides* are `dotted.key=value` with a YAML value.

    Raises:
        ConfigError: names the file and the key, and what to write instead.
    """
    data = _read_yaml(path)
    for key, whole in (("speculation", _listed), ("prompts", _prompt_refs)):
        if data.get(key) is not None:  # written out, so that --set finds one shape
            data[key] = whole(data[key])
    for override in overrides:
        _apply_override(path, data, override)
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise _first_problem(path, error) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(path, None, f"not UTF-8 text ({error.reason}).") from None
    except OSError as error:
        raise ConfigError(path, None, f"cannot be read: {error.strerror}.") from None
    if len(raw) > MOST_BYTES:
        raise ConfigError(path, None, f"over {MOST_BYTES >> 10} kB; a config is a page of text.")
    try:
        data = _parsed(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise ConfigError(where, None, f"not valid YAML: {error.problem}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(path, None, f"not valid YAML: {str(error).splitlines()[0]}.") from None
    if not isinstance(data, dict):
        raise ConfigError(path, None, "a config is a mapping of keys; see `specbench run --help`.")
    return data


def _apply_override(path: Path, data: dict[str, Any], override: str) -> None:
    dotted, equals, text = override.partition("=")
    if not equals or not dotted.strip():
        raise ConfigError("--set", override, "write KEY=VALUE, as in speculation.k=3")
    try:
        value = _parsed(text)
    except yaml.YAMLError:
        raise ConfigError("--set", dotted, f"{text!r} is not a YAML value") from None
    keys = [part.strip() for part in dotted.split(".")]
    _set_in(path, data, keys, value, dotted)


def _set_in(path: Path, node: Any, keys: list[str], value: Any, dotted: str) -> None:  # noqa: ANN401
    """Set a nested key. Through a list, an index picks one item and a name goes to all."""
    key, rest = keys[0], keys[1:]
    if isinstance(node, list):
        if key.isdecimal():
            if int(key) >= len(node):
                raise ConfigError("--set", dotted, f"item {key} is not there (items: {len(node)})")
            if not rest:
                node[int(key)] = value
            else:
                _set_in(path, node[int(key)], rest, value, dotted)
        else:
            for item in node:
                _set_in(path, item, keys, value, dotted)
        return
    if not isinstance(node, dict):
        raise ConfigError("--set", dotted, f"{key!r} would lie inside a plain value of {path}")
    if rest:
        if node.get(key) is None:
            node[key] = {}
        _set_in(path, node[key], rest, value, dotted)
    else:
        node[key] = value


# --- problems, in words --------------------------------------------------------------------------


def _first_problem(path: Path, error: ValidationError) -> ConfigError:
    problem = error.errors(include_url=False)[0]
    location = problem["loc"]
    key = ".".join(str(part)[:80] for part in location)
    if problem["type"] == "extra_forbidden":
        name, model = str(location[-1]), _model_at(location[:-1])
        flag = _field_name(name)
        if model is Config and flag in vllm_names.RENAMED_ENGINE_ARGS:
            return ConfigError(path, key, _renamed(flag, vllm_names.RENAMED_ENGINE_ARGS[flag]))
        if model is Config and flag in vllm_names.known().engine_args:
            return ConfigError(path, key, f"is an engine argument; write it as engine.args.{flag}")
        return ConfigError(path, key, _unknown(name, model.model_fields))
    if problem["type"] == "missing":
        return ConfigError(path, key, "is missing")
    if problem["type"] == "value_error":
        return ConfigError(path, key, str(problem["ctx"]["error"]))
    said = IN_WORDS.get(problem["type"]) or problem["msg"].removeprefix("Input ")
    given = problem.get("input")
    shown = f" (not {_short(given)})" if isinstance(given, str | int | float | bool | None) else ""
    return ConfigError(path, key, said[0].lower() + said[1:] + shown)


def _short(value: object) -> str:
    """*value* as it was written, but for the rest of a long one."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}…{text[-1:] if isinstance(value, str) else ''}"


IN_WORDS = {
    "model_type": "should be a mapping of keys",
    "dict_type": "should be a mapping of keys",
    "tuple_type": "should be a list",
    "too_short": "needs at least one value",
    "string_type": "should be text",
    "string_too_short": "should not be empty",
    "int_type": "should be a whole number",
    "bool_type": "should be true or false",
    "invalid_key": "a key should be text",
}


def _model_at(location: Sequence[str | int]) -> type[BaseModel]:
    inside: dict[str, type[BaseModel]] = {
        "speculation": Speculation,
        "prompts": PromptSetRef,
        "precision": Precision,
        "goodput": Limits,
        "sampling": Sampling,
        "engine": Engine,
        "load": Load,
    }
    return inside.get(str(location[0]), Config) if location else Config


def _field_name(flag: str) -> str:
    """A flag as a Python field: --max-model-len is max_model_len."""
    return flag.lstrip("-").replace("-", "_")


def _unknown(
    name: str, known: Collection[str], renamed: Mapping[str, str | None] | None = None
) -> str:
    """What may have been meant by *name*, today's spelling where it is near an old one."""
    close = vllm_names.nearest(name, {*known, *(renamed or ())})
    close = (renamed or {}).get(close, close) if close else None
    if close:
        return f"unknown key {_short(name)}; did you mean {close!r}?"
    if len(known) > 20:
        return f"unknown key {_short(name)}."
    return f"unknown key {_short(name)}; known: {', '.join(sorted(known))}."


def _renamed(name: str, now: str | None) -> str:
    if now is None:
        return f"{name!r} is an old vLLM key that has no successor; leave it out"
    return f"{name!r} is not the spelling here; write {now}"
