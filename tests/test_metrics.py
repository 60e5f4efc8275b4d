"""Every figure against one worked out by hand; nothing is made up where nothing was measured."""

from collections.abc import Callable

import pytest

from specbench.analysis import metrics
from specbench.analysis.metrics import Acceptance, goodput, summarise
from specbench.records import CounterSpan, EngineCounters, RequestRecord, SpecRequest

Build = Callable[..., RequestRecord]


def acceptance(
    drafts: int,
    draft_tokens: int,
    accepted: int,
    undrafted: int = 0,
    positions: tuple[int, ...] | None = None,
) -> Acceptance:
    return Acceptance("counters", drafts, draft_tokens, accepted, undrafted, positions)


def spec(*histogram: int, drafts: int | None = None) -> SpecRequest:
    """What vLLM says of a request; histogram[n] steps accepted n drafts each."""
    steps = sum(histogram) if drafts is None else drafts
    return SpecRequest(
        drafts=steps,
        draft_tokens=steps * (len(histogram) - 1),
        accepted=sum(n * count for n, count in enumerate(histogram)),
        accepted_histogram=histogram or None,
    )


def span(requests: int, **spent: int | tuple[int, ...]) -> CounterSpan:
    return CounterSpan(requests=requests, spent=EngineCounters.model_validate(spent))


# --- times ---------------------------------------------------------------------------------------


def test_latency_and_first_token_count_from_sending(record: Build) -> None:
    one = record(sent=50, chunks=(150, 250, 650))
    assert metrics.latency_ms(one) == 600
    assert metrics.ttft_ms(one) == 100
    assert metrics.tpot_ms(one) == 250  # (600 - 100) / (3 - 1)


def forty_chunks(first_ms: float = 300) -> list[float]:
    return [first_ms + 2000 * i / 39 for i in range(40)]


def test_time_per_token_counts_tokens_not_chunks(record: Build) -> None:
    """Case E2: 100 tokens in 40 chunks, 2.0 s after the first: 2000 / 99, not 2000 / 39."""
    one = record(chunks=forty_chunks(), tokens=100)
    assert metrics.tpot_ms(one) == pytest.approx(20.2, abs=0.01)


def test_a_first_chunk_of_several_tokens_leaves_fewer_for_the_time_after_it(
    record: Build,
) -> None:
    """Case E2: the first of the 40 chunks carries 4 tokens: 2000 / 96."""
    one = record(chunks=forty_chunks(), tokens=100, chunk_tokens=(4, *[2] * 18, *[3] * 20, 0))
    assert metrics.tpot_ms(one) == pytest.approx(20.833, abs=0.001)


def test_an_empty_first_chunk_counts_as_one_token(record: Build) -> None:
    """A role or a byte that is half a character: output, but no whole token of it."""
    assert metrics.tpot_ms(record(chunks=(0, 900), tokens=10, chunk_tokens=(0, 10))) == 100


@pytest.mark.parametrize(
    ("chunks", "more"),
    [
        pytest.param((300,), {"tokens": 100}, id="one-chunk"),
        pytest.param((300, 400), {"tokens": 1}, id="one-token"),
        pytest.param((300, 400), {"tokens": 0}, id="no-token"),
        pytest.param((300, 400), {"output_tokens": None}, id="not-counted"),
        pytest.param((300, 400), {"tokens": 4, "chunk_tokens": (4, 0)}, id="all-in-the-first"),
        pytest.param((), {"tokens": 0, "error": "cut"}, id="failed"),
    ],
)
def test_no_time_per_token_where_there_was_none(
    record: Build, chunks: tuple[float, ...], more: dict[str, object]
) -> None:
    assert metrics.tpot_ms(record(chunks=chunks, **more)) is None


def test_throughput_is_over_the_time_with_a_request_in_flight(record: Build) -> None:
    """[0, 200] and [100, 300] overlap, [1000, 1100] stands apart: 400 ms, not 1100."""
    records = [
        record("a", sent=0, chunks=(50, 200), tokens=10),
        record("b", sent=100, chunks=(250, 300), tokens=20),
        record("c", sent=1000, chunks=(1050, 1100), tokens=10),
    ]
    assert metrics.busy_ns(records) == 400_000_000
    assert summarise(records).tokens_per_s == 100


def test_a_request_inside_another_adds_no_time(record: Build) -> None:
    records = [record(sent=0, chunks=(10, 500)), record(sent=100, chunks=(150, 200))]
    assert metrics.busy_ns(records) == 500_000_000


# --- acceptance ----------------------------------------------------------------------------------


def test_the_bonus_token_is_in_the_length_and_not_in_the_rate() -> None:
    """Case B1: 100 drafts, 400 tokens, 150 accepted."""
    found = acceptance(100, 400, 150, positions=(70, 45, 25, 10))
    assert found.length == found.length_per_draft == 2.5
    assert found.rate == 0.375
    assert found.positions == (0.7, 0.45, 0.25, 0.1)
    assert 1 + sum(found.positions) == pytest.approx(found.length)


def test_steps_without_a_draft_are_steps() -> None:
    """Case B6: output 5376 = 993 drafts + 3562 accepted + 821 undrafted."""
    found = acceptance(993, 993 * 5, 3562, undrafted=821)
    assert found.length_per_draft == pytest.approx(4.59, abs=0.005)
    assert found.length == pytest.approx(2.96, abs=0.005)
    assert found.coverage == pytest.approx(993 / 1814)


def test_undrafted_steps_are_found_from_the_output(record: Build) -> None:
    """Case B6, from counters: the request's first token comes from no step."""
    records = [record(tokens=5376 + 1)]
    spent = EngineCounters(drafts=993, draft_tokens=4965, accepted=3562)
    found = metrics.acceptance_of_counters(spent, records)
    assert found is not None
    assert found.undrafted_steps == 821
    assert found.length == pytest.approx(2.96, abs=0.005)


def test_tokens_trimmed_at_the_end_make_no_negative_steps(record: Build) -> None:
    """Case B5: one draft of 5, all accepted, the end third: 3 tokens sent, 7 made."""
    found = metrics.acceptance_of_counters(
        EngineCounters(drafts=1, draft_tokens=5, accepted=5), [record(tokens=3)]
    )
    assert found is not None
    assert found.undrafted_steps == 0
    assert found.length == 6


def test_no_drafts_give_no_figure() -> None:
    """Case B3: never 0, never 1, never a division by zero."""
    found = acceptance(0, 0, 0)
    assert (found.length, found.length_per_draft, found.rate) == (None, None, None)
    assert (found.coverage, found.positions) == (None, None)


def test_per_request_metrics_give_the_positions(record: Build) -> None:
    """Two steps accepted 0, three 1, one 2: position 1 four times, position 2 once."""
    found = metrics.acceptance_of_requests([record(tokens=12, spec=spec(2, 3, 1))])
    assert found is not None
    assert (found.drafts, found.draft_tokens, found.accepted) == (6, 12, 5)
    assert found.per_position == (4, 1)
    assert found.undrafted_steps == 0  # 12 = 1 + 6 + 5


def test_positions_of_requests_add_up_whatever_their_depth(record: Build) -> None:
    records = [record(spec=spec(1, 1)), record(spec=spec(0, 0, 0, 2))]
    found = metrics.acceptance_of_requests(records)
    assert found is not None
    assert found.per_position == (3, 2, 2)


def test_a_request_that_drafted_nothing_hides_no_positions(record: Build) -> None:
    found = metrics.acceptance_of_requests([record(spec=spec(1, 1)), record(spec=spec())])
    assert found is not None
    assert found.per_position == (1,)


def test_positions_are_unknown_when_one_request_does_not_say(record: Build) -> None:
    silent = spec(1, 1).model_copy(update={"accepted_histogram": None})
    found = metrics.acceptance_of_requests([record(spec=spec(1, 1)), record(spec=silent)])
    assert found is not None
    assert found.accepted == 2
    assert found.per_position is None


def test_acceptance_is_unknown_when_one_request_does_not_say(record: Build) -> None:
    assert metrics.acceptance_of_requests([record(spec=spec(1, 1)), record()]) is None
    assert metrics.acceptance_of_requests([]) is None


# --- one case ------------------------------------------------------------------------------------


def test_nothing_measured_is_nothing_said() -> None:
    """Case G1."""
    found = summarise([])
    assert (found.requests, found.failed, found.prompts, found.output_tokens) == (0, 0, 0, 0)
    assert (found.latency_ms, found.ttft_ms, found.tpot_ms, found.tokens_per_s) == (None,) * 4
    assert found.acceptance is None


def test_80_failures_have_no_times(record: Build) -> None:
    """Case G1: most failed before their first chunk, one after it."""
    failed = [record(f"{i}", chunks=(), tokens=0, error="HTTP 500") for i in range(79)]
    failed.append(record("79", chunks=(10,), error="the stream was cut"))
    found = summarise(failed, [span(80, drafts=0, accepted=0)])
    assert (found.requests, found.failed, found.output_tokens) == (0, 80, 0)
    assert (found.latency_ms, found.ttft_ms, found.tpot_ms, found.tokens_per_s) == (None,) * 4
    assert found.acceptance is None


def test_a_failed_request_is_counted_and_not_timed(record: Build) -> None:
    found = summarise([record("a", chunks=(100, 300)), record("b", chunks=(), error="cut")])
    assert (found.requests, found.failed, found.prompts) == (1, 1, 1)
    assert (found.latency_ms, found.ttft_ms, found.tpot_ms) == (300, 100, 200)


def test_means_are_over_requests(record: Build) -> None:
    found = summarise([record("a", chunks=(100, 300)), record("b", chunks=(200, 300, 1000))])
    assert (found.latency_ms, found.ttft_ms) == (650, 150)
    assert found.tpot_ms == (200 + 400) / 2


def test_percentiles_lie_between_two_requests_as_numpys_do(record: Build) -> None:
    """101 requests of 1 to 101 ms to the first token, 11 later: p50 is 51, p90 91, p99 100."""
    found = summarise([record(f"{i}", chunks=(i, i + 11)) for i in range(1, 102)])
    assert [found.percentiles[f"ttft_p{p}_ms"] for p in (50, 90, 99)] == pytest.approx(
        [51, 91, 100]
    )
    assert [found.percentiles[f"latency_p{p}_ms"] for p in (50, 90, 99)] == pytest.approx(
        [62, 102, 111]
    )
    assert [found.percentiles[f"tpot_p{p}_ms"] for p in (50, 90, 99)] == pytest.approx([11] * 3)
    ten = summarise([record(f"{i}", chunks=(i, i + 11)) for i in range(1, 11)])
    assert ten.percentiles["ttft_p50_ms"] == pytest.approx(5.5)
    assert ten.percentiles["ttft_p90_ms"] == pytest.approx(9.1)


@pytest.mark.parametrize(
    ("requests", "known"),
    [(0, ()), (1, ()), (2, (50,)), (9, (50,)), (10, (50, 90)), (99, (50, 90)), (100, (50, 90, 99))],
)
def test_a_percentile_that_would_be_the_largest_is_left_out(
    record: Build, requests: int, known: tuple[int, ...]
) -> None:
    found = summarise([record(f"{i}", chunks=(100 + i, 200 + i)) for i in range(requests)])
    assert set(found.percentiles) == {
        f"{name}_p{percent}_ms" for name in ("ttft", "tpot", "latency") for percent in known
    }


def test_percentiles_are_of_the_requests_that_have_the_figure(record: Build) -> None:
    """One chunk has no TPOT; a failure nothing."""
    one_chunk = [record(f"s{i}", chunks=(100,)) for i in range(9)]
    failed = record("f", chunks=(), tokens=0, error="cut")
    found = summarise([record("a"), *one_chunk, failed])
    assert found.percentiles["ttft_p90_ms"] == 100
    assert not [name for name in found.percentiles if name.startswith("tpot")]


def test_requests_per_second_are_over_the_same_time_as_tokens(record: Build) -> None:
    found = summarise([record("a", chunks=(100, 500)), record("b", sent=800, chunks=(900, 1300))])
    assert found.requests_per_s == pytest.approx(2)
    assert found.tokens_per_s == pytest.approx(4)
    assert summarise([]).requests_per_s is None


def test_a_figure_goes_with_its_percentiles(record: Build) -> None:
    found = summarise([record(f"{i}") for i in range(10)])
    left = metrics.without(found, "ttft_ms", "tokens_per_s")
    assert (left.ttft_ms, left.tokens_per_s, left.latency_ms) == (None, None, found.latency_ms)
    assert set(left.percentiles) == {
        *("tpot_p50_ms", "tpot_p90_ms", "latency_p50_ms", "latency_p90_ms")
    }


def test_turns_of_a_conversation_are_one_prompt(record: Build) -> None:
    assert summarise([record("a", turn=0), record("a", turn=1), record("b")]).prompts == 2


def test_per_request_metrics_come_before_counters(record: Build) -> None:
    found = summarise([record(spec=spec(1, 1))], [span(1, drafts=9, draft_tokens=9, accepted=9)])
    assert found.acceptance is not None
    assert found.counted is not None
    assert (found.acceptance.source, found.acceptance.drafts) == ("requests", 2)
    assert (found.counted.source, found.counted.drafts) == ("counters", 9)


def test_counters_of_several_spans_add_up(record: Build) -> None:
    spans = [span(1, drafts=3, accepted=2), span(2, drafts=4, accepted=1)]
    found = summarise([record("a"), record("b"), record("c")], spans)
    assert found.acceptance is not None
    assert (found.acceptance.drafts, found.acceptance.accepted) == (7, 3)


@pytest.mark.parametrize(
    "spans",
    [
        pytest.param([], id="none"),
        pytest.param([span(1, drafts=3, accepted=2)], id="too-few"),
        pytest.param([span(3, drafts=3, accepted=2)], id="too-many"),
        pytest.param([span(2, generation_tokens=5)], id="no-draft-counters"),
        pytest.param(
            [span(1, drafts=3, accepted=2), CounterSpan(requests=1, problem="HTTP 500")],
            id="one-unreadable",
        ),
    ],
)
def test_counters_that_cover_other_requests_are_not_used(
    record: Build, spans: list[CounterSpan]
) -> None:
    """Case B2, B3."""
    assert summarise([record("a"), record("b")], spans).acceptance is None


def test_counters_around_a_failed_request_are_not_used(record: Build) -> None:
    records = [record("a"), record("b", error="cut")]
    assert summarise(records, [span(2, drafts=3, accepted=2)]).acceptance is None


# --- after a resume ------------------------------------------------------------------------------


def test_a_repeated_request_counts_once(record: Build) -> None:
    first, again = record("a", chunks=(100,)), record("a", chunks=(900,))
    assert metrics.last_attempts([first, again]) == [again]


def test_a_good_attempt_is_not_undone_by_a_later_failure(record: Build) -> None:
    good, bad = record("a"), record("a", error="cut")
    assert metrics.last_attempts([bad, good]) == [good]
    assert metrics.last_attempts([good, bad]) == [good]
    assert metrics.last_attempts([bad]) == [bad]


def test_turns_are_different_requests(record: Build) -> None:
    turns = [record("a", turn=0), record("a", turn=1)]
    assert metrics.last_attempts(turns) == turns


def test_a_stream_that_was_read_all_at_once_has_no_time_per_token(record: Build) -> None:
    """Seen on a busy machine: 33 chunks of 48 tokens, all stamped 4495 ms after sending."""
    stalled = record(chunks=[4495] * 33, tokens=48, chunk_tokens=(1,) * 32 + (16,))
    assert metrics.held_up(stalled)
    assert metrics.tpot_ms(stalled) is None
    late = record(chunks=[100] * 3 + [100 + 10 * i for i in range(1, 30)])
    assert not metrics.held_up(late)
    assert metrics.tpot_ms(late) is not None
    assert not metrics.held_up(record(chunks=[100, 100]))


def test_steps_are_not_known_where_the_first_chunk_holds_later_ones(record: Build) -> None:
    """Seen on a busy server: 12 tokens in the first chunk, which took several of the 13 drafts."""
    steps = SpecRequest(drafts=13, draft_tokens=39, accepted=10)
    merged = record(chunks=[1480, 1564, 1702], tokens=24, chunk_tokens=(12, 6, 6), spec=steps)
    assert metrics.decode_steps(merged) is None
    assert metrics.tokens_per_step(merged) is None
    assert metrics.tpot_ms(merged) == pytest.approx(222 / 12)
    whole = record(chunks=[100, 1702], tokens=24, chunk_tokens=(1, 23), spec=steps)
    assert metrics.tokens_per_step(whole) == pytest.approx(23 / 13)


def test_goodput_counts_requests_within_every_limit(record: Build) -> None:
    records = [
        record("a", sent=0, chunks=(100, 200)),  # TTFT 100, TPOT 100, latency 200
        record("b", sent=1000, chunks=(1300, 1350)),  # TTFT 300
        record("c", sent=2000, chunks=(2050, 2450)),  # TPOT 400
        record("d", sent=3000, chunks=(3050,), tokens=1),  # no TPOT to break a limit with
        record("e", sent=4000, chunks=(), error="lost"),
    ]
    limits = {"ttft_ms": 150, "tpot_ms": 150}
    closed = goodput(records, limits, open_loop=False)
    assert (closed.good, closed.requests) == (2, 5)
    assert closed.per_s == pytest.approx(2 / 1.05)  # 200 + 350 + 450 + 50 ms in flight
    waiting = goodput(records, limits, open_loop=True)
    assert waiting.per_s == pytest.approx(2 / 3.05)  # from the first sent to the last answer
    assert goodput(records, {"latency_ms": 60}, open_loop=False).good == 1
    assert goodput([], limits, open_loop=True).per_s is None
