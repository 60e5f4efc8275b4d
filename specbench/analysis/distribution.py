"""Does an arm draw its tokens as its baseline does? A two-sample test, and what it can see.

Both arms sample the same prompts many times, each time with another seed. A cell is a prompt and
an output position; in it the tokens of the two arms are counted side by side. There are three
LOOKS, each at what one kind of fault changes most:

    cells      chi-square over the tokens of each cell, summed: mass that goes to other tokens
    likeliest  how often what follows a token is what follows it most: too greedy, or not enough
    once       how many tokens are said only once in all samples: garbage

A token said fewer than OWN times in a cell is put together with others as rare. The statistic is
the look that is furthest from what shuffles of the samples give, and its p-value is by the same
shuffles: if both arms draw alike, the samples of a prompt can change arms at will (Lehmann & Romano
2005, 15.2). Whole samples change, so the positions of a sample may depend on each other in any way,
and few or sparse counts do no harm. The first token of an output comes from prefill, not from
speculation, and is left out.

The power is simulated on the baseline's own samples: two tapes are drawn from them, and in one a
share of the mass goes astray in every cell. The figure is that of the fault hardest to find (FAULTS).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbench.analysis.outlines import Request
from specbench.records import RequestRecord

ALPHA = 0.01
PERMUTATIONS = 9999
OWN = 10
RARE = ((1, 1), (2, 3), (4, OWN - 1))  # counts that share a bin
LOOKS = 3
LIKELIEST, ONCE = 0, 1  # those that compare two numbers
FIRST_SPECULATED = 1
END = -1  # stands where a sample has ended

SHIFTS = (0.02, 0.03, 0.04, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5)
NULL_TAPES, FAULTY_TAPES = 400, 200
SURE = 0.98  # a fault that is found so often is found when it is larger

FEWEST_PROMPTS = 12  # 2**12 ways to let prompts change arms: p can be 0.001
MOST_PROMPTS = 500  # more show little more, and shuffling them takes memory
BINS_AT_ONCE = 1024
SUSPECT = 0.002
SUSPECT_PERMUTATIONS = 1999

Tokens = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]
Samples = Mapping[str, Sequence[Sequence[int]]]  # prompt -> the token ids of each sample


@dataclass(frozen=True)
class Shift:
    """The token whose share differs most: of all samples at this prompt and position (from 0).

    `token` is None where it is the end of the output.
    """

    prompt: str
    position: int
    token: int | None
    baseline_share: float
    arm_share: float

    @property
    def size(self) -> float:
        """By how much the shares differ."""
        return abs(self.baseline_share - self.arm_share)


@dataclass(frozen=True)
class Comparison:
    """The test of one arm: `p_value` before any correction for further arms."""

    p_value: float
    prompts: int
    samples: int  # of all prompts, of the arm that has fewer
    largest: Shift


@dataclass(frozen=True)
class Power:
    """The share of faulty samplers found, by the share of the mass that they shift."""

    found: Mapping[float, float]

    def of(self, shift: float) -> float:
        """How often a shift of this size is found."""
        return float(np.interp(shift, [0.0, *self.found], [0.0, *self.found.values()]))

    def smallest(self, power: float) -> float | None:
        """The smallest shift found this often; None if the largest tried is not."""
        before = (0.0, 0.0)
        for shift, found in self.found.items():
            if found >= power:
                part = (power - before[1]) / (found - before[1])
                return before[0] + part * (shift - before[0])
            before = (shift, found)
        return None


def samples_of(
    records: Iterable[RequestRecord], prompt_of: Callable[[RequestRecord], str]
) -> dict[str, list[tuple[int, ...]]]:
    """The token ids of the records that have some, by prompt."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for record in records:
        if record.ok and record.token_ids:
            found.setdefault(prompt_of(record), []).append(record.token_ids)
    return found


def compare(
    baseline: Samples, arm: Samples, *, permutations: int = PERMUTATIONS, seed: int = 0
) -> Comparison | None:
    """Whether *arm* draws as *baseline* does; None where there is nothing to compare."""
    rng = np.random.default_rng(seed)
    shared = [prompt for prompt in baseline if arm.get(prompt) and baseline[prompt]]
    both = {prompt: [*baseline[prompt], *arm[prompt]] for prompt in shared}
    once = _said_once(both.values())
    tally = _Tally(1 + permutations)
    shifts = []
    for prompt, samples in both.items():
        here = len(baseline[prompt])
        # One row a shuffle, one column a sample: 1 where it counts as the baseline's.
        belongs = np.zeros((1 + permutations, len(samples)), dtype=np.float32)
        belongs[:, :here] = 1
        rng.permuted(belongs[1:], axis=1, out=belongs[1:])
        followers = _followers([sample] for sample in samples)
        tally.add(LIKELIEST, *_split(belongs, followers))
        for position, tokens, table in _tables(samples):
            tally.add_cell(*_split(belongs, table @ _bins(table.sum(axis=0))))
            rare = np.isin(tokens, once)
            tally.add(ONCE, *_split(belongs, table @ np.stack([rare, ~rare], 1)))
            shifts.append(_largest_shift(prompt, position, tokens, table[:here], table[here:]))
    if not shifts:
        return None
    looks = tally.looks()
    return Comparison(
        p_value=_p_value(_furthest(looks, looks)),
        prompts=len(shared),
        samples=min(sum(len(side[prompt]) for prompt in shared) for side in (baseline, arm)),
        largest=max(shifts, key=lambda shift: shift.size),
    )


def power(baseline: Samples, *, alpha: float = ALPHA, seed: int = 0) -> Power:
    """What a comparison of as many samples as *baseline* has would find at the level *alpha*."""
    rng = np.random.default_rng(seed)
    null = _looks_of_tapes(baseline, NULL_TAPES, rng)
    critical = NormalDist().inv_cdf(1 - alpha / LOOKS)
    found: dict[float, float] = {}
    faults = list(FAULTS)
    for shift in SHIFTS:
        shares = {}
        for fault in faults:
            looks = _looks_of_tapes(baseline, FAULTY_TAPES, rng, fault, shift)
            shares[fault] = float(np.mean(_furthest(looks, null) > critical))
        found[shift] = min(shares.values())
        faults = [fault for fault in faults if shares[fault] < SURE]
        if not faults:
            break
    return Power(found)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """The p-values corrected for being several (Holm 1979)."""
    corrected, most = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        most = max(most, min(1.0, p_values[name] * (len(p_values) - rank)))
        corrected[name] = most
    return corrected


def sampler_suspect(
    baseline: Iterable[Request], arm: Iterable[Request], *, seed: int = 0
) -> str | None:
    """What an ordinary run at temperature > 0 shows of a broken sampler, or None.

    There each prompt was sampled once by each arm, so all outputs together make one cell. If both
    arms draw alike, the outputs to a prompt can change arms; with fewer than FEWEST_PROMPTS
    prompts there are too few ways to, and nothing is said. Of more than MOST_PROMPTS the first
    are looked at.
    """
    one, other = _answers(baseline), _answers(arm)
    shared = sorted(
        prompt
        for prompt in one.keys() & other.keys()
        if list(map(_place, one[prompt])) == list(map(_place, other[prompt]))
    )[:MOST_PROMPTS]
    if len(shared) < FEWEST_PROMPTS:
        return None
    looks = _looks_of_swaps(
        [_said(one[prompt]) for prompt in shared],
        [_said(other[prompt]) for prompt in shared],
        np.random.default_rng(seed),
    )
    p_value = _p_value(_furthest(looks, looks))
    if p_value > SUSPECT:
        return None
    return (
        f"tokens are drawn unlike the baseline's (p = {p_value:.2g} over {len(shared)} prompts): "
        "is sampling broken under speculation? `specbench verify` tests it"
    )


# --- counting ------------------------------------------------------------------------------------


class _Tally:
    """The three looks at many pairs of tapes at once (a row each)."""

    def __init__(self, rows: int) -> None:
        self._cells = np.zeros(rows)
        self._pairs = np.zeros((2, 2, rows, 2))  # of a look: arm, row, (is so, is not)

    def add_cell(
        self, ours: Floats, theirs: Floats, sizes: tuple[Floats, Floats] | None = None
    ) -> None:
        """How often each tape of a pair says what belongs in each bin (a column) of a cell.

        *sizes* are those of the tapes where this is not all of the cell.
        """
        self._cells += _chi_square(ours, theirs, sizes)

    def add(self, look: int, ours: Floats, theirs: Floats) -> None:
        """How many tokens of each tape of a pair are as the look asks, and how many are not."""
        self._pairs[look] += ours, theirs

    def looks(self) -> Floats:
        """The three looks, a row each; a column for each pair of tapes."""
        return np.stack([self._cells, *(_chi_square(*pair) for pair in self._pairs)])


def _split(belongs: Floats, counts: Floats) -> tuple[Floats, Floats]:
    """Counts of samples (rows) as counts of the two arms, for each shuffle."""
    ours = np.rint(belongs @ counts.astype(np.float32))
    return ours, counts.sum(axis=0) - ours


def _chi_square(ours: Floats, theirs: Floats, sizes: tuple[Floats, Floats] | None = None) -> Floats:
    """Pearson's chi-square of two samples, for each row."""
    n, m = sizes or (ours.sum(axis=1, keepdims=True), theirs.sum(axis=1, keepdims=True))
    both = ours + theirs
    off = (ours * (n + m) - both * n) ** 2 / np.maximum(both, 1)
    return np.asarray(off.sum(axis=1) / np.maximum(n * m, 1)[:, 0])


def _furthest(looks: Floats, null: Floats) -> Floats:
    """For each column the look that is furthest from those under *null*, in standard deviations.

    The looks are sums of chi-squares: their cube roots are close to normal (Wilson & Hilferty
    1931), so that the three weigh alike.
    """
    mean, variance = null.mean(axis=1, keepdims=True), null.var(axis=1, keepdims=True)
    moves = variance[:, 0] > 0
    off = np.where(looks > mean + 1e-9, np.inf, -np.inf)  # of a look that never moves
    spread = variance[moves] / (9 * mean[moves] ** 2)
    off[moves] = (np.cbrt(looks[moves] / mean[moves]) - 1 + spread) / np.sqrt(spread)
    return np.asarray(off.max(axis=0))


def _p_value(statistics: Floats) -> float:
    """The share of shuffles that are as far off as the first, which is what was measured."""
    return float(np.mean(statistics >= statistics[0] - 1e-9))


def _bins(both: Floats) -> Floats:
    """Which bin (column) each token (row) belongs in, from its count in both arms together."""
    own = np.count_nonzero(both >= OWN)
    bins = np.zeros((len(both), len(RARE) + own), dtype=np.float32)
    bins[np.arange(len(both)), _bin_of(both)] = 1
    return bins


def _bin_of(both: Floats | Tokens) -> Tokens:
    """The number of the bin that each token belongs in."""
    own = both >= OWN
    found = len(RARE) + np.cumsum(own) - 1
    for number, (low, high) in enumerate(RARE):
        found[(both >= low) & (both <= high)] = number
    return np.asarray(found)


def _binned(ours: Floats, theirs: Floats) -> tuple[Floats, Floats]:
    """Counts of tokens as counts of bins, where the bins differ from row to row."""
    both = ours + theirs
    masks = [(both >= low) & (both <= high) for low, high in RARE]
    own = both >= OWN

    def side(counts: Floats) -> Floats:
        return np.hstack([*((counts * m).sum(axis=1, keepdims=True) for m in masks), counts * own])

    return side(ours), side(theirs)


def _tables(samples: Sequence[Sequence[int]]) -> Iterator[tuple[int, Tokens, Floats]]:
    """For each speculated position its tokens (columns) and who said them: 1 in a sample's row."""
    for position in range(FIRST_SPECULATED, max(map(len, samples))):
        said = [sample[position] if position < len(sample) else END for sample in samples]
        tokens, which = np.unique(said, return_inverse=True)
        table = np.zeros((len(samples), len(tokens)), dtype=np.float32)
        table[np.arange(len(samples)), which] = 1
        yield position, tokens, table


def _said_once(prompts: Iterable[Sequence[Sequence[int]]]) -> Tokens:
    """The tokens that all samples of all prompts together hold only once."""
    said = [t for samples in prompts for sample in samples for t in sample[FIRST_SPECULATED:]]
    tokens, counts = np.unique(np.array(said, dtype=np.int64), return_counts=True)
    return np.asarray(tokens[counts == 1])


def _followers(pages: Iterable[Iterable[Sequence[int]]], often: int = OWN) -> Floats:
    """For each page: how many of its tokens are what most often follows the token before, and how
    many are not. Only after tokens that something follows *often* in all pages together.
    """
    everything = [list(page) for page in pages]
    follow: dict[int, Counter[int]] = {}
    for token, after in (pair for page in everything for said in page for pair in pairwise(said)):
        follow.setdefault(token, Counter())[after] += 1
    most = {
        token: max(after, key=lambda t: (after[t], t))
        for token, after in follow.items()
        if after.total() >= often
    }
    found = np.zeros((len(everything), 2))
    for at, page in enumerate(everything):
        told = Counter(
            after != most[token]
            for said in page
            for token, after in pairwise(said)
            if token in most
        )
        found[at] = told[False], told[True]
    return found


def _largest_shift(
    prompt: str, position: int, tokens: Tokens, ours: Floats, theirs: Floats
) -> Shift:
    one, other = ours.mean(axis=0), theirs.mean(axis=0)
    at = int(np.argmax(np.abs(one - other)))
    token = int(tokens[at])
    named = None if token == END else token
    return Shift(prompt, position, named, round(float(one[at]), 4), round(float(other[at]), 4))


# --- simulated tapes -----------------------------------------------------------------------------

Change = Callable[[Floats, float, np.random.Generator], Floats]


def _nothing(theirs: Floats, shift: float, rng: np.random.Generator) -> Floats:
    return theirs


def _to_the_next_likely(theirs: Floats, shift: float, rng: np.random.Generator) -> Floats:
    """From what most often follows (the first column) to what does next."""
    said = theirs.sum(axis=0)
    part = min(1.0, shift * said.sum() / max(said[0], 1))
    moved = rng.binomial(theirs[:, 0].astype(np.int64), part)
    return theirs + np.stack([-moved, moved], 1)


def _to_one_never_said(theirs: Floats, shift: float, rng: np.random.Generator) -> Floats:
    """From all tokens to one that is right nowhere (the last column)."""
    moved = rng.binomial(theirs.astype(np.int64), shift)
    changed = theirs - moved
    changed[:, -1] += moved.sum(axis=1)
    return changed


def _to_garbage(theirs: Floats, shift: float, rng: np.random.Generator) -> Floats:
    """From all tokens to ones made up anew each time (columns beyond the last)."""
    moved = rng.binomial(theirs.astype(np.int64), shift)
    made_up = moved.sum(axis=1, keepdims=True)
    return np.hstack([theirs - moved, np.arange(made_up.max()) < made_up])


@dataclass(frozen=True)
class Fault:
    """What a wrong sampler does to the counts that it changes most.

    What it does to the others is left out, so that the power is rather said too small.
    """

    in_followers: Change = _nothing
    in_cells: Change = _nothing


RIGHT = Fault()
FAULTS = (
    Fault(in_followers=_to_the_next_likely),
    Fault(in_cells=_to_one_never_said),
    Fault(in_cells=_to_garbage),
)


def _looks_of_tapes(
    source: Samples, tapes: int, rng: np.random.Generator, fault: Fault = RIGHT, shift: float = 0
) -> Floats:
    """The looks at pairs of tapes drawn from *source*, the second ones with *fault*."""
    tally = _Tally(tapes)
    vocabulary = np.unique([END, *chain.from_iterable(chain.from_iterable(source.values()))])
    everywhere = np.zeros((2, tapes, len(vocabulary) + 1))  # the last is never said
    made_up = np.zeros(tapes)
    for samples in source.values():
        even = np.full(len(samples), 1 / len(samples))
        draws = [rng.multinomial(len(samples), even, tapes).astype(np.float32) for _ in "ab"]
        followers = _followers(([sample] for sample in samples), often=OWN // 2)
        ours, theirs = (np.rint(draw @ followers) for draw in draws)
        tally.add(LIKELIEST, ours, fault.in_followers(theirs, shift, rng))
        for _, tokens, table in _tables(samples):
            ours, theirs = (np.rint(draw @ _padded(table, 1)) for draw in draws)
            theirs = fault.in_cells(theirs, shift, rng)
            known = np.append(np.searchsorted(vocabulary, tokens), len(vocabulary))
            everywhere[0][:, known] += ours
            everywhere[1][:, known] += theirs[:, : len(known)]
            made_up += theirs[:, len(known) :].sum(axis=1)
            tally.add_cell(*_binned(_padded(ours, theirs.shape[1] - ours.shape[1]), theirs))
    once = everywhere.sum(axis=0) == 1
    rare, rest = ((everywhere * which).sum(axis=2) for which in (once, ~once))
    rare[1] += made_up
    tally.add(ONCE, *np.stack([rare, rest], 2))
    return tally.looks()


def _padded(table: Floats, columns: int) -> Floats:
    return np.pad(table, ((0, 0), (0, columns)))


# --- ordinary runs -------------------------------------------------------------------------------


def _answers(requests: Iterable[Request]) -> dict[str, list[Request]]:
    """Those with token ids by prompt, in the order of their passes and turns."""
    found: dict[str, list[Request]] = {}
    for request in requests:
        if request.ok and request.ids_hash is not None:
            found.setdefault(request.prompt_id, []).append(request)
    for of_prompt in found.values():
        of_prompt.sort(key=_place)
    return found


def _place(request: Request) -> tuple[int, int]:
    return request.cycle, request.turn


def _said(requests: Iterable[Request]) -> list[tuple[int, ...]]:
    """A page: what one arm said to one prompt."""
    return [request.whole().token_ids or () for request in requests]


def _looks_of_swaps(
    ours: Sequence[Sequence[tuple[int, ...]]],
    theirs: Sequence[Sequence[tuple[int, ...]]],
    rng: np.random.Generator,
) -> Floats:
    """The looks as measured, then with each prompt's arms swapped or not at random."""
    pages = [*ours, *theirs]
    spoken = [
        np.array([token for tokens in page for token in tokens[FIRST_SPECULATED:]], dtype=np.int64)
        for page in pages
    ]
    vocabulary, counts = np.unique(np.concatenate(spoken), return_counts=True)
    places = [np.searchsorted(vocabulary, said) for said in spoken]
    once = counts == 1
    rare = np.array([[once[at].sum(), (~once[at]).sum()] for at in places])
    followers = _followers(pages)
    kept = rng.integers(0, 2, (1 + SUSPECT_PERMUTATIONS, len(ours)))
    kept[0] = 1
    belongs = np.hstack([kept, 1 - kept]).astype(np.float32)
    tally = _Tally(len(belongs))
    bin_of, bins = _bin_of(counts), len(RARE) + int(np.count_nonzero(counts >= OWN))
    sizes = _split(belongs, np.array([[len(said)] for said in spoken]))
    for first in range(0, bins, BINS_AT_ONCE):
        width = min(BINS_AT_ONCE, bins - first)
        table = np.array([_counted(bin_of[at] - first, width) for at in places])
        tally.add_cell(*_split(belongs, table), sizes)
    tally.add(LIKELIEST, *_split(belongs, followers))
    tally.add(ONCE, *_split(belongs, rare))
    return tally.looks()


def _counted(bins: Tokens, width: int) -> Tokens:
    """How often each of the first *width* bins is there."""
    return np.bincount(bins[(bins >= 0) & (bins < width)], minlength=width)
