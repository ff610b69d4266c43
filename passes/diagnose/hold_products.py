"""`HoldProducts`: a step gives the products that it makes, for who reads them behind it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.alias import is_view
from amp_compiler.fx.graph import call_before, canonical_op, node_tensor, results_of
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import InPlacePass, PassResult
from amp_compiler.passes.diagnose.count_exponents import weight_gradients

# A call of a library each, whose result lies in memory of its own whether it is returned or not.
_CONVOLUTIONS = frozenset({"aten.convolution", "aten.convolution_backward"})
_CALLS = frozenset({"aten.mm", "aten.addmm", "aten.bmm"}) | _CONVOLUTIONS
_JOINS = frozenset({"aten.add", "aten.sub"})  # a compiler may make one call of a product and a sum


@dataclass(frozen=True)
class HoldProducts(InPlacePass):
    """Return products beside the results of a step, so that what reads them later need not make them again.

    Their values are those that the step makes without it, to the bit: a compiler stores them anyway.

    Before (`held=("mm",)`)::

        in a: bf16[4, 8]
        in b: bf16[8, 4]
        mm: bf16[4, 4] = aten.mm.default(a, b)  # phase=forward
        relu: bf16[4, 4] = aten.relu.default(mm)  # phase=forward
        return relu

    After::

        in a: bf16[4, 8]
        in b: bf16[8, 4]
        mm: bf16[4, 4] = aten.mm.default(a, b)  # phase=forward
        relu: bf16[4, 4] = aten.relu.default(mm)  # phase=forward
        return relu, mm

    Left alone: names that the graph does not have, as where another pass has rewritten a product; what only an update
    reads, which may make it itself.

    Args:
        held: names of nodes, see `products`.
    """

    held: tuple[str, ...] = ()
    name: ClassVar[str] = "hold_products"
    exact: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        graph, names = subject.graph, frozenset(self.held)
        found = [node for node in products(graph) if node.name in names]
        if found:
            graph.output_node().args = ((*results_of(graph), *map(_returned, found)),)
            subject.recompile()
        return PassResult(subject, bool(found))


def _returned(node: fx.Node) -> fx.Node:
    """Of a convolution's result a copy in the layout in which a compiler for CPUs keeps it, which stays as it is."""
    value = node_tensor(node)
    if canonical_op(_made(node).target) not in _CONVOLUTIONS or value is None or value.dim() != 4:
        return node
    copy = call_before(node.graph.output_node(), torch.ops.aten.clone.default, [node], node.meta[Key.PHASE])
    copy.kwargs = {"memory_format": torch.channels_last}
    copy.meta["val"] = value.contiguous(memory_format=torch.channels_last)
    return copy


def products(graph: fx.Graph) -> list[fx.Node]:
    """What calls of a library make in forward and backward, but for the gradients of weights, which an update may make.

    Left out is what a compiler may make no call of its own of: a product with a dimension of one, or with a sum behind.
    """
    apart = weight_gradients(graph)
    return [node for node in graph.nodes if node not in apart and _is_product(node) and not _is_of_an_update(node)]


def _is_of_an_update(node: fx.Node) -> bool:
    """Whether it is a part of a weight's gradient: of one that is looked up in too, or is multiplied with twice."""
    return bool(node.users) and all(
        user.meta.get(Key.PHASE) == "update" or (is_view(user) and _is_of_an_update(user)) for user in node.users
    )


def _is_product(node: fx.Node) -> bool:
    value = node_tensor(node)
    if node.op != "call_function" or value is None or node.meta.get(Key.PHASE) not in ("forward", "backward"):
        return False
    made = _made(node)
    if canonical_op(made.target) not in _CALLS or not value.is_floating_point():
        return False
    if canonical_op(made.target) in _CONVOLUTIONS:
        return True
    sizes = [size for one in (node, *made.all_input_nodes) for size in _shape(one)]
    alone = next(iter(node.users)) if len(node.users) == 1 else None
    return 1 not in sizes and (alone is None or canonical_op(alone.target) not in _JOINS)


def _made(node: fx.Node) -> fx.Node:
    """The call behind one of several results."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _shape(node: fx.Node) -> torch.Size:
    value = node_tensor(node)
    return torch.Size() if value is None else value.shape
