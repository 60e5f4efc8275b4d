"""The frozen target: one token at a time with a cache, or whole texts at once.

Matrices and caches are fp32 or, for generating on a CPU with bf16 matrix units (AMX), bf16: there a
product of 192 rows runs four times as fast, and without such units half as fast. The residual
stream and the norms are fp32 in both. Both paths return hidden states after the final norm: what the
logits are made of, and what vLLM hands to an EAGLE head.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from specbench.errors import UserError

GROW_BY = 64  # positions; how much room a full cache is given
FORWARD_TOKENS = 1024  # how many run through a layer together: more would leave the CPU's caches


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


def matrix_dtype() -> torch.dtype:
    """What this CPU multiplies matrices fastest in."""
    known = torch.cpu.get_capabilities()
    has_products = known.get("amx_bf16") or known.get("avx512_bf16")
    return torch.bfloat16 if has_products else torch.float32


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

    def at(self, heads: Tensor, positions: Tensor) -> Tensor:
        """Rotate *heads* [N, heads, head_dim], whose rows are at *positions* [N]."""
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        return heads * cos + _quarter_turn(heads) * sin


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


def _joined_layer(weights: dict[str, Tensor], index: int, dtype: torch.dtype) -> _Layer:
    def weight(name: str) -> Tensor:
        return weights[f"layers.{index}.{name}.weight"]

    return _Layer(
        input_norm=weight("input_layernorm"),
        qkv=torch.cat([weight(f"self_attn.{kind}_proj") for kind in "qkv"]).to(dtype),
        out=weight("self_attn.o_proj").to(dtype),
        post_norm=weight("post_attention_layernorm"),
        gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]).to(dtype),
        down=weight("mlp.down_proj").to(dtype),
    )


class Cache:
    """The keys and values of texts that grow together, by one token each at every step.

    The texts end at the same column; the shorter ones begin at a later one.
    """

    def __init__(self, shape: Shape, lengths: Sequence[int], dtype: torch.dtype) -> None:
        self.length = max(lengths)  # the columns in use
        self.starts = self.length - torch.tensor(lengths)
        size = (2, len(lengths), shape.kv_heads, self.length + GROW_BY, shape.head_dim)
        self.layers = [
            torch.zeros(size, dtype=dtype) for _ in range(shape.layers)
        ]  # 2: keys and values

    def __len__(self) -> int:
        """How many texts there are."""
        return len(self.starts)

    def positions(self) -> Tensor:
        """Where the next token of each text stands."""
        return self.length - self.starts

    def mask(self) -> Tensor:
        """What to add to the attention scores of the next tokens [B * kv_heads, 1, columns]."""
        before = torch.arange(self.length + 1) < self.starts[:, None]
        mask = torch.zeros(before.shape).masked_fill(before, -torch.inf)
        return mask.repeat_interleave(self.layers[0].shape[2], 0)[:, None]

    def make_room(self) -> None:
        """Grow where there is no column left."""
        if self.length < self.layers[0].shape[3]:
            return
        for index, layer in enumerate(self.layers):
            self.layers[index] = functional.pad(layer[:, : len(self)], (0, 0, 0, GROW_BY))

    def drop(self, row: int) -> None:
        """Forget the text in *row*; the last one takes its place."""
        last = len(self) - 1
        if row < last:
            begin = int(self.starts[last])
            self.starts[row] = begin
            for layer in self.layers:
                layer[:, row, :, begin : self.length] = layer[:, last, :, begin : self.length]
        self.starts = self.starts[:last]


class Target:
    """A Llama model that is only ever read from; its callers switch gradients off."""

    def __init__(
        self,
        shape: Shape,
        weights: dict[str, Tensor],
        positions: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.shape = shape
        self.positions = positions
        self.embedding = weights["embed_tokens.weight"].to(dtype)  # [vocab, hidden]
        self._final_norm = weights["norm.weight"]
        self._layers = [_joined_layer(weights, index, dtype) for index in range(shape.layers)]
        self._rotary = Rotary(shape, positions)

    @classmethod
    def load(cls, folder: Path, positions: int, dtype: torch.dtype = torch.float32) -> "Target":
        """The checkpoint in *folder*, able to run texts of up to *positions* tokens.

        *dtype* is that of matrices and caches.
        """
        return cls(read_shape(folder), read_weights(folder), positions, dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of final hidden states [..., hidden]."""
        return product(hidden, self.embedding)

    def step(self, tokens: Tensor, caches: Sequence[Cache]) -> Tensor:
        """Feed *tokens* [N], one to each text of all *caches*; their final states [N, hidden]."""
        shape = self.shape
        rotated = shape.heads + shape.kv_heads
        sizes = [len(cache) for cache in caches]
        masks = [cache.mask() for cache in caches]
        positions = torch.cat([cache.positions() for cache in caches])
        for cache in caches:
            cache.make_room()

        def attend(index: int, qkv: Tensor) -> Tensor:
            heads = qkv.view(len(tokens), -1, shape.head_dim)
            heads[:, :rotated] = self._rotary.at(heads[:, :rotated], positions)
            query, key_value = heads.split([shape.heads, 2 * shape.kv_heads], 1)
            key_value = key_value.unflatten(1, (2, -1)).transpose(0, 1)
            parts = zip(caches, masks, query.split(sizes), key_value.split(sizes, 1), strict=True)
            attended = []
            for cache, mask, ask, new in parts:
                seen = cache.layers[index][:, : len(cache), :, : cache.length + 1]
                seen[:, :, :, -1] = new
                keys, values = seen.flatten(1, 2)
                attended.append(_attend_to(keys, values, ask.to(keys.dtype), mask))
            return torch.cat(attended)

        states = self._run(tokens, attend)
        for cache in caches:
            cache.length += 1
        return states

    def begin(self, texts: Sequence[Sequence[int]]) -> tuple[Cache, list[Tensor]]:
        """A cache that holds *texts*, and the final states [length, hidden] of each.

        Cheapest where neighbours are about as long.
        """
        cache = Cache(self.shape, [len(text) for text in texts], self.embedding.dtype)
        states: list[Tensor] = []
        while len(states) < len(texts):
            done = len(states)
            rows = max(1, FORWARD_TOKENS // len(texts[done]))
            tokens = pad_sequence([torch.tensor(text) for text in texts[done : done + rows]], True)
            found, keys_values = self._forward(tokens)
            for row, text in enumerate(texts[done : done + rows]):
                states.append(found[row, : len(text)])
                columns = slice(cache.length - len(text), cache.length)
                for layer, new in zip(cache.layers, keys_values, strict=True):
                    layer[:, done + row, :, columns] = new[:, row, :, : len(text)]
        return cache, states

    def forward(self, tokens: Tensor) -> Tensor:
        """Final hidden states [B, L, hidden] of whole texts *tokens* [B, L], padded at the end."""
        return self._forward(tokens)[0]

    def _forward(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The final states, and each layer's keys and values [2, B, kv_heads, L, head_dim]."""
        shape, (batch, length) = self.shape, tokens.shape
        rotated, group = shape.heads + shape.kv_heads, shape.queries_per_key
        found = []

        def attend(_index: int, qkv: Tensor) -> Tensor:
            heads = qkv.view(batch, length, -1, shape.head_dim).transpose(1, 2)
            heads[:, :rotated] = self._rotary.rows(heads[:, :rotated])
            query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
            found.append(torch.stack([key, value]))
            attended = functional.scaled_dot_product_attention(
                query,
                key.repeat_interleave(group, 1),
                value.repeat_interleave(group, 1),
                is_causal=True,
            )
            return attended.transpose(1, 2).reshape(batch * length, -1)

        states = self._run(tokens.flatten(), attend)
        return states.view(batch, length, -1), found

    def _run(self, tokens: Tensor, attend: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The final states of *tokens* [N].

        *attend* makes attention outputs [N, hidden] of a layer's index and its joined queries,
        keys and values, which it may overwrite.
        """
        state = self.embedding[tokens].float()
        for index, layer in enumerate(self._layers):
            qkv = product(self._norm(state, layer.input_norm), layer.qkv)
            state += product(attend(index, qkv), layer.out)
            gate_up = product(self._norm(state, layer.post_norm), layer.gate_up)
            gate, up = gate_up.chunk(2, -1)
            state += product(functional.silu(gate).mul_(up), layer.down)
        return self._norm(state, self._final_norm)

    def _norm(self, state: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(state, (self.shape.hidden,), weight, self.shape.norm_eps)


def _attend_to(keys: Tensor, values: Tensor, query: Tensor, mask: Tensor) -> Tensor:
    """Attention of *query* [B, heads, head_dim], one token each: [B, heads * head_dim].

    *keys* and *values* are [B * kv_heads, columns, head_dim]. torch's own attention takes half as
    long again for single tokens.
    """
    # The queries that share a key head are the rows of one small matrix.
    rows = query.reshape(len(keys), -1, query.shape[-1])
    if keys.dtype == torch.bfloat16:  # whose bmm would copy the cache, which has room between
        attended = functional.scaled_dot_product_attention(
            rows[:, None], keys[:, None], values[:, None], attn_mask=mask.to(keys.dtype)[:, None]
        )
        return attended.float().view(len(query), -1)
    scores = torch.baddbmm(mask, rows, keys.transpose(1, 2), alpha=query.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), values).view(len(query), -1)


def product(inputs: Tensor, weight: Tensor) -> Tensor:
    """*inputs* [..., in] through a linear layer's *weight* [out, in].

    In fp32 by numpy, on the same memory: its OpenBLAS is faster than torch's MKL.
    """
    if weight.dtype == torch.bfloat16:
        return functional.linear(inputs.bfloat16(), weight).float()
    rows = inputs.reshape(-1, inputs.shape[-1]).numpy()
    return torch.from_numpy(rows @ weight.numpy().T).view(*inputs.shape[:-1], -1)
