"""An outline says of a request what the request says, and reads the rest again."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.analysis.cases import Joined
from specbench.analysis.metrics import summarise
from specbench.analysis.outlines import HEAD, Outlines, Pool, identity
from specbench.analysis.rows import rows
from specbench.analysis.slices import WAYS, By
from specbench.errors import StoreError
from specbench.records import MOST, CounterSpan, Prompt, RequestRecord
from specbench.render.read import measured_cases
from specbench.store import RunStore

Build = Callable[..., RequestRecord]
Made = Callable[..., RunStore]
CASE = "vanilla.c1"
SAME = (
    *(
        "prompt_id",
        "turn",
        "category",
        "start",
        "cycle",
        "key",
        "ok",
        "due_ns",
        "sent_ns",
        "end_ns",
    ),
    *("chunks", "together", "first_tokens", "later_sizes", "prompt_tokens", "prompt_hash"),
    *("output_tokens", "token_source", "cached_tokens", "finish_reason", "ids_hash", "text_hash"),
    *("text_length", "sampling"),
)
OF_SPEC = ("drafts", "draft_tokens", "accepted", "accepted_histogram", "last_accepted")

counts = st.integers(0, 9) | st.integers(0, MOST - 1)
times = st.integers(-9, 9) | st.integers(1 - MOST, MOST - 1)
lists = st.none() | st.lists(counts, max_size=6).map(tuple)
specs = st.none() | st.fixed_dictionaries(
    {"drafts": counts, "accepted": counts},
    optional={
        "draft_tokens": st.none() | counts,
        "accepted_histogram": lists,
        "per_step_accepted": lists,
    },
)
records = st.fixed_dictionaries(
    {
        "prompt_id": st.sampled_from(["a", "b", ""]),
        "prompt_sha256": st.sampled_from(["x", "y"]),
        "sent_ns": times,
        "end_ns": times,
        "error": st.none() | st.just("cut"),
    },
    optional={
        "turn": counts,
        "start": counts,
        "cycle": counts,
        "category": st.none() | st.text(max_size=3),
        "due_ns": st.none() | times,
        "chunk_ns": st.lists(times, max_size=6).map(sorted).map(tuple),
        "chunk_tokens": lists,
        "prompt_tokens": st.none() | counts,
        "prompt_head": st.none() | st.lists(st.integers(), max_size=4).map(tuple),
        "output_tokens": st.none() | counts,
        "token_source": st.sampled_from([None, "usage", "chunks"]),
        "cached_tokens": st.none() | counts,
        "finish_reason": st.none() | st.text(max_size=3),
        "token_ids": st.none() | st.lists(st.integers(), max_size=4).map(tuple),
        "text": st.text(max_size=4),
        "sampling": st.none() | st.dictionaries(st.text(max_size=2), st.floats(0, 2), max_size=3),
        "spec": specs,
    },
).map(RequestRecord.model_validate)


@settings(deadline=None, max_examples=50)
@given(st.lists(records, max_size=6))
def test_an_outline_says_what_its_request_says(given_records: list[RequestRecord]) -> None:
    outlines = Outlines(Pool(), given_records.__getitem__)
    for place, record in enumerate(given_records):
        outlines.add(record, place)
    assert len(outlines) == len(given_records)
    for outline, record in zip(outlines, given_records, strict=True):
        for name in SAME:
            assert getattr(outline, name) == getattr(record, name), name
        assert outline.prompt_head == (record.prompt_head and record.prompt_head[:HEAD])
        assert (outline.spec is None) == (record.spec is None)
        for name in OF_SPEC if record.spec else ():
            assert getattr(outline.spec, name) == getattr(record.spec, name), name
        if record.chunk_ns:
            assert (outline.first_ns, outline.last_ns) == (record.first_ns, record.last_ns)
        assert outline.whole() is record


def test_the_same_request_is_known_again(record: Build) -> None:
    outlines = Outlines(Pool(), lambda _: record())
    outlines.add(record("a"), 0)
    outlines.add(record("b"), 1)
    assert identity(outlines[0]) == identity(next(iter(outlines)))
    assert len({identity(outlines[0]), identity(outlines[1]), identity(record())}) == 3


def filled(made_run: Made, *lines: bytes) -> RunStore:
    store = made_run([], say=lambda *_: "", arms={})
    (store.path / "cases" / CASE / "requests.jsonl").write_bytes(b"".join(lines))
    return store


def line(record: RequestRecord) -> bytes:
    return record.model_dump_json(exclude_none=True).encode() + b"\n"


def test_each_request_is_read_again_from_its_own_line(made_run: Made, record: Build) -> None:
    """Lines of unlike lengths in bytes, and a torn one at the end."""
    made = [
        record("a", text="é" * 50),
        record("b"),
        record("a", text="x"),
        record("c", error="cut"),
    ]
    store = filled(made_run, *map(line, made), line(record("d"))[:-5])
    (case,) = measured_cases(store)
    assert [one.whole() for one in case.records] == made
    assert [one.whole() for one in case.records[1:3]] == made[1:3]
    kept = {key.prompt_id: one.whole() for key, one in case.keyed().items()}
    assert kept == {"a": made[2], "b": made[1], "c": made[3]}
    assert summarise(case.records) == summarise(made)


@pytest.mark.parametrize("by", [None, *WAYS])
def test_a_report_of_outlines_is_that_of_whole_requests(made_run: Made, by: By | None) -> None:
    def say(arm: str, prompt: Prompt, turn: int) -> str:
        return f"{prompt.id} {turn} says " * 9 + (arm if int(prompt.id) % 3 else "the same")

    prompts = [Prompt(id=f"{n}", turns=("Say", "More"), category="ab"[n % 2]) for n in range(6)]
    cases = list(measured_cases(made_run(prompts, say=say)))
    whole = [replace(one, records=[each.whole() for each in one.records]) for one in cases]
    found = rows(cases, baseline="vanilla", by=by, greedy=True)
    assert found == rows(whole, baseline="vanilla", by=by, greedy=True)
    if by != "position":
        parities = [row.parity for row in found if not row.is_baseline]
        assert all(parity and parity.differences and parity.identical for parity in parities)


def test_a_file_that_was_changed_meanwhile_is_an_error_in_words(
    made_run: Made, record: Build
) -> None:
    store = filled(made_run, line(record("a")), line(record("b")))
    (case,) = measured_cases(store)
    path = store.path / "cases" / CASE / "requests.jsonl"
    path.write_bytes(line(record("a"))[:-9])
    for one in case.records:
        with pytest.raises(StoreError, match="was changed while it was read"):
            one.whole()
    path.unlink()
    with pytest.raises(StoreError, match="was changed while it was read"):
        case.records[0].whole()


def test_prompts_and_counters_are_read_again_whenever_they_are_looked_at(
    made_run: Made,
) -> None:
    prompts = [Prompt(id=f"p{n}", turns=("é" * n, "more")) for n in range(4)]
    store = made_run(prompts, say=lambda *_: "some words", arms={})
    spans = [CounterSpan(requests=n, keys=("k",) * n) for n in range(3)]
    for span in spans:
        store.append_counters(CASE, span)
    (case,) = measured_cases(store)
    assert case.expected_requests == 8
    assert (list(case.prompts), case.prompts[2], case.prompts[1:3]) == (
        prompts,
        prompts[2],
        prompts[1:3],
    )
    assert list(case.spans) == list(case.spans) == spans
    store.append_counters(CASE, spans[0])  # a run that goes on
    assert list(case.spans) == spans
    both = Joined([case.spans, case.spans])
    assert (len(both), list(both), both[-1]) == (6, [*spans, *spans], spans[-1])


def test_sums_that_no_engine_can_give_are_kept_too(record: Build) -> None:
    """Pieces of a request add its counts up, each of which may be as large as a count can be."""
    outlines = Outlines(Pool(), lambda _: record())
    for tokens in (3, 2**31, 2**64, 5):
        outlines.add(record(tokens=tokens), 0)
    assert [one.output_tokens for one in outlines] == [3, 2**31, 2**64, 5]
