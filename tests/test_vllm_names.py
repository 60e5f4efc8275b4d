"""What a vLLM knows is read from its source, without importing it."""

from pathlib import Path

import pytest

from specbench import vllm_names
from specbench.vllm_names import installed, nearest, recorded

# Files as vLLM writes them; `raise` proves that none of them is ever run.
ARG_UTILS = '''
from typing import ClassVar, Literal
raise ImportError("never run")

@config
@dataclass
class EngineArgs:
    """Arguments for vLLM engine."""

    model: str = ModelConfig.model
    max_model_len: int | None = ModelConfig.max_model_len
    """How long."""
    speculative_config: dict[str, Any] | None = None
    _private: int = 0
    all_fields: ClassVar[list[str]] = []
    not_annotated = 3

    def __post_init__(self):
        local: int = 5

@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False

class SomethingElse:
    other: int = 0
'''
CLI_ARGS = """
class BaseFrontendArgs:
    chat_template: str | None = None

class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
"""
SPECULATIVE = """
raise ImportError("never run")
MTPModelTypes = Literal["deepseek_mtp", "mtp"]
EagleModelTypes = Literal["eagle", "eagle3", MTPModelTypes]
NgramGPUTypes = Literal["ngram_gpu"]
SpeculativeMethod = Literal["ngram", "draft_model", EagleModelTypes, NgramGPUTypes]
Unrelated = Literal["standard", "synthetic"]
NotALiteral = Optional["x"]

@config
class SpeculativeConfig:
    method: SpeculativeMethod | None = None
    num_speculative_tokens: int = Field(default=None, gt=0)
    prompt_lookup_max: int | None = Field(default=None, ge=1)
    other: ClassVar[int] = 0
"""
VERSION = """
__version__: str
__version_tuple__: tuple[int | str, ...]
version: str
__version__ = version = '0.32.0'
__version_tuple__ = version_tuple = (0, 32, 0)
"""
TREE = {
    "engine/arg_utils.py": ARG_UTILS,
    "entrypoints/openai/cli_args.py": CLI_ARGS,
    "config/speculative.py": SPECULATIVE,
    "_version.py": VERSION,
}


def vllm_at(folder: Path, **changed: str | None) -> Path:
    """A vLLM's package folder; a file given as None is left out."""
    for name, text in {**TREE, **changed}.items():
        if text is not None:
            path = folder / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return folder / "vllm"


def test_engine_arguments_are_the_fields_of_every_args_class(tmp_path: Path) -> None:
    assert installed(vllm_at(tmp_path)).engine_args == {
        "model",
        "max_model_len",
        "speculative_config",
        "enable_log_requests",
        "chat_template",
        "port",
    }


def test_methods_are_gathered_from_literals_inside_literals(tmp_path: Path) -> None:
    assert installed(vllm_at(tmp_path)).methods == {
        *("ngram", "draft_model", "eagle", "eagle3", "deepseek_mtp", "mtp", "ngram_gpu")
    }


def test_speculation_keys_are_the_fields_of_its_config(tmp_path: Path) -> None:
    found = installed(vllm_at(tmp_path)).speculation_keys
    assert found == {"method", "num_speculative_tokens", "prompt_lookup_max"}


def test_an_older_vllm_keeps_its_configs_in_one_file(tmp_path: Path) -> None:
    files = {"config/speculative.py": None, "config/__init__.py": SPECULATIVE}
    assert "eagle3" in installed(vllm_at(tmp_path, **files)).methods


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (VERSION, "0.32.0"),
        ('__version__ = "0.11.2"\n', "0.11.2"),
        ("version = '0.28.0+cpu'\n", "0.28.0+cpu"),
        ("", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_version_is_vllms_own_word(tmp_path: Path, text: str | None, version: str) -> None:
    assert installed(vllm_at(tmp_path, **{"_version.py": text})).version == version


def test_a_folder_that_is_no_vllm_knows_nothing(tmp_path: Path) -> None:
    found = installed(tmp_path)
    assert found.version == "unknown"
    assert not found.methods | found.engine_args | found.speculation_keys


def test_the_recorded_releases_know_what_the_configs_need() -> None:
    names = recorded()
    assert names.methods >= {"eagle", "eagle3", "draft_model", "ngram", "suffix", "mtp", "medusa"}
    assert names.methods >= {"mlp_speculator"}
    assert names.engine_args >= {"max_model_len", "dtype", "enforce_eager", "port"}
    assert names.speculation_keys >= {"prompt_lookup_max", "draft_tensor_parallel_size"}
    assert {"0.11.2", "0.32.0", "0.33.0"} <= set(names.version.split(", "))


def test_no_name_that_a_recorded_release_knows_is_called_old() -> None:
    """But for the count, which specbench calls k."""
    assert not vllm_names.RENAMED_ENGINE_ARGS.keys() & recorded().engine_args
    assert vllm_names.RENAMED_SPECULATION.keys() & recorded().speculation_keys == {
        "num_speculative_tokens"
    }


def test_every_present_spelling_of_an_old_name_is_known() -> None:
    known = recorded().speculation_keys | {"k", "model"}
    now = {new for new in vllm_names.RENAMED_SPECULATION.values() if new}
    assert now <= known
    engine = {new for new in vllm_names.RENAMED_ENGINE_ARGS.values() if new}
    assert {new.removeprefix("speculation.") for new in engine if "speculation" in new} <= known


@pytest.mark.parametrize(
    ("written", "meant"),
    [("max-model-len", "max_model_len"), ("dtyp", "dtype"), ("qqqq", None), ("", None)],
)
def test_nearest_forgives_a_slip_but_makes_nothing_up(written: str, meant: str | None) -> None:
    assert nearest(written, ["max_model_len", "dtype"]) == meant


def test_a_flag_is_a_field_with_hyphens() -> None:
    assert recorded().flag("max_model_len") == "--max-model-len"
