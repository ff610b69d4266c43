"""Attention written out in an FX graph as the products and the softmax that ONNX has below opset 23."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from amp_compiler.errors import CaptureError
from amp_compiler.fx.graph import schema_argument
from amp_compiler.fx.meta import Key
from amp_compiler.ir.dtypes import DType

aten = torch.ops.aten
ATTENTION_OPSET = 23  # from here on ONNX has attention as one op
_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn", Key.PIN)


def write_out_attention(graph_module: fx.GraphModule, low: DType) -> bool:
    """Write `scaled_dot_product_attention` out as the products and the softmax that ONNX has below opset 23, in place.

    So the rules decide on the softmax, as they do in the ONNX file. Query and key are each scaled by the root of the
    scale, which keeps the scores of FP16 in range. What a mask hides gets the low type's minimum, a finite number.

    Before: `attention(q, k, v)`. After: `matmul(softmax(matmul(q * s, kᵀ * s)), v)`.

    Args:
        graph_module: the graph, in normal form.
        low: the 16-bit type that is planned for.

    Returns:
        Whether there was one.
    """
    graph = graph_module.graph
    found = graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    for node in found:
        with graph.inserting_before(node):
            result = _attention(_Emitter(graph, node), node, -low.format.max)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    if found:
        graph_module.recompile()
    return bool(found)


def drop_idle_dropout(graph_module: fx.GraphModule) -> bool:
    """Remove dropout that drops nothing, as the exporter does. Returns whether there was any."""
    idle = [
        node
        for node in graph_module.graph.find_nodes(op="call_function", target=aten.dropout.default)
        if schema_argument(node, "train") is False
    ]
    for node in idle:
        node.replace_all_uses_with(node.args[0])
        graph_module.graph.erase_node(node)
    if idle:
        graph_module.recompile()
    return bool(idle)


class _Emitter:
    """Appends calls whose fake results are computed on the spot."""

    def __init__(self, graph: fx.Graph, origin: fx.Node) -> None:
        self.graph = graph
        self.meta = {key: origin.meta[key] for key in _META if key in origin.meta}

    def __call__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        values = fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
        with torch.no_grad():
            node.meta = {**self.meta, "val": op(*values[0], **values[1])}  # type: ignore[index]
        return node


def _attention(emit: _Emitter, node: fx.Node, hidden: float) -> fx.Node:
    query, key, value = (schema_argument(node, name) for name in ("query", "key", "value"))
    mask, scale = schema_argument(node, "attn_mask"), schema_argument(node, "scale")
    width = query.meta["val"].shape[-1]
    if scale is None and not isinstance(width, int):
        raise CaptureError(
            "the width of an attention head is dynamic", where=node.name, mend="give scale= in the call of attention"
        )
    root = math.sqrt(1 / math.sqrt(width) if scale is None else scale)
    if schema_argument(node, "enable_gqa"):
        groups = query.meta["val"].shape[-3] // key.meta["val"].shape[-3]
        key, value = _repeated(emit, key, groups), _repeated(emit, value, groups)
    flipped = emit(aten.transpose.int, key, -2, -1)
    scores = emit(aten.matmul.default, emit(aten.mul.Tensor, query, root), emit(aten.mul.Tensor, flipped, root))
    empty = False  # a row may have nothing to attend to
    if schema_argument(node, "is_causal"):
        sizes = [_size(emit, query), _size(emit, key)]
        ones = emit(aten.new_ones.default, query, sizes, dtype=torch.bool)
        mask = emit(aten.tril.default, ones)
    elif isinstance(mask, fx.Node):
        empty = mask.meta["val"].dtype is torch.bool
    if isinstance(mask, fx.Node) and mask.meta["val"].dtype is torch.bool:
        scores = emit(aten.masked_fill.Scalar, scores, emit(aten.logical_not.default, mask), hidden)
    elif isinstance(mask, fx.Node):
        scores = emit(aten.add.Tensor, scores, mask)
    weights = emit(aten.softmax.int, scores, -1)
    if empty:
        anything = emit(aten.any.dim, mask, -1, True)
        weights = emit(aten.masked_fill.Scalar, weights, emit(aten.logical_not.default, anything), 0.0)
    dropped = schema_argument(node, "dropout_p")
    if dropped:
        weights = emit(aten.dropout.default, weights, dropped, True)
    return emit(aten.matmul.default, weights, value)


def _repeated(emit: _Emitter, heads: fx.Node, groups: int) -> fx.Node:
    """Each head `groups` times in a row."""
    rank = heads.meta["val"].dim()
    apart = emit(aten.unsqueeze.default, heads, rank - 2)
    sizes = [-1] * (rank + 1)
    sizes[rank - 2] = groups
    return emit(aten.flatten.using_ints, emit(aten.expand.default, apart, sizes), rank - 3, rank - 2)


def _size(emit: _Emitter, node: fx.Node) -> int | fx.Node:
    size = node.meta["val"].shape[-2]
    return size if isinstance(size, int) else emit(aten.sym_size.int, node, node.meta["val"].dim() - 2)
