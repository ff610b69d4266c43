"""Which type every operand needs and every value has once each node carries a label: said here, for all passes.

A label is `low`, `fp32` or `keep` (as captured). Types that a plan may exchange are FP32 and the low type ("flexible");
a value captured in any other type is never touched.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, Operand, PrecisionGraph, Value
from amp_compiler.ir.value_class import value_class
from amp_compiler.policy.rules import OpInfo, OpTable

LOW, FP32, KEEP = "low", "fp32", "keep"
LABELS = (LOW, FP32, KEEP)
_FOREIGN = frozenset(
    {
        DType.FLOAT16, DType.BFLOAT16, DType.FLOAT64, DType.FLOAT8,
        DType.COMPLEX32, DType.COMPLEX64, DType.COMPLEX128,
    }
)  # fmt: skip
_HALVES = frozenset({DType.FLOAT16, DType.BFLOAT16})


class Role(enum.Enum):
    """How an operand takes part in a rewrite."""

    OTHER = "other"  # captured in a type that plans do not exchange
    FIXED = "fixed"  # stays in its captured type whatever the label: a `keep` slot, or a type constraint of the op
    ANY = "any"  # every floating-point type will do, no cast is ever placed: shape-only arguments, explicit casts
    DATA = "data"  # takes the type of the node's label
    HALF = "half"  # of the other 16-bit type beside such data: takes the type of the label, but is none that decides

    __hash__ = object.__hash__  # that of `Enum` is written in Python


@value_class
class NodeTyping:
    """What labels mean for a node, and for all that are like it.

    Args:
        info: its entry in the op table.
        roles: role of each operand.
        data: indices of the operands with role DATA.
        decided: whether a label decides the type of each output: that of one captured in a flexible type.
        is_cast: it is an explicit cast of the model.
        movable: a label other than `keep` has a meaning: it reads data, and mixes in no other floating-point type.
        uniform: all operands have the role DATA.
        plain: a label decides the type of every output.
        joins: it mixes in the other 16-bit type alone, as torch may run it under autocast only: where a rule asks for
            one type, all operands are cast to that.
        clashes: it does so, and torch gives its result in that other type, which no plan can change.
    """

    info: OpInfo
    roles: tuple[Role, ...]
    data: tuple[int, ...]
    decided: tuple[bool, ...]
    is_cast: bool
    movable: bool
    uniform: bool
    plain: bool
    joins: bool = False
    clashes: bool = False

    def decided_outputs(self, node: Node) -> tuple[str, ...]:
        """The outputs of a node whose type a label decides."""
        if self.plain:
            return node.outputs
        return tuple([name for name, decided in zip(node.outputs, self.decided, strict=True) if decided])

    def reads_one(self, label: str, low: DType) -> DType | None:
        """The type that all operands must be read in, as of most nodes; `None` where `TypingRules.need` says of each.

        Args:
            label: the label of the node.
            low: the 16-bit type.
        """
        if label == KEEP or not self.uniform:
            return None
        if label == LOW:
            return low
        return None if self.info.promotes else DType.FLOAT32

    def mixes(self, label: str) -> bool:
        """True where the node takes data operands of different types as they are: at least one must be FP32."""
        return self.info.promotes and label == FP32


class TypingRules:
    """The typing rules of one graph, op table and low type.

    Args:
        graph: the captured graph.
        ops: the op table.
        low: the 16-bit type.

    Example:
        >>> from amp_compiler.ir.graph import ValueKind
        >>> graph = PrecisionGraph()
        >>> graph.add_value(Value("x", DType.FLOAT32, (2,), 2, ValueKind.INPUT))
        >>> relu = Node("y", "aten.relu", (Operand("x", "self"),), ("y",))
        >>> graph.add_node(relu, [Value("y", DType.FLOAT32, (2,), 2)])
        >>> typing = TypingRules(graph, OpTable({}, {}), DType.BFLOAT16)
        >>> typing.need(relu, 0, "low").short, typing.result("y", {"y": "low"}).short
        ('bf16', 'bf16')
    """

    def __init__(self, graph: PrecisionGraph, ops: OpTable, low: DType) -> None:
        self.graph, self.ops, self.low = graph, ops, low
        self.flexible = frozenset({DType.FLOAT32, low})
        self.nodes: dict[str, NodeTyping] = {}
        self.cast_results: set[str] = set()  # what explicit casts make, which few graphs have many of
        self.has_exact = False  # whether rounding commutes with the op of some node
        self._type_nodes()

    def fits(self, graph: PrecisionGraph, ops: OpTable, low: DType) -> bool:
        """True where these are the rules of that graph, as it is now, with that table and type."""
        return self.graph is graph and self.ops is ops and self.low is low and len(self.nodes) == len(graph.nodes)

    def __getitem__(self, node: str) -> NodeTyping:
        return self.nodes[node]

    def is_flexible(self, value: str) -> bool:
        """True where the value was captured in FP32 or in the low type."""
        return self.graph.values[value].dtype in self.flexible

    def label_type(self, label: str, captured: DType) -> DType:
        """The type that a flexible value captured as `captured` has under `label`."""
        return captured if label == KEEP else self.low if label == LOW else DType.FLOAT32

    def result(self, value: str, labels: Mapping[str, str]) -> DType:
        """The type of a value after the rewrite."""
        captured = self.graph.values[value].dtype
        producer = self.graph.producer(value)
        if producer is None or captured not in self.flexible:
            return captured
        return self.label_type(labels[producer.name], captured)

    def results(self, labels: Mapping[str, str]) -> dict[str, DType]:
        """The types of all values after the rewrite, see `result`."""
        types = {name: value.dtype for name, value in self.graph.values.items()}
        low = self.low
        for (name, node), typing in zip(self.graph.nodes.items(), self.nodes.values(), strict=True):
            label = labels.get(name, KEEP)
            if label != KEEP:
                for output in node.outputs if typing.plain else typing.decided_outputs(node):
                    types[output] = low if label == LOW else DType.FLOAT32
        return types

    def need(self, node: Node, index: int, label: str) -> DType | None:
        """The type that operand `index` must be read in under `label`; `None` where it is read as it is.

        A node that mixes (see `NodeTyping.mixes`) needs nothing of any one operand: `anchor` says what it needs.
        """
        typing = self.nodes[node.name]
        role = typing.roles[index]
        if role is Role.OTHER or role is Role.ANY:
            return None
        if role is Role.HALF:
            return None if label == KEEP else self.label_type(label, self.low)
        captured = self.graph.values[node.inputs[index].value].dtype
        if role is Role.FIXED:
            return captured
        return None if typing.mixes(label) else self.label_type(label, captured)

    def anchor(
        self, node: Node, type_of: Callable[[str], DType], free: Callable[[str], bool] = lambda value: False
    ) -> int | None:
        """The operand that must be cast to FP32 so that a mixing node computes in FP32; `None` where none need be.

        Args:
            node: a node that mixes under its label.
            type_of: type of each value before casts.
            free: whether the FP32 cast of a value is there already, for other users.

        Returns:
            Index of the cheapest operand: one whose cast is there, else the one of fewest elements, else the first.
        """
        data = self.nodes[node.name].data
        names = [node.inputs[index].value for index in data]
        if any(type_of(name) is DType.FLOAT32 for name in names):
            return None
        costs = [(not free(name), self.graph.values[name].numel) for name in names]
        return data[min(range(len(data)), key=costs.__getitem__)]

    def complaint(self, node: Node, label: str, reads: Sequence[DType]) -> str | None:
        """What is wrong with the types in which a node reads its operands; `None` where all is well."""
        typing = self.nodes[node.name]
        for index, (operand, role, read) in enumerate(zip(node.inputs, typing.roles, reads, strict=True)):
            wanted = self.need(node, index, label)
            if wanted is None and role in (Role.OTHER, Role.HALF):
                wanted = self.graph.values[operand.value].dtype
            if read is not wanted and (wanted is not None or read not in self.flexible):
                expected = " or ".join(sorted(dtype.short for dtype in ((wanted,) if wanted else self.flexible)))
                return f"node '{node.name}' ({label}) reads operand {index} in {read.short}, not in {expected}"
        if typing.mixes(label) and all(reads[index] is not DType.FLOAT32 for index in typing.data):
            return f"node '{node.name}' is to run in fp32 and reads no operand in fp32"
        return None

    def _type_nodes(self) -> None:
        """Fill `nodes`. Nodes of one op that read and make alike values share what is found of them."""
        values, nodes = self.graph.values, self.nodes
        shared: dict[tuple[object, ...], NodeTyping] = {}
        for name, node in self.graph.nodes.items():
            is_cast = node.pin is not None and node.pin.precision == "cast"
            key: list[object] = [node.op, is_cast]
            for output in node.outputs:
                key.append(values[output].dtype)
            for operand in node.inputs:
                value = values[operand.value]
                key += (operand.slot, operand.allowed, operand.tied, value.dtype, value.shape == (), value.volatile)
            alike = tuple(key)
            known = shared.get(alike)
            if known is None:
                known = shared[alike] = self._look_at(node, is_cast)
                self.has_exact = self.has_exact or known.info.exact
            nodes[name] = known
            if is_cast and known.info.casts:  # and no softmax(dtype=…), whose result is another number
                self.cast_results.update(node.outputs)

    def _look_at(self, node: Node, is_cast: bool) -> NodeTyping:
        info, values = self.ops.info(node.op), self.graph.values
        read = [(operand, values[operand.value]) for operand in node.inputs]
        ranked = info.promotes and any(value.dtype.is_float and value.rank != 0 for _, value in read)
        roles = [self._role(operand, value, info, is_cast, scalars_yield=ranked) for operand, value in read]
        data = tuple([index for index, role in enumerate(roles) if role is Role.DATA])
        foreign = [
            index
            for index, ((operand, value), role) in enumerate(zip(read, roles, strict=True))
            if role is Role.OTHER and self._is_foreign(operand, value, info, ranked)
        ]
        movable = bool(data) and not is_cast
        results = [values[name].dtype for name in node.outputs]
        joins = movable and bool(foreign) and not self.graph.execution.halves_stay
        joins = joins and all(read[index][1].dtype in _HALVES for index in foreign)
        clashes = joins and any(dtype in _HALVES and dtype not in self.flexible for dtype in results)
        for index in foreign if joins else ():
            roles[index] = Role.HALF
        decided = tuple([dtype in self.flexible for dtype in results])
        uniform, plain = len(data) == len(roles), all(decided)
        return NodeTyping(
            info,
            tuple(roles),
            data,
            decided,
            is_cast,
            movable and not foreign,
            uniform,
            plain,
            joins and not clashes,
            clashes,
        )

    def _role(self, operand: Operand, value: Value, info: OpInfo, is_cast: bool, *, scalars_yield: bool) -> Role:
        if value.dtype not in self.flexible:
            return Role.OTHER
        # A 16-bit parameter of a norm goes with the data: no kernel takes FP32 data beside 16-bit parameters.
        kept = _in_slots(operand.slot, info.keep) and value.dtype is DType.FLOAT32
        kept = kept and not operand.tied
        if kept or (operand.allowed is not None and not self.flexible <= operand.allowed):
            return Role.FIXED
        if is_cast or (scalars_yield and value.rank == 0):
            return Role.ANY
        if _in_slots(operand.slot, info.any) and not operand.tied:
            return Role.ANY
        return Role.DATA

    def _is_foreign(self, operand: Operand, value: Value, info: OpInfo, ranked: bool) -> bool:
        """True for an operand of a third floating-point type that takes part in what the op computes in."""
        if value.dtype not in _FOREIGN or _in_slots(operand.slot, info.keep | info.any):
            return False
        return not (ranked and value.rank == 0 and value.dtype.is_float)


def _in_slots(slot: str, slots: frozenset[str]) -> bool:
    """True where `slot`, or the list that it is an element of (`tensors` for `tensors.1`), is in `slots`."""
    return bool(slots) and (slot in slots or slot.partition(".")[0] in slots)
