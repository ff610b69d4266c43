"""`MultiplyConvolutions`: convolutions that are matrix products in all but name, written as such."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import amp_compiler.ops.images  # noqa: F401 - defines torch.ops.amp_compiler.patches
from amp_compiler.fx.graph import canonical_op, node_tensor, refresh, replace_call, schema_argument
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import InPlacePass, PassResult

_aten = torch.ops.aten
_CONVOLUTIONS = ("aten.conv2d", "aten.convolution")
_PIXELS_PER_CHANNEL = 2  # up to which patches are made: with more, they cost more memory than the weight


@dataclass(frozen=True)
class MultiplyConvolutions(InPlacePass):
    """On a CPU, make a BF16 convolution one matrix product where its patches are the pixels themselves, or few.

    A library's convolution reorders its weights at every call, forward and backward; with few pixels that is most of
    its time. A product reads them where they lie, and its weight gradient is a product of two matrices, which a
    training step need not write to memory. The arithmetic is the same: exact products, summed in FP32, rounded once.

    Before (1 x 1, 16 pixels)::

        conv2d: "bf16[4, 64, 2, 2]" = aten.conv2d(x, w)

    After::

        permute: "bf16[4, 2, 2, 32]" = aten.permute(x, [0, 2, 3, 1])
        reshape: "bf16[16, 32]" = aten.reshape(permute, [16, 32])
        reshape_1: "bf16[64, 32]" = aten.reshape(w, [64, 32])
        linear: "bf16[16, 64]" = aten.linear(reshape, reshape_1)
        reshape_2: "bf16[4, 2, 2, 64]" = aten.reshape(linear, [4, 2, 2, 64])
        permute_1: "bf16[4, 64, 2, 2]" = aten.permute(reshape_2, [0, 3, 1, 2])
        contiguous: "bf16[4, 64, 2, 2]" = aten.contiguous(permute_1)

    The last is there only where the convolution's own result would lie so. With a stride, or with a larger kernel and
    at most twice as many pixels of the result as channels, `amp_compiler.patches` takes the place of the first two.

    Left alone: grouped and transposed convolutions, symbolic shapes, padding by name, other types and devices, and a
    node whose gradients have a type of their own.
    """

    exact: ClassVar[bool] = False
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        matches = [
            (node, convolution) for node in subject.graph.nodes if (convolution := _convolution(node)) is not None
        ]
        for node, convolution in reversed(matches):  # the later one first: it may read the earlier one
            _multiply(subject.graph, node, convolution)
        if matches:
            refresh(subject)
        return PassResult(subject, bool(matches))


@dataclass(frozen=True)
class _Convolution:
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]


def _convolution(node: fx.Node) -> _Convolution | None:
    if node.op != "call_function" or canonical_op(node.target) not in _CONVOLUTIONS or Key.BACKWARD in node.meta:
        return None
    x, weight = schema_argument(node, "input"), schema_argument(node, "weight")
    if not _fits(node, x, weight) or schema_argument(node, "groups") != 1 or schema_argument(node, "transposed"):
        return None
    numbers = [_pair(schema_argument(node, name)) for name in ("stride", "padding", "dilation")]
    if any(number is None for number in numbers):
        return None
    stride, padding, dilation = numbers
    convolution = _Convolution(x, weight, schema_argument(node, "bias"), stride, padding, dilation)  # type: ignore[arg-type]
    result = node.meta["val"]
    few = result.shape[0] * result.shape[2] * result.shape[3] <= _PIXELS_PER_CHANNEL * result.shape[1]
    return convolution if few or _is_pointwise(convolution) else None


def _fits(node: fx.Node, *operands: fx.Node) -> bool:
    """Whether the values are BF16 images on a CPU, not empty, and of known sizes."""
    values = [node_tensor(one) for one in (node, *operands)]
    return all(
        value is not None
        and value.dtype == torch.bfloat16
        and value.device.type == "cpu"
        and value.dim() == 4
        and all(isinstance(size, int) and size > 0 for size in value.shape)
        for value in values
    )


def _pair(value: Any) -> list[int] | None:
    """Two numbers from one or two; `None` for the name of a padding."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return (values * 2)[:2] if all(isinstance(one, int) for one in values) else None


def _is_pointwise(convolution: _Convolution) -> bool:
    return convolution.weight.meta["val"].shape[2:] == (1, 1) and convolution.padding == [0, 0]


def _multiply(graph: fx.Graph, node: fx.Node, convolution: _Convolution) -> None:
    batch, channels, height, width = node.meta["val"].shape
    weight = convolution.weight.meta["val"]
    inner = weight.numel() // channels
    with graph.inserting_before(node):

        def call(target: Any, *args: Any) -> fx.Node:
            call_node = graph.call_function(target, args)
            call_node.meta = {key: value for key, value in node.meta.items() if key != "val"}
            return call_node

        if _is_pointwise(convolution) and convolution.stride == [1, 1]:
            rows = call(_aten.permute.default, convolution.x, [0, 2, 3, 1])
            patches = call(_aten.reshape.default, rows, [batch * height * width, inner])
        else:  # strides too: torch 2.13's Inductor miscompiles what the gradient of a strided slice is fused into
            settings = (convolution.stride, convolution.padding, convolution.dilation)
            patches = call(torch.ops.amp_compiler.patches.default, convolution.x, list(weight.shape[2:]), *settings)
        matrix = call(_aten.reshape.default, convolution.weight, [channels, inner])
        product = call(_aten.linear.default, patches, matrix, convolution.bias)
        pixels = call(_aten.reshape.default, product, [batch, height, width, channels])
        result = call(_aten.permute.default, pixels, [0, 3, 1, 2])
        if node.meta["val"].is_contiguous():  # a view of it, here or outside, relies on that
            result = call(_aten.contiguous.default, result)
    replace_call(node, result)
