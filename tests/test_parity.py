"""What two arms said, compared."""

from collections.abc import Callable

from specbench.analysis import parity
from specbench.analysis.parity import Difference, Parity
from specbench.analysis.speedup import Key
from specbench.records import RequestRecord

Build = Callable[..., RequestRecord]
A, B = Key("a", 0, 0), Key("a", 1, 0)


def test_equal_token_ids_are_identical(record: Build) -> None:
    one, other = record(token_ids=(1, 2, 3)), record(token_ids=(1, 2, 3))
    found = parity.compare({A: one}, {A: other})
    assert found == Parity(1, 1)
    assert found.first_differences == ()
    assert found.differing == 0


def test_the_first_difference_is_where_they_part(record: Build) -> None:
    one, other = record(token_ids=(1, 2, 3)), record(token_ids=(1, 9, 3))
    found = parity.compare({A: one}, {A: other})
    assert found is not None
    assert (found.identical, found.compared, found.first_differences) == (0, 1, (1,))
    assert found.differing == 1


def test_an_output_that_goes_on_differs_where_the_other_ends(record: Build) -> None:
    one, other = record(token_ids=(1, 2)), record(token_ids=(1, 2, 3))
    found = parity.compare({A: one}, {A: other})
    assert found is not None
    assert found.first_differences == (2,)
    assert found.differences[0].baseline_ids == ()
    assert found.differences[0].arm_ids == (3,)


def test_a_difference_says_what_each_said_from_there(record: Build) -> None:
    before = "Water boils at one hundred degrees"
    one = record(token_ids=(1, 2, 3, 4, 5, 6, 7), text=f"{before} Celsius.")
    other = record(token_ids=(1, 2, 8), text=f"{before} Kelvin, no, {'x' * 100}")
    found = parity.compare({A: one}, {A: other})
    assert found is not None
    assert found.differences == (
        Difference(
            key=A,
            position=2,
            lead=before[-19:] + " ",
            baseline_text="Celsius.",
            arm_text=f"Kelvin, no, {'x' * 28}",
            baseline_ids=(3, 4, 5, 6),
            arm_ids=(8,),
        ),
    )


def test_one_text_in_other_tokens_differs_without_a_text_to_show(record: Build) -> None:
    one, other = record(token_ids=(1, 2), text="ab"), record(token_ids=(3,), text="ab")
    found = parity.compare({A: one}, {A: other})
    assert found is not None
    (difference,) = found.differences
    assert (difference.lead, difference.baseline_text, difference.arm_text) == ("ab", "", "")


def test_the_histogram_counts_first_differences_in_doubling_buckets(record: Build) -> None:
    one = {Key(str(i), 0, 0): record(token_ids=(1,) * 20) for i in range(20)}
    other = {Key(str(i), 0, 0): record(token_ids=(1,) * i + (2,)) for i in range(12)}
    found = parity.compare(one, other)
    assert found is not None
    assert found.compared == 12
    assert found.histogram() == {(0, 0): 1, (1, 1): 1, (2, 3): 2, (4, 7): 4, (8, 15): 4}


def test_second_turns_with_unlike_prompts_are_left_out(record: Build) -> None:
    one = record(token_ids=(1,)).model_copy(update={"prompt_sha256": "x"})
    other = record(token_ids=(1,)).model_copy(update={"prompt_sha256": "y"})
    assert parity.compare({B: one}, {B: other}) is None


def test_without_token_ids_nothing_is_said(record: Build) -> None:
    assert parity.compare({A: record()}, {A: record(token_ids=(1,))}) is None
    assert parity.compare({}, {}) is None
