"""Small edits of an `onnx_ir` graph, and where in its nested bodies a new node must stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from amp_compiler.errors import LoweringError
from amp_compiler.ir.dtypes import DType
from amp_compiler.onnx.lowering.lower import LOOPS, Lowered, Site
from amp_compiler.onnx.model.model import all_graphs
from amp_compiler.onnx.model.types import ir_type


@dataclass
class Scopes:
    """The nesting of graphs.

    Args:
        owners: by body, the node that holds it.
        depth: by graph, how many bodies it is in.
    """

    owners: Mapping[ir.Graph, ir.Node]
    depth: dict[ir.Graph, int] = field(default_factory=dict)

    def graph_of(self, site: Site) -> ir.Graph:
        """The graph that a reader stands in."""
        graph = site.body if site.body is not None else site.node.graph
        if not isinstance(graph, ir.Graph):
            raise LoweringError(f"node '{site.node.name}' stands in no graph", mend="plan this model again")
        return graph

    def _parent(self, graph: ir.Graph) -> ir.Graph:
        outer = self.owners[graph].graph
        if not isinstance(outer, ir.Graph):
            raise LoweringError(f"the body '{graph.name}' stands in no graph", mend="plan this model again")
        return outer

    def common(self, graphs: list[ir.Graph], home: ir.Graph) -> ir.Graph:
        """The innermost graph that holds all of `graphs`, lifted out of loops as far as the value reaches."""
        found = graphs[0]
        for graph in graphs[1:]:
            while found is not graph:
                if self.depth[found] >= self.depth[graph]:
                    found = self._parent(found)
                else:
                    graph = self._parent(graph)
        while self.depth[found] > self.depth[home]:
            if not any(owner.op_type in LOOPS for owner in self._owners(found, home)):
                break
            found = self._parent(found)
        return found

    def _owners(self, graph: ir.Graph, home: ir.Graph) -> Iterator[ir.Node]:
        while graph is not home:
            yield self.owners[graph]
            graph = self._parent(graph)

    def anchor(self, site: Site, graph: ir.Graph) -> ir.Node | None:
        """The node of `graph` that is, or holds, the reader; `None` where the reader is the result of `graph`."""
        if site.body is graph:
            return None
        node = site.node
        while node.graph is not graph:
            inner = node.graph
            if not isinstance(inner, ir.Graph):
                return None
            node = self.owners[inner]
        return node


def with_data(node: ir.Node, data: ir.TensorProtocol, output: ir.Value, name: str) -> ir.Node:
    """A copy of a `Constant` or `ConstantOfShape` with other data."""
    kept = [entry for key, entry in node.attributes.items() if key not in ("value", "value_float", "value_floats")]
    return ir.Node(
        node.domain,
        node.op_type,
        list(node.inputs),
        [*kept, ir.AttrTensor("value", data)],
        outputs=[output],
        name=name,
        doc_string=node.doc_string,
        metadata_props=dict(node.metadata_props),
    )


def set_data(node: ir.Node, data: ir.TensorProtocol) -> None:
    """Give a `Constant` or `ConstantOfShape` other data."""
    for name in ("value_float", "value_floats"):
        node.attributes.pop(name, None)
    node.attributes["value"] = ir.AttrTensor("value", data)


def set_type(value: ir.Value, dtype: DType) -> None:
    """Change the element type of a value that has a type."""
    if value.type is not None:
        value.type = ir.TensorType(ir_type(dtype), denotation=value.type.denotation)


def rename_duplicates(lowered: Lowered) -> None:
    """Give each node with the name of an earlier one in its graph the name that the neutral graph has for it."""
    graphs = list(all_graphs(lowered.model.ir.graph))
    taken = {node.name or "" for graph in graphs for node in graph}
    neutral = {node: name for name, node in lowered.nodes.items()}
    for graph in graphs:
        seen: set[str] = set()
        for node in graph:
            if not node.name or node in lowered.model.unnamed:
                continue
            if node.name in seen:
                node.name = unique(neutral.get(node, node.name), taken)
            seen.add(node.name)


def unique(name: str, taken: set[str]) -> str:
    """`name`, with a number after it where it is taken; it counts as taken from then on."""
    number, found = 1, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    taken.add(found)
    return found
