"""`no_grad` regions in a flat graph: what a plan puts into one must not be read behind it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import fx

from amp_compiler.fx.alias import AliasGroups, written_roots
from amp_compiler.fx.graph import node_tensor
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private import SET_GRAD_ENABLED


def detach_what_enters(graph: fx.Graph) -> None:
    """Give `no_grad` regions operands of their own: `detach`, in front of the region, of what was made before it.

    A plan casts a value once, where it is first read. A cast that stands in such a region has no gradient, for a weight
    that is read behind the region too. What is written in place has casts for each of its users anyway, and is left.

    Args:
        graph: with calls that switch gradients off and on; changed in place.
    """
    if not graph.find_nodes(op="call_function", target=SET_GRAD_ENABLED):
        return
    groups = AliasGroups(graph)
    written = written_roots(graph, groups)
    opening: fx.Node | None = None  # of the region that a node stands in
    off: set[fx.Node] = set()  # what was computed without gradients
    entered: dict[fx.Node, fx.Node] = {}  # what this region reads from outside, and the same detached
    for node in list(graph.nodes):
        if node.target is SET_GRAD_ENABLED:
            if node.args[0]:
                opening = None
            elif opening is None:
                opening, entered = node, {}
        elif opening is not None and node.op == "call_function":
            with graph.inserting_before(opening):
                for one in node.all_input_nodes:
                    tensor = node_tensor(one)
                    floats = tensor is not None and (tensor.is_floating_point() or tensor.is_complex())
                    known = one.op == "get_attr" or one in off or one in entered  # a constant has no gradient
                    if floats and not known and groups.root(one) not in written:
                        entered[one] = graph.call_function(torch.ops.aten.detach.default, (one,))
                        entered[one].meta = {key: held for key, held in one.meta.items() if key != Key.PIN}
            node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), functools.partial(_now, entered))
            off.add(node)


def _now(entered: Mapping[fx.Node, fx.Node], one: fx.Node) -> fx.Node:
    return entered.get(one, one)
