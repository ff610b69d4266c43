"""Normal form of a captured graph: what tracing left in the way of a precision rewrite is removed, with equal results.

Regions are inlined, checks on element types dropped, implied element types written out, in-place ops made functional
where nothing else sees the change. The normal form computes, bit for bit, what the captured graph does.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from amp_compiler.frontends.fx_alias import functionalize, isolate_mutations, mark_volatile
from amp_compiler.fx_tools import CAST, flat_arguments, node_tensor, refresh, schema_argument, user_source
from amp_compiler.graph import Pin

PIN = "amp_pin"  # key in node.meta
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
    inline_regions(graph_module)
    drop_type_checks(graph_module.graph)
    write_out_types(graph_module.graph)
    merge_getitems(graph_module.graph)
    functionalize(graph_module.graph)
    drop_aliases(graph_module.graph)
    isolate_mutations(graph_module.graph)
    mark_volatile(graph_module.graph)
    graph_module.graph.lint()
    graph_module.recompile()
    return graph_module


def inline_regions(graph_module: fx.GraphModule) -> None:
    """Replace `wrap_with_autocast` and `wrap_with_set_grad_enabled` by the nodes of their bodies."""
    graph = graph_module.graph
    inlined, retype = True, False
    while inlined:
        inlined = False
        for node in list(graph.nodes):
            target = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
            if target == "wrap_with_autocast":
                device, _, enabled, _, body, *operands = node.args
                _inline(graph_module, node, body, operands, off_device=None if enabled else device)
                inlined, retype = True, retype or bool(enabled)
            elif target == "wrap_with_set_grad_enabled":
                enabled, body, *operands = node.args
                _inline(graph_module, node, body, operands, detach=not enabled)
                inlined = True
    graph.eliminate_dead_code(is_impure_node=_keeps)
    graph_module.delete_all_unused_submodules()
    if retype:  # types inside a region with autocast on were those of autocast; without it they follow from the ops
        refresh(graph_module)


def _keeps(node: fx.Node) -> bool:
    # Only the get_attr of an inlined body may go: dead code of the model is none of our business here.
    return node.op != "get_attr"


def region_pin(device: Any, source: str) -> Pin:
    """The pin of a node that stands in an `autocast(enabled=False)` region of the model."""
    return Pin("fp32", f"the model's autocast('{device}', enabled=False) region{f' at {source}' if source else ''}")


def _inline(
    graph_module: fx.GraphModule,
    call: fx.Node,
    body: Any,
    operands: list[Any],
    off_device: Any = None,
    detach: bool = False,
) -> None:
    graph = graph_module.graph
    region: fx.GraphModule = getattr(graph_module, body.target)
    environment: dict[fx.Node, fx.Node] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                _move_attribute(graph_module, region, node.target)
            copied = graph.node_copy(node, lambda old: environment[old])
            environment[node] = copied
            if off_device is not None and copied.op == "call_function" and PIN not in copied.meta:
                copied.meta[PIN] = region_pin(off_device, user_source(copied.meta.get("stack_trace")))
        results = region.graph.output_node().args[0]
        flat = list(results) if isinstance(results, (list, tuple)) else [results]
        made = [environment.get(result) if isinstance(result, fx.Node) else result for result in flat]
        if detach:
            made = [_detached(graph, result) for result in made]
    for user in list(call.users):
        if user.target is operator.getitem:
            with graph.inserting_before(call):
                new = _as_captured(graph, made[user.args[1]], user)  # type: ignore[index]
            user.replace_all_uses_with(new)  # type: ignore[arg-type]
            graph.erase_node(user)
    if call.users:  # a region with one result that is not in a tuple
        call.replace_all_uses_with(made[0])  # type: ignore[arg-type]
    graph.erase_node(call)


def _as_captured(graph: fx.Graph, result: Any, captured: fx.Node) -> Any:
    """What leaves a region has the type that it had there: 16-bit, where autocast was on."""
    tensor = node_tensor(captured)
    if not isinstance(result, fx.Node) or tensor is None or tensor.dtype not in (torch.float16, torch.bfloat16):
        return result
    cast = graph.call_function(CAST, (result, tensor.dtype))
    cast.meta = {key: captured.meta[key] for key in ("val", "stack_trace", "nn_module_stack") if key in captured.meta}
    where = user_source(captured.meta.get("stack_trace"))
    cast.meta[PIN] = Pin("cast", f"result of the model's autocast region{f' at {where}' if where else ''}")
    return cast


def _move_attribute(target: fx.GraphModule, region: fx.GraphModule, name: Any) -> None:
    if not hasattr(target, name):
        setattr(target, name, getattr(region, name))


def _detached(graph: fx.Graph, result: Any) -> Any:
    # no_grad is a property of the trace, not of the values: a detach at its border has the same effect on gradients.
    if not isinstance(result, fx.Node) or node_tensor(result) is None or not node_tensor(result).is_floating_point():  # type: ignore[union-attr]
        return result
    new = graph.call_function(aten.detach.default, (result,))
    new.meta = {key: value for key, value in result.meta.items() if key != PIN}
    return new


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
        if name in _LIKE_FACTORIES and schema_argument(node, "dtype") is None:
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
