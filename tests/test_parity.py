"""What two arms said, compared."""

from collections.abc import Callable

from specbench.analysis import parity
from specbench.records import RequestRecord

Build = Callable[..., RequestRecord]
A, B = ("a", 0, 0), ("a", 1, 0)


def test_equal_token_ids_are_identical(record: Build) -> None:
    one, other = record(token_ids=(1, 2, 3)), record(token_ids=(1, 2, 3))
    assert parity.compare({A: one}, {A: other}) == parity.Parity(1, 1, ())


def test_the_first_difference_is_where_they_part(record: Build) -> None:
    one, other = record(token_ids=(1, 2, 3)), record(token_ids=(1, 9, 3))
    assert parity.compare({A: one}, {A: other}) == parity.Parity(0, 1, (1,))


def test_an_output_that_goes_on_differs_where_the_other_ends(record: Build) -> None:
    one, other = record(token_ids=(1, 2)), record(token_ids=(1, 2, 3))
    assert parity.compare({A: one}, {A: other}) == parity.Parity(0, 1, (2,))


def test_second_turns_with_unlike_prompts_are_left_out(record: Build) -> None:
    one = record(token_ids=(1,)).model_copy(update={"prompt_sha256": "x"})
    other = record(token_ids=(1,)).model_copy(update={"prompt_sha256": "y"})
    assert parity.compare({B: one}, {B: other}) is None


def test_without_token_ids_nothing_is_said(record: Build) -> None:
    assert parity.compare({A: record()}, {A: record(token_ids=(1,))}) is None
    assert parity.compare({}, {}) is None
