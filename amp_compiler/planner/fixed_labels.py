"""What each node's decision comes to before any freedom is used: fixed labels, and the nodes left free.

The "semantic" type of a value is the one that it would have if every free node ran in the widest of its inputs. It says
where information is: a value that is semantically low holds nothing that the low type cannot hold.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from amp_compiler.errors import GraphError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Node, ValueKind
from amp_compiler.planner.draft import Draft
from amp_compiler.planner.typing import FP32, KEEP, LOW, NodeTyping, TypingRules
from amp_compiler.policy.rules import Precision

_SHARED = "shares memory that is changed in place"
_NAMED = (Precision.LOW, Precision.FP32)
_VALUES = {precision: precision.value for precision in Precision}  # `value` of an enum is looked up in Python


@dataclass
class Semantics:
    """What decisions come to.

    Args:
        wide: by flexible value, whether it is semantically FP32 (else it is semantically low).
        fixed: label of every node that is not free.
        free: the nodes whose label is to be chosen, in execution order.
        notes: by node name, how `widest`, `follow` or an obstacle came to its label.
        stored: values that are stored data, or views of them, whose rounding costs nothing: beside other operands they
            do not count, as numbers do not beside tensors in torch.
    """

    wide: dict[str, bool] = field(default_factory=dict)
    stored: set[str] = field(default_factory=set)
    fixed: dict[str, str] = field(default_factory=dict)
    free: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)

    def widest(self, node: Node, data: tuple[int, ...]) -> str | None:
        """The first data operand that counts and is semantically FP32, `None` where all are low.

        Args:
            node: the node.
            data: indices of its data operands.
        """
        inputs, wide, stored = node.inputs, self.wide, self.stored
        counted = False
        for index in data:
            name = inputs[index].value
            if name not in stored:
                if wide[name]:
                    return name
                counted = True
        if counted:
            return None
        return next((name for index in data if wide[name := inputs[index].value]), None)


def resolve(draft: Draft, typing: TypingRules) -> Semantics:
    """Fixed labels, free nodes and semantic types of a draft that has decisions.

    Values that share memory which is changed in place all get one type, so that no cast stands between a tensor and its
    alias: the low type where everything that writes the memory agrees on it, else the captured one.

    Args:
        draft: with a decision for every node.
        typing: the typing rules of it.
    """
    memory = _memories(draft, typing)
    kept = {
        memory[name]
        for name in memory
        if draft.graph.values[name].kind is not ValueKind.RESULT  # others may hold this memory: its type is given
    }
    while True:
        walk = _Walk(draft, typing, memory, kept)
        walk.run()
        if walk.disagreeing <= kept:
            return walk.semantics
        kept |= walk.disagreeing


class _Walk:
    """One walk in execution order. Its loop is long, since a graph has many nodes: what few need stands outside."""

    def __init__(self, draft: Draft, typing: TypingRules, memory: dict[str, str], kept: set[str]) -> None:
        self.draft, self.typing, self.memory, self.kept = draft, typing, memory, kept
        self.values, self.decisions = draft.graph.values, draft.decisions
        self.semantics = Semantics()
        for value in draft.graph.values.values():
            if value.kind is not ValueKind.RESULT and value.dtype in typing.flexible:
                self.semantics.wide[value.name] = value.dtype is DType.FLOAT32
                if draft.graph.execution.stored_casts_free and value.kind is not ValueKind.INPUT:
                    self.semantics.stored.add(value.name)
        self.free: set[str] = set()
        self.memory_wide: dict[str, bool] = {}
        self.disagreeing: set[str] = set()

    def run(self) -> None:
        """Give each node its label, or leave it free, and give its outputs their semantic type."""
        semantics, memory, decisions, typings, values = (
            self.semantics, self.memory, self.decisions, self.typing.nodes, self.values
        )  # fmt: skip
        fixed, wides, stored = semantics.fixed, semantics.wide, semantics.stored
        follow, float32 = Precision.FOLLOW, DType.FLOAT32
        for (name, node), typing in zip(self.draft.graph.nodes.items(), typings.values(), strict=True):
            precision, data = decisions[name].precision, typing.data
            outputs = node.outputs if typing.plain else typing.decided_outputs(node)
            writes = next((memory[one] for one in outputs if one in memory), None) if memory else None
            label: str | None
            if typing.is_cast or not typing.movable:
                label = self._label_kept(node, typing, precision)
            elif precision is follow and not memory:
                label = None
            elif writes is not None and writes in self.kept:
                label = self._in_kept_memory(node, precision)
            elif precision is Precision.WIDEST or precision is follow:
                label = self._by_operands(node, precision, writes)
            else:
                label = _VALUES[precision]
            if label is None:
                semantics.free.append(name)
                self.free.add(name)
                one = node.inputs[data[0]].value if len(data) == 1 else None
                wide = semantics.widest(node, data) is not None if one is None else wides[one]
            else:
                fixed[name] = label
                wide = label == FP32
            for one in outputs:
                wides[one] = values[one].dtype is float32 if label == KEEP else wide
            if stored and typing.info.moves == "shape" and data:
                read = [node.inputs[index].value for index in data]
                stored.update(outputs if stored.issuperset(read) else ())
            if writes is not None:
                self._agree(outputs, writes)

    def _label_kept(self, node: Node, typing: NodeTyping, precision: Precision) -> str:
        """The label of a node that cannot be moved; notes why it stays where the rules would move it."""
        if typing.joins and precision in _NAMED:
            return _VALUES[precision]
        if typing.clashes and typing.info.factors:  # which no kernel takes
            raise GraphError(
                f"'{node.name}' ({node.op}) multiplies data of two 16-bit types, and torch gives its result in the one"
                f" that is not {self.draft.context.low.short}",
                where=node.source,
                hint="cast the operand to FP32 in the model: .float()",
            )
        if not typing.is_cast and typing.decided_outputs(node) and precision is not Precision.KEEP:
            self.semantics.notes[node.name] = "stays as captured: " + (
                "it mixes in another floating-point type" if typing.data else "no operand of it can be cast"
            )
        return KEEP

    def _in_kept_memory(self, node: Node, precision: Precision) -> str:
        values = self.draft.graph.values
        if precision is Precision.FP32 and all(
            values[name].dtype is DType.FLOAT32 for name in self.typing[node.name].decided_outputs(node)
        ):
            return FP32
        if precision is not Precision.KEEP:
            self.semantics.notes[node.name] = f"stays as captured: it {_SHARED}"
        return KEEP

    def _by_operands(self, node: Node, precision: Precision, writes: str | None) -> str | None:
        memory, operands = self.memory, self.typing.nodes[node.name].data
        data = [node.inputs[index].value for index in operands]
        shared = next((name for name in data if memory.get(name) == writes), None) if writes else None
        widest = self.semantics.widest(node, operands)
        if shared is not None:
            wide = self.semantics.wide[shared]
            self.semantics.notes[node.name] = f"has the type of '{shared}', with which it {_SHARED}"
        else:
            wide = widest is not None
            alone = writes is None and not (memory and any(name in memory for name in data))
            if precision is Precision.FOLLOW and alone:
                return None
            if not wide and alone and self._is_behind_free(data):
                return None
            if precision is Precision.FOLLOW:
                self.semantics.notes[node.name] = f"follows its input: it {_SHARED}"
            else:
                self.semantics.notes[node.name] = f"'{widest}' is fp32" if wide else "every input is low"
        if not wide:
            return LOW
        return KEEP if precision is Precision.FOLLOW else FP32

    def _is_behind_free(self, data: list[str]) -> bool:
        """True for what reads a free node, which may come to be FP32, where the widest type is open then.

        It is not in torch graphs: they keep what autocast would do there, whose tensors have no type to choose.
        """
        graph = self.draft.graph
        makers = (graph.producer(name) for name in data) if graph.execution.widest_is_open else ()
        return any(maker is not None and maker.name in self.free for maker in makers)

    def _agree(self, outputs: tuple[str, ...], writes: str) -> None:
        """Note memory that is written in two types, or left in neither the low nor the captured type."""
        for name in outputs:
            if name not in self.memory:
                continue
            wide = self.semantics.wide[name]
            if self.memory_wide.setdefault(writes, wide) != wide:
                self.disagreeing.add(writes)


def _memories(draft: Draft, typing: TypingRules) -> dict[str, str]:
    """By volatile flexible value, a name of the memory that it may share: that of the first value in it.

    A node that reads one volatile value and makes another may alias or write it, so both count as one memory.
    """
    names = [value.name for value in draft.graph.values.values() if value.volatile and value.dtype in typing.flexible]
    if not names:
        return {}
    import networkx as nx

    shared: nx.Graph = nx.Graph()
    shared.add_nodes_from(names)
    for node in draft.graph.nodes.values():
        outputs = [name for name in node.outputs if name in shared]
        if outputs:
            read = [operand.value for operand in node.inputs if operand.value in shared]
            shared.add_edges_from((outputs[0], name) for name in (*read, *outputs[1:]))
    places = {name: place for place, name in enumerate(names)}
    memories: dict[str, str] = {}
    for part in nx.connected_components(shared):
        memories.update(dict.fromkeys(part, min(part, key=places.__getitem__)))
    return {name: memories[name] for name in names}
