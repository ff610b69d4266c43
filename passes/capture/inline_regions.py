"""`InlineRegions`: `wrap_with_autocast` and `wrap_with_set_grad_enabled` are replaced by the nodes of their bodies."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.traceback import preserve_node_meta

from amp_compiler.fx.graph import CAST, LOW_TYPES, node_tensor, refresh, user_source
from amp_compiler.fx.meta import Key, region_pin, source_of
from amp_compiler.fx.torch_private.tracing import traced_graph
from amp_compiler.ir.graph import Pin
from amp_compiler.passes.base import InPlacePass, PassResult
from amp_compiler.passes.capture.drop_type_checks import drop_type_checks

aten = torch.ops.aten


@dataclass(frozen=True)
class InlineRegions(InPlacePass):
    """Replace `wrap_with_autocast` and `wrap_with_set_grad_enabled` by the nodes of their bodies.

    Nodes of a region with autocast off are pinned to FP32. A region in the 16-bit type that the plan does not have gets
    the casts that autocast puts there, and is kept so. What enters and what leaves a `no_grad` region is detached,
    which has the same effect on gradients. The types inside of a region with autocast on were autocast's and now follow
    from the ops; what leaves it has the type that it had.

    Before::

        submod_1 = attribute("submod_1")
        wrap: (fp32[4]) = higher_order.wrap_with_autocast("cpu", None, False, True, submod_1, x)
        getitem: fp32[4] = getitem(wrap, 0)
        return getitem
        graph submod_1
        in x: fp32[4]
        exp: fp32[4] = aten.exp.default(x)
        return exp

    After::

        exp: fp32[4] = aten.exp.default(x)  # pin=fp32
        return exp

    Left alone: a graph without regions; a region with autocast off for a device that the graph does not use is opened
    without pins.

    Args:
        low: the low type that is planned for. `None` where nothing is planned.
    """

    low: torch.dtype | None = None

    exact: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place.

        Raises:
            LoweringError: an op does not take the types that it gets where a region with autocast on is opened.
        """
        modified, retype = _inline_all(subject, self.low)
        if retype:
            drop_type_checks(subject.graph)  # they state autocast's types
            refresh(subject)
        elif modified:
            subject.recompile()
        return PassResult(subject, modified)


def _inline_all(graph_module: fx.GraphModule, low: torch.dtype | None) -> tuple[bool, bool]:
    """Whether a region was opened, and whether types must be computed anew."""
    graph = graph_module.graph
    device = _device_type(graph)
    inlined, retype, modified = True, False, False
    while inlined:
        inlined = False
        for node in list(graph.nodes):
            target = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
            if target == "wrap_with_autocast":
                kind, dtype, enabled, _, body, *operands = node.args
                planned = enabled and low is not None and str(kind) == device
                other = planned and dtype in LOW_TYPES and dtype is not low
                if other:
                    setattr(graph_module, body.target, _written_out(getattr(graph_module, body.target), device, dtype))
                off = str(kind) if not enabled and str(kind) == device else None
                _inline(graph_module, node, body, operands, off_device=off, widen=other)
                inlined, retype = True, retype or bool(enabled)
            elif target == "wrap_with_set_grad_enabled":
                enabled, body, *operands = node.args
                _inline(graph_module, node, body, operands, detach=not enabled)
                inlined = True
        modified |= inlined
    # Only the get_attr of an inlined body may go: dead code of the model is none of our business here.
    modified |= bool(graph.eliminate_dead_code(is_impure_node=lambda node: node.op != "get_attr"))
    graph_module.delete_all_unused_submodules()
    return modified, retype


def _written_out(region: fx.GraphModule, device: str, dtype: torch.dtype) -> fx.GraphModule:
    """A region in the 16-bit type that the plan does not have, with autocast's casts, which a plan leaves alone."""
    inputs = [node.meta["val"] for node in region.graph.find_nodes(op="placeholder")]
    drop_type_checks(region.graph)
    _detach_switched(region)
    with torch.autocast(device, dtype=dtype, cache_enabled=False), preserve_node_meta():
        traced = traced_graph(fx.Interpreter(region).run, *inputs)
    reason = f"the model's autocast('{device}', dtype={dtype}) region"
    for node in traced.graph.nodes:
        if node.op == "call_function" and node.target is not aten._to_copy.default:
            source = user_source(node.meta.get("stack_trace"))
            node.meta[Key.PIN] = Pin("keep", f"{reason}{f' at {source}' if source else ''}")
    return traced


def _detach_switched(region: fx.GraphModule) -> None:
    """Where gradients are switched off within a region values are detached: a trace of kernels notes no switch."""
    switch = torch.ops.higher_order.wrap_with_set_grad_enabled
    for inner in [one for one in region.modules() if isinstance(one, fx.GraphModule)]:
        while switches := inner.graph.find_nodes(op="call_function", target=switch):
            enabled, body, *operands = switches[0].args
            _inline(inner, switches[0], body, operands, detach=not enabled)


def _device_type(graph: fx.Graph) -> str:
    kinds = {tensor.device.type for node in graph.nodes if (tensor := node_tensor(node)) is not None}
    return min(kinds - {"cpu", "meta"}, default="cpu")


def _inline(
    graph_module: fx.GraphModule,
    call: fx.Node,
    body: Any,
    operands: list[Any],
    off_device: str | None = None,
    detach: bool = False,
    widen: bool = False,
) -> None:
    graph = graph_module.graph
    region: fx.GraphModule = getattr(graph_module, body.target)
    with graph.inserting_before(call):
        originals = operands
        if detach:
            operands = [_detached(graph, operand) for operand in operands]
        environment: dict[fx.Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
        for node in region.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            copied = graph.node_copy(node, lambda old: environment[old])
            environment[node] = copied
            if node.op == "get_attr":
                copied.target = _moved_attribute(graph_module, region, node.target)
            if off_device is not None and copied.op == "call_function" and Key.PIN not in copied.meta:
                copied.meta[Key.PIN] = region_pin(off_device, user_source(copied.meta.get("stack_trace")))
        results = region.graph.output_node().args[0]
        flat = list(results) if isinstance(results, (list, tuple)) else [results]
        values_returned = [environment.get(result) if isinstance(result, fx.Node) else result for result in flat]
        if detach:
            outer = dict(zip(region.graph.find_nodes(op="placeholder"), originals, strict=True))
            values_returned = [
                outer.get(_changed_in_place(result)) or _detached(graph, new)
                for result, new in zip(flat, values_returned, strict=True)
            ]
    if widen:
        _widen_results(graph, call, values_returned)
    _replace_results(graph, call, values_returned)


def _widen_results(graph: fx.Graph, call: fx.Node, results: list[Any]) -> None:
    """Let nodes behind a region in the type that the plan does not have read its results in FP32.

    From there a plan casts them on. What the graph returns stays as it is.
    """
    for result in [user for user in call.users if user.target is operator.getitem]:
        wide = _widened(graph, call, results[result.args[1]])  # type: ignore[index]
        result.replace_all_uses_with(wide, delete_user_cb=lambda user: user.op != "output")


def _widened(graph: fx.Graph, call: fx.Node, result: Any) -> Any:
    """What leaves a region in the type that the plan does not have, in FP32, from which a plan may cast it on."""
    tensor = node_tensor(result) if isinstance(result, fx.Node) else None
    if tensor is None or tensor.dtype not in LOW_TYPES:
        return result
    with graph.inserting_before(call):
        cast = graph.call_function(CAST, (result, torch.float32))
    cast.meta = {**source_of(result), "val": tensor.float()}
    return cast


def _changed_in_place(result: Any) -> Any:
    """What an in-place op, or a row of them, changed: its result is that tensor itself, gradients and all."""
    while (
        isinstance(result, fx.Node)
        and isinstance(result.target, torch._ops.OpOverload)
        and result.target._schema.is_mutable
        and result.target._schema.name.endswith("_")
    ):
        result = result.args[0]
    return result


def _replace_results(graph: fx.Graph, call: fx.Node, results: list[Any]) -> None:
    for user in list(call.users):
        if user.target is operator.getitem:
            with graph.inserting_before(call):
                new = _as_captured(graph, results[user.args[1]], user)  # type: ignore[index]
            user.replace_all_uses_with(new)
            graph.erase_node(user)
    if call.users:  # a region with one result that is not in a tuple
        call.replace_all_uses_with(results[0])
    graph.erase_node(call)


def _as_captured(graph: fx.Graph, result: Any, captured: fx.Node) -> Any:
    """What leaves a region has the type that it had there: 16-bit, where autocast was on."""
    tensor = node_tensor(captured)
    if not isinstance(result, fx.Node) or tensor is None or tensor.dtype not in LOW_TYPES:
        return result
    cast = graph.call_function(CAST, (result, tensor.dtype))
    cast.meta = {key: captured.meta[key] for key in ("val", "stack_trace", "nn_module_stack") if key in captured.meta}
    where = user_source(captured.meta.get("stack_trace"))
    cast.meta[Key.PIN] = Pin("cast", f"result of the model's autocast region{f' at {where}' if where else ''}")
    return cast


def _moved_attribute(target: fx.GraphModule, region: fx.GraphModule, name: Any) -> str:
    """Hand an attribute of the region's module to the graph's, under a name that is free there; returns that name."""
    wanted, value, number = str(name), getattr(region, name), 0
    while hasattr(target, wanted) and getattr(target, wanted) is not value:
        number += 1
        wanted = f"{name}_{number}"
    setattr(target, wanted, value)
    return wanted


def _detached(graph: fx.Graph, result: Any) -> Any:
    # no_grad is a property of the trace, not of the values: a detach at its border has the same effect on gradients.
    if not isinstance(result, fx.Node) or node_tensor(result) is None or not node_tensor(result).is_floating_point():  # type: ignore[union-attr]
        return result
    new = graph.call_function(aten.detach.default, (result,))
    new.meta = {key: value for key, value in result.meta.items() if key != Key.PIN}
    return new
