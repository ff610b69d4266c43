"""The graph that `format_graph` wrote, or that a test or a golden file says by hand, read back."""

import json
import math
import re
from typing import Any

from amp_compiler.ir.dtypes import dtype_from_short
from amp_compiler.ir.facts import Execution, Mask, StoredNumbers
from amp_compiler.ir.graph import Attr, Node, Operand, Pin, PrecisionGraph, Value, ValueKind

_NUMBER = r"-?(?:[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|inf|nan)(?![A-Za-z0-9_./])"
_TOKEN = re.compile(rf'\s*(?:("(?:[^"\\]|\\.)*")|({_NUMBER})|([A-Za-z0-9_./]+)|(->|[(){{}}\[\]=,:|~?]))')
_CONSTANTS: dict[str, Attr] = {"true": True, "false": False, "none": None}
_SOURCES = {kind.value for kind in ValueKind if kind is not ValueKind.RESULT}


class Line:
    """The tokens of one line, read from left to right."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = []
        place = 0
        while text[place:].strip():
            match = _TOKEN.match(text, place)
            if match is None:
                raise ValueError(f"no token begins at {text[place:]!r}")
            self.tokens.append(match.group().strip())
            place = match.end()
        self.tokens.reverse()

    def peek(self) -> str:
        return self.tokens[-1] if self.tokens else ""

    def skip(self, token: str) -> bool:
        """Consume the next token if it is `token`; True where it was."""
        return self.peek() == token and bool(self.tokens.pop())

    def take(self, token: str) -> None:
        if not self.skip(token):
            raise ValueError(f"expected {token!r}, found {self.peek()!r}")

    def name(self) -> str:
        token = self.tokens.pop()
        return str(json.loads(token)) if token.startswith('"') else token

    def names(self) -> list[str]:
        names = [self.name()]
        while self.skip(","):
            names.append(self.name())
        return names

    def attr(self) -> Attr:
        if self.skip("("):
            items: list[Attr] = []
            while not self.skip(")"):
                items.append(self.attr())
                self.skip(",")
            return tuple(items)
        token = self.tokens.pop()
        if token.startswith('"'):
            return str(json.loads(token))
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        return int(token) if token.lstrip("-").isdecimal() else float(token)

    def words(self) -> dict[str, Any]:
        """What stands up to the end of the line as `name` or `name=value`."""
        return {self.name(): self.attr() if self.skip("=") else True for _ in iter(self.peek, "")}

    def value(self, name: str, kind: ValueKind = ValueKind.RESULT) -> Value:
        """A type such as `fp32[2, s0]~16 volatile`, as the value `name`."""
        dtype = dtype_from_short(self.name())
        self.take("[")
        shape: tuple[int | str, ...] | None = None
        if self.skip("?"):
            self.take("]")
        else:
            dims: list[int | str] = []
            while not self.skip("]"):
                dims.append(int(self.name()) if self.peek().isdecimal() else self.name())
                self.skip(",")
            shape = tuple(dims)
        if self.skip("~"):
            numel = int(self.name())
        else:
            numel = math.prod(dim if isinstance(dim, int) else int(dim) for dim in shape or ())
        return Value(name, dtype, shape, numel, kind, self.skip("volatile"))

    def operand(self) -> Operand:
        slot = self.name()
        self.take("=")
        value, types = self.name(), []
        if self.skip(":"):
            types.append(self.name())
            while self.skip("|"):
                types.append(self.name())
        tied = types[-1:] == ["tied"]
        types = types[: len(types) - tied]
        allowed = frozenset(dtype_from_short(one) for one in types if one != "none")
        return Operand(value, slot, allowed if types else None, tied)


def parse_graph(text: str) -> PrecisionGraph:
    """The graph that a text says.

    Raises:
        ValueError, LookupError, AmpError: the text is malformed.
    """
    first, *lines = [one for one in text.splitlines() if one.strip() and not one.lstrip().startswith("#")]
    line = Line(first)
    line.take("graph")
    graph = PrecisionGraph(line.name(), Execution(**line.words()))
    numbers: dict[str, StoredNumbers] = {}
    graph.stored_numbers = numbers.get
    for content in lines:
        line = Line(content)
        if line.skip("return"):
            graph.outputs = line.names() if line.peek() else []
        elif line.skip("compound"):
            graph.compounds.append(tuple(line.names()))
        elif line.peek() in _SOURCES:
            _source(graph, line, numbers)
        else:
            _node(graph, line)
    graph.verify()
    return graph


def _source(graph: PrecisionGraph, line: Line, numbers: dict[str, StoredNumbers]) -> None:
    kind, name = ValueKind(line.name()), line.name()
    line.take(":")
    graph.add_value(line.value(name, kind))
    words = line.words()
    if "mask" in words:
        graph.masks = {**graph.masks, name: Mask(words.pop("mask"), words.pop("terms"))}
    if words:
        numbers[name] = StoredNumbers(**words)


def _node(graph: PrecisionGraph, line: Line) -> None:
    result: list[str] = []
    if line.skip("("):
        line.take(")")
    else:
        result = line.names()
    line.take("=")
    op, inputs, attrs = line.name(), [], {}
    line.take("(")
    while not line.skip(")"):
        inputs.append(line.operand())
        line.skip(",")
    if line.skip("{"):
        while not line.skip("}"):
            key = line.name()
            line.take("=")
            attrs[key] = line.attr()
            line.skip(",")
    values = []
    for name in result:
        line.take("," if values else "->")
        values.append(line.value(name))
    facts: dict[str, Any] = {"name": result[0] if result else ""}
    while line.peek():
        key = line.name()
        line.take("=")
        facts[key] = line.name()
        if key == "pin":
            facts[key] = Pin(facts[key], line.name() if line.peek().startswith('"') else "")
    facts["module_type"] = facts.pop("type", "")
    graph.add_node(Node(op=op, inputs=tuple(inputs), outputs=tuple(result), attrs=attrs, **facts), values)
