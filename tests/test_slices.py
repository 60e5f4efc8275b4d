"""Parts of a run add up to it, and a piece of a request is timed and counted like a request."""

from collections.abc import Callable

import pytest

from specbench.analysis.metrics import acceptance_of_requests, tpot_ms
from specbench.analysis.slices import By, parts, piece
from specbench.records import RequestRecord

Build = Callable[..., RequestRecord]


@pytest.fixture
def drafted(record: Build) -> RequestRecord:
    """First token at 100 ms; then steps of 10 ms that emit 1, 2, 3, 4, 1, 2, 3, 4, ... tokens."""
    counts = [1, *([1, 2, 3, 4] * 6)]
    return record(
        chunks=[100 + 10 * i for i in range(len(counts))],
        tokens=sum(counts),
        chunk_tokens=tuple(counts),
        spec={
            "drafts": 24,
            "draft_tokens": 72,
            "accepted": 36,
            "accepted_histogram": (6, 6, 6, 6),
            "per_step_accepted": (0, 1, 2, 3) * 6,
            "per_step_drafted": (3,) * 24,
        },
    )


def test_a_piece_has_the_time_and_the_acceptance_of_its_steps(drafted: RequestRecord) -> None:
    """Tokens 1 to 10 are the first four steps: 40 ms, 10 tokens, 6 accepted."""
    found = piece(drafted, 0, 11)
    assert found is not None
    assert tpot_ms(found) == pytest.approx(4)
    accepted = acceptance_of_requests([found])
    assert accepted is not None
    assert (accepted.drafts, accepted.accepted, accepted.undrafted_steps) == (4, 6, 0)
    assert accepted.positions == (3 / 4, 2 / 4, 1 / 4)


def test_a_piece_in_the_middle_starts_from_the_chunk_before_it(drafted: RequestRecord) -> None:
    """Tokens 14 to 17 come with the step of 3 and the one of 4 from 17 on: 20 ms, 7 tokens."""
    found = piece(drafted, 14, 18)
    assert found is not None
    assert tpot_ms(found) == pytest.approx(20 / 7)
    accepted = acceptance_of_requests([found])
    assert accepted is not None
    assert (accepted.drafts, accepted.accepted, accepted.undrafted_steps) == (2, 5, 0)


def test_pieces_add_up_to_the_request(drafted: RequestRecord) -> None:
    pieces = [part.of(drafted) for part in parts("position", [drafted])]
    kept = [one for one in pieces if one is not None]
    assert len(kept) == len(pieces) == 3
    assert sum((one.output_tokens or 0) - 1 for one in kept) == (drafted.output_tokens or 0) - 1
    assert sum(one.end_ns - one.sent_ns for one in kept) == drafted.end_ns - drafted.chunk_ns[0]
    assert sum(one.spec.accepted for one in kept if one.spec) == 36


def test_what_the_chunks_do_not_tell_is_not_made_up(drafted: RequestRecord, record: Build) -> None:
    merged = drafted.model_copy(
        update={"chunk_ns": drafted.chunk_ns[:-1], "chunk_tokens": (*drafted.chunk_tokens[:-2], 7)}  # type: ignore[index]
    )
    found = piece(merged, 0, 11)
    assert found is not None
    assert found.spec is None  # a chunk holds two steps: which made what is not known
    assert piece(record(), 0, 11) is None  # chunks without token counts
    assert piece(drafted, 1000, 2000) is None


@pytest.mark.parametrize(
    ("by", "names"),
    [
        ("category", ["writing", None]),
        ("turn", ["turn 1", "turn 2"]),
        ("length", ["0-15 prompt tokens", "64-127 prompt tokens"]),
        ("position", ["tokens 0-15", "tokens 16-31"]),
    ],
)
def test_every_request_is_in_one_part(record: Build, by: By, names: list[str | None]) -> None:
    records = [
        record(turn=0, category="writing", prompt_tokens=9, tokens=20),
        record(turn=1, prompt_tokens=100, tokens=12),
    ]
    found = parts(by, records)
    assert [part.name for part in found] == names
    if by != "position":
        assert all(sum(part.of(one) is not None for part in found) == 1 for one in records)
