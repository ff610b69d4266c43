"""Which rule decides on a node: rules compiled so that a node costs little more than a few look-ups."""

from __future__ import annotations

import fnmatch
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Attr, Node, PrecisionGraph, Value
from amp_compiler.policy.rules import Context, Decision, Matcher, Precision, Rule, RuleSet


@dataclass
class RuleMatcher:
    """The rules of a set, ready to be asked about the nodes of one graph.

    Args:
        rules: the rules and the op table.
        graph: the graph that the nodes are of.
        context: low type and device; rules for other ones never match.
        ranges: calibrated largest magnitude by value name.

    Example:
        >>> from amp_compiler.policy.loader import load_rules
        >>> matcher = RuleMatcher(load_rules("default"), PrecisionGraph(), Context(DType.FLOAT16))
        >>> matcher.decide(Node("y", "aten.linear", (), ())).precision
        <Precision.LOW: 'low'>
    """

    rules: RuleSet
    graph: PrecisionGraph
    context: Context
    ranges: Mapping[str, float] = field(default_factory=dict)
    _by_op: dict[str, tuple[Rule, ...]] = field(default_factory=dict, init=False, repr=False)
    _named: dict[tuple[tuple[str, ...], str], bool] = field(default_factory=dict, init=False, repr=False)

    def decide(self, node: Node) -> Decision | None:
        """What the rules say of `node`: the last match decides, and later ones may have refined its arithmetic.

        A rule with a precision replaces everything that earlier ones said; one without sets `math` and `backward` only.

        Returns:
            The decision, or `None` where no rule with a precision matches.
        """
        refined: list[Rule] = []
        for rule in self._candidates(node.op):
            if not self._holds(rule.match, node):
                continue
            refined.append(rule)
            if rule.precision is not None:
                return self._merge(node, rule, refined)
        return None

    def _merge(self, node: Node, rule: Rule, matched: list[Rule]) -> Decision:
        """The decision of `rule` with what later rules (`matched`, last first, ending in `rule`) refine."""
        backward = next((found.backward for found in matched if found.backward is not None), None)
        reason = rule.why or default_reason(node.op, self.rules.ops.info(node.op).family, rule)
        refining = [later.where for later in reversed(matched[:-1])]
        if refining:
            reason += f"; arithmetic refined by {', '.join(refining)}"
        return Decision(
            precision=rule.precision or Precision.KEEP,
            rule=rule.where,
            reason=reason,
            math=next((found.math for found in matched if found.math is not None), None),
            backward=backward,
            backward_math=next((found.backward_math for found in matched if found.backward_math is not None), None),
        )

    def _candidates(self, op: str) -> tuple[Rule, ...]:
        """The rules that `op`, its family, the device and the low type leave, last first."""
        found = self._by_op.get(op)
        if found is None:
            family = self.rules.ops.info(op).family
            found = tuple(rule for rule in reversed(self.rules.rules) if self._possible(rule.match, op, family))
            self._by_op[op] = found
        return found

    def _possible(self, match: Matcher, op: str, family: str) -> bool:
        return (
            (not match.device or self.context.device in match.device)
            and (not match.dtype or self.context.low in match.dtype)
            and (not match.family or family in match.family)
            and (not match.op or _glob(match.op).match(op) is not None)
        )

    def _holds(self, match: Matcher, node: Node) -> bool:
        """True where the conditions that differ between nodes of one op hold, the cheap ones first."""
        if match.phase is not None and node.phase != match.phase:
            return False
        if match.module and not self._name_matches(match.module, node.module):
            return False
        if match.module_type and not self._name_matches(match.module_type, node.module_type):
            return False
        if match.node and not any(pattern.search(node.name) for pattern in match.node):
            return False
        if match.attr and not all(_attribute_is(node.attrs, name, wanted) for name, wanted in match.attr):
            return False
        if match.inputs and not self._inputs_are(match.inputs, node):
            return False
        if match.reduction_size is not None:
            size = reduction_size(self.graph, node, self.rules.ops.info(node.op).family)
            if size is None or not match.reduction_size.holds(size):
                return False
        if match.absmax is not None:
            largest = self._absmax(node)
            if largest is None or not match.absmax.holds(largest):
                return False
        return True

    def _name_matches(self, globs: tuple[str, ...], name: str) -> bool:
        key = (globs, name)
        found = self._named.get(key)
        if found is None:
            found = self._named[key] = _glob(globs).match(name) is not None
        return found

    def _inputs_are(self, wanted: frozenset[DType], node: Node) -> bool:
        floats = [value.dtype for _, value in self.graph.operands(node) if value.dtype.is_float]
        return bool(floats) and all(dtype in wanted for dtype in floats)

    def _absmax(self, node: Node) -> float | None:
        names = (*(operand.value for operand in node.inputs), *node.outputs)
        known = [self.ranges[name] for name in names if name in self.ranges]
        return max(known) if known else None


def default_reason(op: str, family: str, rule: Rule) -> str:
    """The reason where the author of a rule gave none.

    Example:
        >>> default_reason("aten.linear", "matmul", Rule("my.yaml:3", Matcher(family=("matmul",)), Precision.LOW))
        'the rule lets the family matmul run in the low type'
    """
    asked = {
        Precision.LOW: "run in the low type",
        Precision.FP32: "run in FP32",
        Precision.WIDEST: "run in the widest type of its inputs",
        Precision.FOLLOW: "run in whichever type costs least traffic",
        Precision.KEEP: "stay as it was captured",
    }[rule.precision or Precision.KEEP]
    subject = f"the family {family}" if rule.match.family else (op if rule.match.op else "the node")
    return f"the rule lets {subject} {asked}"


@functools.lru_cache(maxsize=4096)
def _glob(globs: tuple[str, ...]) -> re.Pattern[str]:
    """One pattern for all the globs of a condition; matched at the start, it covers the whole name."""
    return re.compile("|".join(f"(?:{fnmatch.translate(glob)})" for glob in globs))


def _attribute_is(attrs: dict[str, Attr], name: str, wanted: Attr) -> bool:
    """Equality that knows truth values from numbers, and a tuple from the flattened attributes `name.0`, `name.1`, …"""
    if name in attrs:
        return _same(attrs[name], wanted)
    if not isinstance(wanted, tuple) or f"{name}.0" not in attrs:
        return False
    spread = tuple(attrs[f"{name}.{index}"] for index in range(len(attrs)) if f"{name}.{index}" in attrs)
    return _same(spread, wanted)


def _same(found: Attr, wanted: Attr) -> bool:
    if isinstance(found, tuple) and isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(_same(one, other) for one, other in zip(found, wanted, strict=True))
    return isinstance(found, bool) == isinstance(wanted, bool) and found == wanted


def reduction_size(graph: PrecisionGraph, node: Node, family: str) -> int | None:
    """How many elements one output element of `node` sums over.

    Products of matrices give their inner dimension, convolutions the taps of one filter, normalisations and softmax the
    elements of one group, reductions the elements of the input over those of the output.

    Returns:
        The number, or `None` where shapes are symbolic or unknown, or where the op sums nothing: then no rule with a
        `reduction_size` matches.
    """
    data = next((value for _, value in graph.operands(node) if value.dtype.is_float), None)
    if data is None:
        return None
    rule = _SIZES.get(family)
    return None if rule is None else rule(graph, node, data)


def _sizes(value: Value) -> tuple[int, ...] | None:
    """The dimensions where all are numbers."""
    if value.shape is None:
        return None
    known = tuple(size for size in value.shape if isinstance(size, int))
    return known if len(known) == len(value.shape) else None


def _slot(graph: PrecisionGraph, node: Node, *names: str) -> Value | None:
    return next((value for operand, value in graph.operands(node) if operand.slot in names), None)


def _of_matmul(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """The inner dimension: the last one of the left factor. A sum of products has its factors after the summand."""
    factors = [value for operand, value in graph.operands(node) if operand.slot not in ("self", "input", "C")]
    added = node.op.split(".")[1] in ("addmm", "addmv", "addbmm", "baddbmm", "_addmm_activation")
    left = factors[0] if added and factors else data
    if node.op in ("aten.einsum", "onnx.Einsum", "aten.addr", "aten.tensordot", "aten.bilinear", "aten._trilinear"):
        return None
    if not left.shape:
        return None
    size = left.shape[-2 if node.attrs.get("transA") and left.rank == 2 else -1]
    return size if isinstance(size, int) else None


def _of_convolution(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """Channels of one group times the elements of the kernel: all of the weight but its dimension of filters."""
    weight = _slot(graph, node, "weight", "W")
    sizes = None if weight is None else _sizes(weight)
    if not sizes:
        return None
    transposed = "transpose" in node.op.lower() or node.attrs.get("transposed") is True
    if not transposed:
        return math.prod(sizes[1:])
    groups = node.attrs.get("groups", node.attrs.get("group", 1))
    return sizes[0] * math.prod(sizes[2:]) // groups if isinstance(groups, int) and groups > 0 else None


def _of_reduction(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """Elements read for each one written; a running sum (same shape) sums over its dimension."""
    made = graph.values.get(node.outputs[0]) if node.outputs else None
    if made is None or _sizes(data) is None or _sizes(made) is None or made.numel == 0:
        return None
    if node.op.split(".")[1].lower().startswith(("cum", "logcum", "_logcum")):
        return _along(data, node.attrs.get("dim", node.attrs.get("axis")))
    return max(1, data.numel // made.numel)


def _of_softmax(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    return _along(data, node.attrs.get("dim", node.attrs.get("axis", -1)))


def _along(data: Value, axis: Attr) -> int | None:
    if not isinstance(axis, int) or not data.shape or not -len(data.shape) <= axis < len(data.shape):
        return None
    size = data.shape[axis]
    return size if isinstance(size, int) else None


def _of_normalization(graph: PrecisionGraph, node: Node, data: Value) -> int | None:
    """Elements of the input that share one mean."""
    sizes, name = _sizes(data), node.op.split(".")[1].lower()
    if sizes is None or len(sizes) < 2:
        return None
    if "batch_norm" in name or "batchnorm" in name:
        return math.prod(sizes) // max(1, sizes[1])
    if "instance" in name:
        return math.prod(sizes[2:])
    if "group" in name:
        groups = node.attrs.get("num_groups", node.attrs.get("group"))
        return math.prod(sizes[1:]) // groups if isinstance(groups, int) and groups > 0 else None
    axis = node.attrs.get("axis")
    if isinstance(axis, int) and -len(sizes) <= axis < len(sizes):
        return math.prod(sizes[axis:])
    shape = node.attrs.get("normalized_shape")
    if not isinstance(shape, tuple):
        shape = tuple(size for key, size in node.attrs.items() if key.startswith("normalized_shape."))
    return math.prod(sizes[-len(shape) :]) if shape else sizes[-1]


_SIZES = {
    "matmul": _of_matmul,
    "convolution": _of_convolution,
    "reduction": _of_reduction,
    "loss": _of_reduction,
    "pooling": _of_reduction,
    "softmax": _of_softmax,
    "normalization": _of_normalization,
    "batch_norm": _of_normalization,
}
