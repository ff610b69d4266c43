"""Memory shared between values: which ones alias, and which of those are changed in place."""

import operator
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from amp_compiler.fx.graph import node_tensor, schema_argument

aten = torch.ops.aten
# Ops that may return their operand itself though their schema does not say so.
_MAY_RETURN_OPERAND = frozenset(
    {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "pad", "einsum", "atleast_1d",
     "atleast_2d", "atleast_3d", "data", "meshgrid", "broadcast_tensors", "sum_to_size", "type_as"}
)  # fmt: skip
# Written without a mark in the schema: these update their running statistics where this argument is true.
_STATISTICS = {"batch_norm": "training", "instance_norm": "use_input_stats"}


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
        info = declared.alias_info  # "(a -> *)" is shared with a list of results, which has no mark of its own
        shares = info is not None and (bool(marks & set(info.before_set)) or "*" in info.after_set)
        if shares or (name in _MAY_RETURN_OPERAND and declared.name in ("input", "self", "tensors")):
            sources += _nodes(schema_argument(node, declared.name))
    return sources


def _changes_type(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    before = node_tensor(source) if isinstance(source, fx.Node) else None
    after = node_tensor(node)
    cast = node.target._schema.name in ("aten::to", "aten::type_as")  # type: ignore[union-attr]
    return cast and before is not None and after is not None and before.dtype != after.dtype


def written_operands(node: fx.Node) -> list[fx.Node]:
    """The operands that the node changes in place."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return []
    schema = node.target._schema
    written: list[fx.Node] = []
    for declared in schema.arguments:
        if declared.alias_info is not None and declared.alias_info.is_write:
            written += _nodes(schema_argument(node, declared.name))
    if takes_statistics(node):
        written += [*_nodes(schema_argument(node, "running_mean")), *_nodes(schema_argument(node, "running_var"))]
    return written


def takes_statistics(node: fx.Node) -> bool:
    """Whether a norm takes its statistics of its input, and updates the running ones without reading them."""
    schema = getattr(node.target, "_schema", None)
    argument = _STATISTICS.get(schema.name.removeprefix("aten::")) if schema is not None else None
    return argument is not None and schema_argument(node, argument) is not False


def _nodes(argument: Any) -> list[fx.Node]:
    items = argument if isinstance(argument, (list, tuple)) else [argument]
    return [item for item in items if isinstance(item, fx.Node)]


def written_roots(graph: fx.Graph, groups: AliasGroups) -> set[fx.Node]:
    """The representatives of the groups whose memory is changed in place somewhere in the graph."""
    return {groups.root(target) for node in graph.nodes for target in written_operands(node)}


def is_view(node: fx.Node) -> bool:
    """True where the value may lie in the memory of the node's first argument."""
    schema = getattr(node.target, "_schema", None)
    return node.target is operator.getitem or (schema is not None and any(a.alias_info for a in schema.arguments))


def source_of(node: fx.Node) -> fx.Node:
    """The value that another is a view of, or itself."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Users of a value, and those of its views."""
    for user in node.users:
        yield user
        if is_view(user):
            yield from readers(user)
