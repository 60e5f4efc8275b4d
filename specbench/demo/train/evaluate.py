"""Exact greedy acceptance lengths, offline, from the target's own greedy texts.

Greedy speculation is lossless, so the text it would produce is known beforehand. One unroll over
that text says at every place whether each draft step would agree; walking it in jumps of accepted
+ 1 tokens counts what an engine in fp32 would count.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from specbench.demo.train.data import Example

LONGEST_DRAFT = 5
FEWEST_OWN_TOKENS = 8  # a shorter answer has hardly a draft to judge


class Drafter(Protocol):
    """Something that proposes tokens; `embedding` [vocab, hidden] makes logits of its states."""

    embedding: Tensor

    def proposing_states(self, tokens: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """For each draft step s from 1: [L, hidden], whose row t chooses token t.

        Row t assumes that the s - 1 tokens before t were drafted and right. *tokens* is [L],
        *hidden* [L, hidden] in fp32. Rows that step s cannot reach are arbitrary.
        """
        ...


@dataclass(frozen=True)
class Acceptance:
    """What speculation with drafts of k tokens came to on some texts."""

    k: int
    target_steps: int
    tokens: int  # emitted, the target's own token of each step included
    accepted_at: tuple[int, ...]  # how many drafts had their 1st, 2nd, ... k-th token accepted

    @property
    def length(self) -> float:
        """Mean tokens per target step; NaN without steps."""
        return self.tokens / self.target_steps if self.target_steps else float("nan")

    @property
    def rates(self) -> tuple[float, ...]:
        """The share of all drafts whose i-th token was accepted; empty without steps."""
        steps = self.target_steps
        return tuple(accepted / steps for accepted in self.accepted_at) if steps else ()

    def __add__(self, other: "Acceptance") -> "Acceptance":
        both = zip(self.accepted_at, other.accepted_at, strict=True)
        return Acceptance(
            self.k,
            self.target_steps + other.target_steps,
            self.tokens + other.tokens,
            tuple(mine + theirs for mine, theirs in both),
        )


def walk(agreed: Sequence[Sequence[bool]], k: int) -> Acceptance:
    """Speculate through one text with drafts of *k* tokens.

    `agreed[s][t]`: draft step s + 1 would propose token t rightly, if the drafted ones before it
    were right. A last draft that would reach past the end is not started.
    """
    accepted_at = [0] * k
    steps = position = 0
    while position < len(agreed[0]) - k:
        accepted = 0
        while accepted < k and agreed[accepted][position + accepted]:
            accepted_at[accepted] += 1
            accepted += 1
        steps += 1
        position += accepted + 1
    return Acceptance(k, steps, position, tuple(accepted_at))


def agreement(
    drafter: Drafter, example: Example, wanted: Tensor, asked: Tensor, steps: int
) -> list[Tensor]:
    """For each draft step: bool [L], whether it chooses `wanted[t]`.

    False where not *asked*, and where the step before was wrong about t - 1: a draft is over then,
    and the output embedding is what costs the time here.
    """
    found: list[Tensor] = []
    for state in drafter.proposing_states(example.tokens, example.hidden.float(), steps):
        alive = asked.clone()
        if found:
            alive[1:] &= found[-1][:-1]
        agreed = torch.zeros_like(asked)
        agreed[alive] = _choices(state[alive], drafter.embedding) == wanted[alive]
        found.append(agreed)
    return found


def _choices(hidden: Tensor, embedding: Tensor) -> Tensor:
    return functional.linear(hidden, embedding).argmax(-1)


def acceptance_by_kind(
    drafter: Drafter, examples: Iterable[Example], longest: int = LONGEST_DRAFT
) -> dict[str, list[Acceptance]]:
    """For each kind of text, the acceptance for k = 1 to *longest*.

    *examples* are the target's greedy texts: a prompt, then its own tokens to the end. The first
    own token comes from the prompt's pass and is never drafted.
    """
    found: dict[str, list[Acceptance]] = {}
    for example in examples:
        first_own = int(example.own.int().argmax())
        if first_own == 0 or len(example.tokens) - first_own < FEWEST_OWN_TOKENS:
            continue
        asked = torch.arange(len(example.tokens)) > first_own
        with torch.no_grad():
            states = agreement(drafter, example, example.tokens, asked, longest)
        agreed = [state[first_own + 1 :].tolist() for state in states]
        walks = [walk(agreed, k) for k in range(1, longest + 1)]
        before = found.get(example.kind)
        found[example.kind] = (
            [a + b for a, b in zip(before, walks, strict=True)] if before else walks
        )
    return found


def render(acceptances: Mapping[str, Sequence[Acceptance]]) -> str:
    """One line for each kind: acceptance lengths by k, and the rates of the longest draft."""
    lines = []
    for kind, by_k in acceptances.items():
        lengths = "  ".join(f"k={acceptance.k} {acceptance.length:.3f}" for acceptance in by_k)
        rates = " ".join(f"{rate:.3f}" for rate in by_k[-1].rates)
        lines.append(f"{kind:>12}  {lengths}  rates {rates}")
    return "\n".join(lines)


def summary(acceptances: Mapping[str, Sequence[Acceptance]]) -> dict[str, list[dict[str, object]]]:
    """The same as plain JSON."""
    return {
        kind: [
            {
                "k": one.k,
                "length": one.length,
                "rates": one.rates,
                "target_steps": one.target_steps,
                "tokens": one.tokens,
            }
            for one in by_k
        ]
        for kind, by_k in acceptances.items()
    }


def held_out_report(drafter: Drafter, examples: Iterable[Example], steps: int = 3) -> str:
    """Mean acceptance length over every start in the model's own tokens, by kind of text.

    Unlike `acceptance_by_kind` it takes sampled texts: right is what the target would have chosen.
    """
    accepted: dict[str, Tensor] = {}
    starts: dict[str, int] = {}
    for example in examples:
        chains, begun = _accepted_chains(drafter, example, steps)
        kind = example.kind.split("_")[0]
        accepted[kind] = accepted.get(kind, torch.zeros(steps)) + chains
        starts[kind] = starts.get(kind, 0) + begun
    parts = []
    for kind, counts in accepted.items():
        rates = (counts / max(1, starts[kind])).tolist()
        shares = " ".join(f"{rate:.3f}" for rate in rates)
        parts.append(f"{kind} {1 + sum(rates):.3f} ({shares})")
    return ", ".join(parts)


def _accepted_chains(drafter: Drafter, example: Example, steps: int) -> tuple[Tensor, int]:
    """How many of the starts had 1, 2, ... *steps* tokens accepted [steps], and the starts."""
    asked = example.own.clone()
    asked[:2] = False  # nothing is drafted before a state and the token after it are known
    wanted = torch.full_like(example.tokens, -1)
    windows = len(asked) - steps + 1
    with torch.no_grad():
        chosen_from = example.hidden[:-1].float()[asked[1:]]
        wanted[1:][asked[1:]] = _choices(chosen_from, drafter.embedding)
        agreed = agreement(drafter, example, wanted, asked, steps)
    begun = asked[:windows] & asked[steps - 1 :]
    alive = begun
    chains = torch.zeros(steps)
    for step in range(steps):
        alive = alive & agreed[step][step : windows + step]
        chains[step] = alive.sum()
    return chains, int(begun.sum())
