"""ShareGPT: whole conversations, of which the user's turns are the prompt."""

from specbench.prompts.fields import Malformed, Record, id_of, kind, text_of
from specbench.prompts.layout import Found, Layout, Piece
from specbench.prompts.perf_layouts import AIPERF_TYPES

USERS = ("human", "user", "prompter")
ASSISTANTS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot")


def _is_sharegpt(record: Record) -> bool:
    return ("conversations" in record or "messages" in record) and (
        record.get("type") not in AIPERF_TYPES
    )


def _sharegpt(record: Record) -> Piece:
    key = "conversations" if "conversations" in record else "messages"
    messages = record.get(key)
    if not isinstance(messages, list):
        raise Malformed(f"`{key}` is {kind(messages)}, not a list")
    turns: list[str] = []
    unkept: dict[str, int] = {}
    for n, message in enumerate(messages, start=1):
        role, said = _message(message, n)
        if role == "user":
            turns.append(text_of(said, "message", n))
        elif said:
            if role == "assistant" and not turns:
                problem = "it begins with the assistant: what the user answers would not be sent"
                raise Malformed(problem)
            unkept[role] = unkept.get(role, 0) + 1
    if not turns:
        raise Malformed(f"`{key}` has no turn of a user")
    return Piece(id_of(record, "id", optional=True), tuple(turns), unkept=unkept or None)


def _message(message: object, n: int) -> tuple[str, object]:
    """Whose a message is (user, assistant, system), and what it says."""
    if not isinstance(message, dict):
        raise Malformed(f"message {n} is {kind(message)}, not an object")
    role = message.get("from", message.get("role"))
    said = message.get("value", message.get("content"))
    if isinstance(said, list) and len(said) == 1 and isinstance(said[0], dict):
        said = said[0].get("text")  # OpenAI's list of parts
    if role in USERS:
        return "user", said
    if role in ASSISTANTS:
        return "assistant", said
    if role == "system":
        return "system", said
    raise Malformed(f"message {n} is from {role!r}; user, assistant and system can be read")


def _write_sharegpt(found: Found, _: int | None) -> list[Record]:
    """With an empty answer after each turn: `vllm bench` leaves out what has no answer."""
    both = [
        {"from": who, "value": text}
        for turn in found.turns
        for who, text in (("human", turn), ("gpt", ""))
    ]
    return [{"id": found.id, "conversations": both}]


CHAT_LAYOUTS: dict[str, Layout] = {
    "sharegpt": Layout(
        _is_sharegpt, _sharegpt, _write_sharegpt, ("json", "jsonl"), turns=True, ids=True
    ),
}
