"""The matchers: the keys that may stand under `match:`. `MATCHERS` is the one list of them.

The schema, the loader and the search for a node's rule read everything from an entry, so that a new matcher is an entry
here with what it asks, the schema made anew (`amp-compiler rules schema`) and a line in `rules/README.md`.
"""

from __future__ import annotations

import copyreg
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from amp_compiler.ir.dtypes import DType, dtype_from_short
from amp_compiler.ir.graph import LOSS_FUNCTION, STORED_KINDS, Attr, Node, Value
from amp_compiler.policy import forms
from amp_compiler.policy.marks import Mark
from amp_compiler.policy.names import known_family, known_op, matches
from amp_compiler.policy.reduction_size import reduction_size
from amp_compiler.policy.rules import Comparison, Condition, Context, Kind, OpInfo, OpTable, View


def read_condition(kind: Kind, written: Any, table: OpTable, mark: Callable[[str], Mark]) -> Condition:
    """Make the condition of what stands in a rule file, whose form has been checked.

    Args:
        kind: the matcher.
        written: what stands there, of the type `kind.form`; a single item comes as a list of one.
        table: the op table.
        mark: the place of one item of a list.

    Raises:
        RuleError: an item is not known, or cannot be read.
    """
    if kind.read is not None:
        return Condition(kind, kind.read(written))
    return Condition(kind, tuple(kind.item(text, table, mark(text)) if kind.item else text for text in written))


# ---- what an item stands for


def _regex(text: str, table: OpTable, mark: Mark) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as cause:
        spot = getattr(cause, "pos", None)
        hint = f"correct it{'' if spot is None else f' at character {spot + 1}'}, or escape its special characters"
        raise mark.error(f"'{text}' is no regular expression: {cause}", hint) from cause


def _type(text: str, table: OpTable, mark: Mark) -> DType:
    return dtype_from_short(text)


# ---- what all stands for, and what is wrong with it


def _attributes(written: dict[str, Any]) -> tuple[tuple[str, Attr], ...]:
    """Names and values, a list as a tuple."""
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in written.items())


def _comparison(written: Any) -> Comparison:
    """An operator and a number; a bare number asks for equality."""
    if not isinstance(written, str):
        return Comparison("==", float(written))
    text = written.strip()
    width = 2 if text[1] == "=" else 1
    return Comparison(text[:width], float(text[width:]))


def _no_comparison(written: Any) -> tuple[str, str]:
    shown = f"'{written}'" if isinstance(written, str) else repr(written)[:60]
    return f"{shown} is no comparison", 'write an operator and a number in quotes, such as "> 8192"'


def _no_backward(written: Any) -> tuple[str, str] | None:
    """Rules are asked before there is a backward."""
    if written != "backward":
        return None
    return (
        "'phase: backward' would match nothing: the backward is generated from the forward after the rules decided",
        "match the forward node and say what its gradients run in: leave 'phase' out, and write"
        " 'backward: {precision: fp32}' (or low) in the place of 'precision: fp32'",
    )


# ---- what is the same for all nodes of an op


def _of_op(wanted: tuple[str, ...], info: OpInfo, context: Context) -> bool:
    return matches(wanted, info.name)


def _among(
    read: Callable[[OpInfo, Context], object], wanted: tuple[object, ...], info: OpInfo, context: Context
) -> bool:
    return read(info, context) in wanted


_of_family = partial(_among, lambda info, context: info.family)
_on_device = partial(_among, lambda info, context: context.device)
_in_low = partial(_among, lambda info, context: context.low)


# ---- what differs from node to node


def _named(field: str, wanted: tuple[str, ...], node: Node, view: View) -> bool:
    """A name of the node matches one of these globs; `*` crosses dots."""
    return matches(wanted, getattr(node, field))


def _searched(wanted: tuple[re.Pattern[str], ...], node: Node, view: View) -> bool:
    return any(pattern.search(node.name) for pattern in wanted)


def _has_attributes(wanted: tuple[tuple[str, Attr], ...], node: Node, view: View) -> bool:
    return all(_attribute_is(node.attrs, name, value) for name, value in wanted)


def _is_part(wanted: tuple[str, ...], node: Node, view: View) -> bool:
    return node.part in wanted


def _makes_output(wanted: bool, node: Node, view: View) -> bool:
    return any(name in view.outputs for name in node.outputs) == wanted


def _is_depthwise(wanted: bool, node: Node, view: View) -> bool:
    """As many groups as channels, and more than one."""
    groups = node.attrs.get("groups", node.attrs.get("group", 1))
    return (groups != 1 and groups == _channels(node, view)) == wanted


def _channels(node: Node, view: View) -> int | str | None:
    """Channels that a convolution reads: dimensions behind them are as many as the weight has behind its second."""
    shapes = [view.graph.values[operand.value].shape for operand in node.inputs[:2]]
    if len(shapes) < 2 or shapes[0] is None or shapes[1] is None or len(shapes[1]) > len(shapes[0]) + 1:
        return None
    return shapes[0][len(shapes[0]) - len(shapes[1]) + 1]


def _feeds(wanted: tuple[str, ...], node: Node, view: View) -> bool:
    return any(matches(wanted, user.op) for name in node.outputs for user, _ in view.graph.users(name))


def _reads_types(wanted: tuple[DType, ...], node: Node, view: View) -> bool:
    """A node without floating-point operands does not match."""
    floats = [value.dtype for _, value in view.graph.operands(node) if value.dtype.is_float]
    return bool(floats) and all(dtype in wanted for dtype in floats)


def _within(number: Callable[[Node, View], float | None], wanted: Comparison, node: Node, view: View) -> bool:
    """A number of the node is within the bound; where it is not known, nothing matches."""
    known = number(node, view)
    return known is not None and wanted.holds(known)


def _reduction_size(node: Node, view: View) -> float | None:
    return reduction_size(view.graph, node, view.ops.info(node.op).sums)


def _absmax(node: Node, view: View) -> float | None:
    names = (*(operand.value for operand in node.inputs), *node.outputs)
    return max((view.ranges[name] for name in names if name in view.ranges), default=None)


def _weight_absmax(node: Node, view: View) -> float | None:
    known = [view.graph.stored_numbers(value.name) for value in _stored(node, view)]
    return max((numbers.largest for numbers in known if numbers is not None), default=None)


def _weight_size(node: Node, view: View) -> float | None:
    return max((value.numel for value in _stored(node, view)), default=None)


def _stored(node: Node, view: View) -> list[Value]:
    """The floating-point values that a node reads and that are stored with the model."""
    return [value for _, value in view.graph.operands(node) if value.kind in STORED_KINDS and value.dtype.is_float]


def _bound(key: str, about: str, number: Callable[[Node, View], float | None]) -> Kind:
    """A matcher that compares a number."""
    return Kind(key, about, forms.Bound, holds=partial(_within, number), read=_comparison, refusal=_no_comparison)


def _name(key: str, about: str) -> Kind:
    """A matcher of globs on a field of the node that is called as the key."""
    return Kind(key, about, forms.Texts, holds=partial(_named, key), name_of=key)


_KINDS = (  # in the order in which they are asked about a node, the cheap ones first
    Kind("family", "op family, such as matmul or softmax", forms.Texts, possible=_of_family, item=known_family),
    Kind("op", "glob on the canonical op name: aten.linear, onnx.Reduce*", forms.Texts, possible=_of_op, item=known_op,
         name_of="op"),
    _name(
        "module", f"glob on the qualified module name; * crosses dots; {LOSS_FUNCTION} is the loss function of a step"
    ),
    _name("module_type", "glob on the class name of the module"),
    Kind("node", "regular expression searched in the node name", forms.Texts, holds=_searched, item=_regex,
         name_of="name"),
    Kind("attr", "attributes of the node with the values they must have", forms.Attributes, holds=_has_attributes,
         read=_attributes),
    Kind("part", "what the node is a part of that an exporter, or torch itself, has written out", forms.Parts,
         holds=_is_part, by_part=True, name_of="part"),
    Kind("output", "whether the node makes an output of the model", bool, holds=_makes_output, read=bool),
    Kind("depthwise", "whether the node is a convolution whose filters read one channel each", bool,
         holds=_is_depthwise, read=bool),
    Kind("feeds", "glob on the canonical name of an op that reads the result", forms.Texts, holds=_feeds,
         item=known_op),
    Kind("inputs", "captured types: every float operand must have one of them", forms.Floats, holds=_reads_types,
         item=_type),
    _bound("reduction_size", 'elements that one output element sums over: "> 8192" or a number', _reduction_size),
    _bound("weight_size", 'elements of the largest stored tensor that the node reads: "< 2048"', _weight_size),
    _bound("absmax", 'calibrated largest magnitude at the node: "> 1000"', _absmax),
    _bound("weight_absmax", 'largest magnitude of the stored numbers that the node reads: "> 1000"', _weight_absmax),
    Kind("phase", "forward; of the backward a rule speaks by its action backward: {precision: ...}",
         Literal["forward"], read=str, refusal=_no_backward),
    Kind("device", "device type that is planned for", forms.Devices, possible=_on_device, contextual=True),
    Kind("dtype", "low type that is planned for", forms.LowTypes, possible=_in_low, item=_type, contextual=True),
)  # fmt: skip
MATCHERS: dict[str, Kind] = {kind.key: kind for kind in _KINDS}


def _kind(key: str) -> Kind:
    return MATCHERS[key]


copyreg.pickle(Kind, lambda kind: (_kind, (kind.key,)))  # type: ignore[arg-type]  # one of each key in a process


def _attribute_is(attrs: dict[str, Attr], name: str, wanted: Attr) -> bool:
    """Equality that knows truth values from numbers, and a tuple from the flattened attributes `name.0`, `name.1`, …"""
    if name in attrs:
        return _same(attrs[name], wanted)
    if not isinstance(wanted, tuple) or f"{name}.0" not in attrs:
        return False
    spread = tuple(attrs[f"{name}.{index}"] for index in range(len(attrs)) if f"{name}.{index}" in attrs)
    return _same(spread, wanted)


def _same(attr: Attr, wanted: Attr) -> bool:
    if isinstance(attr, tuple) and isinstance(wanted, tuple):
        return len(attr) == len(wanted) and all(_same(one, other) for one, other in zip(attr, wanted, strict=True))
    return isinstance(attr, bool) == isinstance(wanted, bool) and attr == wanted
