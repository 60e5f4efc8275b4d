"""The layouts that prompt files come in: which one a record is of, and what it says.

A new layout is a function from a record to a Piece, and one entry in LAYOUTS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from specbench.prompts.rows import Record, kind


class Piece(NamedTuple):
    """What one record says: a conversation, or one turn of it in a layout that joins records."""

    id: str | None  # None: its line number
    turns: tuple[str, ...]
    category: str | None = None
    problem: str | None = None


class Malformed(Exception):
    """Why a record holds no usable prompt; *id* where it is known to belong to a session."""

    def __init__(self, reason: str, *, id: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.id = reason, id


@dataclass(frozen=True)
class Layout:
    """`claims` says whether a record is of this layout, `read` what it holds (or Malformed)."""

    claims: Callable[[Record], bool]
    read: Callable[[Record], Piece]
    joins: bool = False  # consecutive records of one id are the turns of one prompt
    also: frozenset[str] = frozenset()  # layouts whose records mean the same here


def detect(record: Record) -> str:
    """The layout of a record; Malformed when none or more than one claims it."""
    claiming = [name for name, layout in LAYOUTS.items() if layout.claims(record)]
    if len(claiming) == 1:
        return claiming[0]
    if claiming:
        raise Malformed(f"could be {' or '.join(claiming)}; say which with --layout")
    has = ", ".join(f"`{key}`" for key in list(record)[:8]) or "nothing"
    raise Malformed(f"no `text`, `text_input`, `prompt` or `turns`; it has {has}")


def _text(value: object, label: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{label} is {kind(value)}, not text")
    if not value.strip():
        raise Malformed(f"{label} is empty")
    return _whole_characters(value, label)


def _whole_characters(value: str, label: str) -> str:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(value[error.start]):04x}"
        raise Malformed(f"{label} has half of a surrogate pair ({half})") from error
    return value


def _id(record: Record, key: str, *, optional: bool = False) -> str | None:
    value = record.get(key)
    if value is None and optional:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and value:
        return _whole_characters(value, f"`{key}`")
    if key not in record:
        raise Malformed(f"no `{key}`")
    raise Malformed(f"`{key}` is {'empty' if value == '' else kind(value)}, not an id")


def _category(record: Record) -> str | None:
    value = record.get("category")
    return None if value is None else _text(value, "`category`")


def _said(record: Record, where: str = "") -> str:
    """The text of a GenAI-Perf or AIPerf turn, if text is all that it is."""
    for key in ("image", "images", "audio", "audios"):
        if record.get(key):
            raise Malformed(f"{where}has `{key}`; only text can be sent")
    if record.get("role") not in (None, "user"):
        raise Malformed(f"{where}the role is {record['role']!r}; only a user's turns can be sent")
    keys = [key for key in ("text", "text_input") if key in record]
    if len(keys) != 1:
        both = "both `text` and `text_input`; GenAI-Perf takes one of them"
        raise Malformed(where + (both if keys else "no `text` or `text_input`"))
    return _text(record[keys[0]], f"{where}`{keys[0]}`")


def _turns(value: object, key: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise Malformed(f"`{key}` is {kind(value)}, not a list")
    if not value:
        raise Malformed(f"`{key}` is an empty list")
    return tuple(
        _said(turn, f"turn {n}: ") if isinstance(turn, dict) else _text(turn, f"turn {n}")
        for n, turn in enumerate(value, start=1)
    )


def _single(record: Record) -> Piece:
    if "session_id" in record:
        raise Malformed("it has a `session_id`: one turn of a session, not a prompt of its own")
    return Piece(None, (_said(record),))


def _session_turn(record: Record) -> Piece:
    id = _id(record, "session_id")
    try:
        return Piece(id, (_said(record),))
    except Malformed as bad:
        raise Malformed(bad.reason, id=id) from bad


def _conversation(key: str) -> Callable[[Record], Piece]:
    def read(record: Record) -> Piece:
        id = _id(record, key, optional=True)
        return Piece(id, _turns(record.get("turns"), "turns"), _category(record))

    return read


def _humaneval(record: Record) -> Piece:
    return Piece(_id(record, "task_id"), (_text(record.get("prompt"), "`prompt`"),))


def _mt_bench_prompts(record: Record) -> Piece:
    turns = _turns(record.get("prompt"), "prompt")
    return Piece(_id(record, "prompt_id"), turns, _category(record))


def _vllm_bench(record: Record) -> Piece:
    return Piece(None, (_text(record.get("prompt"), "`prompt`"),))


AIPERF_KEYS = {"output_length", "role", "timestamp", "delay", "type", "image", "images"}


def _is_text(record: Record) -> bool:
    return ("text" in record or "text_input" in record) and "turns" not in record


def _is_aiperf(record: Record) -> bool:
    return _is_text(record) and "session_id" not in record and bool(AIPERF_KEYS & record.keys())


def _is_aiperf_conversation(record: Record) -> bool:
    turns = record.get("turns")
    of_objects = isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict)
    return (
        "turns" in record and "question_id" not in record and ("session_id" in record or of_objects)
    )


def _is_prompt(record: Record, id: str | None) -> bool:
    return "prompt" in record and id == next(
        (k for k in ("task_id", "prompt_id") if k in record), None
    )


LAYOUTS: dict[str, Layout] = {
    "genai-perf": Layout(
        lambda r: _is_text(r) and "session_id" not in r and not _is_aiperf(r),
        _single,
        also=frozenset({"aiperf"}),
    ),
    "genai-perf-sessions": Layout(
        lambda r: _is_text(r) and "session_id" in r, _session_turn, joins=True
    ),
    "aiperf": Layout(_is_aiperf, _single, also=frozenset({"genai-perf"})),
    "aiperf-multi-turn": Layout(_is_aiperf_conversation, _conversation("session_id")),
    "eagle": Layout(
        lambda r: "turns" in r and not _is_aiperf_conversation(r), _conversation("question_id")
    ),
    "humaneval": Layout(lambda r: _is_prompt(r, "task_id"), _humaneval),
    "mt-bench-prompts": Layout(lambda r: _is_prompt(r, "prompt_id"), _mt_bench_prompts),
    "vllm-bench": Layout(lambda r: _is_prompt(r, None), _vllm_bench),
}
