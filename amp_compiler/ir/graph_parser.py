"""Reading one line of graph text. `graph_text` says what the text looks like."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from typing import TypeVar

from amp_compiler.errors import AmpError, GraphError
from amp_compiler.ir.dtypes import DType, dtype_from_short
from amp_compiler.ir.facts import Execution, Mask, StoredNumbers
from amp_compiler.ir.graph import Attr, Node, Operand, Pin, Value, ValueKind

KEYWORDS = frozenset({"graph", "return", "volatile", "compound", *(kind.value for kind in ValueKind)})
_NUMBER = r"-?(?:[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|inf|nan)(?![A-Za-z0-9_./])"
_TOKEN = re.compile(rf'\s*(?:("(?:[^"\\]|\\.)*")|({_NUMBER})|([A-Za-z0-9_./]+)|(->|[(){{}}\[\]=,:|~?]))')
_FACTS = ("name", "module", "type", "source", "region", "phase", "part", "pin")
_CONSTANTS: dict[str, Attr] = {"true": True, "false": False, "none": None}


class Line:
    """The tokens of one line, read from left to right.

    Args:
        text: the line.
        number: its number, from 1, for messages.

    Raises:
        GraphError: a character of it begins no token.
    """

    def __init__(self, text: str, number: int) -> None:
        self.number = number
        self.tokens: list[str] = []
        self.at = 0
        place = 0
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            if match is None:
                bad = text[place:].strip()[0]
                raise self.error(f"'{bad}' is not understood", 'write names with special characters as "…"')
            self.tokens.append(match.group().strip())
            place = match.end()

    def error(self, what: str, hint: str = "") -> GraphError:
        """An error that names this line."""
        return GraphError(what, where=f"line {self.number}", hint=hint)

    def peek(self) -> str:
        """The next token, empty at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        """The next token, consumed.

        Raises:
            GraphError: at the end of the line.
        """
        if self.at == len(self.tokens):
            raise self.error("the line ends too early")
        self.at += 1
        return self.tokens[self.at - 1]

    def skip(self, token: str) -> bool:
        """Consume the next token if it is `token`; True where it was."""
        found = self.peek() == token
        self.at += found
        return found

    def take(self, token: str) -> None:
        """Consume `token`.

        Raises:
            GraphError: another token stands there.
        """
        if not self.skip(token):
            raise self.error(f"expected '{token}', found '{self.peek() or 'the end of the line'}'")

    def name(self) -> str:
        """A bare or quoted name, consumed.

        Raises:
            GraphError: no name stands there.
        """
        token = self.next()
        if token.startswith('"'):
            return self.string(token)
        if not re.match(r"[A-Za-z0-9_./]", token):
            raise self.error(f"expected a name, found '{token}'")
        return token

    def string(self, token: str) -> str:
        """What a quoted token says.

        Raises:
            GraphError: it is no JSON string.
        """
        try:
            return str(json.loads(token))
        except json.JSONDecodeError as cause:
            raise self.error(f"{token} is not a JSON string: {cause.msg}") from cause

    def integer(self) -> int:
        """A whole number, consumed.

        Raises:
            GraphError: no whole number stands there.
        """
        token = self.next()
        if not token.isdecimal():
            raise self.error(f"expected a whole number, found '{token}'")
        return int(token)

    def end(self) -> None:
        """Nothing may be left.

        Raises:
            GraphError: something is.
        """
        if self.peek():
            raise self.error(f"'{self.peek()}' is too much")


def parse_value_names(line: Line) -> list[str]:
    """Names with commas between them."""
    names = [line.name()]
    while line.skip(","):
        names.append(line.name())
    return names


_Facts = TypeVar("_Facts", Execution, StoredNumbers)


def parse_facts(line: Line, kind: type[_Facts]) -> _Facts:
    """The fields of `Execution` or `StoredNumbers` up to the end of the line: a name alone says that it is so.

    Raises:
        GraphError: a field is unknown, given twice, or no number or truth value.
    """
    return _facts_of(line, kind, _words(line))


def _words(line: Line) -> dict[str, Attr]:
    """What stands up to the end of the line as `name` or `name=value`."""
    found: dict[str, Attr] = {}
    while line.peek():
        key = line.name()
        if key in found:
            raise line.error(f"'{key}' is given twice")
        found[key] = _attr(line) if line.skip("=") else True
    return found


def _facts_of(line: Line, kind: type[_Facts], words: dict[str, Attr]) -> _Facts:
    types = {one.name: one.default.__class__ for one in fields(kind)}
    for key, value in words.items():
        if key not in types:
            raise line.error(f"'{key}' is unknown", f"use {', '.join(types)}")
        if isinstance(value, bool) != (types[key] is bool) or not isinstance(value, int | float):
            raise line.error(f"'{key}' is no {'truth value' if types[key] is bool else 'number'}")
    return kind(**words)  # type: ignore[arg-type]  # they were looked at


def parse_source(line: Line) -> tuple[Value, StoredNumbers | None, Mask | None]:
    """An `input`, `param`, `buffer` or `const` line.

    Raises:
        GraphError: it is malformed.
    """
    kind = ValueKind(line.next())
    name = line.name()
    line.take(":")
    value = _typed(line, name, kind)
    words = _words(line)
    path, terms = words.pop("mask", None), words.pop("terms", 1.0)
    mask = None
    if path is not None:
        if not isinstance(path, tuple) or not isinstance(terms, int | float):
            raise line.error("a mask is not understood", 'write mask=("node", "node") terms=2.0')
        mask = Mask(tuple(str(node) for node in path), float(terms))
    return value, _facts_of(line, StoredNumbers, words) if words else None, mask


def parse_node(line: Line) -> tuple[Node, list[Value]]:
    """A node's line, with the values that it makes.

    Raises:
        GraphError: it is malformed.
    """
    if line.skip("("):
        line.take(")")
        made: list[str] = []
    else:
        made = parse_value_names(line)
    line.take("=")
    op = line.name()
    line.take("(")
    inputs: list[Operand] = []
    while not line.skip(")"):
        if inputs:
            line.take(",")
        inputs.append(_operand(line))
    attrs = _attrs(line)
    values = []
    if made:
        line.take("->")
        for index, name in enumerate(made):
            if index:
                line.take(",")
            values.append(_typed(line, name, ValueKind.RESULT))
    return _with_facts(line, op, tuple(inputs), tuple(made), attrs), values


def _with_facts(
    line: Line, op: str, inputs: tuple[Operand, ...], outputs: tuple[str, ...], attrs: dict[str, Attr]
) -> Node:
    facts: dict[str, str] = {}
    reason = ""
    while line.peek():
        key = line.name()
        if key not in _FACTS or key in facts:
            known = ", ".join(_FACTS)
            raise line.error(f"'{key}' is {'given twice' if key in facts else 'unknown'}", f"use each of {known} once")
        line.take("=")
        facts[key] = line.name()
        if key == "pin":
            reason = line.string(line.next()) if line.peek().startswith('"') else ""
    if not outputs and "name" not in facts:
        raise line.error("a node without outputs needs a name", "end the line with name=…")
    pin = Pin(facts["pin"], reason) if "pin" in facts else None
    return Node(
        name=facts["name"] if "name" in facts else outputs[0],
        op=op,
        inputs=inputs,
        outputs=outputs,
        attrs=attrs,
        module=facts.get("module", ""),
        module_type=facts.get("type", ""),
        source=facts.get("source", ""),
        region=facts.get("region", ""),
        phase=facts.get("phase", "forward"),
        pin=pin,
        part=facts.get("part", ""),
    )


def _operand(line: Line) -> Operand:
    slot = line.name()
    line.take("=")
    value = line.name()
    if not line.skip(":"):
        return Operand(value, slot)
    if line.skip("tied"):
        return Operand(value, slot, tied=True)
    allowed = set() if line.skip("none") else {_dtype(line)}
    while line.skip("|"):
        if line.skip("tied"):
            return Operand(value, slot, frozenset(allowed), tied=True)
        allowed.add(_dtype(line))
    return Operand(value, slot, frozenset(allowed))


def _attrs(line: Line) -> dict[str, Attr]:
    attrs: dict[str, Attr] = {}
    if line.skip("{"):
        while not line.skip("}"):
            if attrs:
                line.take(",")
            key = line.name()
            line.take("=")
            attrs[key] = _attr(line)
    return attrs


def _attr(line: Line) -> Attr:
    token = line.next()
    if token == "(":
        items: list[Attr] = []
        while not line.skip(")"):
            if items:
                line.take(",")
            items.append(_attr(line))
        return tuple(items)
    if token.startswith('"'):
        return line.string(token)
    if token in _CONSTANTS:
        return _CONSTANTS[token]
    try:
        return int(token) if token.lstrip("-").isdecimal() else float(token)
    except ValueError as cause:
        raise line.error(f"'{token}' is no attribute value", 'write text as "…"') from cause


def _dtype(line: Line) -> DType:
    try:
        return dtype_from_short(line.name())
    except GraphError:
        raise
    except AmpError as cause:
        raise line.error(cause.what, cause.hint) from cause


def _typed(line: Line, name: str, kind: ValueKind) -> Value:
    """A type such as `fp32[2, s0]~16 volatile`, as the value `name`."""
    dtype = _dtype(line)
    line.take("[")
    shape: tuple[int | str, ...] | None = ()
    if line.skip("?"):
        line.take("]")
        shape = None
    else:
        dims: list[int | str] = []
        while not line.skip("]"):
            if dims:
                line.take(",")
            dims.append(int(line.next()) if line.peek().isdecimal() else line.name())
        shape = tuple(dims)
    sizes = [dim for dim in shape or () if isinstance(dim, int)]
    if line.skip("~"):
        numel = line.integer()
    elif shape is not None and len(sizes) == len(shape):
        numel = math.prod(sizes)
    else:
        raise line.error(f"the size of '{name}' is not known", "give the number of elements after the shape, as ~64")
    return Value(name, dtype, shape, numel, kind, line.skip("volatile"))
