"""Each check speaks up about the case it is for, in words, and is silent about a sound one."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specbench.analysis import hygiene
from specbench.analysis.hygiene import CHECKS, CaseFacts, Flag, flags
from specbench.analysis.metrics import CaseMetrics, summarise
from specbench.records import CounterSpan, EngineCounters, RequestRecord, SpecRequest

Build = Callable[..., RequestRecord]


def span(requests: int, **spent: int | tuple[int, ...]) -> CounterSpan:
    return CounterSpan(requests=requests, spent=EngineCounters.model_validate(spent))


def facts(
    records: Sequence[RequestRecord],
    *spans: CounterSpan,
    method: str = "eagle",
    k: int = 3,
    expected: int | None = None,
) -> CaseFacts:
    metrics = summarise(records, spans)
    planned = len(records) if expected is None else expected
    return CaseFacts(method, k, planned, records, spans, metrics)


def finding(check: str, of: CaseFacts) -> str | None:
    return CHECKS[check](of)


@pytest.fixture
def sound(record: Build) -> CaseFacts:
    """40 tokens = 1 request + 15 drafts + 24 accepted, by both counts."""
    spec = SpecRequest(drafts=15, draft_tokens=45, accepted=24, accepted_histogram=(2, 5, 5, 3))
    spent = span(
        1, drafts=15, draft_tokens=45, accepted=24, accepted_per_pos=(13, 8, 3), prefix_cache_hits=0
    )
    return facts([record(tokens=40, spec=spec, prompt_head=(1, 5, 1))], spent)


def test_a_sound_case_has_no_flag(sound: CaseFacts) -> None:
    assert flags(sound) == []


def test_a_sound_vanilla_case_has_no_flag(record: Build) -> None:
    assert flags(facts([record()], span(1, drafts=0, accepted=0), method="vanilla", k=0)) == []
    assert flags(facts([record()], method="vanilla", k=0)) == []


def test_a_flag_carries_its_checks_name(record: Build) -> None:
    found = flags(facts([record()], method="vanilla", k=0, expected=80))
    assert found == [Flag("missing", "1 of 80 requests measured")]


@pytest.mark.parametrize(
    ("good", "bad", "expected", "said"),
    [
        (0, 80, 80, "0 of 80 requests measured, 80 failed"),
        (79, 1, 80, "79 of 80 requests measured, 1 failed"),
        (4, 0, 80, "4 of 80 requests measured"),
        (0, 0, 80, "0 of 80 requests measured"),
        (80, 0, 80, None),
    ],
)
def test_requests_that_are_missing_are_counted(
    record: Build, good: int, bad: int, expected: int, said: str | None
) -> None:
    """Case G1; E9 for 4 of 80."""
    records = [record(f"{i}") for i in range(good)]
    records += [record(f"x{i}", chunks=(), tokens=0, error="HTTP 500") for i in range(bad)]
    assert finding("missing", facts(records, expected=expected)) == said


def test_an_arm_that_failed_as_a_whole_is_called_missing_and_nothing_else(record: Build) -> None:
    failed = [record(f"{i}", chunks=(), tokens=0, error="HTTP 500") for i in range(80)]
    assert [flag.check for flag in flags(facts(failed))] == ["missing"]


def test_a_speculative_arm_that_never_drafted_is_found(record: Build) -> None:
    """Case A3."""
    never = facts([record()], span(1, drafts=0, draft_tokens=0, accepted=0))
    assert finding("no-drafts", never) == "speculation was on but nothing was drafted"


def test_acceptance_that_could_not_be_read_says_why(record: Build) -> None:
    """Case B3."""
    broken = CounterSpan(requests=1, problem="/metrics answered 500")
    said = finding("no-acceptance", facts([record()], broken))
    assert said == "acceptance is not known: /metrics answered 500"
    said = finding("no-acceptance", facts([record()], span(1, generation_tokens=3)))
    assert said == "acceptance is not known: no speculative counters"


def test_a_vanilla_arm_that_drafted_is_found(record: Build) -> None:
    drafted = facts([record()], span(1, drafts=5, accepted=2), method="vanilla", k=0)
    assert finding("drafted-vanilla", drafted) == "called vanilla, but 5 drafts were made"


@pytest.mark.parametrize(
    ("drafts", "accepted", "said"),
    [
        (100, 0, "acceptance length is 1.00 over 100 drafts: the draft does nothing"),
        (20, 0, None),
        (100, 300, None),
        (100, 301, "acceptance length 4.01 is over k + 1 = 4"),
    ],
    ids=["nothing-accepted", "too-few-to-tell", "all-accepted", "more-than-all"],
)
def test_an_impossible_length_is_found(
    record: Build, drafts: int, accepted: int, said: str | None
) -> None:
    """Cases A3 and A4: an EAGLE-3 head run as EAGLE accepts nothing."""
    counted = span(1, drafts=drafts, draft_tokens=3 * drafts, accepted=accepted)
    assert finding("impossible-length", facts([record()], counted)) == said


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ((70, 45, 25), "per-position counts add up to 140, accepted is 150"),
        (
            (70, 25, 55),
            "a later position was accepted more often than an earlier one: (70, 25, 55)",
        ),
        ((70, 45, 35), None),
    ],
)
def test_positions_that_cannot_be_are_found(
    record: Build, positions: tuple[int, ...], said: str | None
) -> None:
    counted = span(1, drafts=100, draft_tokens=300, accepted=150, accepted_per_pos=positions)
    assert finding("positions", facts([record()], counted)) == said


@pytest.mark.parametrize(
    ("counted", "said"),
    [
        (1000, None),
        (1010, None),
        (1011, "drafts: 1000 by per-request metrics, 1011 by the engine's counters"),
        (900, "drafts: 1000 by per-request metrics, 900 by the engine's counters"),
    ],
)
def test_two_counts_of_the_same_drafts_must_agree(
    record: Build, counted: int, said: str | None
) -> None:
    spec = SpecRequest(drafts=1000, draft_tokens=3000, accepted=500)
    spent = span(1, drafts=counted, draft_tokens=3000, accepted=500)
    assert finding("sources", facts([record(spec=spec)], spent)) == said


@pytest.mark.parametrize(
    ("output", "said"),
    [(7, None), (4, None), (3, "the steps made 7 tokens, only 3 were sent")],
)
def test_more_tokens_made_than_can_be_trimmed_are_found(
    record: Build, output: int, said: str | None
) -> None:
    """Case B5: 1 + 2 drafts + 4 accepted = 7 made; at most k = 3 of them are cut at the end."""
    counted = span(1, drafts=2, draft_tokens=6, accepted=4)
    assert finding("tokens", facts([record(tokens=output)], counted)) == said


@pytest.mark.parametrize(
    ("method", "said"),
    [("eagle", "only 55% of the steps had a draft"), ("ngram", None), ("suffix", None)],
)
def test_steps_without_a_draft_are_normal_only_where_drafts_are_looked_up(
    record: Build, method: str, said: str | None
) -> None:
    """Case B6's figures: 993 of 1814 steps; A6 is what they would mean for EAGLE."""
    counted = span(1, drafts=993, draft_tokens=4965, accepted=3562)
    case = facts([record(tokens=5377)], counted, method=method, k=5)
    assert finding("coverage", case) == said


def test_a_token_that_starts_every_prompt_twice_is_found(record: Build) -> None:
    twice = facts([record("a", prompt_head=(1, 1, 5)), record("b", prompt_head=(1, 1, 9))])
    assert finding("bos", twice) == "all 2 prompts start with token 1 twice: two BOS tokens?"
    once = facts([record("a", prompt_head=(1, 5, 5)), record("b", prompt_head=(1, 5, 9))])
    assert finding("bos", once) is None
    only_one = facts([record("a", prompt_head=(7, 7, 5)), record("b", prompt_head=(1, 5, 9))])
    assert finding("bos", only_one) is None


def test_a_hit_prefix_cache_is_found(record: Build) -> None:
    """Case E7."""
    hit = facts([record()], span(1, prefix_cache_hits=32, prefix_cache_queries=40))
    assert finding("prefix-cache", hit) == "32 prompt tokens came from the prefix cache"


def test_chunks_counted_as_tokens_are_found(record: Build) -> None:
    """Cases E2, E4."""
    guessed = facts([record("a", token_source="chunks"), record("b")])
    said = "1 answers have no token count from the server: chunks were counted"
    assert finding("chunk-count", guessed) == said


def measured(output_tokens: int) -> CaseMetrics:
    values: dict[str, Any] = dict.fromkeys(CaseMetrics.__annotations__)
    return CaseMetrics(**values | {"output_tokens": output_tokens})


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        (947, "outputs are 5.3% shorter than the baseline's: compare TPOT only"),
        (1053, "outputs are 5.3% longer than the baseline's: compare TPOT only"),
        (981, None),
        (1000, None),
        (0, None),
    ],
)
def test_outputs_of_unequal_length_are_found(arm: int, said: str | None) -> None:
    """Case E6: 1000 tokens against 947."""
    found = hygiene.unequal_lengths(measured(1000), measured(arm))
    assert found == (said and Flag("lengths", said))
