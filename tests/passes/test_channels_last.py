"""`ChannelsLast`: which readers share a copy, that the bits and the layouts of results stay, and what is left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.passes.device.channels_last import ChannelsLast

ATEN = torch.ops.aten
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def joint(channels, layout=torch.contiguous_format):
    """Forward and backward of a convolution and a ReLU, on integers, whose sums are exact, and those."""

    def run(x, weight, gradient):
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = F.relu(F.conv2d(x, weight, padding=1))
            return y.detach(), *torch.autograd.grad(y, (x, weight), gradient)

    generator = torch.Generator().manual_seed(1)
    shapes = (2, channels, 4, 4), (6, channels, 3, 3), (2, 6, 4, 4)
    tensors = [torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes]
    tensors = [tensor.contiguous(memory_format=layout) for tensor in tensors]
    traced = make_fx(run, tracing_mode="fake")(*tensors)
    for node in traced.graph.find_nodes(op="call_function", target=ATEN.detach.default):
        node.replace_all_uses_with(node.args[0])  # of which a training's graphs have none
        traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()  # items of results that are none
    traced.recompile()
    return traced, tensors


def read_by(graph):
    """Images and weight of the convolution, and of its backward."""
    (forward,) = graph.find_nodes(op="call_function", target=ATEN.convolution.default)
    (backward,) = graph.find_nodes(op="call_function", target=ATEN.convolution_backward.default)
    return forward.args[:2], backward.args[1:3]


def is_channels_last_copy(node):
    return node.target == ATEN.clone.default and node.kwargs == {"memory_format": torch.channels_last}


@pytest.mark.parametrize("channels", [1, 5])
def test_a_convolution_and_its_backward_read_the_same_copies(channels):
    traced, _ = joint(channels)
    assert not any(map(is_channels_last_copy, traced.graph.nodes))
    ChannelsLast()(traced)
    traced.graph.lint()
    forward, backward = read_by(traced.graph)
    assert all(map(is_channels_last_copy, (*forward, *backward)))
    assert forward == backward


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_graph_with_copies_gives_the_same_bits_in_the_same_layouts(channels, layout):
    traced, tensors = joint(channels, layout)
    before = traced(*tensors)
    ChannelsLast()(traced)
    traced.recompile()
    for mine, expected in zip(traced(*tensors), before, strict=True):
        assert torch.equal(mine, expected) and mine.stride() == expected.stride()


def test_a_mask_before_the_convolution_reads_what_it_read():
    """The first copy of an image stands before the first convolution, which may come after a mask."""
    traced, _ = joint(5)
    graph = traced.graph
    image = next(iter(graph.nodes))
    (convolution,) = graph.find_nodes(op="call_function", target=ATEN.convolution.default)
    with graph.inserting_before(convolution):
        mask = graph.call_function(ATEN.threshold_backward.default, (image, image, 0))
        mask.meta["val"] = image.meta["val"]
    results = graph.output_node()
    results.update_arg(0, (*results.args[0], mask))
    ChannelsLast()(traced)
    graph.lint()
    assert mask.args == (image, image, 0)


def test_a_convolution_without_a_backward_is_left_alone():
    def run(x, weight):
        return F.conv2d(x, weight).view(2, -1)

    traced = make_fx(run, tracing_mode="fake")(torch.ones(2, 3, 4, 4), torch.ones(5, 3, 4, 4))
    before = [node.format_node() for node in traced.graph.nodes]
    ChannelsLast()(traced)
    assert [node.format_node() for node in traced.graph.nodes] == before
