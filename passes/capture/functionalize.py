"""`Functionalize`: in-place ops become functional where nothing else sees the change."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.alias import AliasGroups, written_operands
from amp_compiler.fx.graph import node_tensor, replace_call
from amp_compiler.fx.torch_private.tracing import SET_GRAD_ENABLED
from amp_compiler.passes.base import RewritePass


@dataclass(frozen=True)
class Functionalize(RewritePass):
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

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        return _make_functional(graph) | _drop_aliases(graph)


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
        if not _only_name_of_fresh_memory(members[groups.root(target)], target, node, order):
            continue
        if not _keeps_type(node, variant):
            continue
        node.target = variant
        for user in [user for user in target.users if order[user] > order[node]]:
            user.replace_input_with(target, node)
        modified = True
    return modified


def _functional_variant(node: fx.Node) -> torch._ops.OpOverload | None:
    """The overload with the signature of an in-place one, as torch pairs them; its name may be another operator's.

    `pow_.Scalar` raises a tensor to a number, `pow.Scalar` a number to a tensor.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return None
    namespace, _, name = node.target._schema.name.partition("::")
    if namespace != "aten" or not name.endswith("_") or name.endswith("__") or name == "copy_":
        return None
    packet, wanted = getattr(torch.ops.aten, name[:-1], None), _signature(node.target)
    variants = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return next((one for one in variants if not one._schema.is_mutable and _signature(one) == wanted), None)


def _signature(target: torch._ops.OpOverload) -> list[tuple[Any, ...]]:
    """What an operator takes and gives, besides what it changes of it."""
    arguments, returns = target._schema.arguments, target._schema.returns
    return [
        *((one.name, str(one.type), one.kwarg_only, one.default_value) for one in arguments),
        *((str(one.type),) for one in returns),
    ]


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


def _keeps_type(node: fx.Node, variant: torch._ops.OpOverload) -> bool:
    """Whether the functional form gives the type of what the in-place one changes: it may promote, or give bools."""
    tensor = node_tensor(node)
    if tensor is None:
        return False
    if any("val" not in one.meta for one in node.all_input_nodes):  # made by a pass of the user's
        return False
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])  # type: ignore[no-untyped-call]
    with getattr(tensor, "fake_mode", nullcontext()), torch.no_grad():
        result = variant(*args, **kwargs)
    return bool(result.dtype == tensor.dtype)


def _drop_aliases(graph: fx.Graph) -> bool:
    """Remove `alias` nodes: each only gives its operand another name."""
    modified = False
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.alias.default and isinstance(node.args[0], fx.Node):
            replace_call(node, node.args[0])
            modified = True
    return modified
