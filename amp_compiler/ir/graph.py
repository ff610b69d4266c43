"""`PrecisionGraph`: the neutral graph that every pass of the planner works on.

It knows values with a type and a size, and nodes with a canonical op, their module and their source line. It knows
nothing of torch or ONNX: a frontend lowers its own graph to this one and carries a plan back.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace

from amp_compiler.errors import GraphError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import Execution, Mask, StoredNumbers
from amp_compiler.ir.value_class import value_class

Attr = bool | int | float | str | tuple["Attr", ...] | None


class ValueKind(enum.Enum):
    """Where a value comes from; `.value` is its keyword in graph text."""

    INPUT = "input"
    PARAMETER = "param"
    BUFFER = "buffer"
    CONSTANT = "const"
    RESULT = "result"


STORED_KINDS = frozenset({ValueKind.PARAMETER, ValueKind.BUFFER, ValueKind.CONSTANT})
"""Kinds of values whose numbers are stored with the model."""
_FOLDED = (ValueKind.PARAMETER, ValueKind.CONSTANT)


@value_class
class Value:
    """A tensor that flows through the graph.

    Args:
        name: unique in the graph.
        dtype: element type as captured, before any rewrite.
        shape: dimensions; a string is a symbolic one, `None` an unknown rank.
        numel: number of elements; symbolic dimensions count by their hint.
        kind: where it comes from.
        volatile: it shares memory with a tensor that is changed in place, so its contents depend on when it is read:
            a cast of it must stand right before its user and must not be shared.
    """

    name: str
    dtype: DType
    shape: tuple[int | str, ...] | None = ()
    numel: int = 1
    kind: ValueKind = ValueKind.RESULT
    volatile: bool = False

    @property
    def rank(self) -> int | None:
        """Number of dimensions, `None` where unknown."""
        return None if self.shape is None else len(self.shape)


@value_class
class Operand:
    """One tensor argument of a node.

    Args:
        value: name of the value read.
        slot: name of the argument in the op's schema, such as `weight`; `tensors.1` for the second of a list.
        allowed: types that the op takes there, where the frontend knows them (ONNX type constraints); else `None`.
        tied: the op wants it in the type of its data, so that the op table cannot keep it in another one.
    """

    value: str
    slot: str
    allowed: frozenset[DType] | None = None
    tied: bool = False


@value_class
class Pin:
    """What the model's own text demands of a node; no rule overrides it.

    Args:
        precision: `"fp32"`: run in FP32 (an `autocast(enabled=False)` region); `"keep"`: inputs and outputs stay as
            captured; `"cast"`: an explicit cast, or an op that is told its type, which takes any floating-point input
            and gives its captured type.
        reason: why, with the user's source line where known.
    """

    precision: str
    reason: str


LOSS_FUNCTION = "<loss_fn>"  # the module of a node of a step's loss function, which stands in no module of the model
PIN_PRECISIONS = ("fp32", "keep", "cast")
RMS_NORM, LAYER_NORM, GELU = "rms_norm", "layer_norm", "gelu"
"""What a node may be a part of (`Node.part`)."""
CARRIED = "carried"
"""The attribute of a loop that holds (state, its next value) of each state that it carries, as names of values."""


@value_class
class Node:
    """One operation.

    Args:
        name: unique in the graph.
        op: canonical name, `aten.linear` or `onnx.Gemm` (FX overload names and in-place underscores are dropped).
        inputs: tensor arguments in schema order.
        outputs: names of the values made, in order.
        attrs: the other arguments, by schema name: numbers, strings, tuples of them.
        module: qualified name of the module that called it (`encoder.layer.0.mlp`), empty at the root.
        module_type: class name of that module.
        source: `file:line` of the user's model, empty where unknown.
        region: name of the control-flow body that it stands in, empty at top level.
        pin: what the model's text demands of it.
        part: what it is a part of that an exporter has written out (`layer_norm`, `rms_norm`, `gelu`), else empty.
    """

    name: str
    op: str
    inputs: tuple[Operand, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Attr] = field(default_factory=dict)
    module: str = ""
    module_type: str = ""
    source: str = ""
    region: str = ""
    pin: Pin | None = None
    part: str = ""


class PrecisionGraph:
    """Nodes in execution order, the values between them, and the graph's outputs.

    Args:
        device: type of the device that it runs on: `cpu`, `cuda`, …
        execution: how it is run.

    Attributes:
        lists: values that are lists of tensors of one type, as a name of each: no cast takes such a value, so all that
            reads or makes one list has one type.
        stored_numbers: what is known of the numbers stored under a value's name; `None` where there are none, or they
            are not known. What lowers a model sets it.
        masks: stored values that hide scores from a softmax.
        model: class of the model, or the name of its file.
        compounds: the nodes of each norm and GELU that stands in parts, by name, in execution order.

    Example:
        >>> graph = PrecisionGraph()
        >>> graph.add_value(Value("x", DType.FLOAT32, (2, 3), 6, ValueKind.INPUT))
        >>> relu = Node("y", "aten.relu", (Operand("x", "self"),), ("y",))
        >>> graph.add_node(relu, [Value("y", DType.FLOAT32, (2, 3), 6)])
        >>> graph.outputs = ["y"]
        >>> graph.verify()
    """

    def __init__(self, device: str = "cpu", execution: Execution | None = None) -> None:
        self.device, self.execution = device, execution or Execution()
        self.stored_numbers: Callable[[str], StoredNumbers | None] = lambda value: None  # without data
        self.masks: Mapping[str, Mask] = {}
        self.model = ""
        self.compounds: list[tuple[str, ...]] = []
        self.values: dict[str, Value] = {}
        self.nodes: dict[str, Node] = {}
        self.outputs: list[str] = []
        self.lists: set[str] = set()
        self._producer: dict[str, str] = {}
        self._users: dict[str, list[tuple[str, int]]] = {}

    def add_value(self, value: Value) -> None:
        """Add an input, parameter, buffer or constant.

        Raises:
            GraphError: where the name is taken.
        """
        if value.name in self.values:
            raise GraphError(f"the value name '{value.name}' is taken", hint="give every value a name of its own")
        self.values[value.name] = value
        self._users[value.name] = []

    def add_node(self, node: Node, outputs: Iterable[Value]) -> None:
        """Append a node and the values that it makes.

        Raises:
            GraphError: where a name is taken, an operand is unknown, or the outputs do not match `node.outputs`.
        """
        results, name, users = list(outputs), node.name, self._users
        if name in self.nodes:
            raise GraphError(f"the node name '{name}' is taken", hint="give every node a name of its own")
        if tuple([value.name for value in results]) != node.outputs:
            raise GraphError(
                f"node '{name}' lists outputs {node.outputs} but makes other values",
                hint="list its values in their order",
            )
        try:
            read = [users[operand.value] for operand in node.inputs]
        except KeyError as missing:
            raise GraphError(
                f"node '{name}' reads '{missing.args[0]}', which nothing before it makes",
                hint="add nodes in execution order",
            ) from None
        values, makers = self.values, self._producer
        for value in results:
            own = value.name
            if own in values:
                self.add_value(value)  # which refuses it
            values[own], users[own], makers[own] = value, [], name
        for index, known in enumerate(read):
            known.append((name, index))
        self.nodes[name] = node

    def is_folded(self, value: str) -> bool:
        """True where a cast of `value` costs nothing at run time."""
        return self.execution.stored_casts_free and self.values[value].kind in _FOLDED

    def changed(self, pins: Mapping[str, str], masks: Mapping[str, Mask] | None = None) -> PrecisionGraph:
        """The graph with more nodes pinned to FP32, or other masks; this one stays as it is.

        Args:
            pins: by name of the node, why it must run in FP32.
            masks: `None` for those that are there.
        """
        changed = copy.copy(self)
        changed.nodes = dict(self.nodes)
        changed.masks = self.masks if masks is None else masks
        for name, reason in pins.items():
            changed.nodes[name] = replace(changed.nodes[name], pin=Pin("fp32", reason))
        return changed

    def producer(self, value: str) -> Node | None:
        """The node that makes `value`; `None` for inputs, parameters, buffers and constants."""
        name = self._producer.get(value)
        return None if name is None else self.nodes[name]

    def users(self, value: str) -> list[tuple[Node, int]]:
        """Each (node, operand index) that reads `value`, in execution order."""
        return [(self.nodes[name], index) for name, index in self._users[value]]

    def readers(self, value: str) -> Sequence[tuple[str, int]]:
        """The name of each node that reads `value`, with the index of the operand, in execution order."""
        return self._users[value]

    def operands(self, node: Node) -> Iterator[tuple[Operand, Value]]:
        """The operands of a node with the values that they read."""
        for operand in node.inputs:
            yield operand, self.values[operand.value]

    def verify(self) -> None:
        """Check the invariants that `add_value` and `add_node` cannot hold alone: `nodes` and `values` can be edited.

        Raises:
            GraphError: an output is no value, a pin is unknown, a size is negative, a value has two kinds of origin, or
                nodes stand in an order in which they cannot run.
        """
        for name in self.outputs:
            if name not in self.values:
                raise GraphError(
                    f"the graph returns '{name}', which is not a value of it", hint="add the node that makes it"
                )
        for value in self.values.values():
            has_producer = value.name in self._producer
            if has_producer != (value.kind is ValueKind.RESULT):
                raise GraphError(
                    f"value '{value.name}' is a {value.kind.value} but {'has' if has_producer else 'lacks'} a producer",
                    hint="give results a node that makes them, and inputs and parameters none",
                )
            if value.numel < 0:
                raise GraphError(f"value '{value.name}' has {value.numel} elements", hint="give 0 or more")
        ready = self.values.keys() - self._producer.keys()
        for node in self.nodes.values():
            if node.pin is not None and node.pin.precision not in PIN_PRECISIONS:
                raise GraphError(
                    f"node '{node.name}' has the unknown pin '{node.pin.precision}'",
                    hint=f"use one of {', '.join(sorted(PIN_PRECISIONS))}",
                )
            for operand in node.inputs:
                if operand.value not in ready:
                    raise GraphError(
                        f"node '{node.name}' reads '{operand.value}', which nothing before it makes",
                        hint="put nodes in execution order, each behind those that make what it reads",
                    )
            ready.update(node.outputs)
