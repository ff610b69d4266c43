"""`SimplifyCasts`: remove the cast chains that autograd's reversal of a graph leaves, with equal numerics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import fx

from amp_compiler.fx.alias import AliasGroups, written_roots
from amp_compiler.fx.graph import CAST, node_tensor, replace_call
from amp_compiler.fx.meta import Key
from amp_compiler.ops.fp8 import FP8
from amp_compiler.passes.base import RewritePass

_COPY = torch.ops.aten._to_copy.default
_LAYOUTS = (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class SimplifyCasts(RewritePass):
    """Take out casts that change nothing, keep 16-bit values alive rather than their upcasts; each rewrite is exact:

    1. a cast to the type that the value has -> the value
    2. a cast of an exact upcast -> a cast of the 16-bit value (`bf16 -> fp32 -> bf16` is the value itself)
    3. the same cast, or view, of the same value twice in one phase -> once: where products read it, a compiler would
       write what each view shows into memory of its own, as behind a norm for queries, keys and values; and all else
       that FP8 products compute, so that what several of them read is scaled and rounded once
    4. an upcast, or a view or copy of one, made in the forward and read in the backward -> repeated in the backward, so
       that the 16-bit value is what is kept alive
    5. a cast that nobody reads -> nothing

    Before::

        up = aten._to_copy(x16, dtype=float32);  y = aten.mul(up, 2.0);  down = aten._to_copy(up, dtype=bfloat16)

    After::

        up = aten._to_copy(x16, dtype=float32);  y = aten.mul(up, 2.0)      # readers of `down` read x16

    Left alone: a down-cast followed by an up-cast, which rounds; what is changed in place.
    """

    exact: ClassVar[bool] = True
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        groups = AliasGroups(graph)
        roots = written_roots(graph, groups)
        written = {node for node in graph.nodes if groups.root(node) in roots}
        modified = _skip_redundant(graph, written)
        modified |= _repeat_in_backward(graph, written)
        modified |= _merge_equal(graph, written)
        modified |= _erase_unread(graph)
        return modified


def _cast_type(node: fx.Node) -> torch.dtype | None:
    """The type to which a node casts, where it is a cast and changes nothing else; else `None`."""
    if node.op != "call_function":
        return None
    if node.target is CAST and len(node.args) == 2 and not node.kwargs:
        return node.args[1]  # type: ignore[return-value]
    if node.target is _COPY and "dtype" in node.kwargs and _stays(node):
        return node.kwargs["dtype"]  # type: ignore[return-value]
    return None


def _stays(node: fx.Node) -> bool:
    """Whether the other arguments of a copy, which autograd spells out, say nothing new."""
    tensor = node_tensor(node.args[0])  # type: ignore[arg-type]
    same = {
        "dtype": node.kwargs.get("dtype"),
        "layout": torch.strided,
        "device": tensor.device if tensor is not None else None,
    }
    return all(key in same and value in (None, same[key]) for key, value in node.kwargs.items())


def _source(node: fx.Node) -> fx.Node:
    return node.args[0]  # type: ignore[return-value]


def _type(node: fx.Node) -> torch.dtype | None:
    tensor = node_tensor(node)
    return None if tensor is None else tensor.dtype


def _is_upcast(node: fx.Node) -> bool:
    return _cast_type(node) is torch.float32 and _type(_source(node)) in _LOW


def _skip_redundant(graph: fx.Graph, written: set[fx.Node]) -> bool:
    modified = False
    for node in list(graph.nodes):
        dtype = _cast_type(node)
        if dtype is None:
            continue
        source = _source(node)
        if _is_upcast(source) and written.isdisjoint((source, _source(source))):
            node.update_arg(0, source := _source(source))
            modified = True
        if _type(source) is dtype and written.isdisjoint((node, source)) and not _is_returned_input(node, source):
            replace_call(node, source)
            modified = True
    return modified


def _is_returned_input(node: fx.Node, source: fx.Node) -> bool:
    # A graph input must not be returned in the place of a copy of it.
    return source.op == "placeholder" and any(user.op == "output" for user in node.users)


def _repeat_in_backward(graph: fx.Graph, written: set[fx.Node]) -> bool:
    modified = False
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        chain = _from_upcast(node)
        if not chain or node.meta.get(Key.PHASE) != "forward" or not written.isdisjoint((*chain, _source(chain[0]))):
            continue
        later = sorted((user for user in node.users if user.meta.get(Key.PHASE) == "backward"), key=order.__getitem__)
        if not later:
            continue
        source = _source(chain[0])
        with graph.inserting_before(later[0]):
            for link in chain:
                again = graph.node_copy(link)
                again.update_arg(0, source)
                again.meta = {**link.meta, Key.PHASE: "backward"}
                source = again
        for user in later:
            user.replace_input_with(node, source)
        modified = True
    return modified


def _from_upcast(node: fx.Node) -> list[fx.Node]:
    """An upcast and what leads from it to a node, that one included, by views and copies alone; else empty."""
    chain = [node]
    while _only_moves(chain[0]):
        chain.insert(0, _source(chain[0]))
    return chain if _is_upcast(chain[0]) else []


def _only_moves(node: fx.Node) -> bool:
    """Whether a node gives its first argument's elements and nothing else: a view, or a copy for another layout."""
    return _is_view(node) or (node.target in _LAYOUTS and node_tensor(node) is not None)


def _is_view(node: fx.Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node_tensor(node) is None:
        return False
    schema = node.target._schema
    return bool(schema.arguments) and schema.arguments[0].alias_info is not None and not schema.is_mutable


def _merge_equal(graph: fx.Graph, written: set[fx.Node]) -> bool:
    seen: dict[tuple[Any, ...], fx.Node] = {}
    modified = False
    in_fp8 = {node.meta.get(Key.PLANNED) for node in graph.nodes if _type(node) in FP8}
    for node in list(graph.nodes):
        what = _cast_or_view(node)
        if what is None and node.op == "call_function" and node.meta.get(Key.PLANNED, "") in in_fp8:
            what = _call(node)
        if what is None or not written.isdisjoint((node, *node.all_input_nodes)):
            continue
        first = seen.setdefault((*what, node.meta.get(Key.PHASE)), node)
        if first is not node and not any(user.op == "output" for user in node.users):
            replace_call(node, first)
            modified = True
    return modified


def _cast_or_view(node: fx.Node) -> tuple[Any, ...] | None:
    """Equal for nodes that give the same cast or view of the same value; `None` for all else."""
    dtype = _cast_type(node)
    if dtype is not None:
        return _source(node), dtype
    return _call(node) if _is_view(node) else None


def _call(node: fx.Node) -> tuple[Any, ...]:
    leaves, form = pytree.tree_flatten((node.args, node.kwargs))
    return node.target, *leaves, form


def _erase_unread(graph: fx.Graph) -> bool:
    modified = False
    for node in reversed(list(graph.nodes)):
        if _cast_type(node) is not None and not node.users:
            graph.erase_node(node)
            modified = True
    return modified
