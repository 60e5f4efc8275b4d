"""The EAGLE-1 head as vLLM's EagleLlamaForCausalLM runs it, and how it is trained.

Position p reads the target's hidden state h_p (after the final norm) and the embedding of token
p + 1, at rotary position p, and its raw output stands for h_{p+1}: the output embedding is applied
to it as it is. Later draft steps feed that output back, and training unrolls the same.
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
from specbench.demo.train.data import Batch, TrainingData, collate
from specbench.demo.train.distill import Candidates, CandidateSampler, distillation_loss
from specbench.demo.train.layers import Attention, GatedMlp, join_heads, rms_norm
from specbench.demo.train.target import Rotary, Shape, read_config, read_embedding, read_shape
from specbench.demo.train.workers import exit_code
from specbench.errors import UserError

POSITIONS = 1024  # the longest sequence that is trained or judged on, tokens
FAR_BELOW = -1e9  # a score that softmax turns into 0


@dataclass(frozen=True)
class HeadOptions:
    """What the recipe leaves open; the defaults are how the shipped head was made."""

    peak_rate: float = 2e-3
    dropout: float = 0.1
    regulariser: float = 1.0  # weight of the distance between the output and h_{p+1}
    feature_noise: float = 0.215  # largest noise on h, a tenth of its usual size
    prompt_share: float = 0.25  # of the prompts' tokens, those that are learnt
    step_weights: tuple[float, ...] = (1.0, 1.0, 0.8)
    kept_share: float = 0.6  # of the positions, where a step is cheap to thin out
    batch_tokens: int = 2400
    pool_tokens: int = 50_000  # between two looks for new waves
    frequent: int = 3584  # candidates for the softmax
    negatives: int = 640
    two_steps_until: float = 0.4  # of a run that starts from a head

    def unroll_steps(self, progress: float, warm: bool) -> int:
        """How many draft steps are unrolled at *progress*; *warm*: the run began with a head."""
        if warm:
            return 2 if progress < self.two_steps_until else 3
        return 1 if progress < 0.4 else 2 if progress < 0.62 else 3


class HeadLayer(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A Llama layer without the first norm, as EAGLE has it."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = rms_norm(shape)
        self.mlp = GatedMlp(shape)
        self._dropout = dropout

    def forward(self, state: Tensor, rotary: Rotary, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[B, L, hidden] to the same; *seen* holds earlier steps' keys and values, and grows."""
        query, key, value = self.self_attn.project(state, rotary)
        seen.append((key, value))
        attended = join_heads(attend_unrolled(query, seen))
        state = state + self.self_attn.o_proj(self._drop(attended))
        active = self.mlp.activate(self.post_attention_layernorm(state))
        return state + self.mlp.down_proj(self._drop(active))

    def _drop(self, state: Tensor) -> Tensor:
        return functional.dropout(state, self._dropout, self.training)


def attend_unrolled(query: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of draft step `s = len(seen)` for all positions at once: [B, heads, L, head_dim].

    Row p of step s is the s-th token drafted from the true states up to p - s + 1. So it sees the
    first step's keys up to there, one key of each step j in between, at p - s + j, and its own.
    """
    step, length = len(seen), query.shape[2]
    first_key, first_value = seen[0]
    if step == 1:
        return functional.scaled_dot_product_attention(
            query, first_key, first_value, is_causal=True
        )
    rows = torch.arange(length)
    unseen = rows[None, :] > rows[:, None] - (step - 1)
    first_scores = (query @ first_key.transpose(-1, -2)).masked_fill(unseen, FAR_BELOW)
    drafted = [
        (moved_down(key, step - 1 - index), moved_down(value, step - 1 - index))
        for index, (key, value) in enumerate(seen)
        if index
    ]
    own_scores = [(query * key).sum(-1, keepdim=True) for key, _ in drafted]
    scores = torch.cat([first_scores, *own_scores], -1) * query.shape[-1] ** -0.5
    shares = scores.softmax(-1)
    attended = shares[..., :length] @ first_value
    for index, (_, value) in enumerate(drafted):
        attended = attended + shares[..., length + index, None] * value
    return attended


def moved_down(rows: Tensor, count: int) -> Tensor:
    """[..., L, n] with row p at p + *count*, zeros above, and the last rows dropped."""
    return functional.pad(rows, (0, 0, count, 0))[..., : rows.shape[-2], :] if count else rows


class Head(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The head with the target's frozen *embedding* [vocab, hidden], which is not saved."""

    def __init__(self, shape: Shape, embedding: Tensor, dropout: float = 0.1) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([HeadLayer(shape, dropout)])
        self.register_buffer("embedding", embedding, persistent=False)
        self._rotary = Rotary(shape, POSITIONS)
        self._initialise(shape.hidden)

    def _initialise(self, hidden: int) -> None:
        """Begin near the identity: half of h passes, beside a random half of the embedding."""
        layer = self.layers[0]
        late = (layer.self_attn.o_proj, layer.mlp.down_proj)
        with torch.no_grad():
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(std=0.01 if module in late else 0.02)
            scale = 0.5 / (self.embedding.std() * hidden**0.5)
            self.fc.weight[:, :hidden] = torch.randn(hidden, hidden) * scale
            self.fc.weight[:, hidden:] = torch.eye(hidden) * 0.5

    def unroll(self, tokens: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """The outputs [B, L - 1, hidden] of each of *steps* draft steps.

        *tokens* is [B, L], *hidden* [B, L, hidden]. Row p of step s stands for h_{p+1} and is
        meaningful from p = s - 1 on.
        """
        embedded, state = self.embedding[tokens[:, 1:]], hidden[:, :-1]
        seen: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for _ in range(steps):
            joined = self.fc(torch.cat([embedded, state], -1))
            output = self.layers[0](joined, self._rotary, seen)
            outputs.append(output)
            state = moved_down(output, 1)
        return outputs

    def proposing_states(self, tokens: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """See `evaluate.Drafter`: row p of the unroll chooses token p + 2."""
        unrolled = self.unroll(tokens[None], hidden[None], steps)
        return [functional.pad(output[0, :-1], (0, 0, 2, 0)) for output in unrolled]


def save_head(head: Head, folder: Path, target: Path) -> None:
    """Write *head* (bf16) as vLLM's method `eagle` loads it; the config is *target*'s, one layer.

    There is no embedding in the file, so vLLM shares the target's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.bfloat16().contiguous() for name, value in head.state_dict().items()}
    save_file(weights, str(folder / "model.safetensors"))
    config = {**read_config(target), "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def load_head(folder: Path, target: Path, dropout: float = 0.1) -> Head:
    """The head in *folder*, for inference; UserError where it does not fit *target*."""
    head = Head(read_shape(target), read_embedding(target), dropout)
    _load_into(head, folder)
    head.eval()
    return head


def _load_into(head: Head, folder: Path) -> None:
    try:
        weights = load_file(str(folder / "model.safetensors"))
        head.load_state_dict({name: value.float() for name, value in weights.items()})
    except (FileNotFoundError, RuntimeError) as problem:
        raise UserError(f"{folder} holds no EAGLE head for this target: {problem}") from None


def average_heads(folders: list[Path], out: Path, target: Path) -> None:
    """Save in *out* the mean of the weights of the heads in *folders*: trained alike but for the
    seed, they are better together than each alone.
    """
    heads = [load_head(folder, target).state_dict() for folder in folders]
    mean = Head(read_shape(target), read_embedding(target))
    mean.load_state_dict(
        {name: torch.stack([head[name] for head in heads]).mean(0) for name in heads[0]}
    )
    save_head(mean, out, target)


def head_loss(
    head: Head,
    batch: Batch,
    candidates: Candidates,
    steps: int,
    options: HeadOptions,
    *,
    warm: bool,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of *steps* unrolled draft steps and what to print of it.

    Draws noise and positions from torch's default generator.
    """
    batch_size, _ = batch.tokens.shape
    size = options.feature_noise * torch.rand(batch_size, 1, 1)
    noisy = batch.hidden + torch.randn_like(batch.hidden) * size
    following, learn = batch.hidden[:, 1:], batch.learn[:, 1:]
    total = torch.zeros(())
    values: dict[str, float] = {}
    for step, output in enumerate(head.unroll(batch.tokens, noisy, steps)):
        counted = learn.clone()
        counted[:, :step] = False  # where this step has nothing to start from
        if step or warm:
            counted &= torch.rand(counted.shape) < options.kept_share
        student, teacher = output[counted], following[counted]
        cross_entropy, agreed = distillation_loss(student, teacher, candidates)
        distance = functional.smooth_l1_loss(student, teacher)
        loss = cross_entropy + options.regulariser * distance
        total = total + options.step_weights[step] * loss
        values[f"agreement {step + 1}"] = float(agreed)
    return total, {"loss": float(total.detach()), **values}


def train_head(
    *,
    target: Path,
    data: Path,
    out: Path,
    seconds: float,
    max_steps: int | None = None,
    seed: int = 0,
    init: Path | None = None,
    options: HeadOptions | None = None,
    say: loop.Say = print,
) -> Head:
    """Train a head for *target* on the waves in *data* and save it in *out*.

    Ends after *seconds* or *max_steps*. *init* is a head to start from; an interrupted run of the
    same *out* is taken up instead.
    """
    options = options or HeadOptions()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Head(read_shape(target), read_embedding(target), options.dropout)
        if init is not None:
            _load_into(head, init)
        waves = TrainingData(data)
        say(waves.summary())

        def loss(
            batch: Batch, candidates: Candidates, progress: float
        ) -> tuple[Tensor, dict[str, float]]:
            head.train()
            warm = init is not None
            steps = options.unroll_steps(progress, warm)
            return head_loss(head, batch, candidates, steps, options, warm=warm)

        task = loop.Task(
            batches=_head_batches(head, waves, options, random.Random(1 + seed), say),
            loss=loss,
            save=lambda: save_head(head, out, target),
            report=lambda: evaluate.held_out_report(head.eval(), waves.held_out),
            peak_rate=options.peak_rate,
        )
        budget = loop.Budget(seconds, max_steps)
        summary = loop.train(head, task, budget, loop.checkpoint_path(out), say=say)
    loop.mark_finished(out, summary)
    say(f"done: {summary.steps} steps, {summary.tokens} tokens; held out: {summary.held_out}")
    head.eval()
    return head


def _head_batches(
    head: Head, waves: TrainingData, options: HeadOptions, rng: random.Random, say: loop.Say
) -> Iterator[tuple[Batch, Candidates]]:
    """Batches without end, looking for new waves each time a pool is through."""
    while True:
        frequent = waves.frequent_tokens(options.frequent, len(head.embedding))
        sampler = CandidateSampler(head.embedding, frequent, options.negatives)
        for examples in waves.least_used(options.pool_tokens, options.batch_tokens, rng):
            batch = collate(examples, options.prompt_share)
            yield batch, sampler.draw(batch.tokens)
        if waves.refresh():
            say(waves.summary())


def main() -> None:
    """Train one head; a process for each seed, with one thread, is what is fastest."""
    parser = argparse.ArgumentParser(prog="python -m specbench.demo.train.eagle")
    parser.add_argument("--target", type=Path, required=True, help="the target's checkpoint")
    parser.add_argument("--data", type=Path, required=True, help="folder of waves")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--init", type=Path, help="a head to start from")
    parser.add_argument("--peak-rate", type=float, default=HeadOptions.peak_rate)
    parser.add_argument("--dropout", type=float, default=HeadOptions.dropout)
    parser.add_argument("--regulariser", type=float, default=HeadOptions.regulariser)
    parser.add_argument("--batch-tokens", type=int, default=HeadOptions.batch_tokens)
    parser.add_argument("--two-steps-until", type=float, default=HeadOptions.two_steps_until)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = HeadOptions(
        peak_rate=args.peak_rate,
        dropout=args.dropout,
        regulariser=args.regulariser,
        batch_tokens=args.batch_tokens,
        two_steps_until=args.two_steps_until,
    )
    train_head(
        target=args.target,
        data=args.data,
        out=args.out,
        seconds=60 * args.minutes,
        max_steps=args.max_steps,
        seed=args.seed,
        init=args.init,
        options=options,
        say=lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
