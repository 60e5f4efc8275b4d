"""A speed-up is paired, geometric, and its interval covers the truth as often as it says."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from specbench.analysis.speedup import Key, Ratio, compare
from specbench.records import RequestRecord

Build = Callable[..., RequestRecord]


@pytest.fixture
def request_of(record: Build) -> Build:
    """A request of 11 tokens with this time per token, its first token after 100 ms."""

    def build(tpot_ms: float, **more: object) -> RequestRecord:
        return record(chunks=(100, 100 + 10 * tpot_ms), tokens=11, **more)

    return build


def keyed(requests: Mapping[str, RequestRecord]) -> dict[Key, RequestRecord]:
    return {(prompt, 0, 0): request for prompt, request in requests.items()}


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
    assert (found.low, found.high, found.prompts, found.shown) == (None, None, 1, None)


def test_repeats_of_one_prompt_are_still_one_prompt(request_of: Build) -> None:
    baseline = {("a", turn, repeat): request_of(20) for turn in (0, 1) for repeat in range(5)}
    arm = {key: request_of(10) for key in baseline}
    found = compare(baseline, arm)
    assert found.pairs == 10
    assert found.tpot is not None
    assert (found.tpot.low, found.tpot.prompts) == (None, 1)


def test_each_prompt_counts_once_however_often_it_was_sent(request_of: Build) -> None:
    """a: 4 times as fast in 1 request; b: as fast in 3. By prompt 4 ** (1/2), not 4 ** (1/4)."""
    baseline: dict[Key, RequestRecord] = {("a", 0, 0): request_of(40)}
    baseline |= {("b", 0, repeat): request_of(10) for repeat in range(3)}
    arm = {key: request_of(10) for key in baseline}
    assert tpot(baseline, arm).value == pytest.approx(2)


@pytest.mark.parametrize("other", [("b", 0, 0), ("a", 1, 0), ("a", 0, 1)])
def test_only_the_same_prompt_turn_and_repeat_make_a_pair(request_of: Build, other: Key) -> None:
    found = compare({("a", 0, 0): request_of(20)}, {other: request_of(10)})
    assert (found.tpot, found.latency, found.pairs, found.unpaired) == (None, None, 0, 2)


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
    assert [found.value, found.low, found.high] == pytest.approx([2, 2, 2])
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
    assert Ratio(1, low, high, 5).shown is shown


def test_the_interval_covers_the_truth_about_as_often_as_it_says(request_of: Build) -> None:
    """40 prompts a run, true ratio 1.5, 100 runs. The percentile bootstrap falls a little short of
    95% at this size (about 94%); an interval half as wide would cover some 68%."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(100):
        ratios = 1.5 * np.exp(rng.normal(0, 0.2, 40))
        baseline = keyed({f"{i}": request_of(1000 * float(r)) for i, r in enumerate(ratios)})
        arm = keyed({f"{i}": request_of(1000) for i in range(40)})
        found = tpot(baseline, arm)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.5 <= found.high
    assert 0.90 <= covered / 100 <= 0.98


def test_the_interval_is_as_wide_as_theory_says(request_of: Build) -> None:
    """Standard error of a mean of logs: 0.2 / sqrt(400) = 0.01, so ±1.96% around the value."""
    rng = np.random.default_rng(2)
    logs = rng.normal(0, 1, 400)
    logs = 0.2 * (logs - logs.mean()) / logs.std()
    baseline = keyed({f"{i}": request_of(1500 * float(np.exp(x))) for i, x in enumerate(logs)})
    found = tpot(baseline, keyed({f"{i}": request_of(1000) for i in range(400)}))
    assert found.value == pytest.approx(1.5, rel=1e-4)
    assert found.low == pytest.approx(1.5 * np.exp(-0.0196), rel=2e-3)
    assert found.high == pytest.approx(1.5 * np.exp(0.0196), rel=2e-3)
