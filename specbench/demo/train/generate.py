"""The target's own answers to the training prompts, with its hidden state at every token.

All prompts of a wave advance one token at a time together, which keeps the matrices tall without
any padding. Two single-threaded processes are faster than one with two threads: each takes every
second wave.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specbench.demo.train.data import Example, wave_name, write_wave
from specbench.demo.train.prompts import TrainingPrompt, read_prompts
from specbench.demo.train.target import Cache, Target
from specbench.demo.train.workers import exit_code

POSITIONS = 448  # tokens; the longest sequence, prompt included
SAMPLED_FROM = 200  # most likely tokens, at a temperature above 0
LONGEST_USER_TURN = 96  # tokens, when the model writes the user's turn too
COMPACT_BELOW = 0.85  # of a wave's rows still alive: their cache is moved together
COMPACT_EVERY = 16  # tokens; the latest time to do so


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
    positions: int  # that there is room for
    tokens: list[int] = field(init=False)
    own: list[bool] = field(init=False)
    limit: int = field(init=False)  # tokens at which it is finished
    in_user_turn: bool = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt.ids)
        self.own = [False] * len(self.tokens)
        self.in_user_turn = self.prompt.magpie
        self.limit = self.positions
        if not self.in_user_turn:
            self._allow_answer()

    def _allow_answer(self) -> None:
        self.limit = min(self.positions, len(self.tokens) + self.prompt.max_new)

    @property
    def temperature(self) -> float:
        """User turns are always sampled, or they would all be the same."""
        return 1.0 if self.in_user_turn else self.prompt.temp

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

    def pad_to(self, length: int, chat: ChatTokens) -> None:
        """Give a finished sequence that is still in the batch something to be fed."""
        while len(self.tokens) < length:
            self.tokens.append(chat.end_of_turn)
            self.own.append(False)


def choose(logits: Tensor, temperatures: Sequence[float]) -> list[int]:
    """A token for each row of *logits* [N, vocab]: the likeliest at temperature 0, else sampled."""
    chosen = logits.argmax(-1)
    heat = torch.tensor(temperatures)
    hot = (heat > 0).nonzero()[:, 0]
    if len(hot):
        count = min(SAMPLED_FROM, logits.shape[-1])
        values, ids = (logits[hot] / heat[hot, None]).topk(count, -1)
        chosen[hot] = ids.gather(1, torch.multinomial(values.softmax(-1), 1))[:, 0]
    return [int(token) for token in chosen]


def generate_wave(
    target: Target,
    chat: ChatTokens,
    prompts: Sequence[TrainingPrompt],
    cache: Cache,
    *,
    fewest_alive: int,
) -> list[Example]:
    """Answer *prompts* together and return the sequences in their order.

    Stops when fewer than *fewest_alive* are unfinished: a few long ones are not worth the wait,
    and are cut off. *cache* needs a row for each prompt.
    """
    sequences = [_Sequence(prompt, target.positions) for prompt in prompts]
    alive = list(range(len(sequences)))
    hidden = torch.zeros(
        len(sequences), target.positions, target.shape.hidden, dtype=torch.bfloat16
    )
    position = 0
    with torch.no_grad():
        for position in range(target.positions):
            fed = torch.tensor([sequences[index].tokens[position] for index in alive])
            state = target.step(fed, position, cache)
            hidden[alive, position] = state.bfloat16()
            _continue(target, chat, [sequences[index] for index in alive], state, position)
            unfinished = [
                row for row, index in enumerate(alive) if position + 1 < sequences[index].limit
            ]
            if len(unfinished) < fewest_alive:
                break
            if _worth_compacting(len(unfinished), len(alive), position):
                _compact(cache, unfinished, position + 1)
                alive = [alive[row] for row in unfinished]
            for index in alive:
                sequences[index].pad_to(position + 2, chat)
    return [
        _example(sequence, states, position + 1)
        for sequence, states in zip(sequences, hidden, strict=True)
    ]


def _continue(
    target: Target, chat: ChatTokens, sequences: list[_Sequence], state: Tensor, position: int
) -> None:
    """Choose the next token of those *sequences* whose known tokens end at *position*."""
    waiting = [row for row, one in enumerate(sequences) if len(one.tokens) == position + 1]
    if not waiting:
        return
    logits = target.logits(state if len(waiting) == len(sequences) else state[waiting])
    tokens = choose(logits, [sequences[row].temperature for row in waiting])
    for row, token in zip(waiting, tokens, strict=True):
        sequences[row].append(token, chat)


def _worth_compacting(unfinished: int, alive: int, position: int) -> bool:
    late = unfinished < alive and position % COMPACT_EVERY == 0
    return unfinished < alive * COMPACT_BELOW or late


def _compact(cache: Cache, rows: list[int], length: int) -> None:
    """Move the first *length* positions of *rows* to the front of *cache*."""
    picked = torch.tensor(rows)
    for part in (tensor for layer in cache for tensor in layer):
        part[: len(rows), :, :length] = part[picked, :, :length]


def _example(sequence: _Sequence, hidden: Tensor, computed: int) -> Example:
    length = min(sequence.limit, len(sequence.tokens), computed)
    return Example(
        tokens=torch.tensor(sequence.tokens[:length]),
        own=torch.tensor(sequence.own[:length]),
        hidden=hidden[:length],
        kind=sequence.prompt.kind,
    )


def worth_waiting_for(prompts: int) -> int:
    """How many unfinished sequences of a wave of *prompts* still fill the matrices well."""
    return max(1, min(prompts // 2, max(12, prompts // 10)))


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
    fewest_alive: int | None = None,
    say: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Write the waves *first*, *first* + *stride*, ... of *prompts* to *out*; return their tokens.

    A wave that exists is skipped. No wave is begun after *seconds*. *fewest_alive* is as in
    `generate_wave`, worked out from the size of the wave by default. A wave's samples depend on
    its number alone.
    """
    out.mkdir(parents=True, exist_ok=True)
    cache = target.new_cache(min(wave_size, len(prompts)))
    begin, total = clock(), 0
    waves = range(first, -(-len(prompts) // wave_size), stride)
    for number in waves:
        path = out / wave_name(number, wave_size)
        if path.exists():
            say(f"wave {number}: there already")
            continue
        if clock() - begin >= seconds:
            break
        wave_begin = clock()
        batch = prompts[number * wave_size : (number + 1) * wave_size]
        fewest = worth_waiting_for(len(batch)) if fewest_alive is None else fewest_alive
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            examples = generate_wave(target, chat, batch, cache, fewest_alive=fewest)
        write_wave(path, examples)
        tokens = sum(len(example.tokens) for example in examples)
        total += tokens
        took = clock() - wave_begin
        say(
            f"wave {number} of {waves.stop}: {tokens} tokens in {took:.0f} s "
            f"({tokens / max(took, 1e-9):.0f} tokens/s); {total} since {clock() - begin:.0f} s"
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
    parser.add_argument(
        "--fewest-alive", type=int, help="end a wave below so many; 1 lets every answer end"
    )
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    generate_waves(
        Target.load(args.target, POSITIONS),
        read_chat_tokens(args.target),
        read_prompts(args.prompts),
        args.out,
        wave_size=args.wave_size,
        first=args.first,
        stride=args.stride,
        seconds=60 * args.minutes,
        fewest_alive=args.fewest_alive,
        say=lambda line: print(line, flush=True),
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
