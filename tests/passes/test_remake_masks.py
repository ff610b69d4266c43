"""Masks of a ReLU's gradient that are found anew from a norm's data, on graphs as Inductor hands them to a pass."""

from __future__ import annotations

import copy

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.passes.device.remake_masks import RemakeMasks

aten, prims = torch.ops.aten, torch.ops.prims
LOW = torch.bfloat16


def cast(x, dtype):
    return prims.convert_element_type.default(x, dtype)


def block(image, kernel, mean, scale, weight, shift, gradient):
    """A convolution, a batch norm and a ReLU, and the norm's backward: opened, as Inductor opens them."""
    data = aten.convolution(image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    normal = aten.add.Tensor(((cast(data, torch.float32) - mean) * scale) * weight, shift)
    relu = aten.relu.default(cast(normal, LOW))
    zero = torch.full((), 0.0, dtype=LOW)
    masked = cast(aten.where.self(aten.le.Scalar(relu, 0), zero, gradient), torch.float32)
    centred = cast(data, torch.float32) - mean
    over = [0, 2, 3]
    sums = aten.sum.dim_IntList(masked, over), aten.sum.dim_IntList(masked * centred, over)
    of_data = (masked - centred * sums[1][:, None, None]) - sums[0][:, None, None]
    return relu, *sums, cast(of_data * scale, LOW)


def given():
    torch.manual_seed(0)
    image, gradient = torch.randn(2, 4, 9, 9, dtype=LOW), torch.randn(2, 4, 9, 9, dtype=LOW)
    channels = [torch.randn(4, 1, 1) for _ in range(4)]
    return image, torch.randn(4, 4, 3, 3, dtype=LOW), *channels, gradient


def traced(inputs):
    return make_fx(block, tracing_mode="fake")(*inputs)


def relus_compared(graph):
    return [
        le
        for le in graph.find_nodes(op="call_function", target=aten.le.Scalar)
        if le.args[0].target is aten.relu.default
    ]


def test_what_a_norm_reads_says_where_its_relu_is_zero():
    inputs = given()
    before = traced(inputs)
    after = copy.deepcopy(before)
    assert RemakeMasks()(after).modified
    assert len(relus_compared(before.graph)) == 1 and not relus_compared(after.graph)
    masks = after.graph.find_nodes(op="call_function", target=aten.where.self)
    assert len(masks) == 3, "one for each sum, and one for the gradient of the data"
    assert all(len(user.users) == 1 for mask in masks for user in mask.users), "none is read by two loops"
    for one, other in zip(before(*inputs), after(*inputs), strict=True):
        assert torch.equal(one, other)
    relu, *_ = after(*inputs)
    assert 0 < (relu == 0).sum() < relu.numel()


def test_nan_is_let_through_as_before():
    inputs = given()
    inputs[0][0, 0, 4, 4] = torch.nan
    before = traced(inputs)
    after = copy.deepcopy(before)
    RemakeMasks()(after)
    for one, other in zip(before(*inputs), after(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
