"""A config becomes every case exactly once, in an order that its seed decides."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.config import Config
from specbench.errors import UserError
from specbench.sweep import VANILLA, Plan, arms_of, plan, served_names, turns


def config(*speculation: dict[str, Any], **more: Any) -> Config:  # noqa: ANN401
    return Config.model_validate(
        {"model": "m", "prompts": "p", "speculation": list(speculation), **more}
    )


def ngram(k: int | list[int], **more: object) -> dict[str, Any]:
    return {"method": "ngram", "k": k, **more}


def ids(made: Config) -> list[str]:
    return [arm.id for arm in arms_of(made)]


def test_the_baseline_is_added_by_itself_and_first() -> None:
    assert ids(config(ngram([3, 1]))) == ["vanilla", "ngram-k3", "ngram-k1"]


def test_k_zero_is_vanilla_and_no_second_baseline() -> None:
    """Case A2."""
    arms = arms_of(config(ngram([0, 1])))
    assert [arm.id for arm in arms] == ["vanilla", "ngram-k1"]
    assert (arms[0].method, arms[0].k, arms[0].speculative_config) == (VANILLA, 0, None)


def test_k_zero_of_two_methods_is_one_vanilla() -> None:
    suffix = {"method": "suffix", "k": [0, 2]}
    assert ids(config(ngram([0, 1]), suffix)) == ["vanilla", "ngram-k1", "suffix-k2"]


def test_without_a_baseline_only_what_is_named_is_run() -> None:
    assert ids(config(ngram(1), baseline=False)) == ["ngram-k1"]


def test_a_config_that_names_nothing_runs_vanilla() -> None:
    assert ids(config(baseline=False)) == ["vanilla"]


@pytest.mark.parametrize(("speculation", "arm"), [([], "vanilla"), ([ngram(3)], "ngram-k3")])
def test_a_server_that_is_up_is_the_arm_it_is_said_to_be(
    speculation: list[dict[str, Any]], arm: str
) -> None:
    assert ids(config(*speculation, engine={"url": "http://h:1"})) == [arm]


def test_an_arm_carries_what_vllm_gets() -> None:
    arm = arms_of(config({"method": "eagle", "model": "d", "k": 2}))[1]
    assert (arm.method, arm.k, arm.draft) == ("eagle", 2, "d")
    assert arm.speculative_config == {
        "method": "eagle",
        "model": "d",
        "num_speculative_tokens": 2,
    }


def test_the_same_arm_twice_asks_for_a_name() -> None:
    twice = [ngram(3, prompt_lookup_max=2), ngram(3, prompt_lookup_max=4)]
    with pytest.raises(UserError, match=r"called ngram: .* Give one of them a `name`"):
        arms_of(config(*twice))
    with pytest.raises(UserError, match="called ngram"):  # one curve over two drafts would be none
        arms_of(config(ngram(1, prompt_lookup_max=2), ngram(3, prompt_lookup_max=4)))
    twice[1]["name"] = "far"
    assert ids(config(*twice)) == ["vanilla", "ngram-k3", "far-k3"]


AXES: dict[str, Any] = {"max_tokens": [256, 512], "concurrency": [1, 4], "repeats": 2}


def whole_plan(schedule: str, seed: int = 0) -> Plan:
    return plan(config(ngram([1, 3]), schedule=schedule, seed=seed, **AXES), ["he", "mt"])


@pytest.mark.parametrize("schedule", ["blocks", "interleaved"])
def test_every_cell_of_the_sweep_is_one_case(schedule: str) -> None:
    cases = whole_plan(schedule).cases
    cells = Counter((case.arm, *case.conditions) for case in cases)
    assert len(cells) == 3 * 2 * 2 * 2 * 2  # arms, prompt sets, lengths, concurrencies, repeats
    assert set(cells.values()) == {1}
    assert len({case.id for case in cases}) == len(cases)


def test_blocks_start_one_engine_at_a_time_for_each_repeat() -> None:
    made = whole_plan("blocks")
    assert [len(stage.arms) for stage in made.stages] == [1] * 6
    assert made.starts == 6
    for repeat, stages in enumerate((made.stages[:3], made.stages[3:])):
        assert {stage.arms[0].id for stage in stages} == {"vanilla", "ngram-k1", "ngram-k3"}
        assert {case.repeat for stage in stages for round_ in stage.rounds for case in round_} == {
            repeat
        }


def test_interleaved_keeps_all_engines_up_and_each_round_has_every_arm() -> None:
    made = whole_plan("interleaved")
    assert (len(made.stages), made.starts, made.schedule) == (2, 6, "interleaved")
    for repeat, stage in enumerate(made.stages):  # a repeat is a restart
        for round_ in stage.rounds:
            assert {case.arm for case in round_} == {"vanilla", "ngram-k1", "ngram-k3"}
            assert {case.repeat for case in round_} == {repeat}
            assert len({case.conditions for case in round_}) == 1


def grouped(together: int | None, **more: Any) -> Plan:  # noqa: ANN401  (any key of a config)
    return plan(config(ngram([1, 2, 3, 4, 5]), **more), ["he"], together=together)


@pytest.mark.parametrize(
    ("together", "groups", "starts"),
    [(None, [6], 6), (4, [4, 3], 7), (3, [3, 3, 2], 8), (9, [6], 6)],
)
def test_where_not_all_fit_the_baseline_is_up_with_each_group(
    together: int | None, groups: list[int], starts: int
) -> None:
    made = grouped(together)
    assert sorted((len(stage.arms) for stage in made.stages), reverse=True) == groups
    assert all(stage.arms[0].id == "vanilla" for stage in made.stages)
    assert made.starts == starts
    beside = [arm.id for stage in made.stages for arm in stage.arms[1:]]
    assert sorted(beside) == [f"ngram-k{k}" for k in range(1, 6)]


def test_a_baseline_has_a_case_for_each_group_of_arms() -> None:
    cases = grouped(4).cases
    assert len({case.id for case in cases}) == len(cases) == 7
    assert sorted(case.id for case in cases if case.arm == "vanilla") == [
        "vanilla.he.t256.c1.r0",
        "vanilla.he.t256.c1.r0.g1",
    ]


def test_without_room_for_two_engines_arms_take_turns_in_blocks() -> None:
    made = grouped(1)
    assert (made.schedule, made.together, made.starts) == ("blocks", 1, 6)
    assert {case.group for case in made.cases} == {0}


def test_arms_without_a_baseline_are_grouped_too() -> None:
    made = grouped(2, baseline=False)
    assert sorted(len(stage.arms) for stage in made.stages) == [1, 2, 2]


def test_a_chosen_k_is_measured_beside_the_baseline_after_all_else() -> None:
    speculation = {"method": "eagle", "model": "d", "k": "auto", "k_max": 4}
    made = plan(config(speculation), ["he"], chosen={"eagle": [3]})
    assert [[arm.id for arm in stage.arms] for stage in made.stages] == [
        ["vanilla", "eagle-k1", "eagle-k4"],
        ["vanilla", "eagle-k3"],
    ]
    assert len({case.id for case in made.cases}) == 5
    assert plan(config(speculation), ["he"], chosen={"eagle": [4]}).starts == 3  # measured already


def block_order(seed: int) -> list[str]:
    return [stage.arms[0].id for stage in whole_plan("blocks", seed).stages]


def test_the_order_of_blocks_is_repeatable_and_depends_on_the_seed() -> None:
    assert block_order(0) == block_order(0)
    assert len({tuple(block_order(seed)) for seed in range(8)}) > 1


def test_a_case_says_everything_in_its_id() -> None:
    cases = plan(config(), ["My set/1"]).cases
    assert [case.id for case in cases] == ["vanilla.My-set-1.t256.c1.r0"]


@given(seed=st.text(max_size=8), units=st.integers(0, 9))
def test_every_arm_is_sent_every_unit_once(seed: str, units: int) -> None:
    (round_, *_) = whole_plan("interleaved").stages[0].rounds
    sent = Counter(
        (case.arm, unit[0])
        for unit, cases in turns(round_, [[i] for i in range(units)], seed)
        for case in cases
    )
    assert sent == Counter((case.arm, i) for case in round_ for i in range(units))


def test_a_unit_is_done_with_before_the_next_and_no_arm_is_always_first() -> None:
    (round_, *_) = whole_plan("interleaved").stages[0].rounds
    sent = list(turns(round_, [[i] for i in range(20)], "0"))
    assert [unit for unit, _ in sent] == [[i] for i in range(20)]
    assert {cases[0].arm for _, cases in sent} == {"vanilla", "ngram-k1", "ngram-k3"}
    assert sent == list(turns(round_, [[i] for i in range(20)], "0"))


def test_of_two_arms_each_is_first_in_one_of_two_units() -> None:
    """So that a machine that slows down as it goes is not in their ratio, however few units there are."""
    (round_, *_) = whole_plan("interleaved").stages[0].rounds
    for seed in "abc":
        firsts = [cases[0] for _, cases in turns(round_[:2], [[i] for i in range(6)], seed)]
        assert all(a != b for a, b in zip(firsts[::2], firsts[1::2], strict=True))


def test_rates_are_an_axis_of_their_own() -> None:
    made = plan(config(ngram(2), rate=[0.5, 2], max_tokens=[8, 16]), ["he"])
    loads = {(case.rate, case.concurrency) for case in made.cases}
    assert {rate for rate, _ in loads} == {0.5, 2}
    assert len(made.cases) == 2 * 2 * 2
    assert "vanilla.he.t8.q0.5.r0" in {case.id for case in made.cases}
    assert len({case.conditions for case in made.cases}) == 4  # what a ratio is within


def test_models_in_triton_are_called_by_their_method_and_k_where_there_are_several() -> None:
    arms = arms_of(config({"method": "draft_model", "model": "d", "k": 2}, ngram([1, 3])))
    assert served_names(arms) == {
        "vanilla": "base_model",
        "draft_model-k2": "draft_model",
        "ngram-k1": "ngram_model_k1",
        "ngram-k3": "ngram_model_k3",
    }
