"""The matchers: a class for each key that may stand under `match:`. `MATCHERS` is the one list of them.

The schema, the loader and the search for a node's rule read everything from the class, so that a new matcher is a class
here, the schema made anew (`amp-compiler rules schema`) and a line in `rules/README.md`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from amp_compiler.ir.dtypes import dtype_from_short
from amp_compiler.ir.graph import LOSS_FUNCTION, STORED_KINDS, Attr, Node, Value
from amp_compiler.policy import forms
from amp_compiler.policy.marks import Mark
from amp_compiler.policy.names import check_family, check_op, matches
from amp_compiler.policy.reduction_size import reduction_size
from amp_compiler.policy.rules import Comparison, Condition, Context, OpInfo, OpTable, View


class Match(Condition):
    """Base of the matchers."""

    @classmethod
    @abstractmethod
    def read(cls, written: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """Make the condition of what stands in a rule file, whose form has been checked.

        Args:
            written: what stands there, of the type `form`; a single item comes as a list of one.
            table: the op table.
            mark: the place of one item of a list.

        Raises:
            RuleError: an item is not known, or cannot be read.
        """

    @classmethod
    def refusal(cls, written: Any) -> tuple[str, str] | None:
        """What is wrong with what stands there, and the hint, where its form tells; `None` for pydantic's own words."""
        return None


@dataclass(frozen=True)
class _Listed(Match):
    """A matcher whose value is a list, of which one item must hold."""

    wanted: tuple[Any, ...]
    form: ClassVar[Any] = forms.Texts

    @classmethod
    def read(cls, written: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """The items, each as `item` makes it."""
        return cls(tuple(cls.item(text, table, mark(text)) for text in written))

    @classmethod
    def item(cls, text: str, table: OpTable, mark: Mark) -> Any:
        """What one item stands for, the text itself where nothing is to be checked."""
        return text


@dataclass(frozen=True)
class Family(_Listed):
    """The op belongs to one of these families."""

    key: ClassVar[str] = "family"
    about: ClassVar[str] = "op family, such as matmul or softmax"

    @classmethod
    def item(cls, text: str, table: OpTable, mark: Mark) -> Any:
        """A family of the table."""
        check_family(text, mark, table)
        return text

    def possible(self, info: OpInfo, context: Context) -> bool:
        """By the family of the op."""
        return info.family in self.wanted


@dataclass(frozen=True)
class _Ops(_Listed):
    """Globs on canonical names of ops."""

    @classmethod
    def item(cls, text: str, table: OpTable, mark: Mark) -> Any:
        """A glob that matches an op of the table."""
        check_op(text, mark, table)
        return text


@dataclass(frozen=True)
class Op(_Ops):
    """The canonical name of the op matches one of these globs."""

    key: ClassVar[str] = "op"
    about: ClassVar[str] = "glob on the canonical op name: aten.linear, onnx.Reduce*"
    name_of: ClassVar[str] = "op"

    def possible(self, info: OpInfo, context: Context) -> bool:
        """By the name of the op."""
        return matches(self.wanted, info.name)


@dataclass(frozen=True)
class Feeds(_Ops):
    """An op that reads a result of the node matches one of these globs."""

    key: ClassVar[str] = "feeds"
    about: ClassVar[str] = "glob on the canonical name of an op that reads the result"

    def holds(self, node: Node, view: View) -> bool:
        """By the ops that read what the node makes."""
        return any(matches(self.wanted, user.op) for name in node.outputs for user, _ in view.graph.users(name))


@dataclass(frozen=True)
class _Globs(_Listed):
    """Globs on a name of the node, `name_of`; `*` crosses dots."""

    def holds(self, node: Node, view: View) -> bool:
        """By that name."""
        return matches(self.wanted, getattr(node, self.name_of))


@dataclass(frozen=True)
class Module(_Globs):
    """The qualified name of the calling module matches one of these globs."""

    key: ClassVar[str] = "module"
    about: ClassVar[str] = (
        f"glob on the qualified module name; * crosses dots; {LOSS_FUNCTION} is the loss function of a step"
    )
    name_of: ClassVar[str] = "module"


@dataclass(frozen=True)
class ModuleType(_Globs):
    """The class name of the calling module matches one of these globs."""

    key: ClassVar[str] = "module_type"
    about: ClassVar[str] = "glob on the class name of the module"
    name_of: ClassVar[str] = "module_type"


@dataclass(frozen=True)
class NodeName(_Listed):
    """One of these regular expressions is found in the name of the node."""

    key: ClassVar[str] = "node"
    about: ClassVar[str] = "regular expression searched in the node name"
    name_of: ClassVar[str] = "name"

    @classmethod
    def item(cls, text: str, table: OpTable, mark: Mark) -> Any:
        """A regular expression."""
        return _regex(text, mark)

    def holds(self, node: Node, view: View) -> bool:
        """By the name of the node."""
        return any(pattern.search(node.name) for pattern in self.wanted)


@dataclass(frozen=True)
class Attribute(Match):
    """The attributes of the node have these values."""

    wanted: tuple[tuple[str, Attr], ...]
    key: ClassVar[str] = "attr"
    about: ClassVar[str] = "attributes of the node with the values they must have"
    form: ClassVar[Any] = forms.Attributes

    @classmethod
    def read(cls, written: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """Names and values, a list as a tuple."""
        return cls(tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in written.items()))

    def holds(self, node: Node, view: View) -> bool:
        """All of them are equal."""
        return all(_attribute_is(node.attrs, name, wanted) for name, wanted in self.wanted)


@dataclass(frozen=True)
class Part(_Listed):
    """The node is part of a norm, a loss or a GELU that an exporter, or torch itself, has written out."""

    key: ClassVar[str] = "part"
    about: ClassVar[str] = "what the node is a part of that an exporter, or torch itself, has written out"
    form: ClassVar[Any] = forms.Parts
    by_part: ClassVar[bool] = True
    name_of: ClassVar[str] = "part"

    def holds(self, node: Node, view: View) -> bool:
        """By what was found in the graph."""
        return node.part in self.wanted


@dataclass(frozen=True)
class _Truth(Match):
    """A matcher that is true or false of a node."""

    wanted: bool
    form: ClassVar[Any] = bool

    @classmethod
    def read(cls, written: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """The truth value."""
        return cls(written)


@dataclass(frozen=True)
class Output(_Truth):
    """Whether a result of the node is an output of the model."""

    key: ClassVar[str] = "output"
    about: ClassVar[str] = "whether the node makes an output of the model"

    def holds(self, node: Node, view: View) -> bool:
        """By what the graph returns."""
        return any(name in view.outputs for name in node.outputs) == self.wanted


@dataclass(frozen=True)
class Depthwise(_Truth):
    """Whether the node is a convolution of which each filter reads one channel of several."""

    key: ClassVar[str] = "depthwise"
    about: ClassVar[str] = "whether the node is a convolution whose filters read one channel each"

    def holds(self, node: Node, view: View) -> bool:
        """As many groups as channels, and more than one."""
        groups = node.attrs.get("groups", node.attrs.get("group", 1))
        return (groups != 1 and groups == _channels(node, view)) == self.wanted


def _channels(node: Node, view: View) -> int | str | None:
    """Channels that a convolution reads: dimensions behind them are as many as the weight has behind its second."""
    shapes = [view.graph.values[operand.value].shape for operand in node.inputs[:2]]
    if len(shapes) < 2 or shapes[0] is None or shapes[1] is None or len(shapes[1]) > len(shapes[0]) + 1:
        return None
    return shapes[0][len(shapes[0]) - len(shapes[1]) + 1]


@dataclass(frozen=True)
class _Types(_Listed):
    """Types by their names."""

    @classmethod
    def item(cls, text: str, table: OpTable, mark: Mark) -> Any:
        """The type of the name."""
        return dtype_from_short(text)


@dataclass(frozen=True)
class Inputs(_Types):
    """Every floating-point operand was captured in one of these types."""

    key: ClassVar[str] = "inputs"
    about: ClassVar[str] = "captured types: every float operand must have one of them"
    form: ClassVar[Any] = forms.Floats

    def holds(self, node: Node, view: View) -> bool:
        """By the types of the operands; a node without floating-point operands does not match."""
        floats = [value.dtype for _, value in view.graph.operands(node) if value.dtype.is_float]
        return bool(floats) and all(dtype in self.wanted for dtype in floats)


@dataclass(frozen=True)
class _Bound(Match):
    """A matcher that compares a number."""

    form: ClassVar[Any] = forms.Bound
    wanted: Comparison

    @classmethod
    def read(cls, written: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """An operator and a number; a bare number asks for equality."""
        if not isinstance(written, str):
            return cls(Comparison("==", float(written)))
        text = written.strip()
        width = 2 if text[1] == "=" else 1
        return cls(Comparison(text[:width], float(text[width:])))

    @classmethod
    def refusal(cls, written: Any) -> tuple[str, str] | None:
        """It is no comparison."""
        shown = f"'{written}'" if isinstance(written, str) else repr(written)[:60]
        return f"{shown} is no comparison", 'write an operator and a number in quotes, such as "> 8192"'

    def holds(self, node: Node, view: View) -> bool:
        """By the number of the node."""
        number = self.number(node, view)
        return number is not None and self.wanted.holds(number)

    @abstractmethod
    def number(self, node: Node, view: View) -> float | None:
        """What is compared; `None` where it is not known, which matches nothing."""


@dataclass(frozen=True)
class ReductionSize(_Bound):
    """Bound on the number of elements that one output element sums over."""

    key: ClassVar[str] = "reduction_size"
    about: ClassVar[str] = 'elements that one output element sums over: "> 8192" or a number'

    def number(self, node: Node, view: View) -> float | None:
        """By the shapes of the node."""
        return reduction_size(view.graph, node, view.ops.info(node.op).sums)


@dataclass(frozen=True)
class AbsMax(_Bound):
    """Bound on the calibrated largest magnitude of the node's inputs and outputs."""

    key: ClassVar[str] = "absmax"
    about: ClassVar[str] = 'calibrated largest magnitude at the node: "> 1000"'

    def number(self, node: Node, view: View) -> float | None:
        """By the ranges that were measured."""
        names = (*(operand.value for operand in node.inputs), *node.outputs)
        return max((view.ranges[name] for name in names if name in view.ranges), default=None)


@dataclass(frozen=True)
class WeightAbsMax(_Bound):
    """Bound on the largest finite magnitude of the stored numbers that the node reads."""

    key: ClassVar[str] = "weight_absmax"
    about: ClassVar[str] = 'largest magnitude of the stored numbers that the node reads: "> 1000"'

    def number(self, node: Node, view: View) -> float | None:
        """By the data in the file."""
        known = [view.graph.stored_numbers(value.name) for value in _stored(node, view)]
        return max((numbers.largest for numbers in known if numbers is not None), default=None)


@dataclass(frozen=True)
class WeightSize(_Bound):
    """Bound on the elements of the largest stored tensor of floats that the node reads."""

    key: ClassVar[str] = "weight_size"
    about: ClassVar[str] = 'elements of the largest stored tensor that the node reads: "< 2048"'

    def number(self, node: Node, view: View) -> float | None:
        """By the shapes of the data."""
        return max((value.numel for value in _stored(node, view)), default=None)


def _stored(node: Node, view: View) -> list[Value]:
    """The floating-point values that a node reads and that are stored with the model."""
    return [value for _, value in view.graph.operands(node) if value.kind in STORED_KINDS and value.dtype.is_float]


@dataclass(frozen=True)
class Phase(_Listed):
    """The forward, of which every node that is planned is a part: rules are asked before there is a backward."""

    key: ClassVar[str] = "phase"
    about: ClassVar[str] = "forward; of the backward a rule speaks by its action backward: {precision: ...}"
    form: ClassVar[Any] = Literal["forward"]

    @classmethod
    def read(cls, written: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """The one word."""
        return cls((written,))

    @classmethod
    def refusal(cls, written: Any) -> tuple[str, str] | None:
        """The backward cannot be matched."""
        if written != "backward":
            return None
        return (
            "'phase: backward' would match nothing: the backward is generated from the forward after the rules decided",
            "match the forward node and say what its gradients run in: leave 'phase' out, and write"
            " 'backward: {precision: fp32}' (or low) in the place of 'precision: fp32'",
        )


@dataclass(frozen=True)
class DeviceType(_Listed):
    """The device type that is planned for."""

    key: ClassVar[str] = "device"
    about: ClassVar[str] = "device type that is planned for"
    contextual: ClassVar[bool] = True
    form: ClassVar[Any] = forms.Devices

    def possible(self, info: OpInfo, context: Context) -> bool:
        """By the device."""
        return context.device in self.wanted


@dataclass(frozen=True)
class LowType(_Types):
    """The low type that is planned for."""

    key: ClassVar[str] = "dtype"
    about: ClassVar[str] = "low type that is planned for"
    contextual: ClassVar[bool] = True
    form: ClassVar[Any] = forms.LowTypes

    def possible(self, info: OpInfo, context: Context) -> bool:
        """By the low type."""
        return context.low in self.wanted


# In the order in which they are asked about a node, the cheap ones first.
MATCHERS: dict[str, type[Match]] = {
    kind.key: kind
    for kind in (
        Family, Op, Module, ModuleType, NodeName, Attribute, Part, Output, Depthwise, Feeds, Inputs, ReductionSize,
        WeightSize, AbsMax, WeightAbsMax, Phase, DeviceType, LowType,
    )
}  # fmt: skip


def _regex(text: str, mark: Mark) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as cause:
        spot = getattr(cause, "pos", None)
        hint = "correct it" if spot is None else f"correct it at character {spot + 1}"
        raise mark.error(f"'{text}' is no regular expression: {cause}", hint) from cause


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
