"""What `between` comes to: low between nodes that run low, where nothing that runs in FP32 stands above; else FP32.

This is how TensorFlow's automatic mixed precision treats its inferred ("gray") ops, with `follow` for its clear ones
(tensorflow/core/grappler/optimizers/auto_mixed_precision.cc). Three walks over the graph, each along its edges once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from amp_compiler.ir.graph import Node
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.rules import Decision, Precision

_THROUGH = (Precision.BETWEEN, Precision.FOLLOW)


def settle_between(draft: Draft, decisions: Mapping[str, Decision]) -> dict[str, str]:
    """The nodes for which the rules ask `between`, each with why it is not to run low; empty where it is.

    A node stands between where a path through nodes that are `between` or `follow` leads to it from a node that runs
    low, and another one from it to a node that runs low. FP32 goes down such paths: what is `between` below a node that
    the rules run in FP32 runs in FP32, and no path leads through it. What is kept as captured ends paths and sends
    nothing down; it counts as low where it is 16-bit.

    Args:
        draft: the graph, and what is planned for.
        decisions: by node name.

    Returns:
        By node name, the reason for FP32, or an empty text.
    """
    between = Precision.BETWEEN
    if not any(decision.precision is between for decision in decisions.values()):
        return {}
    requested = {name: decision.precision for name, decision in decisions.items()}
    walk = _Walk(draft, requested)
    return {name: walk.why_fp32(name) for name, precision in requested.items() if precision is Precision.BETWEEN}


class _Walk:
    """Sets of node names, found in the order of execution or against it."""

    def __init__(self, draft: Draft, requested: Mapping[str, Precision]) -> None:
        self._draft, self._requested = draft, requested
        nodes = list(draft.graph.nodes.values())
        above = self._above_fp32_or_between(nodes)
        self.below_fp32 = self._below_fp32(nodes, above)
        self.below_low = self._reached(nodes, self._makers)
        self.above_low = self._reached(nodes[::-1], self._readers)

    def why_fp32(self, name: str) -> str:
        """Why a node is not to run low; empty where it is."""
        if name in self.below_fp32:
            return f"'{self.below_fp32[name]}' above it runs in FP32"
        if name not in self.below_low:
            return "nothing above it runs low"
        return "" if name in self.above_low else "nothing below it runs low"

    def _above_fp32_or_between(self, nodes: list[Node]) -> set[str]:
        """The `follow` nodes from which a path of such nodes leads to one that is FP32 or `between`."""
        above: set[str] = set()
        for node in reversed(nodes):
            ends = (Precision.FP32, Precision.BETWEEN)
            if self._requested[node.name] is Precision.FOLLOW and any(
                name in above or self._requested[name] in ends for name in self._readers(node)
            ):
                above.add(node.name)
        return above

    def _below_fp32(self, nodes: list[Node], above: set[str]) -> dict[str, str]:
        """The nodes on a path from one in FP32 to one that is FP32 or `between`, each with the first of the path."""
        below: dict[str, str] = {}
        for node in nodes:
            requested = self._requested[node.name]
            if requested is Precision.BETWEEN or node.name in above:
                for maker in self._makers(node):
                    if self._requested[maker] is Precision.FP32 or maker in below:
                        below[node.name] = below.get(maker, maker)
                        break
        return below

    def _reached(self, nodes: list[Node], neighbours: Callable[[Node], list[str]]) -> set[str]:
        """The nodes that paths from low nodes reach."""
        reached: set[str] = set()
        for node in nodes:
            if self._requested[node.name] not in _THROUGH or node.name in self.below_fp32:
                continue
            if any(name in reached or self._is_low(name) for name in neighbours(node)):
                reached.add(node.name)
        return reached

    def _is_low(self, name: str) -> bool:
        """Whether a node runs low, or was captured so and is kept, as a product beside a quantizer is."""
        node, values, low = self._draft.graph.nodes[name], self._draft.graph.values, self._draft.context.low
        kept = self._requested[name] is Precision.KEEP
        names = (*node.outputs, *(operand.value for operand in node.inputs)) if kept else ()
        return self._requested[name] is Precision.LOW or any(values[one].dtype is low for one in names)

    def _makers(self, node: Node) -> list[str]:
        graph, flexible = self._draft.graph, self._draft.typing.flexible
        makers = [graph.producer(name.value) for name in node.inputs if graph.values[name.value].dtype in flexible]
        return [maker.name for maker in makers if maker is not None]

    def _readers(self, node: Node) -> list[str]:
        graph, flexible = self._draft.graph, self._draft.typing.flexible
        results = [name for name in node.outputs if graph.values[name].dtype in flexible]
        return [user.name for name in results for user, _ in graph.users(name)]
