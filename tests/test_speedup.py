"""A speed-up is paired, geometric, and its interval covers the truth as often as it says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from table_rows import plain_row

from specbench.analysis import speedup
from specbench.analysis.rows import Row
from specbench.analysis.speedup import Interval, Key, Question, Ratio, Speedup, compare, ratio_of
from specbench.records import RequestRecord
from specbench.render.words import fastest

Build = Callable[..., RequestRecord]


@pytest.fixture
def request_of(record: Build) -> Build:
    """A request of 11 tokens with this time per token, its first token after 100 ms."""

    def build(tpot_ms: float, **more: object) -> RequestRecord:
        return record(chunks=(100, 100 + 10 * tpot_ms), tokens=11, **more)

    return build


def keyed(requests: Mapping[str, RequestRecord]) -> dict[Key, RequestRecord]:
    return {Key(prompt, 0, 0): request for prompt, request in requests.items()}


def tpot(baseline: dict[Key, RequestRecord], arm: dict[Key, RequestRecord]) -> Ratio:
    found = compare(baseline, arm).tpot
    assert found is not None
    return found


def test_the_mean_of_ratios_is_geometric(request_of: Build) -> None:
    """Twice as fast and half as fast make no difference."""
    baseline = keyed({"a": request_of(20), "b": request_of(20)})
    arm = keyed({"a": request_of(10), "b": request_of(40)})
    assert tpot(baseline, arm).value == pytest.approx(1)


def test_latency_is_compared_apart(request_of: Build) -> None:
    """(100 + 300) / (100 + 100) ms by latency, 30 / 10 by time per token."""
    found = compare(keyed({"a": request_of(30)}), keyed({"a": request_of(10)}))
    assert found.tpot is not None
    assert found.latency is not None
    assert found.tpot.value == pytest.approx(3)
    assert found.latency.value == pytest.approx(2)


def test_unequal_lengths_are_compared_per_token(record: Build) -> None:
    """Case E6: 1000 tokens in 14.33 s against 947 in 15.32 s."""
    baseline = keyed({"a": record(chunks=(0, 14_330), tokens=1000)})
    arm = keyed({"a": record(chunks=(0, 15_320), tokens=947)})
    assert tpot(baseline, arm).value == pytest.approx(0.885, abs=0.001)


def test_one_prompt_has_no_interval(request_of: Build) -> None:
    found = tpot(keyed({"a": request_of(20)}), keyed({"a": request_of(10)}))
    assert found.value == pytest.approx(2)
    assert (found.like_these, found.this_set, found.prompts, found.shown) == (None, None, 1, None)


def test_repeats_of_one_prompt_are_still_one_prompt(request_of: Build) -> None:
    baseline = {Key("a", turn, repeat): request_of(20) for turn in (0, 1) for repeat in range(5)}
    arm = {key: request_of(10) for key in baseline}
    found = compare(baseline, arm)
    assert found.pairs == 10
    assert found.tpot is not None
    assert (found.tpot.like_these, found.tpot.prompts) == (None, 1)


def test_each_prompt_counts_once_however_often_it_was_sent(request_of: Build) -> None:
    """a: 4 times as fast in 1 request; b: as fast in 3. By prompt 4 ** (1/2), not 4 ** (1/4)."""
    baseline: dict[Key, RequestRecord] = {Key("a", 0, 0): request_of(40)}
    baseline |= {Key("b", 0, repeat): request_of(10) for repeat in range(3)}
    arm = {key: request_of(10) for key in baseline}
    assert tpot(baseline, arm).value == pytest.approx(2)


@pytest.mark.parametrize(
    "other", [Key("b", 0, 0), Key("a", 1, 0), Key("a", 0, 1), Key("a", 0, 0, 1)]
)
def test_only_the_same_prompt_turn_repeat_and_cycle_make_a_pair(
    request_of: Build, other: Key
) -> None:
    found = compare({Key("a", 0, 0): request_of(20)}, {other: request_of(10)})
    assert (found.tpot, found.latency, found.pairs, found.unpaired) == (None, None, 0, 2)


def test_a_second_turn_makes_no_pair_where_the_first_answers_differ(request_of: Build) -> None:
    """Its prompt holds them: the arm was asked something else there, and was four times as fast."""
    hashes = {"a": ("0" * 64, "0" * 64), "b": ("1" * 64, "2" * 64)}
    baseline = {Key(one, 0, 0): request_of(20) for one in hashes}
    arm = {Key(one, 0, 0): request_of(10) for one in hashes}
    for one, (mine, others) in hashes.items():
        baseline[Key(one, 1, 0)] = request_of(20, prompt_sha256=mine)
        arm[Key(one, 1, 0)] = request_of(10 if mine == others else 5, prompt_sha256=others)
    found = compare(baseline, arm)
    assert (found.pairs, found.unpaired, found.asked_otherwise) == (3, 1, 1)
    assert found.tpot is not None
    assert found.tpot.value == pytest.approx(2)


def test_a_failure_on_either_side_makes_no_pair(request_of: Build, record: Build) -> None:
    failed = record(chunks=(), tokens=0, error="cut")
    baseline = keyed({"a": request_of(20), "b": failed, "c": request_of(20)})
    arm = keyed({"a": request_of(10), "b": request_of(10), "c": failed})
    found = compare(baseline, arm)
    assert (found.pairs, found.unpaired) == (1, 2)


def test_nothing_measured_is_no_speedup() -> None:
    found = compare({}, {})
    assert (found.tpot, found.latency, found.pairs, found.unpaired) == (None, None, 0, 0)


def test_a_pair_without_time_per_token_still_has_a_latency(record: Build) -> None:
    found = compare(keyed({"a": record(chunks=(200,))}), keyed({"a": record(chunks=(100,))}))
    assert found.tpot is None
    assert found.latency is not None
    assert found.latency.value == 2


def test_equal_ratios_have_an_interval_without_width(request_of: Build) -> None:
    baseline = keyed({prompt: request_of(20) for prompt in "abc"})
    found = tpot(baseline, keyed({prompt: request_of(10) for prompt in "abc"}))
    assert found.like_these is not None
    interval = found.like_these
    assert [found.value, interval.low, interval.high] == pytest.approx([2, 2, 2])
    assert found.shown is True


def test_the_interval_does_not_change_from_one_report_to_the_next(request_of: Build) -> None:
    baseline = keyed({prompt: request_of(20) for prompt in "abcd"})
    arm = keyed({prompt: request_of(10 + i) for i, prompt in enumerate("abcd")})
    backwards = dict(reversed(list(arm.items())))
    assert compare(baseline, arm) == compare(baseline, backwards)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(1.01, 1.2, True), (0.8, 0.99, True), (0.9, 1.1, False), (1.0, 1.2, False)],
)
def test_a_difference_is_shown_when_the_interval_leaves_1_out(
    low: float, high: float, shown: bool
) -> None:
    assert Ratio(1, Interval(low, high), None, 5, 1, None).shown is shown


def test_the_interval_is_as_wide_as_theory_says(request_of: Build) -> None:
    """Standard error of a mean of logs: 0.2 / sqrt(400) = 0.01, so ±1.96% around the value."""
    rng = np.random.default_rng(2)
    logs = rng.normal(0, 1, 400)
    logs = 0.2 * (logs - logs.mean()) / logs.std()
    baseline = keyed({f"{i}": request_of(1500 * float(np.exp(x))) for i, x in enumerate(logs)})
    found = tpot(baseline, keyed({f"{i}": request_of(1000) for i in range(400)}))
    assert found.value == pytest.approx(1.5, rel=1e-4)
    assert found.like_these is not None
    assert found.like_these.low == pytest.approx(1.5 * np.exp(-0.0196), rel=2e-3)
    assert found.like_these.high == pytest.approx(1.5 * np.exp(0.0196), rel=2e-3)
    assert found.like_these.half_width == pytest.approx(0.0196, rel=0.05)


# --- how often the intervals cover the truth -----------------------------------------------------


@dataclass(frozen=True)
class World:
    """Where pairs come from: spreads of log ratios, and how much is measured."""

    prompts: int
    restarts: int = 1
    cycles: int = 1
    of_prompts: float = 0.2
    of_restarts: float = 0.0
    of_noise: float = 0.02
    whole_set: int | None = None
    truth: float = 1.5  # on prompts like these

    def draw(self, rng: np.random.Generator) -> tuple[float, Ratio]:
        """The true speed-up on the whole set, and what is found."""
        size = self.whole_set or self.prompts
        prompts = rng.normal(0, self.of_prompts, size)
        restarts = rng.normal(0, self.of_restarts, self.restarts)
        keys = product(range(self.prompts), range(self.restarts), range(self.cycles))
        cells = {
            Key(f"{p}", 0, r, c): np.log(self.truth)
            + prompts[p]
            + restarts[r]
            + rng.normal(0, self.of_noise)
            for p, r, c in keys
        }
        found = ratio_of(cells, {}, set_size=self.whole_set, seed=0)
        assert found is not None
        return self.truth * float(np.exp(prompts.mean())), found


def coverage(world: World, question: Question, draws: int = 300) -> float:
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(draws):
        on_set, found = world.draw(rng)
        interval = found.interval(question)
        assert interval is not None
        truth = on_set if question == "this_set" else world.truth
        covered += interval.low <= truth <= interval.high
    return covered / draws


@pytest.mark.parametrize(
    ("world", "question"),
    [
        (World(5), "like_these"),
        (World(16), "like_these"),
        (World(40), "like_these"),
        (World(16, restarts=2, of_restarts=0.02), "like_these"),
        (World(16, restarts=2, of_prompts=0), "like_these"),
        (World(16, restarts=3, of_prompts=0.02), "like_these"),
        (World(8, restarts=4, of_prompts=0.01, of_restarts=0.01), "like_these"),
        (World(16, restarts=4, of_restarts=0.05), "like_these"),
        (World(8, cycles=2), "this_set"),
        (World(16, restarts=2), "this_set"),
        (World(16, restarts=2, of_restarts=0.02), "this_set"),
        (World(64, restarts=2, of_restarts=0.005), "this_set"),
        (World(16, restarts=3, of_restarts=0.01), "this_set"),
        (World(8, restarts=5, of_restarts=0.05), "this_set"),
        (World(16, cycles=2, whole_set=32), "this_set"),
        (World(1, cycles=6), "this_set"),
    ],
    ids=str,
)
def test_intervals_cover_the_truth_about_as_often_as_they_say(
    world: World, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    """95% of 300 draws have a standard error of 1.3%; an interval half as wide covers some 68%."""
    monkeypatch.setattr(speedup, "RESAMPLES", 600)  # quicker; the ends are rougher
    assert 0.90 <= coverage(world, question) <= 0.99


# --- one of several arms -------------------------------------------------------------------------


def row_of(k: int, ratio: Ratio) -> Row:
    return plain_row(k, speedup=Speedup(ratio, ratio, None, ratio.value, ratio.prompts, 0))


@pytest.mark.parametrize(
    "world",
    [
        World(20, truth=1),
        World(4, truth=1),
        World(8, restarts=2, of_prompts=0.05, of_restarts=0.02, truth=1),
    ],
    ids=str,
)
def test_of_seven_arms_that_change_nothing_one_is_rarely_the_headline(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two-sided 5% for all seven: 2.5% of worlds have a "faster" one, and by their own intervals 16%."""
    monkeypatch.setattr(speedup, "RESAMPLES", 400)
    rng, worlds, headlined, alone = np.random.default_rng(9), 150, 0, 0
    for _ in range(worlds):
        found = [row_of(k, world.draw(rng)[1]) for k in range(1, 8)]
        headlined += fastest(found) is not None
        alone += any(
            ratio.shown and ratio.value > 1
            for row in found
            if row.speedup and (ratio := row.speedup.tpot)
        )
    assert headlined / worlds <= 0.055
    assert alone > headlined


def test_one_of_several_has_a_wider_interval_by_the_quantiles_of_t() -> None:
    """20 prompts: t of 19 degrees is 2.093 at 95%, 3.014 at 1 - 5%/7; a normal law's 1.960, 2.690."""
    own = Interval(1.2 / 1.1, 1.2 * 1.1, 19)
    ratio = Ratio(1.2, own, Interval(1.2 / 1.01, 1.2 * 1.01), 20, 1, "steps")
    assert ratio.among(1) == own
    wider = ratio.among(7)
    assert wider
    assert np.log(wider.high / 1.2) / np.log(1.1) == pytest.approx(3.014 / 2.093, abs=0.002)
    assert np.log(1.2 / wider.low) / np.log(1.1) == pytest.approx(3.014 / 2.093, abs=0.002)
    on_set = ratio.among(7, "this_set")
    assert on_set
    assert on_set.half_width == pytest.approx(np.log(1.01) * 2.690 / 1.960, rel=1e-3)
    assert Ratio(1.2, None, None, 1, 1, None).among(7) is None
    assert Ratio(1.2, Interval(1e-99, 1e99, 1), None, 2, 2, None).among(50) is not None


def test_an_interval_knows_its_degrees_of_freedom() -> None:
    """Prompts alone: one less than there are. Of two effects of 1 and many: between them."""
    rng = np.random.default_rng(5)
    alone = World(16).draw(rng)[1].like_these
    assert alone
    assert alone.freedom == 15
    restarted = World(16, restarts=2, of_restarts=0.2).draw(rng)[1]
    assert restarted.like_these
    assert restarted.this_set
    assert 1 < restarted.like_these.freedom < 15
    assert restarted.this_set.freedom == 1


def test_a_given_set_is_known_better_than_prompts_like_it() -> None:
    _, found = World(16, cycles=3).draw(np.random.default_rng(3))
    assert found.this_set is not None
    assert found.like_these is not None
    assert found.this_set.half_width < found.like_these.half_width / 4
    assert found.noise_from == "cycles"


def test_more_cycles_narrow_the_answer_for_the_set_only() -> None:
    rng = np.random.default_rng(4)
    few, many = World(12, cycles=2).draw(rng)[1], World(12, cycles=32).draw(rng)[1]
    assert few.this_set
    assert many.this_set
    assert few.like_these
    assert many.like_these
    assert many.this_set.half_width < few.this_set.half_width / 2
    assert many.like_these.half_width > few.like_these.half_width / 2


def test_restarts_that_differ_widen_both_intervals() -> None:
    rng = np.random.default_rng(5)
    steady = World(40, restarts=3, of_prompts=0.01).draw(rng)[1]
    shaky = World(40, restarts=3, of_prompts=0.01, of_restarts=0.2).draw(rng)[1]
    for question in ("this_set", "like_these"):
        wide, narrow = shaky.interval(question), steady.interval(question)
        assert wide
        assert narrow
        assert wide.half_width > 5 * narrow.half_width


def test_prompts_of_the_set_that_were_not_measured_count() -> None:
    """16 of 164 and 16 of 16 differ by the finite population factor, sqrt(1 - 16/164)."""
    part = World(16, cycles=2, of_noise=1e-4, whole_set=164).draw(np.random.default_rng(6))[1]
    whole = World(16, cycles=2, of_noise=1e-4).draw(np.random.default_rng(6))[1]
    assert part.this_set
    assert part.like_these
    assert whole.this_set
    share = part.this_set.half_width / part.like_these.half_width
    assert share == pytest.approx((1 - 16 / 164) ** 0.5, rel=0.02)
    assert whole.this_set.half_width < 0.01


def test_without_repeats_the_noise_is_read_off_the_steps(record: Build) -> None:
    """Acceptance differs by prompt, the time of a step hardly: so the set's interval is narrow."""
    rng = np.random.default_rng(8)
    baseline, arm = {}, {}
    for i in range(12):
        accepted = int(rng.integers(0, 20))
        spec = {"drafts": 20, "draft_tokens": 60, "accepted": accepted}
        step_ms = 30 * float(np.exp(rng.normal(0, 0.01)))
        tokens = 21 + accepted
        key = Key(f"{i}", 0, 0)
        baseline[key] = record(chunks=(100, 100 + 20 * (tokens - 1)), tokens=tokens)
        arm[key] = record(chunks=(100, 100 + 20 * step_ms), tokens=tokens, spec=spec)
    found = tpot(baseline, arm)
    assert found.noise_from == "steps"
    assert found.this_set
    assert found.like_these
    assert 0.003 < found.this_set.half_width < 0.012
    assert found.like_these.half_width > 0.05


def test_nothing_tells_noise_from_prompts_in_a_single_pass_without_steps(record: Build) -> None:
    """An arm that drafts but whose steps are not known."""
    baseline = keyed({f"{i}": record(chunks=(100, 900 + i), tokens=11) for i in range(9)})
    arm = keyed({f"{i}": record(chunks=(100, 500 + 9 * i), tokens=11) for i in range(9)})
    found = tpot(baseline, arm)
    assert (found.this_set, found.noise_from) == (None, None)


def test_total_time_weighs_long_answers_more(record: Build) -> None:
    baseline = keyed({"a": record(chunks=(1, 1000), tokens=9), "b": record(chunks=(1, 100))})
    arm = keyed({"a": record(chunks=(1, 500), tokens=9), "b": record(chunks=(1, 100))})
    found = compare(baseline, arm)
    assert found.total_time == pytest.approx(1100 / 600)
