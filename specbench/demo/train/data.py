"""What a wave file holds, and how its sequences become training batches.

A wave is `NAME.safetensors` with `tok` int32 [N], `own` uint8 [N] (1: the model produced this
token), `h` bf16 [N, hidden] and `off` int64 [sequences + 1] (where each sequence begins), beside
`NAME.json`, the list of the sequences' kinds. Names start with `w` and the wave's number.
"""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specbench.errors import UserError

SHORTEST = 40  # tokens; a shorter sequence teaches little for its place in a batch
HELD_OUT_WAVES = ("w000_", "w001_")
HELD_OUT_PER_WAVE = 24
SPECIAL_TOKENS = 32  # the first token ids are control tokens, always worth predicting well
PROMPT_SKIP_CHAT, PROMPT_SKIP = (
    30,
    3,
)  # tokens; in a chat these are the same system prompt each time


@dataclass(frozen=True, eq=False)
class Example:
    """One recorded sequence of L tokens.

    `hidden[p]` is the target's final hidden state at token p, so it predicts token p + 1.
    """

    tokens: Tensor  # int64 [L]
    own: Tensor  # bool [L]: the model produced this token itself
    hidden: Tensor  # bf16 [L, hidden]
    kind: str


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences padded at the end to L tokens."""

    tokens: Tensor  # int64 [B, L]
    hidden: Tensor  # fp32 [B, L, hidden]
    learn: Tensor  # bool [B, L]: predicting token p + 1 from position p counts


def write_wave(path: Path, examples: Sequence[Example]) -> None:
    """Write *examples* as the wave *path* (`.safetensors`); it appears whole or not at all."""
    lengths = torch.tensor([0, *(len(example.tokens) for example in examples)])
    tensors = {
        "tok": torch.cat([example.tokens for example in examples]).int(),
        "own": torch.cat([example.own for example in examples]).to(torch.uint8),
        "h": torch.cat([example.hidden for example in examples]),
        "off": lengths.cumsum(0),
    }
    draft = path.with_suffix(".tmp")
    save_file(tensors, str(draft))
    kinds = json.dumps([example.kind for example in examples])
    path.with_suffix(".json").write_text(kinds, encoding="utf-8")
    draft.rename(path)  # last, because this name says that the wave is finished


def read_wave(path: Path) -> list[Example]:
    """The sequences of the wave *path*, in order."""
    tensors = load_file(str(path))
    kinds = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    starts = tensors["off"].tolist()
    return [
        Example(
            tokens=tensors["tok"][start:end].long(),
            own=tensors["own"][start:end].bool(),
            hidden=tensors["h"][start:end],
            kind=kind,
        )
        for start, end, kind in zip(starts, starts[1:], kinds, strict=False)
    ]


def wave_paths(folder: Path) -> list[Path]:
    """The finished waves in *folder*, in the order of their names."""
    return [path for path in sorted(folder.glob("w*.safetensors")) if _kinds_of(path).exists()]


def _kinds_of(wave: Path) -> Path:
    return wave.with_suffix(".json")


class TrainingData:
    """The sequences of a folder's waves; the first few of the first two waves are held out."""

    def __init__(self, folder: Path) -> None:
        self.train: list[Example] = []
        self.held_out: list[Example] = []
        self._folder = folder
        self._read: set[Path] = set()
        self._uses: Counter[int] = Counter()  # by index in `train`
        self.refresh()
        if not self.train:
            raise UserError(f"{folder} holds no training waves.", hint="Generate some first.")

    def refresh(self) -> int:
        """Read the waves that have appeared since the last time; return how many."""
        new = [path for path in wave_paths(self._folder) if path not in self._read]
        for path in new:
            held_out = HELD_OUT_PER_WAVE if path.name.startswith(HELD_OUT_WAVES) else 0
            for index, example in enumerate(read_wave(path)):
                if len(example.tokens) >= SHORTEST:
                    (self.held_out if index < held_out else self.train).append(example)
            self._read.add(path)
        return len(new)

    def summary(self) -> str:
        """How much there is, in words."""
        tokens = sum(len(example.tokens) for example in self.train)
        own = sum(int(example.own.sum()) for example in self.train)
        return (
            f"{len(self._read)} waves, {len(self.train)} sequences, {tokens} tokens, "
            f"{own} of them the model's own; {len(self.held_out)} sequences held out"
        )

    def frequent_tokens(self, count: int, vocab: int) -> Tensor:
        """The *count* most frequent token ids, sorted, control tokens always among them."""
        frequency = torch.zeros(vocab)
        for example in self.train:
            frequency += torch.bincount(example.tokens, minlength=vocab).float()
        frequency[:SPECIAL_TOKENS] += 1e6
        return frequency.topk(min(count, vocab)).indices.sort().values

    def least_used(
        self, pool_tokens: int, batch_tokens: int, rng: random.Random
    ) -> list[list[Example]]:
        """Batches of the least-used sequences, *pool_tokens* in all; they count as used."""
        order = sorted(range(len(self.train)), key=lambda i: (self._uses[i], rng.random()))
        picked: list[Example] = []
        tokens = 0
        for index in order:
            if tokens >= pool_tokens:
                break
            self._uses[index] += 1
            picked.append(self.train[index])
            tokens += len(self.train[index].tokens)
        return batches(picked, batch_tokens, rng)


def batches(
    examples: Sequence[Example], batch_tokens: int, rng: random.Random
) -> list[list[Example]]:
    """*examples* in batches of like lengths, about *batch_tokens* each, in random order."""
    # 30 tokens of noise: the same sequences should not meet in every epoch.
    order = sorted(examples, key=lambda example: len(example.tokens) + rng.random() * 30)
    found: list[list[Example]] = []
    start = 0
    while start < len(order):
        typical = len(order[min(start + 4, len(order) - 1)].tokens)
        size = max(1, batch_tokens // typical)
        found.append(order[start : start + size])
        start += size
    rng.shuffle(found)
    return found


def collate(examples: Sequence[Example], prompt_share: float) -> Batch:
    """Pad *examples* into one batch.

    The model's own tokens are always learnt, of the prompt's a random *prompt_share* (drawn from
    torch's default generator).
    """
    return Batch(
        tokens=pad_sequence([example.tokens for example in examples], batch_first=True),
        hidden=pad_sequence([example.hidden for example in examples], batch_first=True).float(),
        learn=pad_sequence(
            [learnt_positions(example, prompt_share) for example in examples], batch_first=True
        ),
    )


def learnt_positions(example: Example, prompt_share: float) -> Tensor:
    """Which positions p of *example* learn to predict token p + 1: bool [L]."""
    own_next = torch.zeros_like(example.own)
    own_next[:-1] = example.own[1:]
    sampled = (torch.rand(len(own_next)) < prompt_share) & ~own_next
    sampled[: PROMPT_SKIP_CHAT if "chat" in example.kind else PROMPT_SKIP] = False
    sampled[-1] = False
    return own_next | sampled


def wave_name(number: int, size: int) -> str:
    """The file name of wave *number* when waves hold *size* prompts."""
    return f"w{number:03d}_{size}.safetensors"
