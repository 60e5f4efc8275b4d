"""Which vLLM is in which Triton container, and what that vLLM takes.

containers.json holds NVIDIA's table and says where it is from. engine_names.json is made by
tools/record_triton_names.py from vLLM's own sources.
"""

import functools
import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specbench import vllm_names
from specbench.errors import UserError

IMAGE = "nvcr.io/nvidia/tritonserver"

# What releases without a list of methods could do: they took the method from the draft's config.
EARLY_METHODS = frozenset({"ngram", "eagle", "draft_model", "medusa", "mlp_speculator"})


@dataclass(frozen=True)
class Takes:
    """What model.json may say to one vLLM: fields of its `AsyncEngineArgs`."""

    vllm: str
    engine_args: frozenset[str]
    speculation_keys: frozenset[str]
    methods: frozenset[str]

    @property
    def short(self) -> str:
        """Its version without the build: 0.7.0 of 0.7.0+5e800e3d.nv25.2.cu128."""
        return self.vllm.partition("+")[0]

    @property
    def is_flat(self) -> bool:
        """Whether speculation is engine arguments (`speculative_model`): so up to vLLM 0.8.1."""
        return "speculative_config" not in self.engine_args

    @property
    def loads_eagle_repo_heads(self) -> bool:
        """Whether an EAGLE repository's checkpoint loads as it is (vLLM PR 12304, in 0.7.3)."""
        return release(self.vllm) >= (0, 7, 3)

    @property
    def tells_eagle_by_its_path(self) -> bool:
        """Whether a head is one only if "eagle-" is in its path, whatever the method says.

        In vllm/config.py of 0.7.3, 0.8.1 and 0.8.4; 0.9.0 reads the method first.
        """
        return (0, 7, 3) <= release(self.vllm) < (0, 9)


@dataclass(frozen=True)
class Container:
    """One release of NVIDIA's image, such as 25.02, and the vLLM in it."""

    triton: str
    takes: Takes

    @property
    def image(self) -> str:
        """The image's full name."""
        return f"{IMAGE}:{self.triton}-vllm-python-py3"


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: 0.9.0rc1+nv25.6 is (0, 9, 0); equal for all builds of it."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


@functools.cache
def _data(name: str) -> Any:  # noqa: ANN401  (JSON)
    text = resources.files("specbench.triton").joinpath(name).read_text(encoding="utf-8")
    return json.loads(text)


def container_versions() -> Mapping[str, str]:
    """The vLLM of each container in the table, oldest first."""
    found: dict[str, str] = _data("containers.json")["containers"]
    return found


def newest() -> str:
    """The newest container in the table."""
    return list(container_versions())[-1]


def container(triton: str) -> Container:
    """The container *triton* (25.02) and what its vLLM takes.

    Raises:
        UserError: it is not in the table.
    """
    known = container_versions()
    if triton not in known:
        least, most = next(iter(known)), newest()
        raise UserError(
            f"--triton {triton}: the vLLM of that container is not known.",
            hint=f"There are {least} to {most} (YY.MM); of a newer one write --triton {most}.",
        )
    return Container(triton, _recorded(known[triton]))


@functools.cache
def _recorded(vllm: str) -> Takes:
    """What *vllm* takes, by the recorded releases around it."""
    names, at = _data("engine_names.json"), release(vllm)
    missing = _data("containers.json")["not_implemented"]

    def known(kind: str) -> frozenset[str]:
        spans: Mapping[str, tuple[str, str]] = names[kind]
        return frozenset(
            name for name, (first, last) in spans.items() if release(first) <= at <= release(last)
        )

    without = {
        method
        for method, span in missing.items()
        if release(span["first"]) <= at <= release(span["last"])
    }
    methods = known("methods") or EARLY_METHODS
    return Takes(vllm, known("engine_args"), known("speculation_keys"), methods - without)


def installed(package: Path | None = None) -> Takes | None:
    """What the vLLM in *package* takes; by default of the one beside us, or None."""
    if package is None:
        spec = importlib.util.find_spec("vllm")
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            return None
        package = Path(places[0])
    names = vllm_names.installed(package)
    fields = vllm_names.engine_fields(package)
    return Takes(names.version, fields, names.speculation_keys, names.methods)


def require_installed() -> Takes:
    """What the vLLM beside us takes.

    Raises:
        UserError: there is none.
    """
    found = installed()
    if found is None:
        raise UserError(
            "--triton here: there is no vLLM in this environment.", hint="Name a container: 25.02."
        )
    return found


@functools.cache
def ever_taken() -> frozenset[str]:
    """Every engine argument of any recorded release, and of the vLLM beside us."""
    here = installed()
    return frozenset(_data("engine_names.json")["engine_args"]) | (
        here.engine_args if here else frozenset()
    )


# The keys of speculative_config as engine arguments, for releases without it.
FLAT = {
    "model": "speculative_model",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_max": "ngram_prompt_lookup_max",
    "prompt_lookup_min": "ngram_prompt_lookup_min",
    "draft_tensor_parallel_size": "speculative_draft_tensor_parallel_size",
    "max_model_len": "speculative_max_model_len",
    "quantization": "speculative_model_quantization",
    "disable_by_batch_size": "speculative_disable_by_batch_size",
    "disable_mqa_scorer": "speculative_disable_mqa_scorer",
}
# What became of each flat key; None: nothing.
NESTED: Mapping[str, str | None] = {
    **{
        old: "num_speculative_tokens" if new == "k" else new
        for old, new in vllm_names.RENAMED_SPECULATION.items()
    },
    **{flat: key for key, flat in FLAT.items()},
    "speculative_disable_mqa_scorer": None,
    "disable_logprobs_during_spec_decoding": None,
}
FLAT_KEYS = frozenset(NESTED) - {"disable_logprobs", "acceptance_method", "num_spec_tokens"}
