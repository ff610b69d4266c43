"""`pin_kernels`: FP32 for what the execution provider of the target has no 16-bit kernel for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import networkx as nx

from amp_compiler.passes.onnx_plan.pinning import PinPass, Walker
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.targets import Providers


@dataclass(frozen=True)
class PinKernels(PinPass):
    """Pin to FP32 what the provider that is to run the model has no kernel for in the low type.

    Such a node would be cast back by the runtime, node by node, or fall to the CPU. A node without an FP32 kernel falls
    in any case, and is asked of the provider that takes it. What stands among such nodes and holds no product runs in
    FP32 as well: casts around it would cost more than 16 bits save.

    Before (target cpu, low type fp16):

        y = onnx.MatMul(A=x, B=w) -> fp32[2, 8]

    After:

        y = onnx.MatMul(A=x, B=w) -> fp32[2, 8]  pin=fp32 "cpu has no fp16 kernel of onnx.MatMul … (cpu.yaml:162)"

    Left alone: all without a target; other nodes that have a kernel, and what no label moves.

    Args:
        target: the providers; `None` for a file that is to run anywhere.
        versions: by node, the opset of its domain.
    """

    target: Providers | None = None
    versions: Mapping[str, int] = field(default_factory=dict)

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of all nodes that a rule may move."""
        if self.target is None:
            return {}
        graph, low = draft.graph, draft.context.low
        walker = Walker(graph, low)
        free = {name for name, node in graph.nodes.items() if node.pin is None and draft.typing[name].movable}
        for name in graph.nodes:
            reason = self.target.obstacle(graph.nodes[name].op, self.versions[name], low) if name in free else None
            if reason is not None:
                walker.pin(graph.nodes[name], reason)
        lacking = dict(walker.pins)
        whole = nx.Graph()
        whole.add_nodes_from(graph.nodes)
        for value in graph.values:
            maker = graph.producer(value)
            whole.add_edges_from((maker.name, reader) for reader, _ in graph.readers(value) if maker is not None)
        for part in nx.connected_components(whole.subgraph(free - lacking.keys())):
            nodes = [graph.nodes[name] for name in part]
            around = {other for name in part for other in whole[name]}
            dtypes = {graph.values[value].dtype for node in nodes for value in node.outputs}
            product = any(walker.info(node).factors for node in nodes)
            if not product and low not in dtypes and not around.isdisjoint(lacking):
                for node in nodes:
                    walker.pin(node, f"it is among nodes that {self.target.name} has no {low.short} kernel for")
        return walker.pins
