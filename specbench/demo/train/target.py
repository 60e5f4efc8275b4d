"""The frozen target in plain fp32 torch: one token at a time with a cache, or whole texts at once.

fp32 because on a CPU without bf16 matrix units its matrix products run twice as fast. Both paths
return hidden states after the final norm: what the logits are made of, and what vLLM hands to an
EAGLE head.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from specbench.errors import UserError

Cache = list[
    tuple[Tensor, Tensor]
]  # keys and values of each layer: [B, kv_heads, length, head_dim]


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model, under the names that its config.json would abbreviate."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float

    @property
    def queries_per_key(self) -> int:
        """How many query heads share one key head."""
        return self.heads // self.kv_heads


def read_config(folder: Path) -> dict[str, object]:
    """The config.json of the checkpoint in *folder*; UserError where there is none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} holds no config.json: not a checkpoint folder.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} is not a JSON object.")
    return config


def read_shape(folder: Path) -> Shape:
    """The shape of the Llama checkpoint in *folder*; UserError for what this code cannot run."""
    config = read_config(folder)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    assert isinstance(rope, dict)
    unsupported = {
        "model_type other than llama": config.get("model_type") != "llama",
        "an untied output embedding": not config.get("tie_word_embeddings"),
        "biases": bool(config.get("attention_bias") or config.get("mlp_bias")),
        "scaled rotary positions": rope.get("rope_type", "default") != "default",
    }
    if found := [name for name, present in unsupported.items() if present]:
        raise UserError(f"{folder}: cannot train for a target with {', '.join(found)}.")
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    return Shape(
        layers=_integer(config, "num_hidden_layers"),
        hidden=hidden,
        intermediate=_integer(config, "intermediate_size"),
        heads=heads,
        kv_heads=_integer(config, "num_key_value_heads"),
        head_dim=_integer(config, "head_dim") if config.get("head_dim") else hidden // heads,
        vocab=_integer(config, "vocab_size"),
        norm_eps=_number(config, "rms_norm_eps"),
        rope_theta=_number(rope if "rope_theta" in rope else config, "rope_theta"),
    )


def _integer(config: dict[str, object], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int):
        raise UserError(f"config.json: {key} must be an integer, not {value!r}.")
    return value


def _number(config: dict[str, object], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float):
        raise UserError(f"config.json: {key} must be a number, not {value!r}.")
    return float(value)


def read_weights(folder: Path, prefixes: Sequence[str] = ("",)) -> dict[str, Tensor]:
    """The fp32 tensors whose names start with one of *prefixes*, without their leading `model.`."""
    path = folder / "model.safetensors"
    if not path.exists():
        raise UserError(f"{folder} holds no model.safetensors: not a checkpoint folder.")
    weights = {}
    with safe_open(str(path), "pt") as file:
        for name in file.keys():  # noqa: SIM118  # not a dict
            short = name.removeprefix("model.")
            if short.startswith(tuple(prefixes)):
                weights[short] = file.get_tensor(name).float()
    return weights


def read_embedding(folder: Path) -> Tensor:
    """The target's embedding [vocab, hidden] in fp32, which is also its output projection."""
    return read_weights(folder, ["embed_tokens."])["embed_tokens.weight"]


class Rotary:
    """Rotary position tables for positions 0 to *positions* - 1."""

    def __init__(self, shape: Shape, positions: int) -> None:
        exponents = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
        angles = torch.arange(positions).float()[:, None] / shape.rope_theta**exponents
        self.cos = torch.cat([angles.cos(), angles.cos()], -1)  # [positions, head_dim]
        self.sin = torch.cat([angles.sin(), angles.sin()], -1)

    def rows(self, heads: Tensor) -> Tensor:
        """Rotate *heads* [..., L, head_dim], whose rows are positions 0 to L - 1."""
        length = heads.shape[-2]
        return heads * self.cos[:length] + _quarter_turn(heads) * self.sin[:length]

    def at(self, heads: Tensor, position: int) -> Tensor:
        """Rotate *heads* [..., head_dim], all of them at one *position*."""
        return heads * self.cos[position] + _quarter_turn(heads) * self.sin[position]


def _quarter_turn(heads: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat([-second, first], -1)


@dataclass(frozen=True)
class _Layer:
    """One decoder layer; the matrices that read the same input are joined, to be read once."""

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor


def _joined_layer(weights: dict[str, Tensor], index: int) -> _Layer:
    def weight(name: str) -> Tensor:
        return weights[f"layers.{index}.{name}.weight"]

    return _Layer(
        input_norm=weight("input_layernorm"),
        qkv=torch.cat([weight(f"self_attn.{kind}_proj") for kind in "qkv"]),
        out=weight("self_attn.o_proj"),
        post_norm=weight("post_attention_layernorm"),
        gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
        down=weight("mlp.down_proj"),
    )


class Target:
    """A Llama model that is only ever read from; its callers switch gradients off."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], positions: int) -> None:
        self.shape = shape
        self.positions = positions
        self.embedding = weights["embed_tokens.weight"]  # [vocab, hidden]
        self._final_norm = weights["norm.weight"]
        self._layers = [_joined_layer(weights, index) for index in range(shape.layers)]
        self._rotary = Rotary(shape, positions)

    @classmethod
    def load(cls, folder: Path, positions: int) -> "Target":
        """The checkpoint in *folder*, able to run texts of up to *positions* tokens."""
        return cls(read_shape(folder), read_weights(folder), positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of final hidden states [..., hidden]."""
        return functional.linear(hidden, self.embedding)

    def new_cache(self, batch: int) -> Cache:
        """An empty cache for *batch* texts of `positions` tokens."""
        size = (batch, self.shape.kv_heads, self.positions, self.shape.head_dim)
        return [(torch.empty(size), torch.empty(size)) for _ in self._layers]

    def step(self, tokens: Tensor, position: int, cache: Cache) -> Tensor:
        """Feed *tokens* [B], all at *position*, and return their final hidden states [B, hidden].

        *cache* holds the positions before and takes this one, in its first B rows.
        """
        shape, batch = self.shape, len(tokens)
        rotated = shape.heads + shape.kv_heads
        grouped = (batch, shape.kv_heads, shape.queries_per_key, shape.head_dim)
        state = self.embedding[tokens]
        for layer, (keys, values) in zip(self._layers, cache, strict=True):
            qkv = functional.linear(self._norm(state, layer.input_norm), layer.qkv)
            qkv = qkv.view(batch, rotated + shape.kv_heads, shape.head_dim)
            query_key = self._rotary.at(qkv[:, :rotated], position)
            keys[:batch, :, position] = query_key[:, shape.heads :]
            values[:batch, :, position] = qkv[:, rotated:]
            # The queries that share a key head are the rows of one small attention each.
            attended = functional.scaled_dot_product_attention(
                query_key[:, : shape.heads].reshape(grouped),
                keys[:batch, :, : position + 1],
                values[:batch, :, : position + 1],
            )
            state = state + functional.linear(attended.reshape(batch, -1), layer.out)
            state = state + self._mlp(state, layer)
        return self._norm(state, self._final_norm)

    def forward(self, tokens: Tensor) -> Tensor:
        """Final hidden states [B, L, hidden] of whole texts *tokens* [B, L], padded at the end."""
        shape, (batch, length) = self.shape, tokens.shape
        rotated, group = shape.heads + shape.kv_heads, shape.queries_per_key
        state = self.embedding[tokens]
        for layer in self._layers:
            qkv = functional.linear(self._norm(state, layer.input_norm), layer.qkv)
            qkv = qkv.view(batch, length, -1, shape.head_dim).transpose(1, 2)
            query_key = self._rotary.rows(qkv[:, :rotated])
            attended = functional.scaled_dot_product_attention(
                query_key[:, : shape.heads],
                query_key[:, shape.heads :].repeat_interleave(group, 1),
                qkv[:, rotated:].repeat_interleave(group, 1),
                is_causal=True,
            )
            attended = attended.transpose(1, 2).reshape(batch, length, -1)
            state = state + functional.linear(attended, layer.out)
            state = state + self._mlp(state, layer)
        return self._norm(state, self._final_norm)

    def _norm(self, state: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(state, (self.shape.hidden,), weight, self.shape.norm_eps)

    def _mlp(self, state: Tensor, layer: _Layer) -> Tensor:
        gate, up = functional.linear(self._norm(state, layer.post_norm), layer.gate_up).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, layer.down)
