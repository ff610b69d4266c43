"""Where in the nested bodies of a model a new node must stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from amp_compiler.onnx.lowering.lowered import LOOPS, Site
from amp_compiler.onnx.model.edit import graph_of


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
        return site.body if site.body is not None else graph_of(site.node)

    def _parent(self, graph: ir.Graph) -> ir.Graph:
        return graph_of(self.owners[graph])

    def common(self, graphs: list[ir.Graph], home: ir.Graph) -> ir.Graph:
        """The innermost graph that holds all of `graphs`, lifted out of loops as far as the value reaches."""
        innermost = graphs[0]
        for graph in graphs[1:]:
            while innermost is not graph:
                if self.depth[innermost] >= self.depth[graph]:
                    innermost = self._parent(innermost)
                else:
                    graph = self._parent(graph)
        while self.depth[innermost] > self.depth[home]:
            if not any(owner.op_type in LOOPS for owner in self._owners(innermost, home)):
                break
            innermost = self._parent(innermost)
        return innermost

    def _owners(self, graph: ir.Graph, home: ir.Graph) -> Iterator[ir.Node]:
        while graph is not home:
            yield self.owners[graph]
            graph = self._parent(graph)

    def anchor(self, site: Site, graph: ir.Graph) -> ir.Node | None:
        """The node of `graph` that is, or holds, the reader; `None` where the reader is the result of `graph`."""
        if site.body is graph:
            return None
        node = site.node
        while (inner := graph_of(node)) is not graph:
            node = self.owners[inner]
        return node
