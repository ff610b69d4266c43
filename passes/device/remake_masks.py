"""`RemakeMasks`: what a ReLU's gradient lets through is found anew from what the batch norm before it read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import node_tensor
from amp_compiler.passes.base import LatePass

aten, prims = torch.ops.aten, torch.ops.prims
_CAST = prims.convert_element_type.default
_POINTWISE = {_CAST, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor}
_READERS = {*_POINTWISE, aten.sum.dim_IntList}
_FEW = 16  # what a chain reads beside its data has at most this share of its elements


@dataclass(frozen=True)
class RemakeMasks(LatePass):
    """Compare what lies before a ReLU instead of its result, wherever a norm's backward reads that anyway.

    The backward of a batch norm reads its data twice, in the sums over each channel and in the gradient of the data.
    Each time a compiler reads the ReLU's result as well, only to see where it is 0. That can be seen from the data,
    which is at hand: the same operations on the same numbers, of which nothing but a few per channel is read beside it.

    Before::

        relu = relu(cast(add(mul(sub(cast(x), mean), scale), shift)));  where = where(le(relu, 0), 0, gradient)

    After::

        again = cast(add(mul(sub(cast(x), mean), scale), shift));  where = where(le(again, 0), 0, gradient)

    Every reader of the masked gradient has such a chain of its own. A chain that several read would be one of those
    that a compiler writes to memory, for it reads more than they do.

    Left alone: a ReLU of more than one image, as of a sum of two branches, or whose data its gradient's readers do not
    read.
    """

    name: ClassVar[str] = "remake_masks"
    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def awaited(self, graph: fx.Graph) -> bool:
        """Whether it normalizes batches on a GPU, where kernels wait for memory."""
        return normalizes_on_gpu(graph)

    def rewrite(self, graph: fx.Graph) -> bool:
        """Change the masks, in a graph with its norms opened; whether there were any."""
        modified = False
        for le in graph.find_nodes(op="call_function", target=aten.le.Scalar):
            relu = le.args[0]
            if le.args[1] != 0 or relu.target is not aten.relu.default:
                continue
            relu_chain = _chain(relu.args[0])
            if relu_chain is None or relu_chain[1].target is not aten.convolution.default:
                continue
            chain, data = relu_chain
            for where in [user for user in le.users if user.target is aten.where.self and user.args[0] is le]:
                masked = _with_cast(where)
                if _is_read_with(masked[-1], data):
                    _repeat_for_each_reader([*chain, le], masked)
                    modified = True
            if not le.users:
                graph.erase_node(le)
                modified = True
        return modified


def normalizes_on_gpu(graph: fx.Graph) -> bool:
    """Whether a graph holds the backward of a batch norm, not opened yet, and values on a GPU."""
    values = [node_tensor(node) for node in graph.nodes]
    on_gpu = any(value is not None and value.device.type == "cuda" for value in values)
    return on_gpu and any(node.target is aten.native_batch_norm_backward.default for node in graph.nodes)


def _chain(end: fx.Node) -> tuple[list[fx.Node], fx.Node] | None:
    """The loops that make a value of one other of its shape, in order, and that other one; `None` where they do not."""
    whole = node_tensor(end)
    if whole is None:
        return None
    chain: dict[fx.Node, None] = {}
    data: set[fx.Node] = set()
    todo = [end]
    while todo:
        node = todo.pop()
        value = node_tensor(node)
        if value is None or value.shape != whole.shape:
            if value is None or value.numel() * _FEW > whole.numel():
                return None
        elif node.target in _POINTWISE:
            chain[node] = None
            todo.extend(node.all_input_nodes)
        else:
            data.add(node)
    order = {node: place for place, node in enumerate(end.graph.nodes)} if chain else {}
    return (sorted(chain, key=order.__getitem__), data.pop()) if len(data) == 1 else None


def _with_cast(where: fx.Node) -> list[fx.Node]:
    """The masked gradient, and its cast where that alone reads it."""
    users = list(where.users)
    return [where, users[0]] if len(users) == 1 and users[0].target is _CAST else [where]


def _is_read_with(masked: fx.Node, data: fx.Node) -> bool:
    """Whether loops alone read the gradient, and one of them multiplies it with what is made of the data."""
    if not masked.users or not all(user.target in _READERS for user in masked.users):
        return False
    factors = [one for user in masked.users if user.target is aten.mul.Tensor for one in user.args if one is not masked]
    chains = [_chain(one) for one in factors if isinstance(one, fx.Node)]
    return any(chain is not None and chain[1] is data for chain in chains)


def _repeat_for_each_reader(before: list[fx.Node], masked: list[fx.Node]) -> None:
    """Copy a chain with the comparison at its end, and what is masked by it, in front of each reader of that."""
    relu: Any = before[-1].args[0]
    graph = relu.graph
    for reader in list(masked[-1].users):
        copies: dict[fx.Node, fx.Node] = {}
        with graph.inserting_before(reader):
            for node in before[:-1]:
                copies[node] = _copy(graph, node, copies)
            copies[relu] = copies[relu.args[0]]
            for node in (before[-1], *masked):
                copies[node] = _copy(graph, node, copies)
        reader.replace_input_with(masked[-1], copies[masked[-1]])
    for node in reversed(masked):
        graph.erase_node(node)


def _copy(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    return graph.node_copy(node, lambda one: copies.get(one, one))
