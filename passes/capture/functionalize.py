"""`Functionalize`: in-place ops become functional where nothing else sees the change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.alias import AliasGroups, written_operands
from amp_compiler.fx.graph import flat_arguments, node_tensor
from amp_compiler.fx.torch_private import SET_GRAD_ENABLED
from amp_compiler.passes.base import InPlacePass, PassResult


@dataclass(frozen=True)
class Functionalize(InPlacePass):
    """Turn `y = relu_(x)` into `y = relu(x)` where no other name of that memory is read afterwards; drop `alias` nodes.

    Before::

        conv: fp32[2, 8] = aten.linear.default(x, w)
        relu_: fp32[2, 8] = aten.relu_.default(conv)
        add: fp32[2, 8] = aten.add.Tensor(conv, 1)

    After::

        conv: fp32[2, 8] = aten.linear.default(x, w)
        relu_: fp32[2, 8] = aten.relu.default(conv)
        add: fp32[2, 8] = aten.add.Tensor(relu_, 1)

    Left alone: an op that changes an input of the graph, a view of which is read later, or whose functional form would
    have another type; one without gradients (`no_grad`) that changes what was made with them, and leaves these as they
    were.
    """

    name: ClassVar[str] = "functionalize"
    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        modified = _make_functional(subject.graph)
        modified |= _drop_aliases(subject.graph)
        if modified:
            subject.recompile()
        return PassResult(subject, modified)


def _make_functional(graph: fx.Graph) -> bool:
    # Groups and order are taken once: a change only splits groups, so what they say stays on the safe side.
    groups = AliasGroups(graph)
    members = groups.members(graph)
    order = {node: position for position, node in enumerate(graph.nodes)}
    modified = False
    outside: int | None = None  # where the region without gradients begins
    for node in list(graph.nodes):
        if node.target is SET_GRAD_ENABLED:
            outside = None if node.args[0] else order[node] if outside is None else outside
        variant = _functional_variant(node)
        changed = written_operands(node) if variant is not None else []
        if variant is None or len(changed) != 1:
            continue
        target = changed[0]
        if outside is not None and order[groups.root(target)] < outside:
            continue
        if not _only_name_of_fresh_memory(members[groups.root(target)], target, node, order) or not _keeps_type(node):
            continue
        node.target = variant
        _replace_later_uses(target, node, order)
        modified = True
    return modified


def _replace_later_uses(old: fx.Node, new: fx.Node, order: dict[fx.Node, int]) -> None:
    def is_later(user: fx.Node) -> bool:
        return order[user] > order[new]

    old.replace_all_uses_with(new, delete_user_cb=is_later)


def _functional_variant(node: fx.Node) -> torch._ops.OpOverload | None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    namespace, _, name = node.target._schema.name.partition("::")
    if not node.target._schema.is_mutable or not name.endswith("_") or name.endswith("__") or name == "copy_":
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    variant = getattr(packet, node.target._overloadname, None) if packet is not None else None
    if variant is None or variant._schema.is_mutable:
        return None
    same = [a.name for a in variant._schema.arguments] == [a.name for a in node.target._schema.arguments]
    return variant if same else None


def _only_name_of_fresh_memory(
    group: list[fx.Node], target: fx.Node, mutation: fx.Node, order: dict[fx.Node, int]
) -> bool:
    for member in group:
        if member.op != "call_function":
            return False  # the caller's tensor, a parameter or a buffer: the change must reach it
        if member is target or order[member] >= order[mutation]:
            continue
        if any(order[user] > order[mutation] for user in member.users):
            return False
    return True


def _keeps_type(node: fx.Node) -> bool:
    # The in-place form keeps the type of what it changes; the functional one promotes. Equal only without promotion.
    made = node_tensor(node)
    dtypes = {
        tensor.dtype
        for _, _, argument in flat_arguments(node)
        if isinstance(argument, fx.Node) and (tensor := node_tensor(argument)) is not None and tensor.dim() > 0
    }
    floats = {dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex}
    return made is not None and (floats <= {made.dtype} or not floats)


def _drop_aliases(graph: fx.Graph) -> bool:
    """Remove `alias` nodes: each only gives its operand another name."""
    modified = False
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.alias.default and isinstance(node.args[0], fx.Node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            modified = True
    return modified
