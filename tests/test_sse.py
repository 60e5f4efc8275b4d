"""Streams as vLLM writes them, whole and broken, at every way of cutting them into reads."""

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.load import sse

DATA = Path(__file__).with_name("data")
CHAT = (DATA / "vllm_0.32_chat_eagle_k3.sse").read_bytes()
COMPLETION = (DATA / "vllm_0.32_completion_eagle_k3.sse").read_bytes()


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def content(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"delta": {"content": text}, "finish_reason": finish}])


def test_the_recorded_chat_reads_as_it_was_sent() -> None:
    answer = sse.read([(1, CHAT)])
    assert answer.problem is None
    assert answer.tokens == (24, "usage")
    assert len(answer.token_ids) == 24
    assert answer.chunk_tokens == [1, 1, 3, 2, 1, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 2, 1]
    assert answer.finish_reason == "length"
    assert "".join(answer.text).startswith("The waves of the sea, a silent beauty,\n")
    assert answer.prompt_head == (1, 9690, 198, 2683, 359, 253, 5356, 5646)
    assert answer.done


def test_the_recorded_chats_speculation_is_vllms_own_account() -> None:
    spec = sse.read([(1, CHAT)]).spec
    assert spec is not None
    assert (spec.drafts, spec.draft_tokens, spec.accepted) == (17, 51, 6)
    assert spec.accepted_histogram == (12, 4, 1, 0)
    assert 1 + spec.drafts + spec.accepted == 24  # the token identity, nothing trimmed


def test_the_recorded_completion_reads_as_it_was_sent() -> None:
    answer = sse.read([(1, COMPLETION)])
    assert answer.problem is None
    assert answer.tokens == (12, "usage")
    assert "".join(answer.text) == "```\n\nThis function takes two numbers as input and returns"
    assert answer.prompt_head == (1604, 803, 24, 81, 28, 278, 727, 198)


@given(cuts=st.lists(st.integers(0, len(CHAT)), max_size=12).map(sorted))
def test_how_reads_cut_the_stream_changes_nothing_but_times(cuts: list[int]) -> None:
    edges = [0, *cuts, len(CHAT)]
    pieces = [(i, CHAT[a:b]) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    answer, whole = sse.read(pieces), sse.read([(0, CHAT)])
    assert answer.token_ids == whole.token_ids
    assert answer.text == whole.text
    assert answer.chunk_ns == sorted(answer.chunk_ns)


def test_a_chunk_is_stamped_by_the_read_that_completed_it() -> None:
    stream = content("a") + content("b", "stop")
    middle = len(content("a")) + 5
    answer = sse.read([(10, stream[:middle]), (20, stream[middle:])])
    assert answer.chunk_ns == [10, 20]


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (b"", "sent no token"),
        (b"data: [DONE]\n\n", "sent no token"),
        (event(choices=[{"delta": {"role": "assistant", "content": ""}}]), "sent no token"),
        (content("half"), "cut: it has no finish reason"),
        (content("x") + event(error={"message": "core died"}), "inside the stream: core died"),
        (event(error="plain"), "inside the stream: plain"),
        (content("x", "stop") + event(choices=[], usage={"completion_tokens": 0}), "says 0 output"),
        (b"data: {torn\n\n", "not JSON"),
        (b"data: [1, 2]\n\n", "no JSON object"),
        (event(choices=["x"]), "no JSON object"),
    ],
)
def test_a_broken_stream_is_named(stream: bytes, problem: str) -> None:
    assert problem in (sse.read([(1, stream)]).problem or "")


@given(st.binary(max_size=300))
def test_no_bytes_make_it_raise(stream: bytes) -> None:
    sse.read([(1, stream)])


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "choices",
                        "delta",
                        "token_ids",
                        "usage",
                        "metrics",
                        "error",
                        "speculative_decoding",
                        "finish_reason",
                        "content",
                        "prompt_token_ids",
                    ]
                ),
                x,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_no_json_makes_it_raise(value: object) -> None:
    sse.read([(1, b"data: " + json.dumps(value).encode() + b"\n\n")])


def test_a_line_separator_inside_a_string_is_text() -> None:
    raw = 'data: {"choices":[{"delta":{"content":"a\u2028b\u0085c"},"finish_reason":"stop"}]}\n\n'
    answer = sse.read([(1, raw.encode())])
    assert answer.problem is None
    assert "".join(answer.text) == "a\u2028b\u0085c"


def test_crlf_and_a_missing_last_line_end_are_taken() -> None:
    stream = content("a").replace(b"\n", b"\r\n") + content("b", "stop").rstrip()
    assert "".join(sse.read([(1, stream)]).text) == "ab"


def test_without_usage_token_ids_count_and_without_those_chunks_do() -> None:
    with_ids = event(
        choices=[{"delta": {"content": "ab"}, "token_ids": [5, 6], "finish_reason": "stop"}]
    )
    assert sse.read([(1, with_ids)]).tokens == (2, "token_ids")
    assert sse.read([(1, content("a") + content("b", "stop"))]).tokens == (2, "chunks")


def test_nothing_is_taken_from_behind_a_broken_event() -> None:
    reader = sse.Reader()
    for at, piece in enumerate([content("a"), b"data: {torn\n\n", content("b", "stop")]):
        reader.feed(at, piece)
    answer = reader.close()
    assert "".join(answer.text) == "a"
    assert answer.chunk_ns == [0]
    assert "not JSON" in (answer.problem or "")
