"""`pin_running_sums`: FP32 for what a loop adds to, or multiplies, at each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import CARRIED, Node, PrecisionGraph
from amp_compiler.passes.onnx_plan.pinning import PinPass, Walker
from amp_compiler.planner.draft import Draft

_ADDING = frozenset({"onnx.Add", "onnx.Sub", "onnx.Sum", "onnx.Mean"})
_MULTIPLYING = frozenset({"onnx.Mul", "onnx.Div"})
_SCATTERING = frozenset({"onnx.ScatterElements", "onnx.ScatterND"})
_HOLDERS = frozenset({"onnx.If", "onnx.Loop", "onnx.Scan"})


@dataclass(frozen=True)
class PinRunningSums(PinPass):
    """Pin to FP32 what lies between a state of a Loop or Scan and its next value, where that is a sum or a product.

    What is added to at each step stays in FP32, as `CumSum` does: a sum in 16 bits stops growing once what is added is
    below half of its last digit. After 4,000 additions of ones BF16 has come to 256. A product is rounded at each step,
    and a decay of 0.9999 is 1. What lies between is arithmetic, logarithms and the like, selection and moves of
    elements, and other states of the same body. The rules' `keep: {running_sums: false}` leaves it to the rules.

    Before:

        after = onnx.Add(A=before, B=x) -> fp32[8]
        y = onnx.Loop(M=n, cond=c, v_initial.0=start, body.0=c, body.1=after) {carried=(("before", "after"))} -> fp32[8]

    After:

        after = onnx.Add(…) -> fp32[8]  pin=fp32 "part of the running sum 'before' that 'y' (onnx.Loop) carries"

    Left alone: a state that goes through a product of matrices or an activation, as that of a recurrent cell.
    """

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of each loop, in execution order."""
        if not draft.rules.keeps("running_sums"):
            return {}
        holders = [node for node in draft.graph.nodes.values() if CARRIED in node.attrs]
        if not holders:
            return {}
        finder, nodes = _Finder(draft.graph, draft.context.low), draft.graph.nodes
        for holder in holders:
            states = _states(holder)
            steps = [(after, before) for before, after in states]  # a way may lead through another state
            finder.ways.add_edges_from(steps)
            for before, after in states:
                path = finder.between(before, after)
                kind = finder.kind(path)
                for name in path if kind else ():
                    finder.pin(
                        nodes[name], f"part of the running {kind} '{before}' that '{holder.name}' ({holder.op}) carries"
                    )
            finder.ways.remove_edges_from(steps)
        return finder.pins


def _states(holder: Node) -> list[tuple[str, str]]:
    """The states of a loop, each with its next value."""
    held = holder.attrs[CARRIED]
    pairs = held if isinstance(held, tuple) else ()
    return [(str(pair[0]), str(pair[1])) for pair in pairs if isinstance(pair, tuple)]


class _Finder(Walker):
    def __init__(self, graph: PrecisionGraph, low: DType) -> None:
        super().__init__(graph, low)
        self.ways: nx.DiGraph[str | tuple[str]] = nx.DiGraph()  # of values, and of the nodes between, in brackets
        for node in filter(self._carries, graph.nodes.values()):
            self.ways.add_edges_from((operand.value, (node.name,)) for operand in node.inputs)
            self.ways.add_edges_from(((node.name,), output) for output in node.outputs)

    def between(self, before: str, after: str) -> list[str]:
        """The nodes on the ways from one value to another that arithmetic and moves of elements make up."""
        if before == after or not {before, after} <= self.ways.nodes or not nx.has_path(self.ways, before, after):
            return []
        between = nx.descendants(self.ways, before) & nx.ancestors(self.ways, after)
        names = sorted(key[0] for key in between if isinstance(key, tuple))
        return [name for name in names if self.graph.nodes[name].op not in _HOLDERS]

    def kind(self, path: list[str]) -> str:
        """What the nodes between a state and its next value make of it: a sum, a product, or neither."""
        nodes = [self.graph.nodes[name] for name in path]
        if any(node.op in _ADDING or node.attrs.get("reduction") == "add" for node in nodes):
            return "sum"
        return "product" if any(node.op in _MULTIPLYING for node in nodes) else ""

    def _carries(self, node: Node) -> bool:
        plain = self.info(node).family in ("elementwise", "transcendental")
        return plain or node.op in _ADDING | _SCATTERING | _HOLDERS or self.passes(node)
