"""The text format of protocol buffers as a list of fields that know their line, whatever message they belong to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import text_format

from amp_compiler.errors import RuleError

_DEPTH = 100
_QUOTES = ("'", '"')


@dataclass(frozen=True)
class Field:
    """A field as it stands in a file.

    Args:
        name: of the field.
        value: the text of a word, a number or a string; or the fields of a message.
        line: in the file, from 1.
    """

    name: str
    value: str | tuple[Field, ...]
    line: int

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of a message; none where it is none."""
        return self.value if isinstance(self.value, tuple) else ()


def parse_text(text: str, file: str) -> tuple[Field, ...]:
    """Read a message.

    Args:
        text: of the file.
        file: its name, for messages.

    Raises:
        RuleError: it is no text format.

    Example:
        >>> [(field.name, field.value, field.line) for field in parse_text("a: 1\\nb { c: FLOAT }", "net.prototxt")[:1]]
        [('a', '1', 1)]
    """
    tokens = text_format.Tokenizer(text.splitlines())
    try:
        return tuple(_fields(tokens, None, 0))
    except text_format.ParseError as cause:
        problem = str(cause).split(" : ", 1)[-1].strip()
        raise RuleError(
            f"this is no text format of protocol buffers: {problem}",
            file=file,
            line=cause.GetLine(),
            column=cause.GetColumn(),
            hint="correct the syntax",
        ) from cause


def _fields(tokens: Any, end: str | None, depth: int) -> list[Field]:
    if depth > _DEPTH:
        raise tokens.ParseError("messages are nested too deeply")
    fields: list[Field] = []
    while not (tokens.AtEnd() if end is None else tokens.TryConsume(end)):
        if tokens.AtEnd():
            raise tokens.ParseError(f"the file ends before '{end}'")
        line = tokens.ParseError("").GetLine()
        name = tokens.ConsumeIdentifier()
        colon = tokens.TryConsume(":")
        if tokens.TryConsume("["):
            fields += _list(tokens, name, line, depth)
        else:
            fields.append(_value(tokens, name, line, colon, depth))
        _ = tokens.TryConsume(",") or tokens.TryConsume(";")
    return fields


def _list(tokens: Any, name: str, line: int, depth: int) -> list[Field]:
    fields: list[Field] = []
    while not tokens.TryConsume("]"):
        fields.append(_value(tokens, name, line, True, depth))
        if not tokens.LookingAt("]"):
            tokens.Consume(",")
    return fields


def _value(tokens: Any, name: str, line: int, colon: bool, depth: int) -> Field:
    for begin, end in (("{", "}"), ("<", ">")):
        if tokens.TryConsume(begin):
            return Field(name, tuple(_fields(tokens, end, depth + 1)), line)
    if not colon:
        raise tokens.ParseError("Expected ':' or '{'.")
    if tokens.token[:1] in _QUOTES:
        return Field(name, tokens.ConsumeString(), line)
    text: str = tokens.token
    if not text or not (text[0].isalnum() or text[0] in "_-+."):
        raise tokens.ParseError("Expected a value.")
    tokens.NextToken()
    if text == "-":  # a sign stands by itself in front of a word such as inf
        text += tokens.token
        tokens.NextToken()
    return Field(name, text, line)


def named(fields: Sequence[Field], name: str) -> list[Field]:
    """The fields of a name, in order."""
    return [field for field in fields if field.name == name]
