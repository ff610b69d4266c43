"""`WriteOutAttention`: attention as the products and the softmax that ONNX has below opset 23."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.errors import CaptureError
from amp_compiler.fx.graph import schema_argument
from amp_compiler.fx.meta import Key
from amp_compiler.ir.dtypes import DType
from amp_compiler.passes.base import InPlacePass, PassResult

aten = torch.ops.aten
ATTENTION_OPSET = 23  # from here on ONNX has attention as one op
_FUSED = aten.scaled_dot_product_attention.default
_META = ("nn_module_stack", "stack_trace", "source_fn_stack", "torch_fn", Key.PIN)


@dataclass(frozen=True)
class WriteOutAttention(InPlacePass):
    """Write `scaled_dot_product_attention` out, so that the rules decide on its softmax as they do in the file.

    Query and key are each scaled by the root of the scale, which keeps the scores of FP16 in range. What a mask hides
    gets the low type's minimum, a finite number; a row that a boolean mask hides whole becomes zeros.

    Before (opset 20)::

        attend: fp32[1, 2, 4, 16] = aten.scaled_dot_product_attention.default(q, k, v)

    After::

        transpose_int: fp32[1, 2, 16, 4] = aten.transpose.int(k, -2, -1)
        mul_tensor: fp32[1, 2, 4, 16] = aten.mul.Tensor(q, 0.5)
        mul_tensor_1: fp32[1, 2, 16, 4] = aten.mul.Tensor(transpose_int, 0.5)
        matmul_default: fp32[1, 2, 4, 4] = aten.matmul.default(mul_tensor, mul_tensor_1)
        softmax_int: fp32[1, 2, 4, 4] = aten.softmax.int(matmul_default, -1)
        matmul_default_1: fp32[1, 2, 4, 16] = aten.matmul.default(softmax_int, v)

    Left alone: every graph for opset 23 and later, where ONNX has attention as one op.

    Args:
        low: the 16-bit type that is planned for.
        opset: version of ONNX's own ops that the file will have.
    """

    low: DType
    opset: int
    name: ClassVar[str] = "write_out_attention"
    exact: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place.

        Raises:
            CaptureError: the scale depends on a width that is dynamic.
        """
        matches = self._matches(subject.graph)
        for node in matches:
            with subject.graph.inserting_before(node):
                result = _attention(_Emitter(subject.graph, node), node, -self.low.format.max)
            node.replace_all_uses_with(result)
            subject.graph.erase_node(node)
        if matches:
            subject.recompile()
        return PassResult(subject, bool(matches))

    def ensures(self, subject: fx.GraphModule, remembered: Any) -> str | None:
        """None must be left."""
        left = self._matches(subject.graph)
        return f"'{left[0].name}' is attention, which opset {self.opset} does not have" if left else None

    def _matches(self, graph: fx.Graph) -> list[fx.Node]:
        if self.opset >= ATTENTION_OPSET:
            return []
        return list(graph.find_nodes(op="call_function", target=_FUSED))


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
            "the width of an attention head is dynamic", where=node.name, hint="give scale= in the call of attention"
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
