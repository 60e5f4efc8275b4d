"""The draft model: the target's first and last layers and final norm, trained to speak alone.

Embedding and output projection stay the target's, frozen, so only the layers and the norm are
saved: the delta, which with the target's embedding makes a whole checkpoint.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from specbench.demo.train import evaluate, loop
from specbench.demo.train.data import Batch, TrainingData, batches, collate
from specbench.demo.train.distill import Candidates, CandidateSampler, distillation_loss
from specbench.demo.train.layers import Attention, GatedMlp, join_heads, rms_norm
from specbench.demo.train.target import (
    Rotary,
    Shape,
    read_config,
    read_embedding,
    read_shape,
    read_weights,
)
from specbench.demo.train.workers import exit_code
from specbench.errors import UserError

POSITIONS = 1024  # the longest sequence that is trained or judged on, tokens
PREFIX = "model."  # of every name in the delta


@dataclass(frozen=True)
class DraftOptions:
    """What the recipe leaves open; the defaults are how the shipped delta was made."""

    layers: int = 2
    peak_rate: float = 2e-3
    prompt_share: float = 0.4  # of the prompts' tokens, those that are learnt
    batch_tokens: int = 2400
    frequent: int = 4096  # candidates for the softmax
    negatives: int = 768


class DraftLayer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A Llama layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = rms_norm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = rms_norm(shape)
        self.mlp = GatedMlp(shape)

    def forward(self, state: Tensor, rotary: Rotary) -> Tensor:
        """[B, L, hidden] to the same."""
        query, key, value = self.self_attn.project(self.input_layernorm(state), rotary)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        state = state + self.self_attn.o_proj(join_heads(attended))
        return state + self.mlp(self.post_attention_layernorm(state))


class DraftModel(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A small Llama with the target's frozen *embedding* [vocab, hidden], which is not saved."""

    def __init__(self, shape: Shape, embedding: Tensor, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DraftLayer(shape) for _ in range(layers)])
        self.norm = rms_norm(shape)
        self.register_buffer("embedding", embedding, persistent=False)
        self._rotary = Rotary(shape, POSITIONS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Final hidden states [B, L, hidden] of *tokens* [B, L]; row p predicts token p + 1."""
        state = self.embedding[tokens]
        for layer in self.layers:
            state = layer(state, self._rotary)
        return self.norm(state)

    def proposing_states(self, tokens: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """See `evaluate.Drafter`: drafted tokens that were right are the text itself, so every
        step has the same states.
        """
        return [functional.pad(self(tokens[None])[0, :-1], (0, 0, 1, 0))] * steps


def copied_layers(target_layers: int, layers: int) -> list[int]:
    """Which of the target's layers a draft of so many starts from: the first ones and the last."""
    if not 1 <= layers <= target_layers:
        raise UserError(f"A draft of {layers} layers cannot come from {target_layers}.")
    return [0] if layers == 1 else [*range(layers - 1), target_layers - 1]


def new_draft(target: Path, layers: int) -> DraftModel:
    """An untrained draft, made of layers of *target*."""
    shape = read_shape(target)
    sources = copied_layers(shape.layers, layers)
    weights = read_weights(target, ["norm.", *(f"layers.{source}." for source in sources)])
    draft = DraftModel(shape, read_embedding(target), layers)
    state = {"norm.weight": weights["norm.weight"]}
    for index, source in enumerate(sources):
        names = draft.layers[index].state_dict()
        state |= {f"layers.{index}.{name}": weights[f"layers.{source}.{name}"] for name in names}
    draft.load_state_dict(state)
    return draft


def save_delta(draft: DraftModel, folder: Path, target: Path) -> None:
    """Write the layers and the norm of *draft* (bf16) and its config, *target*'s but for depth."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        PREFIX + name: value.bfloat16().contiguous() for name, value in draft.state_dict().items()
    }
    save_file(weights, str(folder / "model.safetensors"))
    config = {**read_config(target), "num_hidden_layers": len(draft.layers)}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def load_delta(folder: Path, target: Path) -> DraftModel:
    """The draft in *folder* (a delta or a whole checkpoint); UserError where it does not fit."""
    layers = read_config(folder)["num_hidden_layers"]
    assert isinstance(layers, int)
    draft = DraftModel(read_shape(target), read_embedding(target), layers)
    _load_into(draft, folder)
    draft.eval()
    return draft


def _load_into(draft: DraftModel, folder: Path) -> None:
    try:
        weights = load_file(str(folder / "model.safetensors"))
        weights.pop(PREFIX + "embed_tokens.weight", None)
        draft.load_state_dict(
            {name.removeprefix(PREFIX): value.float() for name, value in weights.items()}
        )
    except (FileNotFoundError, RuntimeError) as problem:
        raise UserError(f"{folder} holds no draft model for this target: {problem}") from None


def draft_loss(
    draft: DraftModel, batch: Batch, candidates: Candidates
) -> tuple[Tensor, dict[str, float]]:
    """The distillation loss of *batch* and what to print of it."""
    student, teacher = draft(batch.tokens)[batch.learn], batch.hidden[batch.learn]
    loss, agreed = distillation_loss(student, teacher, candidates)
    return loss, {"loss": float(loss.detach()), "agreement": float(agreed)}


def train_draft(
    *,
    target: Path,
    data: Path,
    out: Path,
    seconds: float,
    max_steps: int | None = None,
    seed: int = 0,
    init: Path | None = None,
    options: DraftOptions | None = None,
    say: loop.Say = print,
) -> DraftModel:
    """Train a draft model for *target* on the waves in *data* and save its delta in *out*.

    Ends after *seconds* or *max_steps*. *init* is a delta to start from; an interrupted run of
    the same *out* is taken up instead.
    """
    options = options or DraftOptions()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = new_draft(target, options.layers)
        if init is not None:
            _load_into(draft, init)
        waves = TrainingData(data)
        say(waves.summary())
        task = loop.Task(
            batches=_draft_batches(draft, waves, options, random.Random(2 + seed), say),
            loss=lambda batch, candidates, _progress: draft_loss(draft, batch, candidates),
            save=lambda: save_delta(draft, out, target),
            report=lambda: evaluate.held_out_report(draft, waves.held_out),
            peak_rate=options.peak_rate,
        )
        budget = loop.Budget(seconds, max_steps)
        summary = loop.train(draft, task, budget, loop.checkpoint_path(out), say=say)
    loop.mark_finished(out, summary)
    say(f"done: {summary.steps} steps, {summary.tokens} tokens; held out: {summary.held_out}")
    draft.eval()
    return draft


def _draft_batches(
    draft: DraftModel, waves: TrainingData, options: DraftOptions, rng: random.Random, say: loop.Say
) -> Iterator[tuple[Batch, Candidates]]:
    """Batches without end, looking for new waves after each pass over all."""
    while True:
        frequent = waves.frequent_tokens(options.frequent, len(draft.embedding))
        sampler = CandidateSampler(draft.embedding, frequent, options.negatives)
        for examples in batches(waves.train, options.batch_tokens, rng):
            yield collate(examples, options.prompt_share), sampler.draw()
        if waves.refresh():
            say(waves.summary())


def main() -> None:
    """Train one draft model, with one thread."""
    parser = argparse.ArgumentParser(prog="python -m specbench.demo.train.draft")
    parser.add_argument("--target", type=Path, required=True, help="the target's checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="folder of waves")
    parser.add_argument("--out", type=Path, required=True, help="folder for the delta")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", type=Path, help="a delta to start from")
    parser.add_argument("--layers", type=int, default=DraftOptions.layers)
    parser.add_argument("--peak-rate", type=float, default=DraftOptions.peak_rate)
    parser.add_argument("--batch-tokens", type=int, default=DraftOptions.batch_tokens)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train_draft(
        target=args.target,
        data=args.data,
        out=args.out,
        seconds=60 * args.minutes,
        max_steps=args.max_steps,
        seed=args.seed,
        init=args.init,
        options=DraftOptions(
            layers=args.layers, peak_rate=args.peak_rate, batch_tokens=args.batch_tokens
        ),
        say=lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
