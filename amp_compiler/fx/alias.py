"""Memory shared between values: which ones alias, which of those are changed in place, and how to get rid of it."""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from amp_compiler.fx.graph import flat_arguments, node_tensor, replace_other_uses, schema_argument

VOLATILE = "amp_volatile"  # key in node.meta
aten = torch.ops.aten
# Ops that may return their operand itself though their schema does not say so.
_MAY_RETURN_OPERAND = frozenset(
    {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "pad", "einsum", "atleast_1d",
     "atleast_2d", "atleast_3d", "meshgrid", "broadcast_tensors", "sum_to_size", "type_as"}
)  # fmt: skip
# Written without a mark in the schema: batch_norm and instance_norm update their running statistics.
_STATISTICS = frozenset({"batch_norm", "instance_norm"})


class AliasGroups:
    """Union-find over nodes that may share memory, made from the alias marks in op schemas."""

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            for source in alias_sources(node):
                self._parent[self.root(node)] = self.root(source)

    def root(self, node: fx.Node) -> fx.Node:
        """The representative of the node's group."""
        while (parent := self._parent.get(node, node)) is not node:
            self._parent[node] = self._parent.get(parent, parent)
            node = parent
        return node

    def members(self, graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
        """Every group in execution order, by its representative."""
        groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in graph.nodes:
            groups[self.root(node)].append(node)
        return groups


def alias_sources(node: fx.Node) -> list[fx.Node]:
    """The operands with which the node's result may share memory."""
    if node.op != "call_function":
        return []
    if node.target is operator.getitem:
        return [node.args[0]] if isinstance(node.args[0], fx.Node) else []
    if not isinstance(node.target, torch._ops.OpOverload) or _changes_type(node):
        return []
    schema = node.target._schema
    marks = {mark for result in schema.returns if result.alias_info for mark in result.alias_info.before_set}
    name = schema.name.removeprefix("aten::")
    sources = []
    for declared in schema.arguments:
        shares = declared.alias_info is not None and bool(marks & set(declared.alias_info.before_set))
        if shares or (name in _MAY_RETURN_OPERAND and declared.name in ("input", "self", "tensors")):
            sources += _nodes(schema_argument(node, declared.name))
    return sources


def _changes_type(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    before = node_tensor(source) if isinstance(source, fx.Node) else None
    made = node_tensor(node)
    cast = node.target._schema.name in ("aten::to", "aten::type_as")  # type: ignore[union-attr]
    return cast and before is not None and made is not None and before.dtype != made.dtype


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that the node changes in place."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    written: list[fx.Node] = []
    for declared in schema.arguments:
        if declared.alias_info is not None and declared.alias_info.is_write:
            written += _nodes(schema_argument(node, declared.name))
    if schema.name.removeprefix("aten::") in _STATISTICS:
        written += [*_nodes(schema_argument(node, "running_mean")), *_nodes(schema_argument(node, "running_var"))]
    return written


def _nodes(argument: Any) -> list[fx.Node]:
    items = argument if isinstance(argument, (list, tuple)) else [argument]
    return [item for item in items if isinstance(item, fx.Node)]


def functionalize(graph: fx.Graph) -> None:
    """Turn `y = relu_(x)` into `y = relu(x)` where no other name of that memory is read afterwards."""
    # Groups and order are taken once: a change only splits groups, so what they say stays on the safe side.
    groups = AliasGroups(graph)
    members = groups.members(graph)
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        variant = _functional_variant(node)
        changed = written_operands(node) if variant is not None else []
        if variant is None or len(changed) != 1:
            continue
        target = changed[0]
        if not _only_name_of_fresh_memory(members[groups.root(target)], target, node, order) or not _keeps_type(node):
            continue
        node.target = variant
        _replace_later_uses(target, node, order)


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


def isolate_mutations(graph: fx.Graph) -> None:
    """Give memory that stays changed in place an owner of its own: a `clone` between the op that made it and the rest.

    The op (a GEMM, say) is then free to run in the low type, and only the copy keeps its captured type.
    """
    groups = AliasGroups(graph)
    written = {groups.root(target) for node in graph.nodes for target in written_operands(node)}
    for root, members in groups.members(graph).items():
        base = members[0]
        if root not in written or base.op != "call_function" or len(members) < 2:
            continue
        made = node_tensor(base)
        if base.target is aten.clone.default:
            continue  # it is a copy of its own already
        if made is None or alias_sources(base) or not made.is_floating_point() or not base.all_input_nodes:
            continue
        with graph.inserting_after(base):
            copy = graph.call_function(aten.clone.default, (base,))
        copy.meta = {key: value for key, value in base.meta.items() if key != "val"}
        with unset_fake_temporarily(), torch.no_grad():
            copy.meta["val"] = made.detach().clone() if not hasattr(made, "fake_mode") else _fake_clone(made)
        replace_other_uses(base, copy)


def _fake_clone(made: Any) -> torch.Tensor:
    with made.fake_mode:
        copy: torch.Tensor = torch.ops.aten.clone.default(made)
    return copy


def mark_volatile(graph: fx.Graph) -> None:
    """Mark, in `node.meta`, every node whose memory is changed in place somewhere in the graph."""
    groups = AliasGroups(graph)
    written = {groups.root(target) for node in graph.nodes for target in written_operands(node)}
    for node in graph.nodes:
        if groups.root(node) in written:
            node.meta[VOLATILE] = True
