"""What a record's fields must be: text that can be sent, an id, a category, a list of turns."""

Record = dict[str, object]


class Malformed(Exception):
    """Why a record holds no usable prompt; *id* where it is known to belong to a session."""

    def __init__(self, reason: str, *, id: str | None = None) -> None:
        super().__init__(reason)
        self.reason, self.id = reason, id


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def text_of(value: object, label: str, number: int | None = None) -> str:
    """*value* if it is text with something to say; Malformed, with *label* and *number*, if not."""
    if isinstance(value, str) and value and not value.isspace():
        if value.isascii():
            return value
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = f"half of a surrogate pair (\\u{ord(value[error.start]):04x})"
            raise Malformed(f"{_label(label, number)} has {half}") from error
        return value
    problem = "is empty" if isinstance(value, str) else f"is {kind(value)}, not text"
    raise Malformed(f"{_label(label, number)} {problem}")


def _label(label: str, number: int | None) -> str:
    return label if number is None else f"{label} {number}"


def id_of(record: Record, key: str, *, optional: bool = False) -> str | None:
    """The id under *key*, as text; None where it may lack and does."""
    value = record.get(key)
    if value is None and optional:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and value:
        return value if value.isascii() or value.isspace() else text_of(value, f"`{key}`")
    if key not in record:
        raise Malformed(f"no `{key}`")
    raise Malformed(f"`{key}` is {'empty' if value == '' else kind(value)}, not an id")


def category_of(record: Record) -> str | None:
    """The category, where the record has one."""
    value = record.get("category")
    return None if value is None else text_of(value, "`category`")
