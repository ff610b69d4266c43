"""`torch.autocast` regions in a type that the plan does not have, in one of Dynamo's graphs: each one a call again.

While a piece is traced, no region acts. Nodes are marked with the regions that they stand in, and what is traced of
such a region becomes the body of a `wrap_with_autocast`, as `torch.export` gives it of a whole model.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from amp_compiler.errors import LoweringError
from amp_compiler.fx.graph import CAST, node_tensor, user_source
from amp_compiler.fx.meta import source_of
from amp_compiler.fx.torch_private import SET_GRAD_ENABLED, new_graph_module

_MARK = "amp_regions"  # key in node.meta["custom"]


class Region(NamedTuple):
    """A region as Dynamo opens it.

    Args:
        number: among those of the piece.
        device: its device type.
        dtype: its type.
        enabled: whether it is on.
    """

    number: int
    device: str
    dtype: torch.dtype | None
    enabled: bool


def mark(node: fx.Node, regions: list[Region]) -> None:
    """Mark a node that is to be traced with its regions, from the outermost one in another type on."""
    if regions:
        node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: tuple(regions)}


def wrap_regions(graph_module: fx.GraphModule, depth: int = 0) -> None:
    """Make a call of each region that nodes were marked with, and in its body of each one within.

    What the graph returns of it is FP32, as all that pieces hand on.

    Args:
        graph_module: of the traced piece; changed in place.
        depth: how many regions it stands in.

    Raises:
        LoweringError: gradients are switched off or on within; names the line of the model.
    """
    found: dict[Region, list[fx.Node]] = {}
    for node in graph_module.graph.nodes:
        regions = (node.meta.get("custom") or {}).get(_MARK, ()) if node.op == "call_function" else ()
        if len(regions) > depth:
            found.setdefault(Region(*regions[depth]), []).append(node)
    for region, nodes in found.items():
        _wrap(graph_module, region, _between(nodes[0], nodes[-1]), depth)
    if found:
        graph_module.recompile()


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """All that is computed from one node to another; constants stay outside."""
    nodes, node = [first], first
    while node is not last:
        node = node.next
        nodes += [node] if node.op == "call_function" else []
    return nodes


def _wrap(graph_module: fx.GraphModule, region: Region, nodes: list[fx.Node], depth: int) -> None:
    switched = next((node for node in nodes if node.target is SET_GRAD_ENABLED), None)
    if switched is not None:
        raise LoweringError(
            f"the model switches gradients within torch.autocast('{region.device}', dtype={region.dtype}), in pieces",
            where=next((source for node in nodes if (source := user_source(node.meta.get("stack_trace")))), ""),
            hint="open torch.no_grad around the region, or give it the type that is planned for",
        )
    graph, within = graph_module.graph, set(nodes)
    operands = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in within))
    results = [node for node in nodes if any(user not in within for user in node.users)]
    body = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for operand in operands:
        copies[operand] = body.placeholder(operand.name)
        copies[operand].meta = dict(operand.meta)
    for node in nodes:
        copies[node] = body.node_copy(node, lambda old: copies[old])
    body.output(tuple(copies[node] for node in results))
    inner = new_graph_module(graph_module, body)
    wrap_regions(inner, depth + 1)
    name = f"autocast_{region.number}"
    setattr(graph_module, name, inner)
    with graph.inserting_before(nodes[-1].next):
        taken = graph.get_attr(name)
        call = graph.call_function(
            torch.ops.higher_order.wrap_with_autocast,
            (region.device, region.dtype, region.enabled, True, taken, *operands),
        )
        call.meta = {**source_of(nodes[0]), "val": tuple(node.meta.get("val") for node in results)}
        for place, node in enumerate(results):
            _hand_on(graph, call, place, node, within)
    for node in reversed(nodes):
        graph.erase_node(node)


def _hand_on(graph: fx.Graph, call: fx.Node, place: int, node: fx.Node, within: set[fx.Node]) -> None:
    """Let what stands behind a region read its result."""
    result = graph.call_function(operator.getitem, (call, place))
    result.meta = {key: held for key, held in node.meta.items() if key != "custom"}
    tensor: Any = node_tensor(node)
    returned = any(user.op == "output" for user in node.users)
    wide = result
    if returned and tensor is not None and tensor.is_floating_point():
        wide = graph.call_function(CAST, (result, torch.float32))
        wide.meta = {**source_of(node), "val": tensor.float()}
    for user in [user for user in node.users if user not in within]:
        user.replace_input_with(node, wide if user.op == "output" else result)
