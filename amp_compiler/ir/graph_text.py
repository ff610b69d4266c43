"""A `PrecisionGraph` as text: for reading, for golden files, for diffs.

    graph cpu
    input x: fp32[2, 8]
    param w: fp32[8, 8]
    y = aten.linear(input=x, weight=w) -> fp32[2, 8]  module=fc1 type=Linear source="model.py:3" pin=fp32 "autocast off"
    a, b = aten.split(self=y) {split_size=4} -> fp32[2, 4], fp32[2, 4] volatile  name=split
    return a, b

A dimension may be a name (`fp32[s0, 8]~64`: 64 elements by the hint), the rank unknown (`fp32[?]~64`). An operand may
list the types that its op takes (`X=x:fp16|fp32`). A node is named after its first output unless `name=` says
otherwise, and one without outputs is written `() = op(…)`. After the allowed types may stand `tied`
(`X=x:fp16|fp32|tied`), and after the device what is said of how the graph is run, by the names of `Execution`
(`graph onnx stored_casts_free cast_overhead=4096`). After a source may stand what is known of its numbers, by the names
of `StoredNumbers`, and the way of a mask (`const m: fp32[2] least=-1e+09 mask=("a", "b") terms=2.0`). Behind the nodes
stand the `compound` lines: the nodes of one norm or GELU. After the result types of a node may stand `module`, `type`,
`source`, `region`, `part` and `pin`. Names with characters other than letters, digits, `_`, `.` and `/` are
written as JSON strings, and so are values with the name of a keyword.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields

from amp_compiler.ir.facts import Execution, StoredNumbers
from amp_compiler.ir.graph import Attr, Node, Operand, PrecisionGraph, Value, ValueKind

_KEYWORDS = frozenset({"graph", "return", "volatile", "compound", *(kind.value for kind in ValueKind)})
_BARE = re.compile(r"[A-Za-z0-9_./]+\Z")
_WORDS = {True: "true", False: "false", None: "none"}


def format_graph(graph: PrecisionGraph) -> str:
    """The graph as text, the same for equal graphs.

    Args:
        graph: any graph; sources (inputs, parameters, buffers, constants) come first, then nodes in execution order.

    Example:
        >>> from amp_compiler.ir.dtypes import DType
        >>> graph = PrecisionGraph()
        >>> graph.add_value(Value("x", DType.FLOAT32, (2, "s0"), 6, ValueKind.INPUT))
        >>> print(format_graph(graph), end="")
        graph cpu
        input x: fp32[2, s0]~6
        return
    """
    lines = [" ".join(("graph", _word(graph.device), *_said(graph.execution)))]
    for value in graph.values.values():
        if value.kind is not ValueKind.RESULT:
            words = [f"{value.kind.value} {_name(value.name)}: {_type(value)}"]
            numbers, mask = graph.stored_numbers(value.name), graph.masks.get(value.name)
            words += [] if numbers is None else _said(numbers) or ["least=0.0"]
            words += [] if mask is None else [f"mask={_attr(mask.path)} terms={mask.terms}"]
            lines.append(" ".join(words))
    lines += [_node(graph, node) for node in graph.nodes.values()]
    lines += [f"compound {', '.join(map(_name, names))}" for names in graph.compounds]
    lines.append(f"return {', '.join(map(_name, graph.outputs))}".rstrip())
    return "\n".join(lines) + "\n"


def _node(graph: PrecisionGraph, node: Node) -> str:
    results = ", ".join(map(_name, node.outputs)) or "()"
    reads = ", ".join(f"{_word(operand.slot)}={_operand(operand)}" for operand in node.inputs)
    text = f"{results} = {_word(node.op)}({reads})"
    if node.attrs:
        text += " {" + ", ".join(f"{_word(key)}={_attr(value)}" for key, value in node.attrs.items()) + "}"
    if node.outputs:
        text += " -> " + ", ".join(_type(graph.values[name]) for name in node.outputs)
    facts = []
    if not node.outputs or node.name != node.outputs[0]:
        facts.append(f"name={_word(node.name)}")
    names = {"module": "module", "type": "module_type", "source": "source", "region": "region", "part": "part"}
    facts += [f"{key}={_word(value)}" for key, name in names.items() if (value := getattr(node, name))]
    if node.pin is not None:
        facts.append(f"pin={_word(node.pin.precision)} {_string(node.pin.reason)}")
    return text + ("  " + " ".join(facts) if facts else "")


def _said(facts: Execution | StoredNumbers) -> list[str]:
    """The fields that are not as they are by default."""
    words = []
    for one in fields(facts):
        value = getattr(facts, one.name)
        if value != one.default:
            words.append(one.name if value is True else f"{one.name}={_attr(value)}")
    return words


def _name(value: str) -> str:
    return _string(value) if value in _KEYWORDS else _word(value)


def _word(text: str) -> str:
    return text if _BARE.match(text) else _string(text)


def _string(text: str) -> str:
    # Characters that str.splitlines takes for line ends are escaped too, so that a line stays a line.
    plain = json.dumps(text, ensure_ascii=False)
    return "".join(f"\\u{ord(char):04x}" if char in "\x7f\x85\u2028\u2029" else char for char in plain)


def _operand(operand: Operand) -> str:
    if operand.allowed is None:
        return _name(operand.value) + (":tied" if operand.tied else "")
    words = sorted(dtype.short for dtype in operand.allowed) or ["none"]
    return f"{_name(operand.value)}:{'|'.join(words + ['tied'] * operand.tied)}"


def _type(value: Value) -> str:
    if value.shape is None:
        shape, known = "?", None
    else:
        shape = ", ".join(str(dim) if isinstance(dim, int) else _dim(dim) for dim in value.shape)
        sizes = [dim for dim in value.shape if isinstance(dim, int)]
        known = math.prod(sizes) if len(sizes) == len(value.shape) else None
    hint = "" if known == value.numel else f"~{value.numel}"
    return f"{value.dtype.short}[{shape}]{hint}" + (" volatile" if value.volatile else "")


def _dim(dim: str) -> str:
    return _string(dim) if dim.isdecimal() else _word(dim)


def _attr(value: Attr) -> str:
    if isinstance(value, bool) or value is None:
        return _WORDS[value]
    if isinstance(value, tuple):
        return f"({', '.join(map(_attr, value))})"
    return _string(value) if isinstance(value, str) else repr(value)
