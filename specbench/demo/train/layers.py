"""The parts that the head and the draft model share, with the parameter names that vLLM loads."""

from torch import Tensor, nn
from torch.nn import functional

from specbench.demo.train.target import Rotary, Shape


class Attention(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The four projections of grouped-query attention; who sees whom is the caller's affair."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden, bias=False)

    def project(self, state: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, L, head_dim] of *state* [B, L, hidden].

        Row p is rotated to position p; keys and values are repeated for the queries sharing them.
        """
        group = self.shape.queries_per_key
        query = rotary.rows(self._split(self.q_proj(state)))
        key = rotary.rows(self._split(self.k_proj(state))).repeat_interleave(group, 1)
        value = self._split(self.v_proj(state)).repeat_interleave(group, 1)
        return query, key, value

    def _split(self, projected: Tensor) -> Tensor:
        batch, length, _ = projected.shape
        return projected.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)


def join_heads(attended: Tensor) -> Tensor:
    """[B, heads, L, head_dim] as [B, L, heads * head_dim]."""
    return attended.transpose(1, 2).flatten(2)


class GatedMlp(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Llama's feed-forward block, in two halves so that something can happen in between."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def activate(self, state: Tensor) -> Tensor:
        """The gated units [..., intermediate]; `down_proj` brings them back."""
        return functional.silu(self.gate_proj(state)) * self.up_proj(state)

    def forward(self, state: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.down_proj(self.activate(state))


def rms_norm(shape: Shape) -> nn.RMSNorm:
    """A fresh norm over the hidden size."""
    return nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
