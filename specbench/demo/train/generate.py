"""The target's own answers to the training prompts, with its hidden state at every token.

The batch stays full: where sequences have ended, the next prompts start, in groups that keep a
cache each. Two single-threaded processes are faster than one with two threads: each takes every
second wave.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from specbench.demo.train.data import Example, wave_name, write_wave
from specbench.demo.train.prompts import TrainingPrompt, read_prompts
from specbench.demo.train.target import Cache, Target, matrix_dtype
from specbench.demo.train.workers import exit_code

POSITIONS = 448  # tokens; the longest sequence, prompt included
SAMPLED_FROM = 200  # most likely tokens, at a temperature above 0
LONGEST_USER_TURN = 96  # tokens, when the model writes the user's turn too
SLOTS = 192  # sequences that grow together; more need more memory and are hardly faster
GROUPS = 6  # that fill the slots; with more, smaller ones, each sequence costs more


@dataclass(frozen=True)
class ChatTokens:
    """The token ids that the generator has to know of a chat format."""

    end_of_turn: int
    end_of_text: int
    open_answer: tuple[int, ...]  # what follows the user's end_of_turn

    @property
    def ends(self) -> tuple[int, int]:
        """Both ways for a turn to be over."""
        return self.end_of_turn, self.end_of_text


def read_chat_tokens(target: Path) -> ChatTokens:
    """The chat tokens of the ChatML tokenizer in *target*."""
    from transformers import AutoTokenizer  # slow to import, and not needed by the rest

    tokenizer = AutoTokenizer.from_pretrained(str(target))
    answer = tokenizer("\n<|im_start|>assistant\n", add_special_tokens=False).input_ids
    return ChatTokens(
        end_of_turn=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        end_of_text=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        open_answer=tuple(answer),
    )


@dataclass
class _Sequence:
    """One sequence as it grows."""

    prompt: TrainingPrompt
    target: InitVar[Target]
    wave: int
    dice: random.Random  # its own: what it samples must not depend on what runs beside it
    tokens: list[int] = field(init=False)
    own: list[bool] = field(init=False)
    states: Tensor = field(init=False)  # bf16 [positions, hidden]
    fed: int = field(init=False, default=0)  # tokens whose states are known
    limit: int = field(init=False)  # tokens at which it is finished
    in_user_turn: bool = field(init=False)

    def __post_init__(self, target: Target) -> None:
        self.tokens = list(self.prompt.ids)
        self.own = [False] * len(self.tokens)
        self.states = torch.empty(target.positions, target.shape.hidden, dtype=torch.bfloat16)
        self.in_user_turn = self.prompt.magpie
        self.limit = target.positions
        if not self.in_user_turn:
            self._allow_answer()

    def _allow_answer(self) -> None:
        self.limit = min(len(self.states), len(self.tokens) + self.prompt.max_new)

    @property
    def temperature(self) -> float:
        """User turns are always sampled, or they would all be the same."""
        return 1.0 if self.in_user_turn else self.prompt.temp

    @property
    def finished(self) -> bool:
        """Whether all its tokens have their states."""
        return self.fed >= self.limit

    @property
    def waiting(self) -> bool:
        """Whether the model has to choose the next token."""
        return self.fed == len(self.tokens) and not self.finished

    def take(self, states: Tensor) -> None:
        """Take up the *states* [tokens, hidden] of the tokens fed last."""
        self.states[self.fed : self.fed + len(states)] = states
        self.fed += len(states)

    def append(self, token: int, chat: ChatTokens) -> None:
        """Take up a *token* that the model chose."""
        self.tokens.append(token)
        self.own.append(True)
        ended = token in chat.ends
        if not self.in_user_turn:
            if ended:
                self.limit = min(self.limit, len(self.tokens))
        elif ended or len(self.tokens) - len(self.prompt.ids) >= LONGEST_USER_TURN:
            self._close_user_turn(chat)

    def _close_user_turn(self, chat: ChatTokens) -> None:
        if self.tokens[-1] != chat.end_of_turn:
            self.tokens[-1], self.own[-1] = chat.end_of_turn, False
        self.tokens += chat.open_answer
        self.own += [False] * len(chat.open_answer)
        self.in_user_turn = False
        self._allow_answer()

    def example(self) -> Example:
        """What a wave keeps of it."""
        return Example(
            tokens=torch.tensor(self.tokens[: self.limit]),
            own=torch.tensor(self.own[: self.limit]),
            hidden=self.states[: self.limit],
            kind=self.prompt.kind,
        )


@dataclass
class _Group:
    """Sequences that started together, in the order of their cache's rows."""

    sequences: list[_Sequence]
    cache: Cache

    def drop_finished(self) -> list[_Sequence]:
        """Take the finished sequences out; they are returned."""
        finished = []
        for row in reversed(range(len(self.sequences))):
            if self.sequences[row].finished:
                self.cache.drop(row)
                finished.append(self.sequences[row])
                self.sequences[row] = self.sequences[-1]
                self.sequences.pop()
        return finished


def choose(logits: Tensor, temperatures: Sequence[float], dice: Sequence[float]) -> list[int]:
    """A token for each row of *logits* [N, vocab]: the likeliest at temperature 0, else sampled.

    *dice* are uniform in [0, 1), one for each row.
    """
    chosen = logits.numpy().argmax(-1)  # torch takes ten times as long
    heat, die = torch.tensor(temperatures), torch.tensor(dice)
    hot = (heat > 0).nonzero()[:, 0]
    if len(hot):
        count = min(SAMPLED_FROM, logits.shape[-1])
        values, ids = (logits[hot] / heat[hot, None]).topk(count, -1)
        shares = values.softmax(-1).cumsum(-1)
        picked = torch.searchsorted(shares, die[hot, None], right=True).clamp(max=count - 1)
        chosen[hot] = ids.gather(1, picked)[:, 0]
    return [int(token) for token in chosen]


def grow(
    target: Target, chat: ChatTokens, waiting: Iterator[_Sequence], slots: int = SLOTS
) -> Iterator[_Sequence]:
    """Grow the sequences that are *waiting*, up to *slots* at once; each comes back as it ends."""
    groups: list[_Group] = []
    size = max(1, slots // GROUPS)
    with torch.no_grad():
        while True:
            free = slots - sum(len(group.sequences) for group in groups)
            if free >= size and (new := list(islice(waiting, size))):
                groups.append(_begin(target, chat, new))
            elif groups:
                _step(target, chat, groups)
            else:
                return
            for group in groups:
                yield from group.drop_finished()
            groups = [group for group in groups if group.sequences]


def _begin(target: Target, chat: ChatTokens, sequences: list[_Sequence]) -> _Group:
    """Feed the prompts of *sequences*, and choose the first token of each."""
    cache, states = target.begin([one.tokens[: one.limit] for one in sequences])
    for one, known in zip(sequences, states, strict=True):
        one.take(known)
    _continue(target, chat, sequences, torch.stack([known[-1] for known in states]))
    return _Group(sequences, cache)


def _step(target: Target, chat: ChatTokens, groups: list[_Group]) -> None:
    """Feed one token to each sequence of *groups*, and choose the next where it is not known."""
    sequences = [one for group in groups for one in group.sequences]
    fed = torch.tensor([one.tokens[one.fed] for one in sequences])
    states = target.step(fed, [group.cache for group in groups])
    for one, state in zip(sequences, states.bfloat16()[:, None], strict=True):
        one.take(state)
    _continue(target, chat, sequences, states)


def _continue(target: Target, chat: ChatTokens, sequences: list[_Sequence], states: Tensor) -> None:
    """Choose the next token of those *sequences* that wait for it, from their last *states*."""
    rows = [row for row, one in enumerate(sequences) if one.waiting]
    if not rows:
        return
    asked = [sequences[row] for row in rows]
    tokens = choose(
        target.logits(states[rows]),
        [one.temperature for one in asked],
        [one.dice.random() for one in asked],
    )
    for one, token in zip(asked, tokens, strict=True):
        one.append(token, chat)


def generate_waves(
    target: Target,
    chat: ChatTokens,
    prompts: Sequence[TrainingPrompt],
    out: Path,
    *,
    wave_size: int,
    first: int = 0,
    stride: int = 1,
    seconds: float = float("inf"),
    slots: int = SLOTS,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Write the waves *first*, *first* + *stride*, ... of *prompts* to *out*; return their tokens.

    A wave is written when its last sequence ends, while those of the next waves grow already. One
    that exists is skipped. No wave is begun after *seconds*. What a prompt's sequence samples
    depends on the prompt's index alone.
    """
    out.mkdir(parents=True, exist_ok=True)
    begin, total = clock(), 0
    waves = range(first, -(-len(prompts) // wave_size), stride)
    begun: dict[int, list[_Sequence]] = {}
    left: Counter[int] = Counter()  # of each wave that has begun, unfinished sequences

    def waiting() -> Iterator[_Sequence]:
        for number in waves:
            if (out / wave_name(number, wave_size)).exists():
                say(f"wave {number}: there already")
                continue
            if clock() - begin >= seconds:
                return
            places = range(number * wave_size, min((number + 1) * wave_size, len(prompts)))
            begun[number] = [
                _Sequence(prompts[place], target, number, random.Random(place)) for place in places
            ]
            left[number] = len(places)
            # Neighbours start together, which is cheapest when they are as long.
            yield from sorted(begun[number], key=lambda one: len(one.tokens))

    for ended in grow(target, chat, waiting(), slots):
        left[ended.wave] -= 1
        if left[ended.wave]:
            continue
        examples = [one.example() for one in begun.pop(ended.wave)]
        write_wave(out / wave_name(ended.wave, wave_size), examples)
        tokens = sum(len(example.tokens) for example in examples)
        total += tokens
        took = clock() - begin
        say(
            f"wave {ended.wave} of {waves.stop}: {tokens} tokens; {total} since {took:.0f} s "
            f"({total / max(took, 1e-9):.0f} tokens/s)"
        )
    return total


def main() -> None:
    """Generate one process's share of the waves, with one thread."""
    parser = argparse.ArgumentParser(prog="python -m specbench.demo.train.generate")
    parser.add_argument("--target", type=Path, required=True, help="the target's checkpoint")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON of training prompts")
    parser.add_argument("--out", type=Path, required=True, help="folder for the waves")
    parser.add_argument("--wave-size", type=int, default=128, help="prompts in a wave")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--first", type=int, default=0, help="number of the first wave")
    parser.add_argument("--stride", type=int, default=1, help="how many processes share the waves")
    args = parser.parse_args()
    torch.set_num_threads(1)
    generate_waves(
        Target.load(args.target, POSITIONS, matrix_dtype()),
        read_chat_tokens(args.target),
        read_prompts(args.prompts),
        args.out,
        wave_size=args.wave_size,
        first=args.first,
        stride=args.stride,
        seconds=60 * args.minutes,
        say=lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
