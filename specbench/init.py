"""A first config from three answers: which model, how tokens are drafted, which prompts.

The heads that are suggested are public ones, with where each is named. A config is loaded before it gets
its name, so that what is written runs.
"""

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from specbench.config import Config, load
from specbench.errors import ConfigError, UserError
from specbench.store import write_text
from specbench.vllm_names import known

DEFAULT_MODEL = "demo:target"  # runs on any machine
DEFAULT_PROMPTS = ("humaneval", "mt_bench")
DEFAULT_K = (1, 3, 5)
WITHOUT_DRAFT = "ngram"  # needs no second model
NEEDS_DRAFT = ("eagle", "eagle3", "draft_model", "medusa")
EAGLE_README = "github.com/SafeAILab/EAGLE, README"
EAGLE_POSITIONS = 2048  # what EAGLE's own heads were trained on: longer contexts cost acceptance
POSITIONS = 4096
DEMO_PROMPTS = 5


class Head(NamedTuple):
    """A public draft for a target, and where it is named as that."""

    method: str
    model: str
    source: str


def _eagle(method: str, name: str) -> Head:
    return Head(method, f"yuhuili/{name}", EAGLE_README)


HEADS: dict[str, tuple[Head, ...]] = {
    "demo:target": (
        Head("eagle", "demo:eagle", "trained by this project"),
        Head("draft_model", "demo:draft", "trained by this project"),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (
        _eagle("eagle3", "EAGLE3-LLaMA3.1-Instruct-8B"),
        _eagle("eagle", "EAGLE-LLaMA3.1-Instruct-8B"),
        Head("draft_model", "meta-llama/Llama-3.2-1B-Instruct", "the same family and tokenizer"),
    ),
    "meta-llama/Llama-3.3-70B-Instruct": (_eagle("eagle3", "EAGLE3-LLaMA3.3-Instruct-70B"),),
    "meta-llama/Meta-Llama-3-8B-Instruct": (_eagle("eagle", "EAGLE-LLaMA3-Instruct-8B"),),
    "meta-llama/Meta-Llama-3-70B-Instruct": (_eagle("eagle", "EAGLE-LLaMA3-Instruct-70B"),),
    "meta-llama/Llama-2-7b-chat-hf": (_eagle("eagle", "EAGLE-llama2-chat-7B"),),
    "meta-llama/Llama-2-13b-chat-hf": (_eagle("eagle", "EAGLE-llama2-chat-13B"),),
    "meta-llama/Llama-2-70b-chat-hf": (_eagle("eagle", "EAGLE-llama2-chat-70B"),),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": (
        _eagle("eagle3", "EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),
    ),
    "lmsys/vicuna-7b-v1.3": (_eagle("eagle", "EAGLE-Vicuna-7B-v1.3"),),
    "lmsys/vicuna-13b-v1.3": (
        _eagle("eagle3", "EAGLE3-Vicuna1.3-13B"),
        _eagle("eagle", "EAGLE-Vicuna-13B-v1.3"),
    ),
    "lmsys/vicuna-33b-v1.3": (_eagle("eagle", "EAGLE-Vicuna-33B-v1.3"),),
    "Qwen/Qwen2-7B-Instruct": (_eagle("eagle", "EAGLE-Qwen2-7B-Instruct"),),
    "Qwen/Qwen2-72B-Instruct": (_eagle("eagle", "EAGLE-Qwen2-72B-Instruct"),),
    "Qwen/Qwen3-1.7B": (Head("eagle3", "AngelSlim/Qwen3-1.7B_eagle3", EAGLE_README),),
    "Qwen/Qwen3-4B": (Head("eagle3", "AngelSlim/Qwen3-4B_eagle3", EAGLE_README),),
    "Qwen/Qwen3-8B": (
        Head("eagle3", "RedHatAI/Qwen3-8B-speculator.eagle3", "vLLM's speculators, README"),
        Head("eagle3", "AngelSlim/Qwen3-8B_eagle3", EAGLE_README),
    ),
    "Qwen/Qwen3-14B": (Head("eagle3", "AngelSlim/Qwen3-14B_eagle3", EAGLE_README),),
    "Qwen/Qwen3-32B": (
        Head("eagle3", "RedHatAI/Qwen3-32B-speculator.eagle3", "its page on the hub"),
        Head("eagle3", "AngelSlim/Qwen3-32B_eagle3", EAGLE_README),
    ),
    "openai/gpt-oss-20b": (
        Head("eagle3", "RedHatAI/gpt-oss-20b-speculator.eagle3", "vLLM's own tests"),
    ),
    "openai/gpt-oss-120b": (
        Head("eagle3", "lmsys/EAGLE3-gpt-oss-120b-bf16", EAGLE_README),
        Head("eagle3", "nvidia/gpt-oss-120b-Eagle3", EAGLE_README),
    ),
}


@dataclass(frozen=True)
class Answers:
    """What a config is made of."""

    model: str
    method: str
    draft: str | None
    prompts: tuple[str, ...] = DEFAULT_PROMPTS
    k: tuple[int, ...] = DEFAULT_K

    @property
    def file_name(self) -> str:
        """What its file is called by default."""
        parts = (self.model.rpartition("/")[2], self.method)
        words = [re.sub(r"[^A-Za-z0-9.]+", "_", part).strip("_.").lower() for part in parts]
        return f"{'_'.join(words)}.yaml"


def heads_for(model: str) -> tuple[Head, ...]:
    """The public drafts that are known for *model*, the first the one to begin with."""
    by_name = {name.lower(): heads for name, heads in HEADS.items()}
    return by_name.get(model.strip().lower(), ())


def drafting(answer: str, model: str) -> tuple[str, str | None]:
    """Method and draft from an answer such as `ngram`, `eagle3` or `eagle3 org/head`.

    A method without its draft gets the known one of *model*.

    Raises:
        UserError: vLLM has no such method, or nobody knows a draft for it.
    """
    words = answer.replace("=", " ").split()
    if not words or len(words) > 2:
        raise UserError(f"{answer!r}: write METHOD or METHOD DRAFT, as in `eagle3 org/head`.")
    method, draft = words[0], words[1] if len(words) > 1 else None
    if method not in known().methods:
        raise UserError(
            f"vLLM has no method {method!r}.", hint="Common: eagle3, eagle, draft_model, ngram."
        )
    if draft is None and method in NEEDS_DRAFT:
        draft = next((head.model for head in heads_for(model) if head.method == method), None)
        if draft is None:
            raise UserError(
                f"{method} needs a draft, and none is known for {model}.",
                hint=f"Write `{method} PATH-OR-HUB-ID`, or ngram, which needs none.",
            )
    return method, draft


def suggested(model: str) -> str:
    """The answer to how tokens are drafted that is offered for *model*."""
    heads = heads_for(model)
    return f"{heads[0].method} {heads[0].model}" if heads else WITHOUT_DRAFT


def config_text(answers: Answers) -> str:
    """The config as YAML."""
    one: dict[str, Any] = {"method": answers.method}
    if answers.draft is not None:
        one["model"] = answers.draft
    one["k"] = list(answers.k) if len(answers.k) > 1 else answers.k[0]
    if answers.method == "ngram":
        one |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    lines = [
        "# Written by `specbench init`; docs/configs.md has every key.",
        _dumped({"model": answers.model}),
        _comment(answers),
        _dumped({"speculation": one}),
    ]
    if answers.model.startswith("demo:"):
        few = [{"set": name, "limit": DEMO_PROMPTS, "seed": 0} for name in answers.prompts]
        lines += [
            "# A few of each set: minutes on a laptop.",
            _dumped({"prompts": few}),
            _dumped({"max_tokens": 24}),
            _dumped({"sampling": {"temperature": 0}}),
            "# In float32 greedy outputs are the same with and without speculation.",
            _dumped({"engine": {"args": _demo_args()}}),
        ]
    else:
        positions = EAGLE_POSITIONS if (answers.draft or "").startswith("yuhuili/") else POSITIONS
        args = {"dtype": "bfloat16", "max_model_len": positions}
        lines.append(_dumped({"prompts": list(answers.prompts)}))
        lines += [_dumped({"max_tokens": 512}), _dumped({"sampling": {"temperature": 0}})]
        lines.append(_dumped({"engine": {"args": args}}))
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines if line)


def _demo_args() -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_model_len": 2048,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 134217728,
    }


def _comment(answers: Answers) -> str:
    for head in heads_for(answers.model):
        if (head.method, head.model) == (answers.method, answers.draft):
            return f"# The draft is a public one for this model ({head.source})."
    return ""


def _dumped(value: dict[str, Any]) -> str:
    # In ASCII: YAML takes some characters (U+0085) for the end of a line.
    return yaml.safe_dump(value, sort_keys=False, width=1000)


def write(answers: Answers, target: Path, *, overwrite: bool = False) -> Config:
    """Write the config to *target*, once it has been loaded.

    Raises:
        ConfigError: an answer makes no config; *target* is there and *overwrite* is not given.
        StoreError: *target* can't be written.
    """
    text = config_text(answers)
    with tempfile.TemporaryDirectory(prefix="specbench-init-") as made:
        draft = Path(made, target.name)
        draft.write_text(text, encoding="utf-8", errors="surrogateescape")
        try:
            config = load(draft)
        except ConfigError as error:
            where, key = "the config of these answers", error.key
            problem = str(error).removeprefix(f"{draft}: ").removeprefix(f"{key}: ")
            raise ConfigError(where, key, problem) from None
    if target.exists() and not overwrite:
        raise ConfigError(target, None, "is there already.", hint="Give another -o FILE.")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, text)
    return config


def prompt_names(answer: str) -> tuple[str, ...]:
    """The prompt sets in an answer such as `humaneval, mt_bench`.

    Raises:
        UserError: it names none.
    """
    names = tuple(dict.fromkeys(name.strip() for name in answer.split(",") if name.strip()))
    if not names:
        raise UserError("Name a prompt set or a file, e.g. humaneval.")
    return names


def missing_sets(names: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Those of *names* that are neither converted sets nor files yet."""
    return [
        name
        for name in names
        if not any((folder / f"{name}.jsonl").is_file() for folder in folders)
        and not Path(name).is_file()
    ]
