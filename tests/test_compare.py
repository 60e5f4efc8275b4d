"""Two runs beside each other: a real change is found, chance is not, and unlike runs are refused."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specbench.analysis.compare import Change, Comparison, compare
from specbench.analysis.series import Cell, Series, series
from specbench.analysis.snapshot import (
    PromptsUsed,
    Setup,
    Snapshot,
    SnapshotRow,
)

PROMPTS = 40
Table = NDArray[np.float64]


@dataclass(frozen=True)
class Nature:
    """A world whose truth is known, in logs: how far starts, noise and the day take a time."""

    start: float = 0.01
    noise: float = 0.03
    day: float = 0.05
    repeats: int = 2
    arms: int = 3
    prompts: int = PROMPTS


def measured(nature: Nature, seed: int, *, slower: float = 0.0, run: str = "run") -> Snapshot:
    """One run in *nature*: vanilla and some arms, all arms' TPOT *slower* by this share."""
    rng = np.random.default_rng(seed)
    prompts = np.random.default_rng(0).normal(0, 0.3, (nature.arms + 1, nature.prompts))
    day = rng.normal(0, nature.day)
    logs = []
    for arm in range(nature.arms + 1):
        starts = rng.normal(0, nature.start, nature.repeats)
        noise = rng.normal(0, nature.noise, (nature.prompts, nature.repeats))
        change = np.log1p(slower) if arm else 0.0
        logs.append(2 + day + prompts[arm, :, None] + starts + noise + change)
    rows = [row("vanilla", 0, {"tpot_ms": of_table(logs[0])})]
    for arm in range(1, nature.arms + 1):
        found = {"speedup": of_table(logs[0] - logs[arm]), "tpot_ms": of_table(logs[arm])}
        rows.append(row(f"eagle-k{arm}", arm, found))
    return snapshot(*rows, run=run)


def of_table(table: Table) -> Series:
    """A series of [prompts, starts], the textbook's way: a table without gaps."""
    prompts, starts = table.shape
    left = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    freedom = (prompts - 1) * (starts - 1)
    return Series(
        by_prompt={f"p{p}": float(mean) for p, mean in enumerate(table.mean(1))},
        starts=tuple(float(one) for one in table.mean(0) - table.mean()),
        noise=float(np.sqrt((left**2).sum() / freedom / prompts)) if freedom else None,
    )


def row(arm: str, k: int, found: Mapping[str, Series | None], **more: Any) -> SnapshotRow:  # noqa: ANN401
    some = {name: one for name, one in found.items() if one}
    facts: dict[str, Any] = {
        "arm": arm,
        "method": "eagle" if k else "vanilla",
        "k": k,
        "prompt_set": "he",
        "max_tokens": 256,
        "concurrency": 1,
        "is_baseline": not k,
        "requests": PROMPTS,
        "prompt_tokens": 1000,
        "figures": {n: float(np.exp(np.mean(list(s.by_prompt.values())))) for n, s in some.items()},
        "series": some,
    }
    return SnapshotRow.model_validate(facts | more)


def snapshot(*rows: SnapshotRow, **more: Any) -> Snapshot:  # noqa: ANN401
    gpu = {"name": "NVIDIA H200", "memory.total": "143771 MiB"}
    facts: dict[str, Any] = {
        "run": "run",
        "model": "m",
        "prompt_sets": {"he": PromptsUsed(sha256="a" * 64, prompts=PROMPTS)},
        "sampling": {"temperature": 0.0, "seed": 0},
        "schedule": "interleaved",
        "client": "direct",
        "hardware": {"cpu": "Some CPU", "cores": 8, "memory_gib": 64.0, "gpus": [gpu]},
        "versions": {"vllm": "0.32.0", "driver": "570.1"},
        "setups": (Setup(arms=("vanilla", "eagle-k1"), values={"--dtype": "bfloat16"}),),
        "rows": rows,
    }
    return Snapshot.model_validate(facts | more)


def speedups(comparison: Comparison) -> list[Change]:
    return [c for one in comparison.rows for c in one.changes if c.measure == "speedup"]


def verdicts(nature: Nature, worlds: int, *, slower: float = 0.0) -> Iterator[str]:
    """Of the first arm's speed-up, in so many pairs of nights."""
    for seed in range(worlds):
        base = measured(nature, 2 * seed)
        new = measured(nature, 2 * seed + 1, slower=slower)
        yield speedups(compare(base, new))[0].verdict


# --- is the interval true? -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nature", "most"),
    [
        (Nature(), 0.99),
        (Nature(repeats=4), 0.99),
        pytest.param(Nature(start=0.03, noise=0.01, arms=5), 0.99, marks=pytest.mark.engine),
        pytest.param(Nature(start=0, repeats=1, arms=1), 0.99, marks=pytest.mark.engine),
        # Cautious: 2 freedoms, and starts that do not differ beyond the noise.
        (Nature(arms=1), 1.0),
        (Nature(start=0, noise=0.05), 1.0),
    ],
    ids=lambda one: (
        f"{one.start}-{one.noise}-R{one.repeats}-A{one.arms}" if isinstance(one, Nature) else ""
    ),
)
def test_two_nights_of_the_same_differ_in_one_of_twenty(nature: Nature, most: float) -> None:
    """300 pairs of nights, the days' pace apart by 7%: 95% ± 2.5% are within chance (two sigma)."""
    same = sum(verdict == "no difference shown" for verdict in verdicts(nature, 300)) / 300
    assert 0.92 <= same <= most


def test_a_slow_down_of_a_tenth_is_found_and_one_of_a_hundredth_is_not_claimed() -> None:
    found = list(verdicts(Nature(), 60, slower=0.1))
    assert found.count("worse") >= 57
    assert list(verdicts(Nature(), 60, slower=0.01)).count("worse") <= 12


def test_a_speed_up_is_found_as_one() -> None:
    assert list(verdicts(Nature(), 30, slower=-0.1)).count("better") >= 28


def test_the_pace_of_the_day_cancels_in_the_speed_up_and_not_in_the_times() -> None:
    nature = Nature(start=0.001, noise=0.01, day=0, arms=2)
    base, new = measured(nature, 1), measured(nature, 2)
    slow = measured(replace(nature, day=1e-9), 2)
    shifted = snapshot(
        *(
            one.model_copy(
                update={"series": {**one.series, "tpot_ms": shift(one.series["tpot_ms"], 0.1)}}
            )
            for one in slow.rows
        )
    )
    by_name = {c.measure: c for c in compare(base, shifted).rows[1].changes}
    assert by_name["speedup"].change == pytest.approx(
        speedups(compare(base, new))[0].change, abs=1e-6
    )
    assert by_name["tpot_ms"].verdict == "worse"


def shift(one: Series, by: float) -> Series:
    return one.model_copy(update={"by_prompt": {p: v + by for p, v in one.by_prompt.items()}})


def test_one_start_a_side_is_said_and_more_starts_widen_what_they_show() -> None:
    once = speedups(compare(measured(Nature(repeats=1), 0), measured(Nature(repeats=1), 1)))[0]
    twice = speedups(compare(measured(Nature(), 0), measured(Nature(), 1)))[0]
    assert once.of_these_starts
    assert not twice.of_these_starts
    assert width(once) < width(twice)


def test_a_baseline_of_one_start_borrows_what_the_other_nights_starts_show() -> None:
    one = speedups(compare(measured(Nature(repeats=1), 0), measured(Nature(repeats=3), 1)))[0]
    assert one.starts == (1, 3)
    assert not one.of_these_starts
    assert one.low is not None


def width(change: Change) -> float:
    assert change.low is not None
    assert change.high is not None
    return change.high - change.low


def test_a_run_does_not_differ_from_itself() -> None:
    night = measured(Nature(), 3)
    for change in (c for one in compare(night, night).rows for c in one.changes):
        assert change.change == 0
        assert change.verdict == "no difference shown"


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(-0.5, 0.5),
    st.integers(0, 1000),
)
def test_the_change_lies_in_its_interval_and_turns_round_with_the_runs(
    prompts: int, before: int, after: int, by: float, seed: int
) -> None:
    base = measured(Nature(prompts=prompts, repeats=before), seed)
    new = measured(Nature(prompts=prompts, repeats=after), seed + 1, slower=by)
    forth, back = speedups(compare(base, new))[0], speedups(compare(new, base))[0]
    assert (1 + forth.change) * (1 + back.change) == pytest.approx(1)
    if forth.low is None or forth.high is None:
        assert prompts == 1
        assert before == after == 1
        assert forth.verdict == "no interval"
    else:
        assert forth.low <= forth.change <= forth.high
        if max(before, after) > 1:  # a bootstrap's two tails need not be each other's mirror
            assert {forth.verdict, back.verdict} in (
                {"better", "worse"},
                {"no difference shown"},
            )


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 1000))
def test_cells_become_the_series_that_the_textbook_makes_of_their_table(
    prompts: int, starts: int, seed: int
) -> None:
    table = np.random.default_rng(seed).normal(0, 1, (prompts, starts))
    cells = {
        Cell((0, r), f"p{p}"): float(table[p, r]) for p in range(prompts) for r in range(starts)
    }
    found, wanted = series(cells), of_table(table)
    assert found is not None
    assert found.by_prompt == pytest.approx(wanted.by_prompt)
    assert found.starts == pytest.approx(wanted.starts)
    assert found.noise == (None if wanted.noise is None else pytest.approx(wanted.noise))


def test_a_prompt_that_one_start_lacks_is_no_difference_of_that_start() -> None:
    cells = {Cell((0, r), f"p{p}"): float(p) for p in range(3) for r in range(2)}
    del cells[Cell((0, 1), "p2")]
    found = series(cells)
    assert found is not None
    assert found.starts == (0, 0)
    assert found.by_prompt == {"p0": 0, "p1": 1, "p2": 2}


def test_starts_that_measured_nothing_in_common_count_as_one() -> None:
    found = series({Cell((0, 0), "a"): 1.0, Cell((0, 1), "b"): 2.0})
    assert found is not None
    assert len(found.starts) == 1


def arms_of(*starts: float, by: float = 0.0, noise: float | None = None) -> SnapshotRow:
    """An arm whose starts are so far from their mean."""
    prompts = {f"p{i}": 1 + by for i in range(4)}
    one = Series(by_prompt=prompts, starts=starts, noise=noise)
    return row("eagle-k1", 1, {"speedup": one})


def test_a_single_arm_has_students_interval_of_its_own_starts() -> None:
    """s^2 = (2 x 0.01^2 + 2 x 0.03^2) / 2; t(0.975, 2) = 4.30265; error s x sqrt(1/2 + 1/2)."""
    base, new = arms_of(0.01, -0.01), arms_of(0.03, -0.03, by=0.1)
    change = speedups(compare(snapshot(base), snapshot(new)))[0]
    half = 4.30265 * np.sqrt(0.001) + 1e-4
    assert change.low == pytest.approx(np.expm1(0.1 - half), rel=1e-4)
    assert change.high == pytest.approx(np.expm1(0.1 + half), rel=1e-4)


def test_three_arms_over_one_baseline_count_as_two() -> None:
    """3 / (1 + 2/4) = 2 arms of 2 freedoms: t(0.975, 4) = 2.77645, the variance a mean of all."""
    base = [arms_of(0.01, -0.01), arms_of(0.02, -0.02), arms_of(0.0, 0.0)]
    rows = [one.model_copy(update={"arm": f"eagle-k{i}"}) for i, one in enumerate(base)]
    variance = (2 * 2 * 0.01**2 / 2 + 2 * 2 * 0.02**2 / 2) / 3
    for change in speedups(compare(snapshot(*rows), snapshot(*rows))):
        assert change.high == pytest.approx(np.expm1(2.77645 * np.sqrt(variance) + 1e-4), rel=1e-4)


def test_starts_that_agree_by_chance_are_no_better_known_than_the_noise_allows() -> None:
    same = arms_of(0.0, 0.0, noise=0.01)
    change = speedups(compare(snapshot(same), snapshot(same)))[0]
    assert change.high == pytest.approx(np.expm1(4.30265 * 0.01 + 1e-4), rel=1e-4)


@pytest.mark.parametrize("starts", [(0.0,), (0.0, 0.0)])
def test_what_rounding_makes_is_no_difference(starts: tuple[float, ...]) -> None:
    """A pinned baseline has four decimals of a log."""
    base, new = arms_of(*starts), arms_of(*starts, by=0.00005)
    assert speedups(compare(snapshot(base), snapshot(new)))[0].verdict == "no difference shown"
    more = arms_of(*starts, by=0.0003)
    assert speedups(compare(snapshot(base), snapshot(more)))[0].verdict == "better"


# --- may they be compared? -----------------------------------------------------------------------


def only(base: Snapshot, new: Snapshot, **more: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Why the first row of both is refused."""
    return compare(base, new, **more).rows[0].refused


NIGHT = measured(Nature(prompts=3), 0)


@pytest.mark.parametrize(
    ("change", "why", "kind"),
    [
        (
            {"prompt_sets": {"he": PromptsUsed(sha256="b" * 64, prompts=12)}},
            "other prompts: he is 40 prompts (aaaaaaaaaaaa) in BASE, 12 (bbbbbbbbbbbb) in NEW",
            None,
        ),
        (
            {"prompt_sets": {"he": PromptsUsed(sha256="a" * 64, prompts=0)}},
            "the prompts of he are not known: they were imported without",
            None,
        ),
        (
            {"sampling": {"temperature": 1.0, "seed": 0}},
            "other sampling: temperature: 0.0 against 1.0",
            "sampling",
        ),
        (
            {"setups": (Setup(arms=("vanilla",), values={"--dtype": "float32"}),)},
            "other engine: --dtype: bfloat16 against float32",
            "args",
        ),
        ({"model": "other"}, "other models: m in BASE, other in NEW", "args"),
        ({"client": "aiperf"}, "other load generators: direct in BASE, aiperf in NEW", "args"),
        (
            {"hardware": {**NIGHT.hardware, "gpus": [{"name": "NVIDIA L4"}]}},
            "other hardware: gpus: 1x NVIDIA H200",
            "hardware",
        ),
    ],
)
def test_unlike_runs_are_refused_with_the_reason_unless_allowed(
    change: dict[str, Any], why: str, kind: str | None
) -> None:
    other = NIGHT.model_copy(update=change)
    (said,) = only(NIGHT, other)
    assert said.startswith(why)
    assert compare(NIGHT, other).rows[0].verdict == "not comparable"
    if kind:
        allowed = compare(NIGHT, other, allowed=(kind,))
        assert allowed.rows[0].refused == ()
        assert allowed.rows[0].changes
        assert said in allowed.notes


def test_another_version_is_said_and_not_refused() -> None:
    newer = NIGHT.model_copy(update={"versions": {**NIGHT.versions, "vllm": "0.33.0"}})
    comparison = compare(NIGHT, newer)
    assert comparison.versions == ("vllm 0.32.0 in BASE, 0.33.0 in NEW",)
    assert comparison.rows[0].refused == ()


def test_another_chat_template_is_another_prompt() -> None:
    rows = [one.model_copy(update={"prompt_tokens": 1001}) for one in NIGHT.rows]
    (said,) = only(NIGHT, NIGHT.model_copy(update={"rows": tuple(rows)}))
    assert "became 1000 tokens in BASE, 1001 in NEW" in said


def test_rows_that_one_run_lacks_are_told_from_those_that_lost_requests() -> None:
    vanilla, arm, *_ = NIGHT.rows
    comparison = compare(snapshot(vanilla, arm), snapshot(vanilla))
    assert [one.verdict for one in comparison.rows][1] == "only in BASE"
    assert comparison.rows[1].lost
    assert compare(snapshot(vanilla), snapshot(vanilla, arm)).rows[1].verdict == "only in NEW"
    failed = arm.model_copy(update={"missing": 3})
    assert compare(snapshot(arm), snapshot(failed)).rows[0].lost
    assert not compare(snapshot(failed), snapshot(failed)).rows[0].lost


def test_too_few_prompts_in_common_are_no_comparison() -> None:
    few = of_table(np.zeros((3, 2)))
    many = of_table(np.zeros((10, 2)))
    base, new = row("e-k1", 1, {"tpot_ms": many}), row("e-k1", 1, {"tpot_ms": few})
    assert compare(snapshot(base), snapshot(new)).rows[0].changes == ()
