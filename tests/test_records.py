"""Facts are frozen and strict, and counters subtract and add as an engine's counters do."""

import pytest
from pydantic import ValidationError

from specbench.records import EngineCounters, Prompt


def test_a_fact_refuses_an_unknown_key() -> None:
    with pytest.raises(ValidationError, match="styel"):
        Prompt.model_validate({"id": "a", "turns": ["Q"], "styel": "chat"})


def test_a_fact_cannot_be_changed() -> None:
    prompt = Prompt(id="a", turns=("Q",))
    with pytest.raises(ValidationError, match="frozen"):
        prompt.id = "b"


def test_a_difference_leaves_warm_up_out() -> None:
    """Case B2: 20 drafts and 60 accepted before; 100 and 150 are what was measured."""
    spent = EngineCounters(drafts=120, accepted=210) - EngineCounters(drafts=20, accepted=60)
    assert spent == EngineCounters(drafts=100, accepted=150)


def test_a_restart_shows_as_a_negative_difference() -> None:
    before = EngineCounters(drafts=120, accepted_per_pos=(70, 45, 25))
    spent = EngineCounters(drafts=5, accepted_per_pos=(3,)) - before
    assert spent.drafts == -115
    assert spent.accepted_per_pos == (-67, -45, -25)


def test_a_counter_that_appears_started_at_zero() -> None:
    after = EngineCounters(drafts=7, accepted_per_pos=(4, 2))
    assert after - EngineCounters() == after


def test_a_counter_that_is_not_there_has_no_difference() -> None:
    spent = EngineCounters(requests=3) - EngineCounters(requests=1, drafts=5)
    assert spent == EngineCounters(requests=2)


def test_positions_counted_later_than_others_line_up() -> None:
    spent = EngineCounters(accepted_per_pos=(9, 4, 1)) - EngineCounters(accepted_per_pos=(5, 4))
    assert spent.accepted_per_pos == (4, 0, 1)


def test_differences_add_up_over_spans() -> None:
    one = EngineCounters(drafts=10, accepted=12, accepted_per_pos=(8, 4))
    two = EngineCounters(drafts=5, accepted=3, accepted_per_pos=(3,), requests=1)
    assert one + two == EngineCounters(drafts=15, accepted=15, accepted_per_pos=(11, 4), requests=1)


def test_nothing_and_something_make_something() -> None:
    something = EngineCounters(drafts=10, accepted_per_pos=(8, 4))
    assert EngineCounters() + something == something
    assert something + EngineCounters() == something
