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

from amp_compiler.ir.dtypes import DType, dtype_from_short, low_type
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
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """Make the condition of what stands in a rule file, whose form has been checked.

        Args:
            given: what stands there, of the type `form`; a single item comes as a list of one.
            table: the op table.
            mark: the place of one item of a list.

        Raises:
            RuleError: an item is not known, or cannot be read.
        """

    @classmethod
    def refusal(cls, given: Any) -> tuple[str, str] | None:
        """What is wrong with what stands there, and the hint, where its form tells; `None` for pydantic's own words."""
        return None


@dataclass(frozen=True)
class _Names(Match):
    """A matcher whose value is a list of names, of which one must hold."""

    names: tuple[str, ...]

    @property
    def given(self) -> Any:
        """The names."""
        return self.names

    @classmethod
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """The names as they stand there."""
        return cls(tuple(given))


@dataclass(frozen=True)
class Family(_Names):
    """The op belongs to one of these families."""

    key: ClassVar[str] = "family"
    about: ClassVar[str] = "op family, such as matmul or softmax"
    form: ClassVar[Any] = forms.Texts

    @classmethod
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """Every name is a family of the table."""
        for name in given:
            check_family(name, mark(name), table)
        return cls(tuple(given))

    def possible(self, info: OpInfo, context: Context) -> bool:
        """By the family of the op."""
        return info.family in self.names


@dataclass(frozen=True)
class _Ops(_Names):
    """Globs on canonical names of ops."""

    form: ClassVar[Any] = forms.Texts

    @classmethod
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """Every glob matches an op of the table."""
        for glob in given:
            check_op(glob, mark(glob), table)
        return cls(tuple(given))


@dataclass(frozen=True)
class Op(_Ops):
    """The canonical name of the op matches one of these globs."""

    key: ClassVar[str] = "op"
    about: ClassVar[str] = "glob on the canonical op name: aten.linear, onnx.Reduce*"

    def possible(self, info: OpInfo, context: Context) -> bool:
        """By the name of the op."""
        return matches(self.names, info.name)

    def compared(self, node: Node, view: View) -> str:
        """The op."""
        return node.op


@dataclass(frozen=True)
class Feeds(_Ops):
    """An op that reads a result of the node matches one of these globs."""

    key: ClassVar[str] = "feeds"
    about: ClassVar[str] = "glob on the canonical name of an op that reads the result"

    def holds(self, node: Node, view: View) -> bool:
        """By the ops that read what the node makes."""
        return any(matches(self.names, user.op) for name in node.outputs for user, _ in view.graph.users(name))


@dataclass(frozen=True)
class Module(_Names):
    """The qualified name of the calling module matches one of these globs; `*` crosses dots."""

    key: ClassVar[str] = "module"
    about: ClassVar[str] = (
        f"glob on the qualified module name; * crosses dots; {LOSS_FUNCTION} is the loss function of a step"
    )
    form: ClassVar[Any] = forms.Texts

    def holds(self, node: Node, view: View) -> bool:
        """By the name of the module."""
        return matches(self.names, node.module)

    def compared(self, node: Node, view: View) -> str:
        """The module."""
        return node.module


@dataclass(frozen=True)
class ModuleType(_Names):
    """The class name of the calling module matches one of these globs."""

    key: ClassVar[str] = "module_type"
    about: ClassVar[str] = "glob on the class name of the module"
    form: ClassVar[Any] = forms.Texts

    def holds(self, node: Node, view: View) -> bool:
        """By the class of the module."""
        return matches(self.names, node.module_type)

    def compared(self, node: Node, view: View) -> str:
        """The class of the module."""
        return node.module_type


@dataclass(frozen=True)
class NodeName(Match):
    """One of these regular expressions is found in the name of the node."""

    patterns: tuple[re.Pattern[str], ...]
    key: ClassVar[str] = "node"
    about: ClassVar[str] = "regular expression searched in the node name"
    form: ClassVar[Any] = forms.Texts

    @property
    def given(self) -> Any:
        """The patterns."""
        return self.patterns

    @classmethod
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """Every text is a regular expression."""
        return cls(tuple(_regex(text, mark(text)) for text in given))

    def holds(self, node: Node, view: View) -> bool:
        """By the name of the node."""
        return any(pattern.search(node.name) for pattern in self.patterns)

    def compared(self, node: Node, view: View) -> str:
        """The name of the node."""
        return node.name


@dataclass(frozen=True)
class Attribute(Match):
    """The attributes of the node have these values."""

    values: tuple[tuple[str, Attr], ...]
    key: ClassVar[str] = "attr"
    about: ClassVar[str] = "attributes of the node with the values they must have"
    form: ClassVar[Any] = forms.Attributes

    @property
    def given(self) -> Any:
        """Pairs of name and value."""
        return self.values

    @classmethod
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """Names and values, a list as a tuple."""
        return cls(tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in given.items()))

    def holds(self, node: Node, view: View) -> bool:
        """All of them are equal."""
        return all(_attribute_is(node.attrs, name, wanted) for name, wanted in self.values)


@dataclass(frozen=True)
class Part(_Names):
    """The node is part of a norm, a loss or a GELU that an exporter, or torch itself, has written out."""

    key: ClassVar[str] = "part"
    about: ClassVar[str] = "what the node is a part of that an exporter, or torch itself, has written out"
    form: ClassVar[Any] = forms.Parts
    by_part: ClassVar[bool] = True

    def holds(self, node: Node, view: View) -> bool:
        """By what was found in the graph."""
        return node.part in self.names

    def compared(self, node: Node, view: View) -> str:
        """What it is part of."""
        return node.part


@dataclass(frozen=True)
class _Truth(Match):
    """A matcher that is true or false of a node."""

    wanted: bool
    form: ClassVar[Any] = bool

    @property
    def given(self) -> Any:
        """Whether it is to be true."""
        return self.wanted

    @classmethod
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """The truth value."""
        return cls(given)


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
class Inputs(Match):
    """Every floating-point operand was captured in one of these types."""

    types: frozenset[DType]
    key: ClassVar[str] = "inputs"
    about: ClassVar[str] = "captured types: every float operand must have one of them"
    form: ClassVar[Any] = forms.Floats

    @property
    def given(self) -> Any:
        """The types."""
        return self.types

    @classmethod
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """The types by their short names."""
        return cls(frozenset(dtype_from_short(short) for short in given))

    def holds(self, node: Node, view: View) -> bool:
        """By the types of the operands; a node without floating-point operands does not match."""
        floats = [value.dtype for _, value in view.graph.operands(node) if value.dtype.is_float]
        return bool(floats) and all(dtype in self.types for dtype in floats)


@dataclass(frozen=True)
class _Bound(Match):
    """A matcher that compares a number."""

    form: ClassVar[Any] = forms.Bound
    bound: Comparison

    @property
    def given(self) -> Any:
        """The bound."""
        return self.bound

    @classmethod
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """An operator and a number; a bare number asks for equality."""
        if not isinstance(given, str):
            return cls(Comparison("==", float(given)))
        text = given.strip()
        width = 2 if text[1] == "=" else 1
        return cls(Comparison(text[:width], float(text[width:])))

    @classmethod
    def refusal(cls, given: Any) -> tuple[str, str] | None:
        """It is no comparison."""
        shown = f"'{given}'" if isinstance(given, str) else repr(given)[:60]
        return f"{shown} is no comparison", 'write an operator and a number in quotes, such as "> 8192"'


@dataclass(frozen=True)
class ReductionSize(_Bound):
    """Bound on the number of elements that one output element sums over; no match where it is unknown."""

    key: ClassVar[str] = "reduction_size"
    about: ClassVar[str] = 'elements that one output element sums over: "> 8192" or a number'

    def holds(self, node: Node, view: View) -> bool:
        """By the shapes of the node."""
        size = reduction_size(view.graph, node, view.ops.info(node.op).sums)
        return size is not None and self.bound.holds(size)


@dataclass(frozen=True)
class AbsMax(_Bound):
    """Bound on the calibrated largest magnitude of the node's inputs and outputs; no match without calibration."""

    key: ClassVar[str] = "absmax"
    about: ClassVar[str] = 'calibrated largest magnitude at the node: "> 1000"'

    def holds(self, node: Node, view: View) -> bool:
        """By the ranges that were measured."""
        names = (*(operand.value for operand in node.inputs), *node.outputs)
        known = [view.ranges[name] for name in names if name in view.ranges]
        return bool(known) and self.bound.holds(max(known))


@dataclass(frozen=True)
class WeightAbsMax(_Bound):
    """Bound on the largest finite magnitude of the stored numbers that the node reads; no match where unknown."""

    key: ClassVar[str] = "weight_absmax"
    about: ClassVar[str] = 'largest magnitude of the stored numbers that the node reads: "> 1000"'

    def holds(self, node: Node, view: View) -> bool:
        """By the data in the file."""
        known = [found for value in _stored(node, view) if (found := view.graph.stored_numbers(value.name)) is not None]
        return bool(known) and self.bound.holds(max(numbers.largest for numbers in known))


@dataclass(frozen=True)
class WeightSize(_Bound):
    """Bound on the elements of the largest stored tensor of floats that the node reads; no match without one."""

    key: ClassVar[str] = "weight_size"
    about: ClassVar[str] = 'elements of the largest stored tensor that the node reads: "< 2048"'

    def holds(self, node: Node, view: View) -> bool:
        """By the shapes of the data."""
        sizes = [value.numel for value in _stored(node, view)]
        return bool(sizes) and self.bound.holds(max(sizes))


def _stored(node: Node, view: View) -> list[Value]:
    """The floating-point values that a node reads and that are stored with the model."""
    return [value for _, value in view.graph.operands(node) if value.kind in STORED_KINDS and value.dtype.is_float]


@dataclass(frozen=True)
class Phase(_Names):
    """The forward, of which every node that is planned is a part: rules are asked before there is a backward."""

    key: ClassVar[str] = "phase"
    about: ClassVar[str] = "forward; of the backward a rule speaks by its action backward: {precision: ...}"
    form: ClassVar[Any] = Literal["forward"]

    @classmethod
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """The one word."""
        return cls((given,))

    @classmethod
    def refusal(cls, given: Any) -> tuple[str, str] | None:
        """The backward cannot be matched."""
        if given != "backward":
            return None
        return (
            "'phase: backward' would match nothing: the backward is generated from the forward after the rules decided",
            "match the forward node and say what its gradients run in: leave 'phase' out, and write"
            " 'backward: {precision: fp32}' (or low) in the place of 'precision: fp32'",
        )


@dataclass(frozen=True)
class DeviceType(_Names):
    """The device type that is planned for."""

    key: ClassVar[str] = "device"
    about: ClassVar[str] = "device type that is planned for"
    contextual: ClassVar[bool] = True
    form: ClassVar[Any] = forms.Devices

    def possible(self, info: OpInfo, context: Context) -> bool:
        """By the device."""
        return context.device in self.names


@dataclass(frozen=True)
class LowType(Match):
    """The low type that is planned for."""

    types: tuple[DType, ...]
    key: ClassVar[str] = "dtype"
    about: ClassVar[str] = "low type that is planned for"
    contextual: ClassVar[bool] = True
    form: ClassVar[Any] = forms.Lows

    @property
    def given(self) -> Any:
        """The types."""
        return self.types

    @classmethod
    def read(cls, given: Any, table: OpTable, mark: Callable[[str], Mark]) -> Self:
        """The types by their short names."""
        return cls(tuple(low_type(name) for name in given))

    def possible(self, info: OpInfo, context: Context) -> bool:
        """By the low type."""
        return context.low in self.types


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


def _same(found: Attr, wanted: Attr) -> bool:
    if isinstance(found, tuple) and isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(_same(one, other) for one, other in zip(found, wanted, strict=True))
    return isinstance(found, bool) == isinstance(wanted, bool) and found == wanted
