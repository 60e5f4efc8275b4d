"""The names vLLM goes by: engine arguments, keys of speculative_config, methods, per version.

Read from vLLM's own source by its syntax tree, never by importing it (an import costs 10 s and
may touch the GPU). `recorded()` is what releases 0.11 to 0.33 knew, for machines without a vLLM;
`installed()` asks the one that is there.
"""

import ast
import difflib
import functools
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

# Spellings that vLLM has dropped, and what it reads today. The flat keys were engine arguments
# until 0.8 (docs v0.7.1 against v0.8.2); the ngram_ prefix went with vLLM PR 15348.
RENAMED_SPECULATION = {
    "speculative_model": "model",
    "num_speculative_tokens": "k",
    "num_spec_tokens": "k",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "speculative_max_model_len": "max_model_len",
    "speculative_model_quantization": "quantization",
    "speculative_disable_mqa_scorer": None,
    "speculative_disable_by_batch_size": None,
    "spec_decoding_acceptance_method": "rejection_sample_method",
    "typical_acceptance_sampler_posterior_threshold": None,
    "typical_acceptance_sampler_posterior_alpha": None,
    "acceptance_method": "rejection_sample_method",
    "disable_logprobs": None,
}
RENAMED_ENGINE_ARGS = {
    "speculative_model": "speculation.model",
    "num_speculative_tokens": "speculation.k",
    "ngram_prompt_lookup_max": "speculation.prompt_lookup_max",
    "ngram_prompt_lookup_min": "speculation.prompt_lookup_min",
    "speculative_draft_tensor_parallel_size": "speculation.draft_tensor_parallel_size",
    "disable_log_requests": "enable_log_requests: false (the default today)",
    "use_v2_block_manager": None,
    "device": None,
}


@dataclass(frozen=True)
class VllmNames:
    """What one vLLM knows. Names are Python fields (`max_model_len`), not flags."""

    version: str
    engine_args: frozenset[str]
    speculation_keys: frozenset[str]
    methods: frozenset[str]

    def flag(self, name: str) -> str:
        """The command-line flag of an engine argument."""
        return "--" + name.replace("_", "-")


def drafts_are_chains(method: str) -> bool:
    """Whether drafts of *method* at a smaller k are the first tokens of those at a larger one.

    So for drafts made token by token, each from the last; not for those looked up in the context,
    for trees, and for heads that make all tokens at once.
    """
    return method in {"eagle", "eagle3", "draft_model", "mtp"} or method.endswith("_mtp")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that *name* was most likely meant to be."""
    found = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


@functools.cache
def recorded() -> VllmNames:
    """The union of what the recorded releases knew (see tools/record_vllm_names.py)."""
    text = resources.files("specbench").joinpath("vllm_names.json").read_text(encoding="utf-8")
    data = json.loads(text)
    return VllmNames(
        version=", ".join(data["versions"]),
        engine_args=frozenset(data["engine_args"]),
        speculation_keys=frozenset(data["speculation_keys"]),
        methods=frozenset(data["methods"]),
    )


@functools.cache
def known() -> VllmNames:
    """What a config may name: the recorded releases' names, and those of the vLLM beside us.

    A vLLM newer than the recorded ones thus needs no new specbench.
    """
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec else []
    if not places:
        return recorded()
    here = installed(Path(places[0]))
    return VllmNames(
        version=f"{recorded().version}, {here.version}",
        engine_args=recorded().engine_args | here.engine_args,
        speculation_keys=recorded().speculation_keys | here.speculation_keys,
        methods=recorded().methods | here.methods,
    )


@functools.cache
def installed(package: Path) -> VllmNames:
    """What the vLLM whose package folder is *package* knows."""
    engine_args: set[str] = set()
    for path in [package / "engine" / "arg_utils.py", *_cli_arg_files(package)]:
        for cls in _classes(path):
            if cls.name.endswith(("EngineArgs", "FrontendArgs")):
                engine_args |= set(_fields(cls))
    speculation_file = package / "config" / "speculative.py"
    if not speculation_file.is_file():
        speculation_file = package / "config" / "__init__.py"
    if not speculation_file.is_file():  # before 0.10
        speculation_file = package / "config.py"
    literals = dict(_literals(speculation_file))
    keys = {
        field
        for cls in _classes(speculation_file)
        if cls.name == "SpeculativeConfig"
        for field in _fields(cls)
    }
    return VllmNames(
        version=_version(package),
        engine_args=frozenset(engine_args),
        speculation_keys=frozenset(keys),
        methods=frozenset(_expand("SpeculativeMethod", literals)),
    )


def engine_fields(package: Path) -> frozenset[str]:
    """What `AsyncEngineArgs` of the vLLM in *package* takes: without the API server's arguments."""
    classes = _classes(package / "engine" / "arg_utils.py")
    wanted = (cls for cls in classes if cls.name in ("EngineArgs", "AsyncEngineArgs"))
    return frozenset(field for cls in wanted for field in _fields(cls))


def _cli_arg_files(package: Path) -> list[Path]:
    return sorted((package / "entrypoints").rglob("cli_args.py"))


def _version(package: Path) -> str:
    """The version from vLLM's own file; distribution metadata may bear another name."""
    path = package / "_version.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    found = found or re.search(r"version = ['\"]([^'\"]+)['\"]", text)
    return found[1] if found else "unknown"


def _statements(path: Path) -> list[ast.stmt]:
    """The file's top level; nothing for a file that this version does not have."""
    return ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []


def _classes(path: Path) -> Iterator[ast.ClassDef]:
    for node in _statements(path):
        if isinstance(node, ast.ClassDef):
            yield node


def _fields(cls: ast.ClassDef) -> Iterator[str]:
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            is_class_var = "ClassVar" in ast.unparse(node.annotation)
            if not node.target.id.startswith("_") and not is_class_var:
                yield node.target.id


def _literals(path: Path) -> Iterator[tuple[str, list[str | ast.Name]]]:
    """Each `Name = Literal[...]`: its strings, and the names of other literals inside."""
    for node in _statements(path):
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Subscript(value=ast.Name(id="Literal"), slice=inside),
            ):
                parts = inside.elts if isinstance(inside, ast.Tuple) else [inside]
                strings = [p.value for p in parts if isinstance(p, ast.Constant)]
                names = [p for p in parts if isinstance(p, ast.Name)]
                yield name, [*(s for s in strings if isinstance(s, str)), *names]


def _expand(name: str, literals: dict[str, list[str | ast.Name]]) -> Iterator[str]:
    for part in literals.get(name, []):
        if isinstance(part, ast.Name):
            yield from _expand(part.id, literals)
        else:
            yield part
