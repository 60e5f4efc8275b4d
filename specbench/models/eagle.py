"""EAGLE heads: the EAGLE repository's layout, and the one that vLLM before 0.7.3 loads.

|          | the EAGLE repository, vLLM from 0.7.3 | vLLM before 0.7.3 (Triton up to 25.02)       |
|----------|---------------------------------------|----------------------------------------------|
| config   | that of a one-layer model             | `{"model_type": "eagle", "model": the same}` |
| names    | `layers.0.…`, `fc.weight`             | the same, or below `model.`                  |
| target's | embedding or none, no lm_head         | both                                         |

Sources: vllm/model_executor/models/eagle.py of 0.7.0 (it pops lm_head.weight, and leaves an
embedding that is not there as it was allocated), vLLM PR 12304 (0.7.3 copies both from the target)
and 0.32 itself, which refuses a head with an lm_head and drops the bias of its fc (tried).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbench.errors import UserError
from specbench.models.checkpoint import (
    Tensors,
    read_config,
    read_tensors,
    weight_files,
    write_checkpoint,
)

Layout = Literal["vllm-0.7", "current", "eagle"]
LAYOUTS = ("vllm-0.7", "current", "eagle")

LM_HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
ADDED = "specbench_added"  # in the weights' metadata: what the way back leaves out again
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@dataclass(frozen=True)
class Converted:
    """What was done; `written` is None where nothing had to be."""

    written: Path | None
    reason: str
    tensors: int = 0
    notes: tuple[str, ...] = ()


@dataclass
class _Head:
    """A head in the EAGLE repository's terms, however it was stored."""

    source: Path
    config: dict[str, Any]
    tensors: Tensors
    added: frozenset[str] | None  # None: it was not specbench that converted it
    is_wrapped: bool


def convert(source: Path, out: Path, to: Layout, *, target: Path | None = None) -> Converted:
    """Write the head in *source* to *out* in the layout *to*.

    `current` is what vLLM from 0.7.3 loads (safetensors), `eagle` what the EAGLE repository's own
    code does (pytorch_model.bin). *target* is the target model's folder: what the head lacks for
    `vllm-0.7` is taken from there.

    Raises:
        UserError: *source* is no EAGLE head, or lacks what *to* needs, or *out* is there already.
        StoreError: the disk is full or read-only; nothing half-written stays.
    """
    config = read_config(source)
    is_wrapped = config.get("model_type") == "eagle"
    if reason := _no_need(source, config, to):
        return Converted(None, reason)
    head = _read(source, config, is_wrapped=is_wrapped)
    if to == "current" and not is_wrapped and LM_HEAD not in head.tensors:
        reason = "vLLM from 0.7.3 (Triton from 25.03) loads it as it is."
        return Converted(None, reason, notes=tuple(_notes(head, to)))
    notes = list(_notes(head, to))
    if to == "vllm-0.7":
        added = _fill(head, target)
        notes += [f"{name} is the target's" for name in sorted(added)]
        beside = {ADDED: ",".join(sorted(added))}
        write_checkpoint(out, _wrapped(head), head.tensors, beside=beside)
        where = "for vLLM before 0.7.3 (Triton up to 25.02)"
    else:
        drop = {LM_HEAD} if head.added is None else set(head.added)
        if to == "current":  # EagleLlamaForCausalLM has none of its own, and refuses one
            drop.add(LM_HEAD)
        kept = {name: tensor for name, tensor in head.tensors.items() if name not in drop}
        notes += [
            f"{name} is left out: it is the target's" for name in sorted(drop & head.tensors.keys())
        ]
        head.tensors = kept
        write_checkpoint(out, _plain(head.config), kept, pickled=to == "eagle")
        where = "for the EAGLE repository" if to == "eagle" else "for vLLM from 0.7.3"
    return Converted(out, where, len(head.tensors), tuple(notes))


def _no_need(source: Path, config: Mapping[str, Any], to: Layout) -> str | None:
    """Why *source* is in the layout *to* already; None if it is not."""
    if config.get("model_type") == "eagle":
        return "vLLM before 0.7.3 loads it as it is." if to == "vllm-0.7" else None
    if to == "eagle" and [path.name for path in weight_files(source)] == ["pytorch_model.bin"]:
        return "it is in the EAGLE repository's layout."
    return None


def _read(source: Path, config: dict[str, Any], *, is_wrapped: bool) -> _Head:
    """The head with its names and its config unwrapped.

    Raises:
        UserError: it is no EAGLE head, or one that no other layout can hold.
    """
    inner = config.get("model") if is_wrapped else config
    if not isinstance(inner, dict):
        raise UserError(f"{source / 'config.json'}: model: should be the head's own config.")
    stored, beside = read_tensors(source)
    tensors: Tensors = {}
    for name, tensor in stored.items():
        short = name.removeprefix("model.").removeprefix("model.")
        if short in tensors:
            raise UserError(f"{source} holds {short} twice, under {name} and another name.")
        tensors[short] = tensor
    if "midlayer.hidden_norm.weight" in tensors or "d2t" in tensors:
        raise UserError(
            f"{source} is an EAGLE-3 head: vLLM before 0.8.5 has none, later ones load it as it is."
        )
    if "fc.weight" not in tensors or not any(name.startswith("layers.") for name in tensors):
        raise UserError(
            f"{source} is no EAGLE head: it should hold fc.weight and layers.0.…",
            hint="Name the head's folder, not the target's.",
        )
    if "token_map" in tensors:
        raise UserError(
            f"{source} drafts from a part of the vocabulary (token_map): only the old vLLM can."
        )
    added = frozenset(filter(None, beside[ADDED].split(","))) if ADDED in beside else None
    return _Head(source, inner, tensors, added, is_wrapped)


def _notes(head: _Head, to: Layout) -> list[str]:
    biased = "fc.bias" in head.tensors
    has_attention_bias = any("_proj.bias" in name for name in head.tensors)
    found = []
    if biased and to == "current":
        found.append(
            "vLLM 0.32 has no bias in fc and drops this one without a word: expect lower acceptance"
        )
    if head.config.get("bias") and not has_attention_bias:
        found.append(
            'its config says "bias": true, and vLLM then expects biases in attention as well; '
            "they are not in the checkpoint"
        )
    return found


def _fill(head: _Head, target: Path | None) -> set[str]:
    """Put the target's lm_head and embedding into a head that lacks them; the names of these.

    Raises:
        UserError: there is no target to take them from, or it is another one's.
    """
    lacking = {LM_HEAD, EMBEDDING} - head.tensors.keys()
    if not lacking:
        return set()
    if target is None:
        raise UserError(
            f"{head.source} has no {' and no '.join(sorted(lacking))}: vLLM before 0.7.3 wants them.",
            hint="Name the target's folder: --target Meta-Llama-3-8B-Instruct.",
        )
    names = {LM_HEAD: LM_HEAD, f"model.{EMBEDDING}": EMBEDDING, EMBEDDING: EMBEDDING}
    stored, _ = read_tensors(target, names.__contains__)
    theirs = {names[name]: tensor for name, tensor in stored.items()}
    if EMBEDDING in theirs and read_config(target).get("tie_word_embeddings"):
        theirs.setdefault(LM_HEAD, theirs[EMBEDDING])
    hidden = int(head.tensors["fc.weight"].shape[0])
    dtype = head.tensors["fc.weight"].dtype
    for name in sorted(lacking):
        if name not in theirs:
            raise UserError(f"{target} has no {name} either: is it the target's whole checkpoint?")
        shape = tuple(theirs[name].shape)
        if shape[1:] != (hidden,):
            raise UserError(
                f"{target}: {name} is {shape}, and the head is for hidden size {hidden}.",
                hint="Name the model that the head was trained for.",
            )
        head.tensors[name] = theirs[name].to(dtype, copy=True)
    return lacking


def _wrapped(head: _Head) -> dict[str, Any]:
    """The config for vLLM before 0.7.3, and for the transformers of its time."""
    inner = dict(head.config)
    if not inner.get("architectures"):
        kind = str(inner.get("model_type"))
        if kind not in ARCHITECTURES:
            raise UserError(f"{head.source / 'config.json'}: architectures: is missing.")
        inner["architectures"] = [ARCHITECTURES[kind]]
    # Transformers 5 writes these two in other words; an old one would take its own defaults.
    rope = inner.get("rope_parameters")
    if isinstance(rope, dict):
        inner.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        if rope.get("rope_type", "default") != "default":
            scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
            inner.setdefault("rope_scaling", scaling)
    if "dtype" in inner:
        inner.setdefault("torch_dtype", inner["dtype"])
    if "fc.bias" in head.tensors:
        inner["eagle_fc_bias"] = True
    return {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": inner}


def _plain(inner: Mapping[str, Any]) -> dict[str, Any]:
    """The head's own config without what `_wrapped` added."""
    plain = {key: value for key, value in inner.items() if key != "eagle_fc_bias"}
    if "rope_parameters" in plain:
        plain = {k: v for k, v in plain.items() if k not in ("rope_theta", "rope_scaling")}
    if "dtype" in plain:
        plain.pop("torch_dtype", None)
    return plain
