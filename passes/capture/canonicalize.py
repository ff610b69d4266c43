"""Normal form of a captured graph: what tracing left in the way of a precision rewrite is removed, with equal results.

Regions are inlined, checks on element types dropped, implied element types written out, in-place ops made functional
where nothing else sees the change. The normal form computes, bit for bit, what the captured graph does.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from amp_compiler.fx.alias import functionalize, isolate_mutations, mark_volatile
from amp_compiler.fx.graph import flat_arguments, node_tensor, refresh, schema_argument, user_source
from amp_compiler.fx.meta import PIN
from amp_compiler.ir.graph import Pin
from amp_compiler.passes.capture.inline_regions import inline_regions

aten = torch.ops.aten

_LIKE_FACTORIES = frozenset(
    {"zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like",
     "new_zeros", "new_ones", "new_full", "new_empty"}
)  # fmt: skip
_CASTING = frozenset({"to", "type_as", "_to_copy"})


def normalize(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Bring a captured graph into normal form, in place.

    Before: `wrap_with_autocast(…, enabled=False, submod, x)`, `_assert_tensor_metadata(x, dtype=float32)`,
    `zeros_like(x)`, `relu_(y)`. After: the region's nodes, pinned to FP32; nothing; `zeros_like(x, dtype=float32)`;
    `relu(y)`.
    """
    retype = inline_regions(graph_module)
    drop_type_checks(graph_module.graph)
    if retype:
        refresh(graph_module)
    write_out_types(graph_module.graph)
    merge_getitems(graph_module.graph)
    functionalize(graph_module.graph)
    drop_aliases(graph_module.graph)
    isolate_mutations(graph_module.graph)
    mark_volatile(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def drop_type_checks(graph: fx.Graph) -> None:
    """Remove `_assert_tensor_metadata`: it states the captured element types, which a rewrite changes."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def write_out_types(graph: fx.Graph) -> None:
    """Write the element type into every op that would take it from an operand, and casts as `to.dtype`."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        made = node_tensor(node)
        if made is None:
            continue
        name = node.target._schema.name.removeprefix("aten::")
        if node.target is aten.view.dtype:
            node.meta.setdefault(PIN, Pin("keep", "it reads the bits of its operand as another type"))
        elif name in _LIKE_FACTORIES and schema_argument(node, "dtype") is None:
            node.update_kwarg("dtype", made.dtype)
        elif name in _CASTING:
            _write_out_cast(node, made)
        elif _has_explicit_type(node):
            node.meta.setdefault(PIN, Pin("cast", "explicit dtype argument in the model"))


def _write_out_cast(node: fx.Node, made: torch.Tensor) -> None:
    source = node.args[0]
    before = node_tensor(source) if isinstance(source, fx.Node) else None
    node.meta.setdefault(PIN, Pin("cast", _cast_reason(node)))
    if before is not None and before.device == made.device and schema_argument(node, "memory_format") is None:
        node.target, node.args, node.kwargs = aten.to.dtype, (source, made.dtype), {}


def _cast_reason(node: fx.Node) -> str:
    source = user_source(node.meta.get("stack_trace"))
    return f"explicit cast in the model{f' at {source}' if source else ''}"


def _has_explicit_type(node: fx.Node) -> bool:
    reads_float = any(
        isinstance(argument, fx.Node)
        and node_tensor(argument) is not None
        and node_tensor(argument).is_floating_point()  # type: ignore[union-attr]
        for _, _, argument in flat_arguments(node)
    )
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    return reads_float and name not in _LIKE_FACTORIES and isinstance(schema_argument(node, "dtype"), torch.dtype)


def merge_getitems(graph: fx.Graph) -> None:
    """Leave one `getitem` per output of a node, so that an output has one name."""
    seen: dict[tuple[fx.Node, Any], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
            continue
        key = (node.args[0], node.args[1])
        if key in seen:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)
        else:
            seen[key] = node


def drop_aliases(graph: fx.Graph) -> None:
    """Remove `alias` nodes: each only gives its operand another name."""
    for node in list(graph.nodes):
        if node.target is aten.alias.default and isinstance(node.args[0], fx.Node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
