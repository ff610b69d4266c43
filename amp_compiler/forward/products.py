"""Which counted values the products of a graph multiply, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from amp_compiler.fx.graph import op_of
from amp_compiler.fx.meta import Key
from amp_compiler.ir.plan import PlannedNode, PrecisionPlan
from amp_compiler.ops.fp8 import fp8_product
from amp_compiler.ops.typed_op import typed_op
from amp_compiler.policy.op_table import op_table

_FAMILIES = ("matmul", "convolution")
_BACKWARD = "aten.convolution_backward"  # of which three operands make two gradients
_OTHERS = (_BACKWARD, "aten._scaled_mm")


@dataclass
class CountedProduct:
    """A node of the plan that may compute of FP8 operands.

    Args:
        node: the node.
        operands: what it multiplies: nodes that are counted, and names of parameters.
        gradients: what comes in for its backward: nodes that are counted.
    """

    node: PlannedNode
    operands: dict[fx.Node | str, None] = field(default_factory=dict)
    gradients: dict[fx.Node | str, None] = field(default_factory=dict)


def counted_products(
    graph: fx.Graph, plan: PrecisionPlan, counted: Set[fx.Node], scaled: Set[fx.Node]
) -> list[CountedProduct]:
    """The products of a graph, in the order of the plan.

    Args:
        graph: a rewritten forward, or forward and backward.
        plan: of the forward.
        counted: the nodes whose values are counted.
        scaled: the nodes that the seed of the backward is part of.
    """
    ops = op_table()
    products = {node.name: CountedProduct(node) for node in plan.nodes if ops.info(node.op).fp8}
    for node in graph.nodes:
        product = products.get(str(node.meta.get(Key.PLANNED, node.name)))
        op = op_of(node) if product is not None and node.op == "call_function" else ""
        if product is None or not (op in _OTHERS or ops.info(op).family in _FAMILIES):
            continue
        for operand in _operands(node):
            for source in _sources(operand, product.node.name, counted):
                if source in scaled:
                    product.gradients[source] = None
                elif source.op == "call_function":
                    product.operands[source] = None
                elif name := plan.model.names.get(str((source.meta.get(Key.LOW) or (source.name,))[0])):
                    product.operands[name] = None
    return list(products.values())


def _operands(node: fx.Node) -> list[fx.Node]:
    """What a call multiplies."""
    op = op_of(node)
    args: Any = node.args[1] if node.target in (fp8_product, typed_op) else node.args
    first = int(op_table().info(op).sums == "inner_behind_summand")
    return [one for one in args[first:][: 3 if op == _BACKWARD else 2] if isinstance(one, fx.Node)]


def _sources(operand: fx.Node, product: str, counted: Set[fx.Node]) -> Iterator[fx.Node]:
    """The counted values, and the inputs, that an operand is made of without arithmetic but the product's own."""
    pending = [operand]
    seen: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" or (node in counted and node.meta.get(Key.PLANNED, node.name) != product):
            yield node
        else:
            pending += node.all_input_nodes
