"""A model beside its neutral graph, and the way from one to the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import PrecisionGraph
from amp_compiler.ir.value_class import value_class
from amp_compiler.onnx.model.model import OnnxModel

FOLDED = ("Constant", "ConstantOfShape")
EMPTY_LIST = "SequenceEmpty"
LOOPS = ("Loop", "Scan")


@value_class
class Site:
    """Where an operand of a neutral node stands in the model: input `index` of `node`, or output `index` of a body."""

    node: ir.Node
    index: int
    body: ir.Graph | None = None


@dataclass
class Lowered:
    """A model with its neutral graph, and what leads from one to the other.

    Args:
        model: the model.
        graph: the neutral graph.
        low: the 16-bit type.
        values: the value behind each neutral one.
        nodes: the node behind each neutral one.
        sites: where the operands of neutral nodes stand that leave inputs out or have bodies; see `sites_of`.
        returned: for each output of the neutral graph, its index among the outputs of the model.
        owners: by body, the node that holds it.
        late: nodes kept only since their opset does not admit the low type, with the first opset that does.
        fused: how many norms and GELUs were made one op each before the model was lowered.
        notes: what there is to say of that, in a sentence each.
        renamed: whether a node has another name here, since an earlier one has its own.
        held: casts of FP32 to FP32 that an export has kept for the plan; those go that come to nothing.
    """

    model: OnnxModel
    graph: PrecisionGraph
    low: DType
    values: dict[str, ir.Value] = field(default_factory=dict)
    nodes: dict[str, ir.Node] = field(default_factory=dict)
    sites: dict[str, list[Site]] = field(default_factory=dict)
    returned: list[int] = field(default_factory=list)
    owners: dict[ir.Graph, ir.Node] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    fused: int = 0
    notes: list[str] = field(default_factory=list)
    renamed: bool = False
    held: frozenset[str] = frozenset()

    def sites_of(self, name: str) -> list[Site]:
        """Where the operands of a neutral node stand."""
        known, node = self.sites.get(name), self.nodes[name]
        return [Site(node, index) for index in range(len(node.inputs))] if known is None else known
