"""Protobuf's text format, as far as a config.pbtxt needs it: fields, messages and lists of both.

The protobuf package could read it only with Triton's own model_config schema, which is in no
package that specbench needs.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+|\#[^\n]*)
      |(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      |(?P<word>[A-Za-z_][A-Za-z0-9_./-]*)
      |(?P<number>[-+]?[0-9.][0-9A-Za-z.+-]*)
      |(?P<mark>[{}\[\]<>:,;])""",
    re.VERBOSE,
)
DEEPEST = 50


class PbtxtError(ValueError):
    """Text that is no text format; *line* is the physical line, from 1."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(problem)
        self.line = line


@dataclass(frozen=True)
class Message:
    """The fields of a message in their order: name, value, line."""

    fields: tuple[tuple[str, "Value", int], ...] = ()

    def all(self, name: str) -> list["Value"]:
        """Every value of the field *name*."""
        return [value for field, value, _ in self.fields if field == name]

    def get(self, name: str) -> "Value | None":
        """The last value of the field *name*, which is what protobuf keeps."""
        found = self.all(name)
        return found[-1] if found else None

    def text(self, name: str) -> str | None:
        """The field *name* where it is a plain value."""
        found = self.get(name)
        return found if isinstance(found, str) else None

    def messages(self, name: str) -> list["Message"]:
        """Every message of the field *name*."""
        return [value for value in self.all(name) if isinstance(value, Message)]

    def line(self, name: str) -> int | None:
        """Where the field *name* stands first."""
        return next((line for field, _, line in self.fields if field == name), None)


Value = str | Message
Token = tuple[str, str, int]


def parse(text: str) -> Message:
    """The message that *text* is; plain values stay text, strings without their quotes.

    Raises:
        PbtxtError: it is none.
    """
    tokens = [*_tokens(text), ("end", "", text.count("\n") + 1)]
    message, at = _message(tokens, 0, "", 0)
    if tokens[at][0] != "end":
        raise PbtxtError(tokens[at][2], f"a {tokens[at][1]} too many")
    return message


def _tokens(text: str) -> Iterator[Token]:
    at, line = 0, 1
    while at < len(text):
        found = TOKEN.match(text, at)
        if found is None or found.lastgroup is None:
            raise PbtxtError(line, f"{text[at : at + 10].splitlines()[0]!r} can't stand here")
        if found.lastgroup != "space":
            yield found.lastgroup, found[0], line
        line += found[0].count("\n")
        at = found.end()


def _message(tokens: list[Token], at: int, end: str, depth: int) -> tuple[Message, int]:
    """The fields from *at* to the mark *end*; and where that stands."""
    if depth > DEEPEST:
        raise PbtxtError(tokens[at][2], "nested too deep")
    fields: list[tuple[str, Value, int]] = []
    while tokens[at][0] != "end" and tokens[at][1] not in ("}", ">", "]"):
        kind, name, line = tokens[at]
        if kind != "word":
            raise PbtxtError(line, f"a field's name should stand where {name!r} is")
        at += 1
        has_colon = tokens[at][1] == ":"
        values, at = _values(tokens, at + has_colon, depth)
        if not has_colon and any(isinstance(value, str) for value in values):
            raise PbtxtError(line, f"a colon is missing after {name}")
        fields += [(name, value, line) for value in values]
        at += tokens[at][1] in (",", ";")
    if end and tokens[at][1] != end:
        raise PbtxtError(tokens[at][2], f"a {end} is missing")
    return Message(tuple(fields)), at


def _values(tokens: list[Token], at: int, depth: int) -> tuple[list[Value], int]:
    """One value, or those of a list."""
    if tokens[at][:2] != ("mark", "["):
        value, at = _value(tokens, at, depth)
        return [value], at
    values: list[Value] = []
    at += 1
    while tokens[at][:2] != ("mark", "]"):
        value, at = _value(tokens, at, depth)
        values.append(value)
        if tokens[at][:2] == ("mark", ","):
            at += 1
        elif tokens[at][:2] != ("mark", "]"):
            raise PbtxtError(tokens[at][2], "a comma or ] is missing in a list")
    return values, at + 1


def _value(tokens: list[Token], at: int, depth: int) -> tuple[Value, int]:
    kind, text, line = tokens[at]
    if kind == "mark" and text in ("{", "<"):
        message, at = _message(tokens, at + 1, {"{": "}", "<": ">"}[text], depth + 1)
        return message, at + 1
    if kind == "string":
        joined = ""
        while tokens[at][0] == "string":  # strings side by side are one
            joined += re.sub(r"\\(.)", r"\1", tokens[at][1][1:-1])
            at += 1
        return joined, at
    if kind not in ("word", "number"):
        raise PbtxtError(line, "a value is missing")
    return text, at + 1
