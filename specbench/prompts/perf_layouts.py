"""The layouts of NVIDIA's load generators, GenAI-Perf and AIPerf: one text a turn.

Read from GenAI-Perf 0.0.16 (its file and payload retrievers) and AIPerf 0.13 (its loaders' models).
"""

from specbench.prompts.fields import Malformed, Record, category_of, id_of, kind, text_of
from specbench.prompts.layout import Found, Layout, Piece

AIPERF_KEYS = {"output_length", "role", "timestamp", "delay", "type", "image", "images", "texts"}
MOONCAKE_KEYS = {"output_length", "timestamp", "delay", "type", "input_length", "hash_ids"}
NOT_PLAIN = {
    *("text_input", "texts", "role", "image", "images", "audio", "audios", "video", "videos")
}
AIPERF_TYPES = ("single_turn", "multi_turn", "mooncake_trace")


def _said(record: Record, where: str = "") -> str:
    """The text of a GenAI-Perf or AIPerf turn, if text is all that it is."""
    if not where and "text" in record and NOT_PLAIN.isdisjoint(record):
        return text_of(record["text"], "`text`")
    for key in ("image", "images", "audio", "audios", "video", "videos"):
        if record.get(key):
            raise Malformed(f"{where}has `{key}`; only text can be sent")
    if record.get("role") not in (None, "user"):
        raise Malformed(f"{where}the role is {record['role']!r}; only a user's turns can be sent")
    keys = [key for key in ("text", "text_input", "texts") if key in record]
    if len(keys) != 1:
        both = " and ".join(f"`{key}`" for key in keys)
        problem = f"both {both}; GenAI-Perf takes one of them" if keys else NO_TEXT
        raise Malformed(where + problem)
    value = record[keys[0]]
    if keys[0] == "texts" and isinstance(value, list):
        if len(value) != 1:
            raise Malformed(f"{where}`texts` has {len(value)} texts for one request; write one")
        value = value[0]
    return text_of(value, f"{where}`{keys[0]}`")


NO_TEXT = "no `text` or `text_input`"


def _has_text(record: Record) -> bool:
    return ("text" in record or "text_input" in record) and "turns" not in record


def _is_genai_perf(record: Record) -> bool:
    return ("text" in record and len(record) == 1) or (
        _has_text(record)
        and "session_id" not in record
        and not _is_aiperf(record)
        and not _is_mooncake(record)
    )


def _single(record: Record) -> Piece:
    if "session_id" in record:
        raise Malformed("it has a `session_id`: one turn of a session, not a prompt of its own")
    return Piece(None, (_said(record),))


def _is_session_turn(record: Record) -> bool:
    return _has_text(record) and "session_id" in record and record.get("type") not in AIPERF_TYPES


def _session_turn(record: Record) -> Piece:
    id = id_of(record, "session_id")
    try:
        return Piece(id, (_said(record),))
    except Malformed as bad:
        raise Malformed(bad.reason, id=id) from bad


def _write_session(found: Found, _: int | None) -> list[Record]:
    """GenAI-Perf's lines of a session: a delay on all but the last."""
    lines: list[Record] = [{"session_id": found.id, "text": t, "delay": 0} for t in found.turns]
    del lines[-1]["delay"]
    return lines


def _is_aiperf(record: Record) -> bool:
    if record.get("type") in AIPERF_TYPES:
        return record["type"] == "single_turn"
    return (
        ("text" in record or "texts" in record)
        and "turns" not in record
        and "session_id" not in record
        and not AIPERF_KEYS.isdisjoint(record)
    )


def _aiperf(record: Record) -> Piece:
    return Piece(id_of(record, "session_id", optional=True), (_said(record),))


def _write_aiperf(found: Found, tokens: int | None) -> list[Record]:
    record: Record = {"type": "single_turn", "session_id": found.id, "text": found.turns[0]}
    return [record | at_most("output_length", tokens)]


def at_most(key: str, tokens: int | None) -> Record:
    """How many tokens to generate, where that was said."""
    return {} if tokens is None else {key: tokens}


def is_aiperf_conversation(record: Record) -> bool:
    """Whether `turns` are those of AIPerf and not of a question."""
    if "turns" not in record or "question_id" in record:
        return False
    turns = record["turns"]
    of_objects = isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict)
    return "session_id" in record or of_objects


def _write_aiperf_conversation(found: Found, tokens: int | None) -> list[Record]:
    turns = [{"text": text, **at_most("output_length", tokens)} for text in found.turns]
    return [{"type": "multi_turn", "session_id": found.id, "turns": turns}]


def _is_mooncake(record: Record) -> bool:
    if record.get("type") in AIPERF_TYPES:
        return record["type"] == "mooncake_trace"
    if "text" in record or "turns" in record:
        return False
    if "text_input" in record and "session_id" in record:
        return False  # it means the same as a turn of a GenAI-Perf session
    if "text_input" in record or "messages" in record:
        return not MOONCAKE_KEYS.isdisjoint(record)
    return "input_length" in record or "hash_ids" in record


def _mooncake(record: Record) -> Piece:
    id = id_of(record, "session_id", optional=True)
    if "text_input" not in record and "text" not in record:
        if "messages" in record:
            problem = "`messages` are one request with its history; --from sharegpt reads them"
        else:
            problem = "a trace of lengths without `text_input`: there is no text to send"
        raise Malformed(problem, id=id)
    try:
        return Piece(id, (_said(record),))
    except Malformed as bad:
        raise Malformed(bad.reason, id=id) from bad


def _write_mooncake(found: Found, tokens: int | None) -> list[Record]:
    """AIPerf's lines of a session: a delay on all but the first."""
    most = at_most("output_length", tokens)
    head: Record = {"type": "mooncake_trace", "session_id": found.id}
    return [
        head | {"text_input": text} | ({"delay": 0} if n else {}) | most
        for n, text in enumerate(found.turns)
    ]


def turns_of(value: object, key: str) -> tuple[str, ...]:
    """The texts of a list of turns, each a text or an object of AIPerf's."""
    if not isinstance(value, list):
        raise Malformed(f"`{key}` is {kind(value)}, not a list")
    if not value:
        raise Malformed(f"`{key}` is an empty list")
    return tuple(
        [
            _said(turn, f"turn {n}: ") if isinstance(turn, dict) else text_of(turn, "turn", n)
            for n, turn in enumerate(value, start=1)
        ]
    )


def _conversation(record: Record) -> Piece:
    turns = turns_of(record.get("turns"), "turns")
    return Piece(id_of(record, "session_id", optional=True), turns, category_of(record))


PERF_LAYOUTS: dict[str, Layout] = {
    "genai-perf": Layout(
        _is_genai_perf,
        _single,
        lambda found, _: [{"text": found.turns[0]}],
        also=frozenset({"aiperf", "mooncake-trace"}),
    ),
    "genai-perf-sessions": Layout(
        _is_session_turn, _session_turn, _write_session, joins=True, turns=True, ids=True
    ),
    "aiperf": Layout(
        _is_aiperf, _aiperf, _write_aiperf, ids=True, lengths=True, also=frozenset({"genai-perf"})
    ),
    "aiperf-multi-turn": Layout(
        is_aiperf_conversation,
        _conversation,
        _write_aiperf_conversation,
        turns=True,
        ids=True,
        lengths=True,
    ),
    "mooncake-trace": Layout(
        _is_mooncake,
        _mooncake,
        _write_mooncake,
        joins=True,
        turns=True,
        ids=True,
        lengths=True,
        also=frozenset({"genai-perf", "genai-perf-sessions"}),
    ),
}
