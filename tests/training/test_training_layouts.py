"""Training steps of a small CNN on a CPU whose convolutions read one memory layout, against the same steps run eagerly.

GCC 12 and its SLP vectorizer make NaN of such a step (`_NO_SLP` in `fx/torch_private.py`): tiles of 16-bit numbers,
which Inductor transposes where layouts meet, are read before they are written.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import amp_compiler as amp
from amp_compiler.cli.demo import SmallCnn
from amp_compiler.passes.device.channels_last import keep_channels_last

ATEN = torch.ops.aten
GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(3, 32, 1, 8, 8, generator=GENERATOR)
Y = torch.randint(0, 10, (3, 32), generator=GENERATOR)
# A pixel or a pooling that rounds to the other side of another moves a gradient as a whole: up to 0.055 was measured.
# BF16 itself is 0.1 to 0.2 away from FP32 here.
NEAR = 6e-2
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


def loss_and_maps(model, x, y):
    """Also the feature maps of the first block, and what the pooling makes of the last."""
    first = model.features[:3](x)
    pooled = model.features[3:-1](first)
    return F.cross_entropy(model.head(pooled.flatten(1)), y), (first, pooled)


def make(backend, layout, loss_of=loss_and_maps):
    torch.manual_seed(0)
    model = SmallCnn(batch_norm=True, width=32).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)  # the weights stay alike
    return amp.training_step(model, loss_of, optimizer, dtype="bf16", backend=backend)


def relative(found, exact):
    """Of the L2 norms."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


@pytest.fixture(scope="module", params=["contiguous", pytest.param("channels last", marks=pytest.mark.slow)])
def steps(request):
    """A compiled step and an eager one."""
    return [make(backend, LAYOUTS[request.param]) for backend in ("inductor", "eager")]


@pytest.mark.compiles
def test_gradients_are_those_of_the_eager_backend(steps):
    mine, theirs = steps
    for x, y in zip(X, Y, strict=True):
        losses = [step(x, y)[0] for step in steps]
        for (name, gradient), expected in zip(mine.gradients().items(), theirs.gradients().values(), strict=True):
            assert bool(gradient.isfinite().all()), name
            assert relative(gradient, expected) < NEAR, name
        assert float(losses[0]) == pytest.approx(float(losses[1]), rel=1e-2)


@pytest.mark.compiles
def test_results_keep_their_layouts(steps):
    found, expected = (step(X[0], Y[0])[1] for step in steps)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dim() == 4 and mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape and mine.stride() == theirs.stride()
        assert relative(mine, theirs) < 2e-2


def loss_of_both(model, x, y):
    """The same images through the same weights, twice."""
    return F.cross_entropy(model(x), y) + F.cross_entropy(model(x), y)


def test_convolutions_may_share_images_and_weights(compiler):
    mine, theirs = (make(backend, torch.contiguous_format, loss_of_both) for backend in ("inductor", "eager"))
    assert float(mine(X[0], Y[0])) == pytest.approx(float(theirs(X[0], Y[0])), rel=1e-2)
    for (name, gradient), expected in zip(mine.gradients().items(), theirs.gradients().values(), strict=True):
        assert relative(gradient, expected) < NEAR, name


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
    keep_channels_last(traced.graph)
    traced.graph.lint()
    forward, backward = read_by(traced.graph)
    assert all(map(is_channels_last_copy, (*forward, *backward)))
    assert forward == backward


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_graph_with_copies_gives_the_same_bits_in_the_same_layouts(channels, layout):
    traced, tensors = joint(channels, layout)
    before = traced(*tensors)
    keep_channels_last(traced.graph)
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
    keep_channels_last(graph)
    graph.lint()
    assert mask.args == (image, image, 0)


def test_a_convolution_without_a_backward_is_left_alone():
    def run(x, weight):
        return F.conv2d(x, weight).view(2, -1)

    traced = make_fx(run, tracing_mode="fake")(torch.ones(2, 3, 4, 4), torch.ones(5, 3, 4, 4))
    before = [node.format_node() for node in traced.graph.nodes]
    keep_channels_last(traced.graph)
    assert [node.format_node() for node in traced.graph.nodes] == before
