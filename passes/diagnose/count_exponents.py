"""`CountExponents`: count the binary exponents of what the nodes of a training step make."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.alias import alias_sources, is_view
from amp_compiler.fx.graph import call_before, canonical_op, node_tensor, results_of
from amp_compiler.fx.meta import Key
from amp_compiler.ops.exponents import COUNT
from amp_compiler.ops.fp8 import FP8
from amp_compiler.passes.base import RewritePass

CLONE = torch.ops.aten.clone.default
_UPDATE = "update"
_TOGETHER = 8
# They move elements, or make constants.
_MOVES = frozenset({
    "aten.clone", "aten.contiguous", "aten.cat", "aten.stack", "aten.full", "aten.full_like", "aten.zeros_like",
    "aten.ones_like", "aten.empty", "aten.empty_like", "aten.zeros", "aten.ones", "aten.copy", "aten.new_zeros",
    "aten.constant_pad_nd", "aten.scalar_tensor", "aten.embedding", "aten.index", "aten.index_select",
})  # fmt: skip
# What they make lies in memory anyway, so that no compiler keeps it in registers.
_STORES = frozenset({
    "aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.linear", "aten.matmul", "aten.convolution",
    "aten.convolution_backward",
})  # fmt: skip
_BEHIND = frozenset({"aten._to_copy", "aten.clone", "aten.add"})  # between a weight's gradient and what returns it


@dataclass(frozen=True)
class CountExponents(RewritePass):
    """Count how often each binary exponent occurs in what every node makes, forward and backward.

    Each value is read once; a few neighbours are read together. What is read is a copy, so that a compiler keeps in
    registers what it kept there; but not of a product, which is stored anyway.

    Before::

        in x: bf16[4]
        mul: bf16[4] = aten.mul.Tensor(x, 2)  # phase=forward
        return mul

    After::

        in x: bf16[4]
        mul: bf16[4] = aten.mul.Tensor(x, 2)  # phase=forward
        clone: bf16[4] = aten.clone.default(mul)  # phase=forward
        count_exponents: i64[1, 280] = amp_compiler.count_exponents.default([clone])  # phase=forward
        cat: i64[1, 280] = aten.cat.default([count_exponents])  # phase=update
        return mul, cat

    Left alone: what only moves elements, widens them or is a constant; whole numbers; the gradients of weights, which a
    step returns; what a product with FP8 operands is made of, but its results.
    """

    exact: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        apart = weight_gradients(graph) | _within_products(graph)
        watched = [node for node in graph.nodes if node not in apart and _is_watched(node)]
        if not watched:
            return False
        counts = [_count(group) for group in _groups(watched)]
        end = graph.output_node()
        joined = call_before(end, torch.ops.aten.cat.default, [counts], _UPDATE)
        end.args = ((*results_of(graph), joined),)
        return True


def counted(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose values are counted, one for each row of the counts."""
    counts = graph.find_nodes(op="call_function", target=COUNT)
    values = [one for node in counts for one in node.args[0]]  # type: ignore[union-attr]
    return [one.args[0] if one.target is CLONE else one for one in values]  # type: ignore[union-attr, misc]


def _groups(watched: list[fx.Node]) -> Iterator[list[fx.Node]]:
    """Neighbours of one phase, few enough that little memory has to wait for their counting."""
    for _, group in itertools.groupby(watched, key=lambda node: node.meta[Key.PHASE]):
        members = list(group)
        yield from (members[place : place + _TOGETHER] for place in range(0, len(members), _TOGETHER))


def _count(group: list[fx.Node]) -> fx.Node:
    behind, phase = group[-1].next, group[-1].meta[Key.PHASE]
    values = [node if _is_stored(node) else call_before(behind, CLONE, [node], phase) for node in group]
    return call_before(behind, COUNT, [values], phase)


def _is_stored(node: fx.Node) -> bool:
    source = node.all_input_nodes[0] if node.target is operator.getitem else node
    return canonical_op(source.target) in _STORES


def _is_watched(node: fx.Node) -> bool:
    value = node_tensor(node)
    if node.op != "call_function" or value is None or not value.is_floating_point() or not value.numel():
        return False
    if node.meta.get(Key.PHASE) not in ("forward", "backward") or not node.all_input_nodes:
        return False
    source = node.all_input_nodes[0] if node.target is operator.getitem else node  # one of several results
    return not (is_view(source) or canonical_op(source.target) in _MOVES or _widens(node, value))


def _within_products(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of products with FP8 operands, forward or backward, that nothing outside of their product reads."""
    of = {node: node.meta.get(Key.PLANNED) for node in graph.nodes}
    products = {of[node] for node in graph.nodes if (value := node_tensor(node)) is not None and value.dtype in FP8}
    inner: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if of[node] in products and all(
            user in inner
            or (of[user] == of[node] and not is_view(user))
            or (of[user] in products and canonical_op(user.target) in _STORES)  # another one with the same operand
            for user in node.users
        ):
            inner.add(node)
    return inner


def _widens(node: fx.Node, value: torch.Tensor) -> bool:
    if node.target is not torch.ops.aten._to_copy.default:
        return False
    source = node_tensor(node.all_input_nodes[0])
    return source is not None and source.is_floating_point() and source.dtype.itemsize <= value.dtype.itemsize


def weight_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that make the gradients of weights, and nothing else."""
    gradients: set[fx.Node] = set()
    pending = [node for node in results_of(graph) if isinstance(node, fx.Node)]
    while pending:
        node = pending.pop()
        users = [user for user in node.users if user.meta.get(Key.PHASE) != _UPDATE and user.op != "output"]
        if node.meta.get(Key.PHASE) != "backward" or not gradients.issuperset(users) or node in gradients:
            continue
        gradients.add(node)
        if canonical_op(node.target) in _BEHIND or node.target is operator.getitem or alias_sources(node):
            pending += node.all_input_nodes
    return gradients
