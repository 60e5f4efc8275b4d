"""Texts that the target wrote in an earlier training, so that nobody has to wait for them again.

`tokens.npz` beside this file holds chats as token ids only: 0.5 MB, where their hidden states take
700 MB and two hours to generate. One forward pass gives the states back.

    python -m specbench.demo.train.recorded --keep WORK/data               (waves to tokens.npz)
    python -m specbench.demo.train.recorded --target TARGET --out WORK/data    (and back)
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from specbench.demo.train.data import Example, read_wave, wave_name, wave_paths, write_wave
from specbench.demo.train.target import Target, matrix_dtype
from specbench.demo.train.workers import exit_code
from specbench.errors import UserError

RECORDED = Path(__file__).with_name("tokens.npz")
FIRST_WAVE = 500  # its number; those that are generated begin at 0
WAVE_SIZE = 128
TOGETHER = 16  # sequences in a forward pass


@dataclass(frozen=True, eq=False)
class Text:
    """One sequence of L tokens without its states."""

    tokens: torch.Tensor  # int64 [L]
    own: torch.Tensor  # bool [L]: the model produced this token itself
    kind: str


def keep(path: Path, examples: Iterable[Example]) -> int:
    """Write the chats among *examples* to *path*; how many. Code is from other people's packages."""
    chats = [one for one in examples if one.kind.startswith("chat")]
    kinds = sorted({one.kind for one in chats})
    np.savez_compressed(
        path,
        tokens=np.concatenate([one.tokens.numpy() for one in chats]).astype(np.uint16),
        own=np.packbits(np.concatenate([one.own.numpy() for one in chats])),
        lengths=np.array([len(one.tokens) for one in chats], dtype=np.uint16),
        kinds=np.array(kinds),
        kind=np.array([kinds.index(one.kind) for one in chats], dtype=np.uint8),
    )
    return len(chats)


def read(path: Path = RECORDED) -> list[Text]:
    """The texts in *path*.

    Raises:
        UserError: it holds none.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            lengths = file["lengths"].astype(np.int64)
            edges = np.concatenate([[0], lengths.cumsum()])
            tokens = torch.from_numpy(file["tokens"].astype(np.int64))
            own = torch.from_numpy(np.unpackbits(file["own"], count=len(tokens)).astype(bool))
            kinds = [str(file["kinds"][index]) for index in file["kind"]]
    except (OSError, ValueError, KeyError, IndexError) as problem:
        raise UserError(f"{path} holds no recorded texts: {problem!r}") from None
    return [
        Text(tokens[begin:end], own[begin:end], kind)
        for begin, end, kind in zip(edges, edges[1:], kinds, strict=False)
    ]


def recall(
    target: Target,
    texts: Sequence[Text],
    out: Path,
    *,
    wave_size: int = WAVE_SIZE,
    first: int = 0,
    stride: int = 1,
    say: Callable[[str], None] = print,
) -> int:
    """Write *texts* with *target*'s states as waves to *out*; their tokens. What is there stays.

    Only every *stride*-th wave, from the *first* on: the others are other processes'.
    """
    out.mkdir(parents=True, exist_ok=True)
    began, total = time.monotonic(), 0
    for wave in range(first, -(-len(texts) // wave_size), stride):
        number, begins = FIRST_WAVE + wave, wave * wave_size
        path = out / wave_name(number, wave_size)
        if path.exists():
            say(f"wave {number}: there already")
            continue
        part = texts[begins : begins + wave_size]
        examples: dict[int, Example] = {}
        # Neighbours run together, which is cheapest when they are as long.
        order = sorted(range(len(part)), key=lambda place: len(part[place].tokens))
        for begin in range(0, len(order), TOGETHER):
            places = order[begin : begin + TOGETHER]
            with torch.no_grad():
                states = target.forward(pad_sequence([part[p].tokens for p in places], True))
            for place, state in zip(places, states, strict=True):
                one = part[place]
                hidden = state[: len(one.tokens)].bfloat16().clone()
                examples[place] = Example(one.tokens, one.own, hidden, one.kind)
        write_wave(path, [examples[place] for place in range(len(part))])
        total += sum(len(one.tokens) for one in part)
        took = max(time.monotonic() - began, 1e-9)
        say(f"wave {number}: {total} tokens ({total / took:.0f} tokens/s)")
    return total


def main() -> None:
    """The two commands above."""
    parser = argparse.ArgumentParser(prog="python -m specbench.demo.train.recorded")
    parser.add_argument("--file", type=Path, default=RECORDED)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="waves whose tokens to record")
    parser.add_argument("--target", type=Path, help="the target's checkpoint")
    parser.add_argument("--out", type=Path, help="folder for the waves")
    parser.add_argument("--first", type=int, default=0, help="the first wave of this process")
    parser.add_argument("--stride", type=int, default=1, help="of how many processes it is one")
    args = parser.parse_args()
    if args.keep is not None:
        waves = wave_paths(args.keep)
        found = keep(args.file, (one for path in waves for one in read_wave(path)))
        print(f"{found} chats in {args.file}")
        return
    if args.target is None or args.out is None:
        parser.error("give --target and --out, or --keep")
    torch.set_num_threads(1)
    texts = read(args.file)
    recall(
        Target.load(args.target, max(len(one.tokens) for one in texts), matrix_dtype()),
        texts,
        args.out,
        first=args.first,
        stride=args.stride,
        say=lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
