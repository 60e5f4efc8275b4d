"""Facts become one row an arm and condition, the baseline first, and no case disappears."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from specbench.analysis.cases import MeasuredCase
from specbench.analysis.curves import curves
from specbench.analysis.rows import Row, best_of, choices, rows
from specbench.analysis.scaling import scaling
from specbench.records import (
    CounterSpan,
    EngineCounters,
    EngineFacts,
    Prompt,
    RequestRecord,
    ToolReport,
)
from specbench.render.sparkline import k_curves
from specbench.render.words import beside_lines

Build = Callable[..., RequestRecord]


def case(
    arm: str,
    records: Sequence[RequestRecord],
    *,
    k: int = 0,
    repeat: int = 0,
    prompt_set: str = "he",
    max_tokens: int = 256,
    spans: Sequence[CounterSpan] = (),
    expected: int | None = None,
    problem: str | None = None,
) -> MeasuredCase:
    return MeasuredCase(
        arm=arm,
        method="eagle" if k else "vanilla",
        k=k,
        prompt_set=prompt_set,
        max_tokens=max_tokens,
        concurrency=1,
        repeat=repeat,
        expected_requests=len(records) if expected is None else expected,
        records=records,
        spans=spans,
        status="failed" if problem else "ok",
        problem=problem,
    )


def table(*cases: MeasuredCase, baseline: str | None = "vanilla", **more: Any) -> list[Row]:  # noqa: ANN401
    return rows(cases, baseline=baseline, **more)


def names(found: Sequence[Row]) -> list[tuple[str, str, int | None]]:
    return [(row.arm, row.prompt_set, row.max_tokens) for row in found]


@pytest.fixture
def timed(record: Build) -> Build:
    """A request of 11 tokens at this many ms each."""

    def build(prompt: str, tpot_ms: float, **more: object) -> RequestRecord:
        return record(prompt, chunks=(0, 10 * tpot_ms), tokens=11, **more)

    return build


def test_a_condition_stands_together_with_its_baseline_first(record: Build) -> None:
    found = table(
        case("e-k1", [record()], k=1),
        case("e-k1", [record()], k=1, max_tokens=512),
        case("vanilla", [record()], max_tokens=512),
        case("vanilla", [record()]),
    )
    assert names(found) == [
        ("vanilla", "he", 256),
        ("e-k1", "he", 256),
        ("vanilla", "he", 512),
        ("e-k1", "he", 512),
    ]
    assert [row.is_baseline for row in found] == [True, False, True, False]


def test_repeats_are_one_row(timed: Build) -> None:
    found = table(*(case("vanilla", [timed("a", 10)], repeat=i) for i in range(3)))
    assert [(row.repeats, row.metrics.requests) for row in found] == [(3, 3)]


def test_repeats_are_paired_by_their_number_in_whatever_order_they_come(timed: Build) -> None:
    """The machine was twice as slow in repeat 1, for both arms."""
    found = table(
        case("vanilla", [timed("a", 20)], repeat=0),
        case("vanilla", [timed("a", 40)], repeat=1),
        case("e-k1", [timed("a", 20)], k=1, repeat=1),
        case("e-k1", [timed("a", 10)], k=1, repeat=0),
    )
    assert found[1].speedup is not None
    assert found[1].speedup.pairs == 2
    assert found[1].speedup.tpot is not None
    assert found[1].speedup.tpot.value == pytest.approx(2)


def test_a_repeat_that_the_baseline_lacks_is_not_paired_with_another(timed: Build) -> None:
    found = table(
        case("vanilla", [timed("a", 20)], repeat=1),
        case("e-k1", [timed("a", 10)], k=1, repeat=0),
    )
    assert found[1].speedup is not None
    assert (found[1].speedup.pairs, found[1].speedup.unpaired) == (0, 2)


def test_a_speedup_is_over_the_baseline_of_the_same_condition(timed: Build) -> None:
    found = table(
        case("vanilla", [timed("a", 20)]),
        case("vanilla", [timed("a", 30)], prompt_set="mt"),
        case("e-k1", [timed("a", 10)], k=1, prompt_set="mt"),
    )
    assert names(found)[-1] == ("e-k1", "mt", 256)
    assert found[-1].speedup is not None
    assert found[-1].speedup.tpot is not None
    assert found[-1].speedup.tpot.value == pytest.approx(3)


@pytest.mark.parametrize("baseline", [None, "vanilla"])
def test_without_a_baseline_there_is_no_speedup(record: Build, baseline: str | None) -> None:
    (row,) = table(case("e-k1", [record()], k=1), baseline=baseline)
    assert (row.speedup, row.is_baseline) == (None, False)


def test_a_case_that_was_never_measured_is_still_a_row(record: Build) -> None:
    """Case G1, A8: and says why."""
    found = table(
        case("vanilla", [record()]), case("e-k1", [], k=1, expected=80, problem="it died\ntail")
    )
    assert (found[1].metrics.requests, found[1].problem) == (0, "it died\ntail")
    assert [flag.check for flag in found[1].flags] == ["missing"]


def test_a_resumed_case_counts_each_prompt_once(record: Build) -> None:
    attempts = [record("a", error="cut"), record("b"), record("a")]
    (row,) = table(case("vanilla", attempts, expected=2))
    assert (row.metrics.requests, row.metrics.failed, row.flags) == (2, 0, ())


def engine(arm: str, start: int, *flags: str) -> EngineFacts:
    return EngineFacts(
        arm=arm,
        start=start,
        kind="vllm",
        version="0.32.0",
        url="http://127.0.0.1:1",
        served_model="m",
        argv=("vllm", "serve", "m", *flags),
        started_at="2026-11-01T00:00:00+00:00",
    )


def test_checks_see_what_the_case_says_of_its_prompts_sampling_and_engines(record: Build) -> None:
    hot = record(sampling={"temperature": 0.7, "max_tokens": 256})
    (row,) = table(
        replace(
            case("vanilla", [hot]),
            sampling={"temperature": 0.0},
            prompts=[Prompt(id="a", turns=("[INST] hi [/INST]",))],
            engines=[
                engine("vanilla", 0, '--speculative-config={"synthetic_acceptance_length":2}')
            ],
        )
    )
    assert [flag.check for flag in row.flags] == ["synthetic", "sampling", "template"]


def test_an_arm_is_compared_with_the_baseline_engines_that_stood_beside_it(record: Build) -> None:
    """Start 1 of the baseline stood beside another group, with its memory shared otherwise."""
    engines = [engine("vanilla", 0), engine("vanilla", 1, "--gpu-memory-utilization", "0.3")]
    base = [
        replace(case("vanilla", [record(start=group)]), group=group, engines=engines)
        for group in (0, 1)
    ]
    arm = replace(case("same", [record()]), engines=[engine("same", 0)])
    assert table(*base, arm)[1].flags == ()
    other = replace(arm, group=1)
    (flag,) = table(*base, other)[1].flags
    assert flag.finding == (
        "set up unlike the baseline: --gpu-memory-utilization: 0.3 against not set"
    )


def test_a_flagged_baseline_flags_every_arm(record: Build) -> None:
    found = table(case("vanilla", [record()], expected=80), case("same", [record()]))
    assert [flag.check for flag in found[0].flags] == ["missing"]
    assert [flag.check for flag in found[1].flags] == ["baseline"]


def test_unequal_lengths_flag_the_arm(record: Build) -> None:
    """Case E6."""
    found = table(
        case("vanilla", [record(chunks=(0, 14_330), tokens=1000)]),
        case(
            "e-k1",
            [record(chunks=(0, 15_320), tokens=947)],
            k=1,
            spans=[CounterSpan(requests=1, spent=EngineCounters(drafts=500, accepted=446))],
        ),
    )
    assert [flag.check for flag in found[1].flags] == ["lengths"]
    assert found[1].speedup is not None
    assert found[1].speedup.tpot is not None
    assert found[1].speedup.tpot.value == pytest.approx(0.885, abs=0.001)


# --- the best k ----------------------------------------------------------------------------------


def of_k(timed: Build, tpots: dict[int, float], *, few: Sequence[int] = ()) -> list[MeasuredCase]:
    """Vanilla at 20 ms and an arm at each k; of those in *few* a request is missing, a flag."""
    prompts = [f"{i}" for i in range(9)]
    spent = EngineCounters(drafts=60, draft_tokens=60, accepted=30)
    found = [case("vanilla", [timed(one, 20) for one in prompts])]
    for k, ms in tpots.items():
        spans = [CounterSpan(requests=9, spent=spent)]
        records = [timed(one, ms) for one in prompts]
        found.append(case("e", records, k=k, spans=spans, expected=10 if k in few else 9))
    return [replace(one, arm=f"e-k{one.k}", label="e") if one.k else one for one in found]


def flagged_out(found: Sequence[Row]) -> list[Row]:
    """Without the flags that these made-up figures have besides."""
    kept = ((row, [flag for flag in row.flags if flag.check == "missing"]) for row in found)
    return [replace(row, flags=tuple(flags)) for row, flags in kept]


@pytest.mark.parametrize(
    ("tpots", "few", "best", "doubt"),
    [
        ({1: 16, 2: 12, 3: 10}, (), 3, ""),
        ({1: 16, 2: 12, 3: 10}, (3,), 2, ""),  # the fastest is flagged
        ({1: 16, 2: 12, 3: 10}, (2, 3), 1, ""),
        ({1: 16, 2: 12, 3: 10}, (1, 2, 3), 3, "?"),  # there is none without
    ],
)
def test_a_report_names_one_best_k(
    timed: Build, tpots: dict[int, float], few: Sequence[int], best: int, doubt: str
) -> None:
    cases = of_k(timed, tpots, few=few)
    found = flagged_out(table(*cases))
    (curve,) = curves(cases, baseline="vanilla", chosen=choices(found))
    assert curve.best is not None
    assert (curve.best.k, curve.best.flagged) == (best, bool(doubt))
    assert curve.best.speedup == pytest.approx(20 / tpots[best])
    assert (curve.best.share, curve.best.prompts) == (1, 9)
    (line,) = k_curves(found)
    assert line.endswith(f"best {best} ({20 / tpots[best]:.2f}x{doubt})")
    row = best_of(row for row in found if row.k)
    assert row is not None
    assert row.k == best
    again = [*found, *(replace(row, concurrency=4) for row in found)]
    assert [one.best[1][0] for one in scaling(again)] == ([best] if not doubt else [])


def test_vanilla_is_best_where_every_k_without_a_flag_is_slower(timed: Build) -> None:
    cases = of_k(timed, {1: 25, 2: 22, 3: 10}, few=(3,))
    (curve,) = curves(cases, baseline="vanilla", chosen=choices(flagged_out(table(*cases))))
    assert curve.best is not None
    assert (curve.best.k, curve.best.speedup, curve.best.share) == (0, 1, 1)


def test_without_a_speedup_there_is_no_best_k(timed: Build) -> None:
    found = table(*of_k(timed, {1: 16, 2: 12}), baseline=None)
    assert best_of(found) is None
    assert choices(found) == {}


# --- by category ---------------------------------------------------------------------------------


def two_categories(timed: Build) -> list[MeasuredCase]:
    def asked(coding: float, maths: float) -> list[RequestRecord]:
        return [timed("a", coding, category="coding"), timed("b", maths, category="maths")]

    spent = EngineCounters(drafts=14, draft_tokens=14, accepted=6)
    spans = [CounterSpan(requests=2, spent=spent)]
    return [
        case("vanilla", asked(20, 20)),
        case("e-k1", asked(10, 40), k=1, spans=spans),
    ]


def test_by_category_splits_every_arm_and_its_speedup(timed: Build) -> None:
    found = table(*two_categories(timed), by="category")
    assert [(row.part, row.arm) for row in found] == [
        ("coding", "vanilla"),
        ("coding", "e-k1"),
        ("maths", "vanilla"),
        ("maths", "e-k1"),
    ]
    ratios = [row.speedup.tpot.value for row in found if row.speedup and row.speedup.tpot]
    assert ratios == [pytest.approx(2), pytest.approx(0.5)]
    assert {row.metrics.requests for row in found} == {1}


def test_counters_of_a_whole_case_say_nothing_about_a_category(timed: Build) -> None:
    whole = table(*two_categories(timed))[1]
    assert whole.metrics.acceptance is not None
    split = table(*two_categories(timed), by="category")
    assert [row.metrics.acceptance for row in split] == [None] * 4


def test_prompts_without_a_category_are_a_part_of_their_own(timed: Build) -> None:
    records = [timed("a", 10, category="coding"), timed("b", 10), timed("c", 10)]
    found = table(case("vanilla", records), by="category")
    assert [(row.part, row.metrics.requests) for row in found] == [("coding", 1), (None, 2)]


@pytest.mark.parametrize("category", [None, "coding"])
def test_a_single_category_is_the_whole(timed: Build, category: str | None) -> None:
    spent = EngineCounters(drafts=5, draft_tokens=5, accepted=5)
    spans = [CounterSpan(requests=1, spent=spent)]
    records = [timed("a", 10, category=category)]
    (row,) = table(case("e-k1", records, k=1, spans=spans, expected=9), by="category")
    assert row.part == category
    assert row.metrics.acceptance is not None
    assert [flag.check for flag in row.flags] == ["missing"]


def test_a_run_in_which_everything_failed_has_rows_by_category_too() -> None:
    (row,) = table(case("vanilla", [], expected=80, problem="it died"), by="category")
    assert (row.part, row.problem) == (None, "it died")


def test_a_rate_makes_a_condition_of_its_own(record: Build) -> None:
    closed = case("vanilla", [record()])
    found = table(
        closed, replace(closed, rate=2.0), replace(case("e-k2", [record()], k=2), rate=2.0)
    )
    assert [(row.arm, row.condition.load) for row in found] == [
        ("vanilla", "concurrency 1"),
        ("vanilla", "2 req/s"),
        ("e-k2", "2 req/s"),
    ]
    assert found[2].speedup is not None


def test_goodput_is_there_when_limits_are(record: Build) -> None:
    plain = case("vanilla", [record("a", chunks=(100, 200)), record("b", chunks=(900, 950))])
    assert table(plain)[0].goodput is None
    found = table(replace(plain, limits={"ttft_ms": 500.0}))[0].goodput
    assert found is not None
    assert (found.good, found.requests) == (1, 2)


def test_a_tools_own_figures_stand_beside_the_row(record: Build) -> None:
    said = ToolReport(
        tool="aiperf",
        version="0.13.0",
        argv=(),
        folder="aiperf.0",
        start=0,
        keys=("a#0@0",),
        wall_s=1,
        figures={"ttft_ms": 110},
    )
    row = table(replace(case("vanilla", [record(chunks=(100, 200))]), tools=[said]))[0]
    assert [(one.figure, one.theirs, one.ours) for one in row.beside] == [("ttft_ms", 110, 100)]
    assert beside_lines([row]) == [
        "vanilla on he: aiperf itself says TTFT 110 against 100 here (+10.0%)"
    ]
