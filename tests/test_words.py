"""The sentences of a report say what the numbers say, and no more."""

from dataclasses import replace
from typing import Any

import pytest
from table_rows import plain_row

from specbench.analysis.cases import Condition
from specbench.analysis.cost import BestK, CostModel, Line, Predicted
from specbench.analysis.curves import Curve
from specbench.analysis.hygiene import Flag
from specbench.analysis.metrics import CaseMetrics
from specbench.analysis.parity import Parity
from specbench.analysis.rows import Cost, Row
from specbench.analysis.speedup import Interval, Ratio, Speedup
from specbench.render.words import curve_record, explanations, headlines, precision_lines

METRICS = CaseMetrics(6, 0, 6, 288, 2345.6, 321.4, 43.21, 22.25, None, None)
VANILLA = plain_row(0, prompt_set="humaneval", max_tokens=48, metrics=METRICS)


def eagle(k: int, value: float, low: float, high: float, **more: Any) -> Row:  # noqa: ANN401
    on_set = Interval(value * 0.99, value * 1.01)
    ratio = Ratio(value, Interval(low, high), on_set, 6, 1, "steps")
    latency = replace(ratio, value=0.95 * value)
    speedup = Speedup(ratio, latency, replace(ratio, value=0.8), value, 6, 0)
    row = replace(VANILLA, arm=f"eagle-k{k}", label="eagle", method="eagle", k=k, speedup=speedup)
    return replace(row, is_baseline=False, **more)


def test_the_headline_is_the_fastest_set_up_with_both_intervals() -> None:
    parity = Parity(159, 164, ())
    rows = [VANILLA, eagle(1, 1.2, 1.1, 1.3), eagle(3, 1.42, 1.3, 1.5, parity=parity)]
    assert headlines(rows) == [
        (
            "humaneval: eagle k=3 is 1.42x as fast by TPOT, 1.35x by latency (the fastest of the 2 that "
            "are shown to be faster, of 2 set-ups; 95% intervals of all 2 together on prompts like these "
            "1.28 to 1.51, on this prompt set 1.40 to 1.44; outputs identical on 159 of 164)."
        )
    ]


def test_a_headline_is_no_best_of_all_where_faster_ones_are_not_shown() -> None:
    """As it was once: k=1 called the best of 7, with 2.16x and 1.43x in the table."""
    ngram = replace(eagle(3, 2.16, 0.8, 5.8), label="ngram", method="ngram", arm="ngram-k3")
    rows = [VANILLA, eagle(1, 1.17, 1.1, 1.25), eagle(3, 1.43, 0.9, 2.3), ngram]
    (line,) = headlines(rows)
    assert (
        "eagle k=1 is 1.17x as fast by TPOT, 1.11x by latency (the only one of 3 set-ups that"
        in line
    )
    assert line.endswith("; measured faster but not shown: ngram k=3 2.16x, eagle k=3 1.43x).")
    assert "best of" not in line
    several = [*rows, *(eagle(k, 1.3, 0.9, 1.9) for k in (4, 5))]
    assert headlines(several)[0].endswith(
        "ngram k=3 2.16x, eagle k=3 1.43x, eagle k=5 1.30x and 1 more)."
    )


def test_a_single_set_up_has_its_own_interval() -> None:
    (line,) = headlines([VANILLA, eagle(3, 1.42, 1.3, 1.5)])
    assert "(the only set-up; 95% intervals on prompts like these 1.30 to 1.50, on this" in line


def test_a_headline_without_latency_gives_total_time_or_neither() -> None:
    one = eagle(3, 1.42, 1.3, 1.5)
    assert one.speedup
    total = replace(one, speedup=replace(one.speedup, latency=None))
    assert "1.42x as fast by TPOT, 1.42x by total time (" in headlines([total])[0]
    bare = replace(one, speedup=replace(one.speedup, latency=None, total_time=None))
    assert "1.42x as fast by TPOT (" in headlines([bare])[0]


def test_what_is_shown_alone_need_not_be_among_seven() -> None:
    """1.02 to 1.38 by itself; of seven together the low end is under 1."""
    rows = [VANILLA, eagle(1, 1.19, 1.02, 1.38), *(eagle(k, 1.0, 0.9, 1.1) for k in range(2, 8))]
    assert headlines(rows) == [
        "humaneval: no set-up of 7 is shown to be faster (1 would be, had no other been tried)."
    ]
    assert "k=1 is 1.19x" in headlines(rows[:2])[0]


def test_flagged_set_ups_were_tried_too() -> None:
    flagged = [eagle(k, 1.0, 0.9, 1.1, flags=(Flag("bos", "two"),)) for k in range(2, 8)]
    (line,) = headlines([VANILLA, eagle(1, 1.19, 1.02, 1.38), *flagged])
    assert line.endswith("(6 are flagged, 1 would be, had no other been tried).")


def test_a_flagged_row_is_no_headline() -> None:
    flagged = eagle(3, 1.42, 1.3, 1.5, flags=(Flag("bos", "two BOS tokens"),))
    (line,) = headlines([VANILLA, eagle(1, 1.2, 1.1, 1.3), flagged])
    assert "eagle k=1 is 1.20x" in line
    (line,) = headlines([VANILLA, flagged])
    assert line == "humaneval: no set-up of 1 is shown to be faster (1 is flagged)."


def test_an_interval_that_holds_1_is_no_headline() -> None:
    assert headlines([VANILLA, eagle(1, 1.05, 0.97, 1.13)]) == [
        "humaneval: no set-up of 1 is shown to be faster."
    ]


def test_one_prompt_shows_nothing() -> None:
    ratio = Ratio(1.4, None, None, 1, 1, None)
    row = replace(eagle(1, 1.4, 1.3, 1.5), speedup=Speedup(ratio, ratio, None, 1.4, 1, 0))
    assert headlines([VANILLA, row]) == [
        "humaneval: one prompt has no interval, so nothing is shown."
    ]


def test_conditions_are_told_apart_by_what_differs() -> None:
    rows = [eagle(1, 1.2, 1.1, 1.3), eagle(1, 1.4, 1.3, 1.5, concurrency=4)]
    assert [line.split(":")[0] for line in headlines(rows)] == [
        "humaneval at concurrency 1",
        "humaneval at concurrency 4",
    ]


def test_nothing_compared_is_no_headline() -> None:
    assert headlines([VANILLA]) == []


def test_the_precision_asked_for_stands_beside_the_one_reached() -> None:
    rows = [VANILLA, eagle(1, 1.2, 1.1, 1.3), replace(eagle(3, 1.4, 1.3, 1.5), cycles=4)]
    assert precision_lines({"within": 0.02, "of": "this_set"}, rows)[1] == (
        "eagle-k3 on humaneval: ±1.0% on this prompt set after 4 passes (±2.0% asked for: reached)"
    )
    missed = precision_lines({"within": 0.02, "of": "like_these"}, rows)
    assert missed[1].endswith("on prompts like these after 4 passes (±2.0% asked for: not reached)")
    assert precision_lines(None, rows) == []


CURVE = Curve(
    label="eagle",
    method="eagle",
    condition=Condition("humaneval", 48, 1),
    model=CostModel(20.0, {1: 24.0, 3: 28.0}, {1: 1.5, 3: 2.0}, Line(22.0, 2.0, None), 6, 6),
    best=BestK(3, 1.43, 0.92, 20),
    predicted={2: Predicted(1.8, 26.0, 1.38)},
    predicted_best=BestK(2, 1.44, 0.7, 6),
    not_predicted=None,
)


def test_a_curve_says_its_best_k_and_where_a_step_goes() -> None:
    assert explanations([], [CURVE]) == [
        (
            "eagle on humaneval (48 tokens, concurrency 1): best k = 3 of those measured (1.43x, 92% of "
            "resamples of 20 prompts agree); in vanilla steps of 20.0 ms a verification takes 1.10 and "
            "a drafted token 0.10; predicted best k = 2 (1.44x, predicted)"
        )
    ]


@pytest.mark.parametrize(("share", "prompts"), [(0.85, 3), (1.0, 7), (None, 1)])
def test_few_prompts_do_not_say_how_sure_a_best_k_is(share: float | None, prompts: int) -> None:
    few = replace(CURVE, best=BestK(3, 1.43, share, prompts))
    (line,) = explanations([], [few])
    assert "best k = 3 of those measured (1.43x, too few prompts to say how sure);" in line
    assert "resamples" not in line
    (line,) = explanations([], [replace(few, best=BestK(0, 1.0, share, prompts))])
    assert "vanilla is faster than every k measured (too few prompts to say how sure)" in line
    best = curve_record(few)["best"]
    assert (best["share"], best["prompts"]) == (share, prompts)


def test_a_best_k_of_flagged_ones_only_says_so() -> None:
    (line,) = explanations([], [replace(CURVE, best=BestK(3, 1.43, 0.92, 20, flagged=True))])
    assert (
        "best k = 3 of those measured (1.43x?, 92% of resamples of 20 prompts agree, every k is"
        in line
    )


def test_a_step_of_two_kinds_is_not_divided() -> None:
    """Looked-up drafts: there is no line, and nothing is said of verifying and drafting."""
    assert CURVE.model
    mixed = replace(CURVE, model=replace(CURVE.model, line=None, mixed="ngram looks drafts up"))
    (line,) = explanations([], [mixed])
    assert "a verification takes" not in line
    assert curve_record(mixed)["steps_mixed"] == "ngram looks drafts up"
    assert curve_record(mixed)["verify_ms"] is None


def test_a_curve_on_which_nothing_pays_says_so() -> None:
    (line,) = explanations([], [replace(CURVE, best=BestK(0, 1.0, 0.8, 9), predicted_best=None)])
    assert "vanilla is faster than every k measured (80% of resamples of 9 prompts agree)" in line


def test_what_speculation_costs_is_said_once_for_each_arm() -> None:
    cost = Cost(28, 1.4, 1.4, None, 12.3, 9000, -0.18, 8.4e6)
    rows = [VANILLA, eagle(3, 1.4, 1.3, 1.5, cost=cost)]
    rows.append(replace(rows[-1], prompt_set="mt_bench"))
    assert explanations(rows, []) == [
        (
            "eagle-k3 costs: +8 MiB of memory, KV cache -18% (room for 9,000 tokens), start-up 12 s, "
            "TTFT x1.25 on humaneval"
        )
    ]


def test_concurrency_ends_in_a_schedule_for_vllm() -> None:
    rows = [
        eagle(1, 1.2, 1.1, 1.3),
        eagle(3, 1.4, 1.3, 1.5),
        eagle(1, 1.1, 1.0, 1.2, concurrency=4),
        eagle(3, 0.9, 0.8, 1.0, concurrency=4),
        eagle(1, 0.8, 0.7, 0.9, concurrency=16),
    ]
    (line,) = explanations(rows, [])
    assert line.startswith("eagle on humaneval by concurrency: 1: 1.40x (k=3), 4: 1.10x (k=1)")
    assert "stops paying at concurrency 6" in line
    assert line.endswith(
        "num_speculative_tokens_per_batch_size: [[1, 3, 3], [4, 15, 1], [16, 16, 0]]"
    )
