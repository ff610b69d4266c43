"""Graph pieces as Dynamo hands them to a backend, retraced to ATen training IR."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from amp_compiler.errors import CaptureError, ValuesReadError
from amp_compiler.fx.capture_errors import user_frame
from amp_compiler.fx.graph import rename_placeholder, user_source
from amp_compiler.fx.meta import CUSTOM_REGION, Key, region_pin
from amp_compiler.fx.no_grad import detach_what_enters
from amp_compiler.fx.piece_regions import Region, mark, wrap_regions
from amp_compiler.fx.regions import names_other_type
from amp_compiler.fx.torch_private import (
    TENSOR_OF_NUMBER,
    is_restart,
    new_graph_module,
    restored_transforms,
    traced_graph,
    transform_of,
)
from amp_compiler.fx.tracing import tracing_context
from amp_compiler.ir.graph import ValueKind


def trace_piece(
    piece: fx.GraphModule, inputs: Sequence[Any], low: torch.dtype
) -> tuple[fx.GraphModule, dict[str, ValueKind]]:
    """Retrace one of Dynamo's graphs to ATen training IR, before autograd.

    Args:
        piece: Dynamo's graph of torch functions and methods.
        inputs: the example inputs that Dynamo gives with it; sizes may be symbolic.
        low: the low type that is planned for.

    Returns:
        The ATen graph, with one placeholder per placeholder of the piece, and the kind of each placeholder.

    Raises:
        CaptureError: where the piece cannot be traced; names the line of the model.
        LoweringError: the model switches gradients in an autocast region of another 16-bit type; names its line.
    """
    placeholders = piece.graph.find_nodes(op="placeholder")
    examples = [node.meta.get("example_value", given) for node, given in zip(placeholders, inputs, strict=True)]
    kinds = {value.device.type for value in examples if isinstance(value, torch.Tensor)}
    body = _without_autocast_calls(piece, min(kinds - {"cpu", "meta"}, default="cpu"), low)
    for node in piece.graph.nodes:
        if "autograd_function_apply" in str(node.target):
            raise CaptureError(
                "the model applies a custom torch.autograd.Function, whose backward a traced graph would lose",
                where=user_source(node.meta.get("stack_trace")),
                hint="put the call under torch.compiler.disable, or use amp.compile, which does that",
            )
    # The piece's own fake mode: constants that it makes while it is traced must be of the same.
    fake_mode = next((value.fake_mode for value in examples if isinstance(value, FakeTensor)), None)
    try:
        with (
            tracing_context(),
            restored_transforms(),
            fx_traceback.preserve_node_meta(),
            fake_mode or contextlib.nullcontext(),
        ):
            # Before autograd, unless a transform of torch.func has to be carried out: it is gone behind that alone.
            before = not any(map(transform_of, body.graph.nodes))
            run = fx.Interpreter(body).run
            traced = traced_graph(run, *examples, pre_dispatch=before, _allow_non_fake_inputs=True)
    except Exception as cause:  # tracing runs the model's own calls, which may raise anything
        if is_restart(cause):
            raise
        raise CaptureError(
            f"a piece of the model cannot be traced to ATen: {type(cause).__name__}: {cause}",
            where=user_frame(cause),
            hint="exclude that part with torch.compiler.disable, or keep it out of the compiled module",
        ) from cause
    for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default):
        if "val" not in node.meta:
            raise ValuesReadError(
                "an index or a size is read from a tensor while the graph is made",
                where=user_source(node.meta.get("stack_trace")),
                hint="index with a tensor of one dimension, or use index_select",
            )
    if torch.is_grad_enabled():
        detach_what_enters(traced.graph)
    if not before:
        traced.graph.eliminate_dead_code()  # checks of sizes, which have no value
    _restore_pins(traced)
    wrap_regions(traced)
    for node, original in zip(traced.graph.find_nodes(op="placeholder"), placeholders, strict=True):
        rename_placeholder(node, original.name)
    traced.recompile()
    given_as = {
        node.name: ValueKind.PARAMETER if isinstance(given, torch.nn.Parameter) else ValueKind.INPUT
        for node, given in zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True)
    }
    return traced, given_as


def _without_autocast_calls(piece: fx.GraphModule, kind: str, low: torch.dtype) -> fx.GraphModule:
    """A copy in which autocast regions are marks on nodes, not calls that would act while tracing; data is detached."""
    graph = fx.Graph()
    environment: dict[fx.Node, fx.Node] = {}
    regions: list[Region] = []
    opened = 0
    for node in piece.graph.nodes:
        called = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if called == "_enter_autocast":
            device, dtype, enabled = node.args[:3]
            regions.append(Region(opened, str(device), dtype, bool(enabled)))
            opened += 1
            continue
        if called == "_exit_autocast":
            regions.pop()
            continue
        copied = graph.node_copy(node, lambda old: environment[old])
        if called == "_get_data_attr":  # of `x.data`, which no tracer takes note of
            copied.target = torch.Tensor.detach
        if node.target is TENSOR_OF_NUMBER:  # Dynamo's for `torch.tensor` of a number that is an input
            _as_stacked_numbers(copied)
        environment[node] = copied
        if regions and not regions[-1].enabled:
            copied.meta["custom"] = {**copied.meta.get("custom", {}), CUSTOM_REGION: regions[-1].device}
        other = [names_other_type(one.device, one.dtype, one.enabled, kind, low) for one in regions]
        mark(copied, regions[other.index(True) :] if True in other else [])
    return new_graph_module(piece, graph)


def _as_stacked_numbers(node: fx.Node) -> None:
    """Have `torch.tensor` of numbers, in lists or not, made by what a trace can follow."""
    told = [one.meta.get("example_value") if isinstance(one, fx.Node) else one for one in pytree.tree_leaves(node.args)]
    if told and all(isinstance(one, (float, int, torch.SymFloat, torch.SymInt)) for one in told):
        node.target = _stacked_numbers


def _stacked_numbers(
    data: Any, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **unused: Any
) -> Tensor:
    """`torch.tensor` of numbers. Torch's own form for a trace ends in `detach_`, which a stack of several refuses."""
    if dtype is None:
        kinds = {type(one) for one in pytree.tree_leaves(data)}
        real = kinds & {float, torch.SymFloat}
        dtype = torch.get_default_dtype() if real else torch.bool if kinds == {bool} else torch.int64
    if not isinstance(data, (list, tuple)):
        return torch.scalar_tensor(data, dtype=dtype, device=device)
    return torch.stack([_stacked_numbers(one, dtype=dtype, device=device) for one in data])


def _restore_pins(traced: fx.GraphModule) -> None:
    for node in traced.graph.nodes:
        region = (node.meta.get("custom") or {}).get(CUSTOM_REGION)
        if region is not None and node.op == "call_function":
            node.meta[Key.PIN] = region_pin(region, user_source(node.meta.get("stack_trace")))
