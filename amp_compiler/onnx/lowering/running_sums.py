"""Running sums and products that a Loop or Scan carries: what is added to at each step stays in FP32, as `CumSum` does.

A sum in 16 bits stops growing once what is added is below half of its last digit: after 4,000 additions of ones BF16
has come to 256. A product is rounded at each step, and a decay of 0.9999 is 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import onnx_ir as ir

from amp_compiler.ir.graph import Node, Pin
from amp_compiler.onnx.lowering.lowered import LOOPS, Lowered
from amp_compiler.onnx.lowering.walk import Walker

_ADDING = frozenset({"onnx.Add", "onnx.Sub", "onnx.Sum", "onnx.Mean"})
_MULTIPLYING = frozenset({"onnx.Mul", "onnx.Div"})
_SCATTERING = frozenset({"onnx.ScatterElements", "onnx.ScatterND"})
_HOLDERS = frozenset({"onnx.If", "onnx.Loop", "onnx.Scan"})


def pin_running_sums(lowered: Lowered) -> None:
    """Pin to FP32 what lies between a state of a Loop or Scan and its next value, where something is added to it, or
    it is multiplied.

    What lies between is arithmetic, logarithms and the like, selection and moves of elements, and other states of the
    same body: a state that goes through a product of matrices or an activation, as that of a recurrent cell, is no sum.
    Changes `lowered.graph`.

    Args:
        lowered: the lowered model.
    """
    nodes = lowered.graph.nodes
    finder = _Finder(lowered, {})
    names = {value: name for name, value in lowered.values.items()} if lowered.owners else {}
    for body, holder in lowered.owners.items():
        states = [(names[before], names[after]) for before, after in _states(body, holder)
                  if before in names and after in names]  # fmt: skip
        for before, after in states:
            path = finder.between(before, after, states)
            kind = finder.kind(path)
            for name in path if kind else ():
                finder.pin(nodes[name], f"part of the running {kind} '{before}' that {_told(holder)} carries")
    for name, reason in finder.pins.items():
        nodes[name] = replace(nodes[name], pin=Pin("fp32", reason))


def _states(body: ir.Graph, holder: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Each state that a body takes, with the value that it hands to the next step."""
    if holder.op_type not in LOOPS:
        return
    if holder.op_type == "Loop":  # it takes number and condition before the states, and gives the condition
        yield from zip(body.inputs[2:], body.outputs[1:], strict=False)
        return
    scanned = holder.attributes.get("num_scan_inputs")
    count = len(body.inputs) - (scanned.value if scanned is not None else 0)
    yield from zip(body.inputs[:count], body.outputs[:count], strict=False)


def _told(holder: ir.Node) -> str:
    return f"'{holder.name}' (onnx.{holder.op_type})" if holder.name else f"a {holder.op_type}"


class _Finder(Walker):
    def between(self, before: str, after: str, states: list[tuple[str, str]]) -> list[str]:
        """The nodes on the ways from one value to another that arithmetic and moves of elements make up.

        Args:
            before: a state that a body takes.
            after: its next value.
            states: all states of the body, with their next values: a way may lead through another one, step after step.
        """
        handed: dict[str, list[str]] = {}
        for other, following in states:
            if other != before:
                handed.setdefault(following, []).append(other)
        reached = {before}
        pending = [before]
        while pending:
            name = pending.pop()
            made = [out for node, _ in self.graph.users(name) if self._carries(node) for out in node.outputs]
            fresh = [out for out in dict.fromkeys((*made, *handed.get(name, ()))) if out not in reached]
            reached.update(fresh)
            pending += fresh
        if after not in reached or after == before:
            return []
        taken = {state: following for state, following in states if state != before}
        wanted, path = {after}, dict[str, None]()
        pending = [after]
        while pending:
            name = pending.pop()
            node = self.graph.producer(name)
            sources = [taken[name]] if name in taken else []
            if node is not None and self._carries(node):
                sources = [operand.value for operand in node.inputs if operand.value in reached]
                if sources:
                    path[node.name] = None
            fresh = [source for source in dict.fromkeys(sources) if source in reached and source not in wanted]
            wanted.update(fresh)
            pending += fresh
        return [name for name in path if self.graph.nodes[name].op not in _HOLDERS]

    def kind(self, path: list[str]) -> str:
        """What the nodes between a state and its next value make of it: a sum, a product, or neither."""
        nodes = [self.graph.nodes[name] for name in path]
        if any(self._adds(node) for node in nodes):
            return "sum"
        return "product" if any(node.op in _MULTIPLYING for node in nodes) else ""

    def _adds(self, node: Node) -> bool:
        """True for a node that adds its operands up."""
        return node.op in _ADDING or (node.op in _SCATTERING and node.attrs.get("reduction") == "add")

    def _carries(self, node: Node) -> bool:
        plain = self.info(node).family in ("elementwise", "transcendental")
        return plain or node.op in _ADDING | _SCATTERING | _HOLDERS or self.passes(node)
