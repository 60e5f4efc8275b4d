"""Do two arms draw alike? Tested on synthetic samplers, right and wrong in known ways."""

from collections.abc import Callable

import numpy as np
import pytest

from specbench.analysis import distribution
from specbench.analysis.distribution import ALPHA, Samples
from specbench.records import RequestRecord
from specbench.verify import SAMPLES

Build = Callable[..., RequestRecord]
Mend = Callable[[int, np.random.Generator], int]
VOCABULARY = 2000
PROMPTS, TOKENS = 4, 8


def right(token: int, rng: np.random.Generator) -> int:
    return token


def astray_to_one(token: int, rng: np.random.Generator) -> int:
    """5% of the mass goes to a token that is right nowhere."""
    return VOCABULARY if rng.random() < 0.05 else token


def garbage(token: int, rng: np.random.Generator) -> int:
    """5% of the mass goes to tokens made up anew each time."""
    return int(rng.integers(VOCABULARY, 50_000)) if rng.random() < 0.05 else token


def to_the_next_likely(token: int, rng: np.random.Generator) -> int:
    """A tenth of what every context's likeliest token (a multiple of 10) had goes to the next.

    In 4 of 10 contexts that token has half of the mass or more, so about 5% moves.
    """
    return token + 1 if token % 10 == 0 and rng.random() < 0.1 else token


def sampler(seed: int, *, samples: int, mend: Mend = right, tokens: int = TOKENS) -> Samples:
    """Samples of a made-up model whose next token hangs on the last and is Zipf-like.

    Some contexts are nearly certain, some wide open, as those of a small model at temperature 1.
    *mend* is the fault: it gets every token after the first.
    """
    rng = np.random.default_rng(seed)

    def one(prompt: int) -> list[int]:
        said = [_next(prompt * 7, rng)]
        while len(said) < tokens:
            said.append(mend(_next(said[-1], rng), rng))
        return said

    return {str(prompt): [one(prompt) for _ in range(samples)] for prompt in range(PROMPTS)}


def _next(last: int, rng: np.random.Generator) -> int:
    """The likeliest tokens of a context are 10c, 10c+1, …; steep contexts give the first most."""
    steep = (0.6, 1.2, 2.0, 3.0)[last % 4]
    rank = min(int(rng.pareto(steep)), 199)
    return (last * 31 % 17) * 10 + rank


def test_a_right_sampler_is_flagged_no_more_often_than_said() -> None:
    """False positives over many seeds: at most the level, give or take what chance gives."""
    p_values = []
    for seed in range(200):
        tape = sampler(seed, samples=24, tokens=4)
        one = {prompt: said[:12] for prompt, said in tape.items()}
        other = {prompt: said[12:] for prompt, said in tape.items()}
        found = distribution.compare(one, other, permutations=199, seed=seed)
        assert found is not None
        p_values.append(found.p_value)
    for level in (0.01, 0.05, 0.2):
        flagged = np.mean(np.array(p_values) <= level)
        assert flagged <= level + 3 * (level * (1 - level) / len(p_values)) ** 0.5
    assert 0.4 < np.mean(p_values) < 0.6


@pytest.mark.parametrize("fault", [to_the_next_likely, astray_to_one, garbage])
def test_a_wrong_sampler_that_shifts_5_percent_is_caught(fault: Mend) -> None:
    for seed in range(2):
        one = sampler(seed, samples=200)
        other = sampler(1000 + seed, samples=200, mend=fault)
        found = distribution.compare(one, other, permutations=999)
        assert found is not None
        assert found.p_value <= ALPHA
        assert (found.prompts, found.samples) == (4, 800)


def test_what_differs_most_is_named() -> None:
    one = {"a": [[1, 2, 3]] * 40, "b": [[1, 2, 3]] * 40}
    other = {"a": [[1, 2, 3]] * 40, "b": [[1, 2, 3]] * 30 + [[1, 2, 4]] * 5 + [[1, 2]] * 5}
    found = distribution.compare(one, other)
    assert found is not None
    assert found.p_value < ALPHA
    assert found.largest == distribution.Shift("b", 2, 3, 1.0, 0.75)


def test_the_first_token_is_prefills_and_is_left_out() -> None:
    one, other = {"a": [[1, 5]] * 50}, {"a": [[2, 5]] * 50}
    found = distribution.compare(one, other, permutations=99)
    assert found is not None
    assert found.p_value == 1
    assert distribution.compare({"a": [[1]]}, {"a": [[2]]}) is None


def test_arms_may_have_samples_of_unlike_number() -> None:
    tape = sampler(3, samples=100)
    one = {prompt: said[:70] for prompt, said in tape.items()}
    other = {prompt: said[70:] for prompt, said in tape.items() if prompt != "0"}
    found = distribution.compare(one, other, permutations=499)
    assert found is not None
    assert found.p_value > ALPHA
    assert (found.prompts, found.samples) == (3, 90)


def test_nothing_in_common_is_no_comparison() -> None:
    assert distribution.compare({"a": [[1, 2]]}, {"b": [[1, 2]]}) is None
    assert distribution.compare({}, {}) is None


@pytest.mark.engine
def test_the_power_said_is_the_power_there_is() -> None:
    """What `power` says of a tape is how often a fault of that size in such tapes is found."""
    power = distribution.power(sampler(0, samples=60), alpha=0.05)
    smallest = power.smallest(0.8)
    assert smallest is not None
    assert power.of(smallest) == pytest.approx(0.8)

    def mend(token: int, rng: np.random.Generator) -> int:
        """The fault that is hardest to find with few samples."""
        return int(rng.integers(VOCABULARY, 10**9)) if rng.random() < smallest else token

    found = 0
    for seed in range(40):
        one = sampler(100 + seed, samples=60)
        other = sampler(500 + seed, samples=60, mend=mend)
        comparison = distribution.compare(one, other, permutations=199)
        assert comparison is not None
        found += comparison.p_value <= 0.05
    assert found >= 0.65 * 40


@pytest.mark.engine
def test_more_samples_find_smaller_shifts() -> None:
    """And the default number finds a shift of 5%."""
    few, many = (distribution.power(sampler(0, samples=n)) for n in (60, SAMPLES))
    small, smaller = few.smallest(0.8), many.smallest(0.8)
    assert small is not None
    assert smaller is not None
    assert smaller < small
    assert few.of(0) == 0
    assert many.of(0.05) > 0.8


def test_a_power_never_reached_is_not_said() -> None:
    power = distribution.Power({0.1: 0.2, 0.5: 0.5})
    assert power.smallest(0.8) is None
    assert power.smallest(0.2) == pytest.approx(0.1)
    assert power.of(0.3) == pytest.approx(0.35)


def test_tokens_are_binned_alike_one_by_one_and_row_by_row() -> None:
    """The permutation test bins once, the simulation for each row: the same bins must come out."""
    rng = np.random.default_rng(0)
    ours, theirs = (rng.poisson(3, (1, 300)).astype(np.float64) for _ in "ab")
    theirs[0, :5] += 20
    theirs[0, 5:] *= rng.integers(0, 2, 295)
    bins = distribution._bins((ours + theirs)[0])
    for one, other in zip(
        distribution._binned(ours, theirs), (ours @ bins, theirs @ bins), strict=True
    ):
        assert sorted(one[one > 0]) == sorted(other[other > 0])


def test_holm_corrects_for_every_arm() -> None:
    corrected = distribution.holm({"a": 0.01, "b": 0.04, "c": 0.03})
    assert corrected == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert distribution.holm({"a": 0.7, "b": 0.9}) == pytest.approx({"a": 1, "b": 1})
    assert distribution.holm({}) == {}


# --- ordinary runs -------------------------------------------------------------------------------


def answers(record: Build, samples: Samples) -> list[RequestRecord]:
    """An ordinary run: each prompt (here: each sample) answered once."""
    said = [tokens for tapes in samples.values() for tokens in tapes]
    return [record(str(i), token_ids=tuple(tokens)) for i, tokens in enumerate(said)]


def broken(token: int, rng: np.random.Generator) -> int:
    """Like vLLM 0.32 on a CPU: about half of the tokens are the draft's choice or garbage."""
    return int(rng.integers(0, 50_000)) if rng.random() < 0.3 else token // 10 * 10


def test_an_ordinary_run_shows_a_broken_sampler(record: Build) -> None:
    one = sampler(1, samples=4, tokens=48)
    other = sampler(2, samples=4, tokens=48, mend=broken)
    found = distribution.sampler_suspect(answers(record, one), answers(record, other))
    assert found is not None
    assert "drawn unlike the baseline's (p = 0.0005 over 16 prompts)" in found


def test_an_ordinary_run_of_a_right_sampler_is_not_suspected(record: Build) -> None:
    suspected = 0
    for seed in range(30):
        one, other = (sampler(seed + more, samples=4, tokens=24) for more in (0, 1000))
        found = distribution.sampler_suspect(answers(record, one), answers(record, other))
        suspected += found is not None
    assert suspected <= 1


def test_few_prompts_are_not_enough_to_suspect(record: Build) -> None:
    one = answers(record, sampler(1, samples=2, tokens=48))
    other = answers(record, sampler(2, samples=2, tokens=48, mend=broken))
    assert len(one) == 8
    assert distribution.sampler_suspect(one, other) is None
    assert distribution.sampler_suspect([], []) is None


def test_a_prompt_that_only_one_arm_answered_in_full_is_left_out(record: Build) -> None:
    one = answers(record, sampler(1, samples=3, tokens=48))
    other = answers(record, sampler(2, samples=3, tokens=48, mend=broken))
    assert distribution.sampler_suspect(one, other) is not None
    failed = [r.model_copy(update={"error": "cut"}) if r.prompt_id == "0" else r for r in other]
    assert distribution.sampler_suspect(one, failed) is None  # 11 are left


def test_of_very_many_prompts_the_first_are_looked_at(
    record: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = answers(record, sampler(1, samples=4, tokens=48))
    other = answers(record, sampler(2, samples=4, tokens=48, mend=broken))
    monkeypatch.setattr(distribution, "MOST_PROMPTS", 13)
    found = distribution.sampler_suspect(one, other)
    assert found is not None
    assert "over 13 prompts" in found


def test_bins_may_be_looked_at_a_few_at_a_time(
    record: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = answers(record, sampler(1, samples=4, tokens=48))
    other = answers(record, sampler(2, samples=4, tokens=48, mend=broken))
    whole = distribution.sampler_suspect(one, other)
    monkeypatch.setattr(distribution, "BINS_AT_ONCE", 5)
    assert whole is not None
    assert distribution.sampler_suspect(one, other) == whole
