"""Which values that are all zero may have been numbers: FP16 holds none below 2^-25."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from amp_compiler.fx.graph import canonical_op, node_tensor

# Each element is one of an operand's, or zero, or -1 times it: nothing becomes smaller.
_SELECTS = frozenset({
    "aten.threshold_backward", "aten.relu", "aten.where", "aten.masked_fill", "aten.clone", "aten.neg", "aten.cat",
    "aten.stack", "aten.constant_pad_nd", "aten.index", "aten.index_select", "aten.embedding", "aten.copy",
})  # fmt: skip
_PRODUCTS = frozenset({"aten.mm", "aten.bmm", "aten.mul"})  # zero where any operand is


@dataclass(frozen=True)
class _Step:
    """One call: its float operands, those of them that are gradients, and whether it makes FP16."""

    node: fx.Node
    op: str
    inputs: tuple[fx.Node, ...]
    scaled: tuple[fx.Node, ...]
    narrow: bool


@dataclass(frozen=True)
class ZeroTrail:
    """What each value of a joint graph is made of, kept beside a graph that loses nodes.

    A gradient is linear in the gradients that it is made of, so it is truly zero where all of those are.

    Args:
        steps: in the order of execution.
    """

    steps: tuple[_Step, ...]

    @classmethod
    def of(cls, graph: fx.Graph, scaled: Collection[fx.Node]) -> ZeroTrail:
        """Of a graph.

        Args:
            graph: forward and backward.
            scaled: its gradients.
        """
        steps = []
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            tensor, inputs = node_tensor(node), tuple(one for one in node.all_input_nodes if _floats(one))
            narrow = tensor is not None and tensor.dtype is torch.float16
            gradients = tuple(one for one in inputs if one in scaled)
            steps.append(_Step(node, canonical_op(node.target), inputs, gradients, narrow))
        return cls(tuple(steps))

    def vanished(self, zero: Mapping[fx.Node, bool], nodes: Collection[fx.Node]) -> set[fx.Node]:
        """Those of the nodes asked for of which it is not known that they are zero in FP32 too.

        Args:
            zero: whether a value that was counted is zero in every element.
            nodes: those asked for, which are zero.
        """
        exact, lost = set[fx.Node](), set[fx.Node]()  # zero whatever the type; zero, and in FP32 perhaps not
        wanted = set(nodes)
        for step in self.steps:
            is_zero = step.node in wanted or zero.get(step.node)
            if is_zero is False:
                continue
            product = step.op in _PRODUCTS and not exact.isdisjoint(step.inputs)
            if product or (step.scaled and exact.issuperset(step.scaled)):
                exact.add(step.node)
            elif not lost.isdisjoint(step.inputs):
                lost.add(step.node)
            elif (step.inputs and exact.issuperset(step.inputs)) or (
                is_zero and (not step.narrow or step.op in _SELECTS)
            ):
                exact.add(step.node)
            elif is_zero:  # of what was not counted nothing is known
                lost.add(step.node)
        return lost & wanted


def _floats(node: fx.Node) -> bool:
    value = node.meta.get("val")
    several = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(one, torch.Tensor) and one.is_floating_point() for one in several)
