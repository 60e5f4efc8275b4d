"""Each check speaks up about the case it is for, in words, and is silent about a sound one."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from specbench.analysis.calibration import Calibration, ClientError
from specbench.analysis.hygiene import CaseFacts, Flag, PairFacts
from specbench.analysis.hygiene.checks import CHECKS, PAIR_CHECKS, flags, pair_flags
from specbench.analysis.hygiene.setup import arguments, engine_differences, machine_differences
from specbench.analysis.metrics import summarise
from specbench.analysis.outlines import Request
from specbench.analysis.speedup import Key, compare
from specbench.records import (
    CounterSpan,
    EngineCounters,
    EngineFacts,
    Prompt,
    RequestRecord,
    SpecRequest,
)

Build = Callable[..., RequestRecord]


def span(requests: int, **spent: int | tuple[int, ...]) -> CounterSpan:
    return CounterSpan(requests=requests, spent=EngineCounters.model_validate(spent))


def facts(
    records: Sequence[RequestRecord],
    *spans: CounterSpan,
    method: str = "eagle",
    k: int = 3,
    expected: int | None = None,
    **more: Any,  # noqa: ANN401  (any other field of the facts)
) -> CaseFacts:
    metrics = summarise(records, spans)
    planned = len(records) if expected is None else expected
    return CaseFacts(method, k, planned, records, spans, metrics, **more)


def vanilla(
    records: Sequence[RequestRecord],
    **more: Any,  # noqa: ANN401
) -> CaseFacts:
    return facts(records, method="vanilla", k=0, **more)


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


def test_further_cycles_come_on_top_of_the_planned_requests(record: Build) -> None:
    cycles = [record(f"{i}", cycle=cycle) for cycle in range(3) for i in range(4)]
    assert finding("missing", facts(cycles[:10], expected=4)) is None
    failed = record("0", cycle=3, chunks=(), tokens=0, error="HTTP 500")
    said = finding("missing", facts([*cycles, failed], expected=4))
    assert said == "4 of 4 requests measured, 1 failed"


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


def test_look_ups_may_be_refused_for_longer(record: Build) -> None:
    refused = span(1, drafts=100, draft_tokens=300, accepted=0)
    assert finding("impossible-length", facts([record()], refused, method="ngram")) is None
    assert finding("impossible-length", facts([record()], refused)) is not None


def test_drafts_longer_than_k_are_found(record: Build) -> None:
    """Case A2: the engine ran another k than the one written."""
    other = facts([record()], span(1, drafts=100, draft_tokens=500, accepted=10), k=3)
    said = "5.00 tokens a draft are over k = 3: the engine ran another k"
    assert finding("impossible-length", other) == said


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ((70, 45, 25), "per-position counts add up to 140, accepted is 150"),
        (
            (70, 25, 55),
            "a later position was accepted more often than an earlier one: (70, 25, 55)",
        ),
        ((110, 30, 10), "position 1 was accepted 110 times in 100 drafts"),
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


def test_a_step_trims_no_more_than_it_accepted(record: Build) -> None:
    """1 + 2 drafts + 4 accepted = 7 made; the last step accepted 1 of them."""

    def sent(tokens: int) -> CaseFacts:
        spec = SpecRequest(drafts=2, draft_tokens=6, accepted=4, per_step_accepted=(3, 1))
        return facts([record(tokens=tokens, spec=spec)])

    assert finding("tokens", sent(6)) is None
    assert finding("tokens", sent(5)) == "the steps made 7 tokens, only 5 were sent"


def test_steps_that_ran_on_past_a_stop_string_are_expected(record: Build) -> None:
    spec = SpecRequest(drafts=4, draft_tokens=12, accepted=4, per_step_accepted=(3, 1, 0, 0))
    late = facts([record(tokens=5, spec=spec)])
    assert finding("tokens", late) is not None
    assert finding("tokens", replace(late, sampling={"stop": ["\n"]})) is None


# n-gram at k = 3: 30 chunks after the first token, 10 of them steps with a draft, 3 of which were
# accepted in full: 1 + 30 + 9 = 40 tokens.
CHUNKS = (1, 4, 4, 4, *[1] * 27)


@pytest.mark.parametrize(
    ("accepted", "said"),
    [
        (9, None),
        (18, "the steps made 49 tokens, only 40 were sent"),
        (3, "the steps made 34 tokens, but 40 were sent: counts were lost"),
    ],
    ids=["right", "twice", "a-third"],
)
def test_steps_without_a_draft_hide_no_wrong_count(
    record: Build, accepted: int, said: str | None
) -> None:
    counted = span(1, drafts=10, draft_tokens=30, accepted=accepted)
    one = record(chunks=range(31), tokens=40, chunk_tokens=CHUNKS)
    assert finding("tokens", facts([one], counted, method="ngram")) == said


def test_lost_counts_are_not_taken_for_steps_without_a_draft(record: Build) -> None:
    """13 steps of 4 tokens, a third of the accepted ones lost; or 13 of 39 steps with a draft."""
    counted = span(1, drafts=13, draft_tokens=39, accepted=26)
    lost = record(chunks=range(14), tokens=53, chunk_tokens=(1, *[4] * 13))
    found = [flag for flag in flags(facts([lost], counted)) if flag.check != "sources"]
    assert found == [Flag("tokens", "the steps made 40 tokens, but 53 were sent: counts were lost")]
    undrafted = record(chunks=range(27), tokens=53, chunk_tokens=(1, *[3] * 13, *[1] * 13))
    found = flags(facts([undrafted], counted))
    assert found == [Flag("coverage", "only 50% of the steps had a draft")]


def test_chunks_of_several_steps_say_nothing_of_lost_counts(record: Build) -> None:
    counted = span(1, drafts=10, draft_tokens=30, accepted=9)
    merged = record(chunks=range(21), tokens=40, chunk_tokens=(1, 8, 8, 6, *[1] * 17))
    assert finding("tokens", facts([merged], counted, method="ngram")) is None


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
    same = facts([record("a", prompt_head=(7, 7, 5)), record("a", cycle=1, prompt_head=(7, 7, 5))])
    assert finding("bos", same) is None
    only_one = facts([record("a", prompt_head=(7, 7, 5)), record("b", prompt_head=(1, 5, 9))])
    assert finding("bos", only_one) is None


def test_a_hit_prefix_cache_is_found(record: Build) -> None:
    """Case E7."""
    hit = facts([record()], span(1, prefix_cache_hits=32, prefix_cache_queries=40))
    assert finding("prefix-cache", hit) == "32 prompt tokens came from the prefix cache"
    told = facts([record(cached_tokens=32), record("b", cached_tokens=0)])
    assert finding("prefix-cache", told) == "32 prompt tokens came from the prefix cache"
    assert finding("prefix-cache", facts([record(cached_tokens=0)])) is None


def test_preempted_requests_are_found_in_either_arm(record: Build) -> None:
    """The same count on both sides is no excuse: both times are those of waiting."""
    busy = facts([record()], span(1, preemptions=3))
    said = finding("preempted", busy)
    assert said is not None
    assert said.startswith("requests were preempted 3 times: the KV cache was too small for the")
    assert "schedule: blocks" in said
    assert "1 time:" in str(finding("preempted", facts([record()], span(1, preemptions=1))))
    baseline = vanilla([record()])
    baseline = replace(baseline, spans=busy.spans)
    assert [flag.check for flag in flags(baseline)] == ["preempted"]


@pytest.mark.parametrize("spent", [{"preemptions": 0}, {"generation_tokens": 3}, None])
def test_without_a_preemption_or_a_count_there_is_none(
    record: Build, spent: dict[str, int] | None
) -> None:
    """Triton counts nothing, an old run did not keep it."""
    silent = CounterSpan(requests=1, problem="none") if spent is None else span(1, **spent)
    assert finding("preempted", facts([record()], silent)) is None


def test_preemptions_beside_a_failed_request_count_and_those_of_a_lost_attempt_do_not(
    record: Build,
) -> None:
    good, failed = record("a"), record("b", chunks=(), tokens=0, error="HTTP 500")
    spent = EngineCounters(preemptions=2)
    mixed = CounterSpan(requests=2, keys=(good.key, failed.key), spent=spent)
    assert "2 times" in str(finding("preempted", facts([good, failed], mixed)))
    lost = CounterSpan(requests=1, keys=(failed.key,), spent=spent)
    assert finding("preempted", facts([good, failed], lost)) is None


def test_chunks_counted_as_tokens_are_found(record: Build) -> None:
    """Cases E2, E4."""
    guessed = facts([record("a", token_source="chunks"), record("b")])
    said = "1 answers have no token count from the server: chunks were counted"
    assert finding("chunk-count", guessed) == said


# --- what was sent -------------------------------------------------------------------------------

WRITTEN: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "seed": 0,
    "ignore_eos": False,
    "stop": [],
}
SENT = WRITTEN | {"stop": None, "max_tokens": 24}


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (SENT, None),
        (SENT | {"seed": 17}, None),
        (None, None),
        (SENT | {"temperature": 0.7}, "temperature is 0.0, 0.7 was sent"),
        (SENT | {"max_tokens": 256}, "max_tokens is 24, 256 was sent"),
        (SENT | {"stop": ["END"]}, "stop is [], ['END'] was sent"),
        (SENT | {"seed": None}, "seed is 0, nothing was sent"),
        ({"temperature": 0.0, "max_tokens": 24}, "top_p is 1.0, nothing was sent"),
    ],
    ids=["as-written", "own-seed", "not-known", "hot", "longer", "stops", "no-seed", "left-out"],
)
def test_sampling_must_be_sent_as_it_is_written(
    record: Build, sent: dict[str, Any] | None, said: str | None
) -> None:
    """Case C3."""
    asked = vanilla([record("a", sampling=sent)], sampling=WRITTEN, max_tokens=24)
    assert finding("sampling", asked) == (said and f"1 of 1 requests (a first): {said}")


def test_sampling_is_not_judged_where_the_config_is_not_known(record: Build) -> None:
    assert finding("sampling", vanilla([record(sampling={"temperature": 1})])) is None


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>"),
        ("[INST] hi [/INST]", "[INST]"),
        ("<|start_header_id|>user<|end_header_id|>\n\nhi", "<|start_header_id|>"),
        ("<start_of_turn>user\nhi", "<start_of_turn>"),
        ("### Human: hi\n### Assistant:", "### Assistant:"),
        ("A chat. USER: hi ASSISTANT:", "ASSISTANT:"),
        ("Write a dialogue between a user and an assistant:", None),
        ("What does ASSISTANT: mean in this prompt?", None),
        ("x = a[INST]", "[INST]"),
        ("hi", None),
    ],
)
def test_a_template_inside_a_chat_message_is_found(
    record: Build, text: str, marker: str | None
) -> None:
    """Case E10."""
    prompt = Prompt(id="a", turns=("hello", text))
    said = marker and f"1 of 1 chat messages hold a template already: {marker}"
    assert finding("template", vanilla([record()], prompts=[prompt])) == said
    rendered = Prompt(id="a", turns=(text,), style="completion")
    assert finding("template", vanilla([record()], prompts=[rendered])) is None


def test_a_marker_here_and_there_is_text(record: Build) -> None:
    prompts = [Prompt(id=str(i), turns=("hi",)) for i in range(39)]
    prompts += [Prompt(id="x", turns=("What is <|im_end|> for?",))]
    assert finding("template", vanilla([record()], prompts=prompts)) is None


# --- cold starts ---------------------------------------------------------------------------------


def timed(
    record: Build, step_ms: Sequence[float], ttft_ms: Sequence[float] | None = None, **more: object
) -> list[RequestRecord]:
    """Requests one after the other, of 20 steps at these times."""
    found, sent = [], 0.0
    for i, step in enumerate(step_ms):
        first = sent + (ttft_ms[i] if ttft_ms else 50.0)
        chunks = [first + step * j for j in range(21)]
        found.append(record(f"p{i}", sent=sent, chunks=chunks, **more))
        sent = chunks[-1] + 1
    return found


STEADY = [10.0, 10.3, 9.8, 10.1, 9.9, 10.2, 10.0, 9.7] * 4
PROMPT_TOKENS = [100, 130, 90, 220, 400, 110, 150, 180] * 4


def cold(record: Build, step_ms: Sequence[float], concurrency: int = 1) -> str | None:
    return finding("cold-start", vanilla(timed(record, step_ms), concurrency=concurrency))


def test_a_steady_engine_is_warm(record: Build) -> None:
    assert cold(record, STEADY) is None


def test_a_first_request_with_slow_steps_is_found(record: Build) -> None:
    said = "the first request's chunks came 4.0x as far apart as the others'"
    assert cold(record, [40, *STEADY[1:]]) == f"{said} (engine start 0): not warm yet?"


def test_a_first_request_that_waits_for_its_first_token_is_found(record: Build) -> None:
    said = "the first request's first token took 5.0x as long as the others' (engine start 0)"
    waited = timed(record, STEADY, [250, *[50] * 31])
    assert finding("cold-start", vanilla(waited)) == f"{said}: not warm yet?"


def test_every_engine_start_has_a_first_request(record: Build) -> None:
    warm = timed(record, STEADY, start=0)
    again = timed(record, [40, *STEADY[1:]], start=1)
    said = finding("cold-start", vanilla([*warm, *again]))
    assert said is not None
    assert "(engine start 1)" in said


def test_a_long_first_prompt_may_take_long(record: Build) -> None:
    """0.5 ms a prompt token, 2000 tokens first."""
    lengths = [2000, *PROMPT_TOKENS[1:]]
    records = timed(record, STEADY, [10 + 0.5 * n for n in lengths])
    sized = [
        r.model_copy(update={"prompt_tokens": n}) for r, n in zip(records, lengths, strict=True)
    ]
    assert finding("cold-start", vanilla(sized)) is None
    assert finding("cold-start", vanilla(records)) is not None


@pytest.mark.parametrize(
    "step_ms",
    [
        [15, *STEADY[1:]],
        [40, *STEADY[1:7]],
        [25, *STEADY[1:20], 22, *STEADY[21:]],
        [25, *STEADY * 5],
    ],
    ids=["not-far", "too-few", "not-alone", "one-of-160"],
)
def test_a_first_request_that_could_be_chance_is_left_alone(
    record: Build, step_ms: list[float]
) -> None:
    assert cold(record, step_ms) is None


# Tokens/s as in z-lab/dflash issue 135: from 43 to 69 over the first 8 requests, then steady.
CLIMB = [43.0, 46.7, 50.4, 54.1, 57.9, 61.6, 65.3, 69.0]
PLATEAU = [69.0, 68.1, 69.6, 69.2, 68.5, 70.0, 68.8, 69.3] * 3


def test_a_throughput_that_rises_over_the_first_requests_is_found(record: Build) -> None:
    said = "the first 4 requests' chunks came 1.43x as far apart as the later ones'"
    rising = [1000 / rate for rate in CLIMB + PLATEAU]
    assert cold(record, rising) == f"{said} (engine start 0): not warm yet?"


def test_a_throughput_that_rises_all_the_time_is_no_cold_start(record: Build) -> None:
    """It is drift, which pairs cancel."""
    rising = [1000 / (43 + 26 * i / 79) for i in range(80)]
    assert cold(record, rising) is None


def test_a_slow_phase_longer_than_a_cold_start_is_not_called_one(record: Build) -> None:
    assert cold(record, [14.0] * 12 + STEADY * 2) is None


def test_several_in_flight_wait_for_each_other_at_first(record: Build) -> None:
    assert cold(record, [40, *STEADY[1:]], concurrency=8) is None


def test_looked_up_drafts_make_steps_unlike_without_a_cold_start(record: Build) -> None:
    rising = timed(record, [1000 / rate for rate in CLIMB + PLATEAU])
    assert finding("cold-start", facts(rising, method="ngram")) is None
    assert finding("cold-start", facts(rising, method="eagle")) is not None


def test_answers_of_one_chunk_have_no_steps_to_judge(record: Build) -> None:
    whole = [record(f"{i}", sent=100 * i, chunks=(100 * i + 50,), tokens=9) for i in range(20)]
    assert finding("cold-start", vanilla(whole)) is None


# --- two arms ------------------------------------------------------------------------------------


def keyed(records: Sequence[Request]) -> dict[Key, Request]:
    return {Key(r.prompt_id, r.turn, r.start, r.cycle): r for r in records}


def pair(base: CaseFacts, arm: CaseFacts) -> PairFacts:
    """The starts of an engine are the repeats."""
    ones, others = keyed(base.records), keyed(arm.records)
    both = [(key, ones[key], others[key]) for key in ones if key in others]
    return PairFacts(base, arm, both, compare(ones, others))


def pair_finding(check: str, base: CaseFacts, arm: CaseFacts) -> str | None:
    return PAIR_CHECKS[check](pair(base, arm))


def sampled(
    record: Build, k: int, tokens: Callable[[int, int], int], temperature: float
) -> CaseFacts:
    """40 prompts of 20 tokens each, chosen by *tokens* from (prompt, position)."""
    records = [
        record(f"{i}", tokens=20, token_ids=tuple(tokens(i, at) for at in range(20)))
        for i in range(40)
    ]
    return facts(
        records, k=k, method="eagle" if k else "vanilla", sampling={"temperature": temperature}
    )


def test_a_sampler_that_speculation_breaks_is_found(record: Build) -> None:
    """Half of the tokens are garbage, as vLLM 0.32's CPU build makes them at temperature 1."""
    dice = random.Random(3)

    def right(_prompt: int, _at: int) -> int:
        return dice.choice([1, 1, 1, 2, 2, 3])

    def garbage(prompt: int, at: int) -> int:
        return dice.randrange(40_000) if dice.random() < 0.5 else right(prompt, at)

    base, sound, broken = (
        sampled(record, k, tokens, 1.0) for k, tokens in ((0, right), (3, right), (3, garbage))
    )
    said = pair_finding("sampler", base, broken)
    assert said is not None
    assert "specbench verify" in said
    assert pair_finding("sampler", base, sound) is None
    assert (
        pair_finding("sampler", base, sampled(record, 3, garbage, 0.0)) is None
    )  # that is parity's


def test_a_draft_no_better_than_chance_is_found(record: Build) -> None:
    """45 of 4071 drafted tokens: what the broken sampler left of EAGLE."""
    spent = span(1, drafts=1357, draft_tokens=4071, accepted=45)
    said = finding("impossible-length", facts([record()], spent))
    assert said is not None
    assert said.startswith("45 of 4071 drafted tokens were accepted")
    assert finding("impossible-length", facts([record()], spent, method="ngram")) is None
    good = span(1, drafts=1357, draft_tokens=4071, accepted=900)
    assert finding("impossible-length", facts([record()], good)) is None


def test_a_sound_pair_has_no_flag(record: Build, sound: CaseFacts) -> None:
    assert pair_flags(pair(vanilla([record(tokens=40)]), sound)) == []


def test_a_flagged_baseline_flags_the_ratio(record: Build, sound: CaseFacts) -> None:
    found = pair_flags(pair(vanilla([record(tokens=40)], expected=80), sound))
    assert found == [Flag("baseline", "the baseline itself is flagged: missing")]


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
def test_outputs_of_unequal_length_are_found(record: Build, arm: int, said: str | None) -> None:
    """Case E6: 1000 tokens against 947."""
    base, other = vanilla([record(tokens=1000)]), facts([record(tokens=arm)])
    assert pair_finding("lengths", base, other) == said


def test_lengths_are_of_the_prompts_that_both_answered(record: Build) -> None:
    base = vanilla([record("a", tokens=100), record("b", tokens=100)])
    assert pair_finding("lengths", base, facts([record("a", tokens=100)])) is None


def test_arms_that_were_asked_something_else_are_found(record: Build) -> None:
    """Cases D5, D6, E10."""
    base = vanilla([record("a", prompt_tokens=31), record("b", prompt_tokens=9)])

    def said(*records: RequestRecord) -> str | None:
        return pair_finding("prompts", base, facts(records))

    assert said(record("a", prompt_tokens=31), record("b", prompt_tokens=9)) is None
    assert said(record("a"), record("b", prompt_sha256="0" * 64)) == (
        "1 of 2 prompts were another text (b)"
    )
    assert said(record("a", prompt_tokens=18), record("b", prompt_tokens=9)) == (
        "1 of 2 prompts became another number of tokens (a): another chat template or tokenizer?"
    )


def test_a_second_turn_may_hold_another_first_answer(record: Build) -> None:
    one, other = (record("a", turn=1, prompt_sha256=c * 64, prompt_tokens=9) for c in "01")
    assert pair_finding("prompts", vanilla([one]), facts([other])) is None


def test_prompts_of_one_arm_only_are_found(record: Build) -> None:
    sets = [[Prompt(id=name, turns=("x",)) for name in names] for names in ("ab", "abc")]
    base, arm = (vanilla([record("a")], prompts=prompts) for prompts in sets)
    assert pair_finding("prompts", base, arm) == "1 prompts belong to one of the two arms only (c)"
    assert pair_finding("prompts", base, base) is None


def test_arms_with_unlike_sampling_are_found(record: Build) -> None:
    """Case C3: the baseline at 0.0, EAGLE at 0.7."""
    base = vanilla([record("a", sampling=SENT)])
    hot = facts([record("a", sampling=SENT | {"temperature": 0.7})])
    said = "temperature is 0.0 for the baseline, 0.7 here (a)"
    assert pair_finding("sampling-differs", base, hot) == said
    assert pair_finding("sampling-differs", base, facts([record("a", sampling=SENT)])) is None
    assert pair_finding("sampling-differs", base, facts([record("a")])) is None


# --- set-ups -------------------------------------------------------------------------------------

SERVE = ("python", "-m", "vllm.entrypoints.cli.main", "serve", "/models/target")
ADDRESS = ("--host", "127.0.0.1", "--port", "40001", "--served-model-name", "specbench-1")


def engine(*flags: str, **more: object) -> EngineFacts:
    said: dict[str, Any] = {
        "arm": "vanilla",
        "start": 0,
        "kind": "vllm",
        "version": "0.32.0",
        "url": "http://127.0.0.1:40001",
        "served_model": "specbench-1",
        "argv": (*SERVE, *flags, *ADDRESS),
        "env": {"OMP_NUM_THREADS": "1"},
        "started_at": "2026-11-01T00:00:00+00:00",
    }
    return EngineFacts.model_validate(said | more)


EAGLE = '{"method": "eagle", "model": "/models/head", "num_speculative_tokens": 3}'


def test_engines_that_differ_in_their_speculation_and_address_are_alike() -> None:
    arm = engine("--speculative-config", EAGLE, "--per-request-spec-decode-metrics", "detailed")
    moved = arm.argv and tuple("40002" if token == "40001" else token for token in arm.argv)
    other = arm.model_copy(update={"argv": moved, "pid": 7, "url": "http://127.0.0.1:40002"})
    assert engine_differences([engine()], [other]) == []


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        (engine("--enforce-eager"), "--enforce-eager: not set against true"),
        (engine("--no-enable-prefix-caching"), "--enable-prefix-caching: not set against false"),
        (
            engine("--gpu-memory-utilization", "0.45"),
            "--gpu-memory-utilization: not set against 0.45",
        ),
        (engine(version="0.33.0"), "version: 0.32.0 against 0.33.0"),
        (engine(argv=None, version="0.33.0"), "version: 0.32.0 against 0.33.0"),
        (engine(env={"OMP_NUM_THREADS": "2"}), "OMP_NUM_THREADS: 1 against 2"),
        (
            engine(argv=("vllm", "serve", "/models/other")),
            "model: /models/target against /models/other",
        ),
    ],
    ids=["eager", "cache", "memory", "version", "attached", "threads", "model"],
)
def test_engines_with_unlike_set_ups_are_found(record: Build, arm: EngineFacts, said: str) -> None:
    """Case C5."""
    assert engine_differences([engine()], [arm]) == [said]
    base = vanilla([record()], engines=[engine()])
    other = facts([record()], engines=[arm])
    assert pair_finding("setup", base, other) == f"set up unlike the baseline: {said}"
    assert pair_finding("setup", base, base) is None


def test_an_engine_that_was_up_already_is_not_judged_by_its_arguments() -> None:
    assert engine_differences([engine("--enforce-eager")], [engine(argv=None)]) == []
    assert engine_differences([engine()], [engine(argv=None, version=None)]) == []
    assert engine_differences([engine()], []) == []


def test_a_restart_with_another_version_is_found() -> None:
    both = [engine(), engine(start=1, version="0.33.0")]
    assert engine_differences(both, both) == [
        "version: 0.32.0 and 0.33.0 against 0.32.0 and 0.33.0"
    ]


def test_many_differences_are_counted(record: Build) -> None:
    arm = engine("--enforce-eager", "--dtype", "float16", env={"A": "1", "OMP_NUM_THREADS": "2"})
    base, other = (vanilla([record()], engines=[one]) for one in (engine(), arm))
    said = pair_finding("setup", base, other)
    assert said == (
        "set up unlike the baseline: OMP_NUM_THREADS: 1 against 2; "
        "--enforce-eager: not set against true; --dtype: not set against float16 and 1 more"
    )


def test_an_argument_is_read_in_every_spelling() -> None:
    argv = (*SERVE, "--a_b=1", "--config", '{"y": 1, "x": 2}', "--seed", "-1", "--names", "p", "q")
    assert arguments(argv) == {
        "model": "/models/target",
        "a-b": "1",
        "config": '{"x": 2, "y": 1}',
        "seed": "-1",
        "names": "p q",
    }


H100 = {
    "name": "NVIDIA H100",
    "uuid": "GPU-1",
    "driver_version": "575",
    "memory.total": "81559 MiB",
}
H100_SAID = "NVIDIA H100, 81559 MiB, ?, ?, 575"
MACHINE = {
    "commit": "abc",
    "cpu": "AMD EPYC",
    "cores": 8,
    "memory_gib": 62.7,
    "gpus": [H100],
    "packages": {"torch": "2.13.0"},
}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({}, []),
        ({"commit": "def", "memory_gib": 62.8}, []),
        ({"gpus": [H100 | {"uuid": "GPU-2"}]}, []),
        ({"gpus": None}, []),
        ({"cpu": "Intel Xeon"}, ["cpu: AMD EPYC against Intel Xeon"]),
        ({"memory_gib": 125.5}, ["memory GiB: 62.7 against 125.5"]),
        ({"packages": {"torch": "2.14.0"}}, ["torch: 2.13.0 against 2.14.0"]),
        (
            {"gpus": [H100, H100]},
            [f"gpus: 1x {H100_SAID} against 2x {H100_SAID}"],
        ),
    ],
    ids=["same", "commit", "gpu-id", "unknown", "cpu", "memory", "torch", "gpus"],
)
def test_unlike_machines_are_found(record: Build, other: dict[str, Any], said: list[str]) -> None:
    assert machine_differences(MACHINE, MACHINE | other) == said
    base = vanilla([record()], machine=MACHINE)
    arm = facts([record()], machine=MACHINE | other)
    found = pair_finding("setup", base, arm)
    assert found == (f"set up unlike the baseline: {'; '.join(said)}" if said else None)


def test_one_machine_that_is_not_known_is_not_judged() -> None:
    assert machine_differences({}, MACHINE) == []


SYNTHETIC = '{"method": "eagle", "rejection_sample_method": "synthetic"}'
RATES = '{"method": "eagle", "synthetic_acceptance_rates": [0.8, 0.6]}'
BLOCK = (
    '{"method": "eagle", "rejection_sample_method": "block", "synthetic_acceptance_length": null}'
)


@pytest.mark.parametrize(
    ("of", "what"),
    [
        (engine("--speculative-config", SYNTHETIC), "rejection_sample_method: synthetic"),
        (engine(f"-sc={SYNTHETIC}"), "rejection_sample_method: synthetic"),
        (engine("--speculative-config", RATES), "synthetic_acceptance_rates: [0.8, 0.6]"),
        (
            engine("--speculative-config.synthetic-acceptance-length", "2.5"),
            "synthetic_acceptance_length: 2.5",
        ),
        (engine(env={"SGLANG_SIMULATE_ACC_LEN": "3"}), "SGLANG_SIMULATE_ACC_LEN: 3"),
        (engine(env={"SGLANG_SIMULATE_ACC_LEN": "0"}), None),
        (engine("--speculative-config", BLOCK), None),
        (engine("--speculative-config", EAGLE), None),
        (engine("--speculative-config", "{torn"), None),
        (engine(argv=None), None),
    ],
)
def test_synthetic_acceptance_left_on_is_found(
    record: Build, of: EngineFacts, what: str | None
) -> None:
    """Case C5."""
    said = what and f"acceptance is synthetic ({what}): no text was really accepted"
    assert finding("synthetic", facts([record()], engines=[of])) == said


# --- noise ---------------------------------------------------------------------------------------


def passes(
    record: Build, *tpot_ms: float, at: float = 0, cycles: bool = False
) -> list[RequestRecord]:
    """Eight prompts of 11 tokens in each pass, *at* ms after the hour."""
    found = []
    for number, tpot in enumerate(tpot_ms):
        for i in range(8):
            sent = at + 1e6 * number + 5000 * i
            wobble = tpot * (1 + 0.001 * (i % 3))
            found.append(
                record(
                    f"p{i}",
                    sent=sent,
                    chunks=(sent + 50, sent + 50 + 10 * wobble),
                    tokens=11,
                    **({"cycle": number} if cycles else {"start": number}),
                )
            )
    return found


def test_noise_between_repeats_over_the_claim_is_found(record: Build) -> None:
    """One arm after the other: 8% claimed, while the baseline alone differs by 21%."""
    base = vanilla(passes(record, 20.0, 22.0, 24.2, 22.0))
    arm = facts(passes(record, 18.6, 20.4, 22.4, 20.3, at=500_000))
    said = "the baseline's own TPOT differs by 21.0% between repeats, more than the 7.9% claimed"
    assert pair_finding("noise", base, arm) == said


def test_a_claim_over_the_noise_stands(record: Build) -> None:
    base = vanilla(passes(record, 20.0, 22.0, 24.2, 22.0))
    arm = facts(passes(record, 10.0, 11.0, 12.1, 11.0, at=500_000))
    assert pair_finding("noise", base, arm) is None


def test_drift_between_cycles_of_one_arm_after_the_other_is_noise(record: Build) -> None:
    base = vanilla(passes(record, 20.0, 24.0, cycles=True))
    arm = facts(passes(record, 18.0, 22.0, at=5e6, cycles=True))
    said = pair_finding("noise", base, arm)
    assert said is not None
    assert said.startswith("the baseline's own TPOT differs by 20.0%")


def test_noise_that_both_arms_felt_at_the_same_time_cancels(record: Build) -> None:
    base = vanilla(passes(record, 20.0, 22.0, 24.2, 22.0))
    arm = facts(passes(record, 18.6, 20.4, 22.4, 20.3, at=1000))
    assert pair_finding("noise", base, arm) is None


def test_restarts_that_disagree_by_more_than_the_claim_are_found(record: Build) -> None:
    base = vanilla(passes(record, *[20.0] * 6))
    arm = facts(passes(record, 17.0, 17.2, 17.4, 17.6, 19.5, 19.6, at=1000))
    said = "the speed-up differs by 15.3% between repeats, more than the 11.0% claimed"
    assert pair_finding("noise", base, arm) == said


def test_where_no_difference_is_claimed_none_is_refuted(record: Build) -> None:
    base = vanilla(passes(record, 20.0, 24.0))
    arm = facts(passes(record, 19.0, 25.5, at=500_000))
    assert pair_finding("noise", base, arm) is None


def test_a_pass_without_most_of_the_prompts_is_no_measure_of_noise(record: Build) -> None:
    base = passes(record, 20.0, 20.1, 30.0, cycles=True)[:18]
    arm = facts(passes(record, 18.0, 18.0, 27.0, at=5e6, cycles=True))
    assert pair_finding("noise", vanilla(base), arm) is None


def test_streams_that_were_read_late_are_counted(record: Build) -> None:
    late = [record(f"l{i}", chunks=[4495] * 20) for i in range(2)]
    fine = [record(f"f{i}", chunks=[100 + 20 * j for j in range(20)]) for i in range(30)]
    said = finding("stalled", vanilla([*fine, *late]))
    assert said is not None
    assert said.startswith("the first token of 2 of 32 answers came together with later ones")
    assert finding("stalled", vanilla(fine)) is None


def test_answers_that_the_server_cuts_at_a_limit_of_its_own(record: Build) -> None:
    """Triton's vLLM backend cuts at 16 tokens what comes without sampling_parameters."""
    cut = [record("a", tokens=16, finish_reason="length"), record("b", tokens=9)]
    found = vanilla(cut, max_tokens=64)
    assert "cut at 16 tokens, not at max_tokens = 64" in (finding("cut-short", found) or "")
    whole = [record("a", tokens=64, finish_reason="length"), record("b", tokens=9)]
    assert finding("cut-short", vanilla(whole, max_tokens=64)) is None
    assert finding("cut-short", vanilla(cut, max_tokens=16)) is None
    guessed = [record("a", tokens=16, finish_reason="length", token_source="chunks")]
    assert finding("cut-short", vanilla(guessed, max_tokens=64)) is None


def test_acceptance_from_chunks_is_of_single_steps(record: Build) -> None:
    """Triton counts no drafts: a chunk is taken for a step, and one of several steps is found."""
    single = [record("a", chunks=(1, 2, 3, 4), chunk_tokens=(1, 4, 1, 2), tokens=8)]
    metrics = summarise(single, speculative=True)
    assert metrics.acceptance is not None
    assert metrics.acceptance.source == "chunks"
    assert metrics.acceptance.length == pytest.approx(7 / 3)
    assert metrics.acceptance.per_position == (2, 1, 1)
    assert metrics.acceptance.rate is None
    assert metrics.acceptance.length_per_draft is None
    found = replace(facts(single, k=3), metrics=metrics)
    assert finding("merged-chunks", found) is None
    assert "1 of 3 chunks hold more than k + 1 = 3" in (
        finding("merged-chunks", replace(facts(single, k=2), metrics=metrics)) or ""
    )
    assert summarise(single).acceptance is None  # of an arm that does not speculate
    unknown = [record("a", chunks=(1, 2, 3), tokens=8)]
    assert summarise(unknown, speculative=True).acceptance is None


def test_times_as_short_as_the_clients_own_error(record: Build) -> None:
    fast = [record(p, chunks=(10, 11, 12, 13)) for p in "abcd"]
    slow = [record(p, chunks=(10, 60, 110, 160)) for p in "abcd"]
    error = ClientError(
        concurrency=1,
        gap_ms=1,
        requests=4,
        chunks=100,
        served_gap_ms=1,
        ttft_ms=0.1,
        ttft_median_ms=0.1,
        ttft_p95_ms=0.2,
        tpot_ms=0.05,
        tpot_share=0.05,
        latency_ms=0.2,
        delay_ms=0.05,
        delay_p95_ms=0.1,
        merged_share=0,
        held_up=0,
        cpu_us_per_chunk=50,
    )
    known = Calibration(errors=(error,), wall_s=1)
    assert "+5.0% of the time per token" in (
        finding("client", replace(vanilla(fast), calibration=known)) or ""
    )
    assert finding("client", replace(vanilla(slow), calibration=known)) is None
    assert finding("client", vanilla(fast)) is None


def test_a_client_that_does_not_keep_the_rate(record: Build) -> None:
    ms = 1_000_000
    kept = [record(p, sent=100 * i + 2, due_ns=100 * i * ms) for i, p in enumerate("abcd")]
    late = [record(p, sent=100 * i + 30, due_ns=100 * i * ms) for i, p in enumerate("abcd")]
    assert finding("late", vanilla(kept)) is None
    assert "30.0 ms after they were due on average, 30%" in (finding("late", vanilla(late)) or "")
    assert finding("late", vanilla([record(p) for p in "abcd"])) is None
