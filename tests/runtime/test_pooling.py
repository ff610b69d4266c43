"""Max-pooling with the places of its pixels in one byte, against ATen's in FP32, and its backward against FP64.

The images have few different values, so that many pixels of a window are equal.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.backends.pool_offsets import use_offsets
from amp_compiler.runtime import cpu_pooling

ATEN, OWN = torch.ops.aten, torch.ops.amp_compiler
POOL, POOL_BACKWARD = ATEN.max_pool2d_with_indices.default, ATEN.max_pool2d_with_indices_backward.default
MASK = ATEN.threshold_backward.default
CASES = {  # kernel, stride, padding, dilation, ceil_mode
    "halves": ([2, 2], [2, 2], [0, 0], [1, 1], False),
    "overlapping": ([3, 3], [2, 2], [1, 1], [1, 1], False),
    "all different": ([3, 2], [1, 2], [1, 0], [2, 1], True),
    "over the end": ([3, 3], [2, 2], [0, 0], [1, 1], True),
}
EACH = pytest.mark.parametrize("case", list(CASES))
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TYPED = pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
LAID_OUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
PATHS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])

NATIVE = pytest.mark.skipif(not cpu_pooling.can_run(torch.ones(1, 1, 1, 1)), reason="no C++ compiler on this machine")


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def path(request):
    """Runs the test with the loops and without."""
    with on(request.param):
        yield


def on(native):
    if native and not cpu_pooling.can_run(torch.ones(1, 1, 1, 1)):
        pytest.skip("no C++ compiler on this machine")
    return mock.patch.object(cpu_pooling, "can_run", cpu_pooling.can_run if native else lambda tensor: False)


def images(sizes, dtype=torch.float32, layout=torch.contiguous_format, seed=0):
    """Quarters from -1 to 1; of every sixteenth pixel or so a NaN, an infinity or a zero below zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, sizes, generator=generator) / 4
    odd = torch.randint(0, 48, sizes, generator=generator)
    for number, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
        values[odd == number] = value
    return values.to(dtype).contiguous(memory_format=layout)


def indices_of(offsets, width, kernel, stride, padding, dilation):
    """What ATen notes, from the places in the windows."""
    down, across = (torch.arange(offsets.shape[2 + dim]) * stride[dim] - padding[dim] for dim in (0, 1))
    rows = down[:, None] + offsets.long() // kernel[1] * dilation[0]
    return rows * width + across + offsets.long() % kernel[1] * dilation[1]


def assert_pools(x, *arguments):
    """The same values, NaN included, from the same places."""
    largest, offsets = OWN.max_pool(x, *arguments)
    expected, indices = POOL(x.float(), *arguments)
    assert largest.dtype == x.dtype and offsets.dtype == torch.int8
    torch.testing.assert_close(largest.float(), expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(indices_of(offsets, x.shape[3], *arguments[:4]), indices)
    return offsets, indices


def assert_backward(x, offsets, indices, *arguments):
    """A sum in FP32 that is rounded once; exact for small integers."""
    generator = torch.Generator().manual_seed(1)
    exact = torch.randint(-8, 9, offsets.shape, generator=generator).to(x.dtype)
    usual = torch.randn(offsets.shape, generator=generator).to(x.dtype)
    for gradient, rtol, atol in ((exact, 0, 0), (usual, torch.finfo(x.dtype).eps, 1e-6)):
        for given_ in (gradient, gradient.contiguous(memory_format=torch.channels_last)):
            found = OWN.max_pool_backward(given_, offsets, list(x.shape), *arguments[:4])
            expected = POOL_BACKWARD(gradient.double(), x.double(), *arguments, indices)
            torch.testing.assert_close(found, expected.to(x.dtype), rtol=rtol, atol=atol)
            last = not offsets.is_contiguous()
            assert found.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


@TYPED
@LAID_OUT
@EACH
@pytest.mark.parametrize("channels", [1, 3, 64, 70])
def test_results_and_gradients_are_those_of_aten(path, channels, case, layout, dtype):
    x = images((2, channels, 9, 8), dtype, layout)
    found = assert_pools(x, *CASES[case])
    assert_backward(x, *found, *CASES[case])


@st.composite
def geometries(draw):
    """Sizes of images and settings by which there is a window, and each has a pixel."""
    sizes = tuple(draw(st.integers(1, most)) for most in (3, 4, 9, 9))
    kernel, stride, dilation = ([draw(st.integers(1, 3)) for _ in range(2)] for _ in range(3))
    reach = [dilation[dim] * (kernel[dim] - 1) + 1 for dim in (0, 1)]
    padding = [draw(st.integers(0, kernel[dim] // 2)) for dim in (0, 1)]
    assume(all(sizes[2 + dim] + 2 * padding[dim] >= reach[dim] for dim in (0, 1)))
    assume(all(sizes[2 + dim] > (dilation[dim] - 1) * bool(padding[dim]) for dim in (0, 1)))
    return sizes, (kernel, stride, padding, dilation, draw(st.booleans()))


@PATHS
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(geometry=geometries(), dtype=st.sampled_from(list(TYPES)), layout=st.sampled_from(list(LAYOUTS)))
def test_any_small_images(native, geometry, dtype, layout):
    sizes, arguments = geometry
    x = images(sizes, TYPES[dtype], LAYOUTS[layout])
    with on(native):
        found = assert_pools(x, *arguments)
        assert_backward(x, *found, *arguments)


@pytest.mark.parametrize("lie", ["gaps", "one for all", "columns"])
def test_images_may_lie_in_memory_as_they_like(path, lie):
    x = images((2, 3, 9, 8))
    strided = {
        "gaps": torch.stack([x, x + 1], dim=4)[..., 0],
        "one for all": x[:1, :1].expand_as(x),
        "columns": x.transpose(2, 3).contiguous().transpose(2, 3),
    }[lie]
    assert not strided.is_contiguous()
    assert_pools(strided, *CASES["overlapping"])


def test_a_window_without_pixels_has_the_least_value_and_passes_nothing_on(path):
    """The two rows of a window lie above and below an image of one row."""
    arguments = ([2, 2], [1, 1], [1, 0], [2, 1], False)
    x = torch.zeros(1, 70, 1, 4)
    for _ in range(2):
        largest, offsets = OWN.max_pool(x, *arguments)
        assert torch.equal(largest, POOL(x, *arguments)[0]) and bool((largest == -torch.inf).all())
        assert not OWN.max_pool_backward(torch.ones(1, 70, 1, 3), offsets, [1, 70, 1, 4], *arguments[:4]).any()


@LAID_OUT
def test_results_keep_the_layout_of_the_images(path, layout):
    x = images((2, 5, 9, 8), layout=layout)
    for made in OWN.max_pool(x, *CASES["overlapping"]):
        assert made.is_contiguous(memory_format=layout) and not made[:, :2].is_contiguous()


@LAID_OUT
@EACH
def test_opcheck(path, case, layout):
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    for channels in (1, 3):
        x = images((2, channels, 9, 8), layout=layout)
        offsets = OWN.max_pool(x, *CASES[case])[1]
        torch.library.opcheck(OWN.max_pool.default, (x, *CASES[case]), **checks)
        given_ = (torch.ones(offsets.shape), offsets, list(x.shape), *CASES[case][:4])
        torch.library.opcheck(OWN.max_pool_backward.default, given_, **checks)


def test_no_images_have_no_pixels(path):
    largest, offsets = OWN.max_pool(torch.ones(0, 3, 4, 4), *CASES["halves"])
    assert largest.shape == offsets.shape == (0, 3, 2, 2)
    assert OWN.max_pool_backward(largest, offsets, [0, 3, 4, 4], *CASES["halves"][:4]).shape == (0, 3, 4, 4)


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same(threads):
    before, x = torch.get_num_threads(), images((3, 70, 9, 8), torch.bfloat16, torch.channels_last)
    torch.set_num_threads(threads)
    try:
        found = assert_pools(x, *CASES["overlapping"])
        assert_backward(x, *found, *CASES["overlapping"])
    finally:
        torch.set_num_threads(before)


def joint(forward, *tensors, mode="fake"):
    """Forward and backward as one graph, whose results are those of `forward` and the gradient of its first argument.

    The first result is what goes on, times the last tensor.
    """

    def run(x, *others):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            results = forward(x)
            (gradient,) = torch.autograd.grad(results[0], x, others[-1])
        return *(result.detach() for result in results), gradient

    return traced_as_in_training(run, tensors, mode)


def traced_as_in_training(run, tensors, mode="fake"):
    """Without `detach`."""
    traced = make_fx(run, tracing_mode=mode)(*tensors)
    for node in traced.graph.find_nodes(op="call_function", target=ATEN.detach.default):
        node.replace_all_uses_with(node.args[0])
        traced.graph.erase_node(node)
    traced.recompile()
    return traced


def targets(traced):
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def rewritten(traced, *tensors):
    """Before and after: results. Gradients are integers, whose sums are exact."""
    before = traced(*tensors)
    use_offsets(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return before, traced(*tensors)


def assert_same_results(first, second):
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one.stride() == other.stride()


def relu_and_pool(case):
    kernel, stride, padding, dilation, ceil_mode = CASES[case]
    return lambda x: (F.max_pool2d(F.relu(x), kernel, stride, padding, dilation, ceil_mode),)


def gradient_for(forward, x):
    shape = forward(x)[0].shape
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)


@NATIVE
@TYPED
@LAID_OUT
@EACH
def test_a_graph_with_offsets_gives_the_same_bits(case, layout, dtype):
    forward, x = relu_and_pool(case), images((2, 3, 9, 8), dtype, layout)
    tensors = x, gradient_for(forward, x)
    traced = joint(forward, *tensors)
    assert_same_results(*rewritten(traced, *tensors))
    assert not {POOL, POOL_BACKWARD} & set(targets(traced))
    assert {OWN.max_pool.default, OWN.max_pool_backward.default} <= set(targets(traced))
    (mask,) = traced.graph.find_nodes(op="call_function", target=MASK)
    (pool,) = traced.graph.find_nodes(op="call_function", target=OWN.max_pool.default)
    assert mask.args[1].args == (pool, 0)


@NATIVE
def test_a_stride_that_is_left_out_is_the_kernel():
    x = images((2, 3, 9, 8))
    tensors = x, gradient_for(relu_and_pool("halves"), x)
    traced = joint(lambda x: (F.max_pool2d(F.relu(x), 2),), *tensors)
    assert_same_results(*rewritten(traced, *tensors))
    assert OWN.max_pool.default in targets(traced)


@NATIVE
def test_a_gradient_that_others_read_keeps_its_mask():
    """Where the images have another reader, their gradient is a sum, and not zero where no window took them."""

    def forward(x):
        x = F.relu(x)
        return (F.max_pool2d(x, 2) + F.avg_pool2d(x, 2),)

    x = images((2, 3, 8, 8)).nan_to_num(0.5, 1.0, -1.0)
    tensors = x, 4 * gradient_for(forward, x)
    traced = joint(forward, *tensors)
    assert_same_results(*rewritten(traced, *tensors))
    assert OWN.max_pool.default in targets(traced)
    (mask,) = traced.graph.find_nodes(op="call_function", target=MASK)
    assert mask.args[1].target == ATEN.relu.default


@NATIVE
def test_a_gradient_that_is_a_result_keeps_its_mask():
    def run(x, gradient):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = F.relu(x)
            z = F.max_pool2d(y, 2)
            return z.detach(), *torch.autograd.grad(z, (x, y), gradient)

    x = images((2, 3, 9, 8))
    tensors = x, gradient_for(relu_and_pool("halves"), x)
    traced = traced_as_in_training(run, tensors)
    assert_same_results(*rewritten(traced, *tensors))
    (mask,) = traced.graph.find_nodes(op="call_function", target=MASK)
    assert mask.args[0].target == OWN.max_pool_backward.default


def with_indices(x):
    return F.max_pool2d(F.relu(x), 2, return_indices=True)


def wide_window(x):
    return (F.max_pool2d(F.relu(x), (8, 16), (1, 1), (4, 8), (1, 1)),)


def three_dimensional(x):
    return (F.max_pool2d(F.relu(x), 2),)


KEPT = {
    "indices are a result": (with_indices, (2, 3, 8, 8), "fake"),
    "a place needs more than a byte": (wide_window, (1, 2, 8, 9), "fake"),
    "no batch": (three_dimensional, (3, 8, 8), "fake"),
    "sizes are not known": (relu_and_pool("halves"), (2, 3, 9, 8), "symbolic"),
}


@pytest.mark.parametrize("kept", list(KEPT))
def test_left_alone(kept):
    forward, sizes, mode = KEPT[kept]
    x = images(sizes)
    tensors = x, gradient_for(forward, x)
    traced = joint(forward, *tensors, mode=mode)
    before = [str(node.format_node()) for node in traced.graph.nodes]
    assert_same_results(*rewritten(traced, *tensors))
    assert before == [str(node.format_node()) for node in traced.graph.nodes]
    assert {POOL, POOL_BACKWARD} <= set(targets(traced))


def test_a_pooling_without_a_backward_is_left_alone():
    x = images((2, 3, 8, 8))
    traced = make_fx(relu_and_pool("halves"), tracing_mode="fake")(x)
    traced.graph.eliminate_dead_code()
    assert_same_results(*rewritten(traced, x))
    assert OWN.max_pool.default not in targets(traced)


def test_indices_that_nobody_reads_are_no_obstacle():
    """A graph without a backward, where the user asked for indices and dropped them."""
    x = images((2, 3, 8, 8))
    traced = make_fx(lambda x: F.max_pool2d(x, 2, return_indices=True)[0], tracing_mode="fake")(x)
    (pool,) = traced.graph.find_nodes(op="call_function", target=POOL)
    assert [len(item.users) for item in sorted(pool.users, key=lambda item: item.args[1])] == [1, 0]
    before = traced(x)
    use_offsets(traced.graph)
    traced.recompile()
    torch.testing.assert_close(traced(x), before, rtol=0, atol=0, equal_nan=True)


def test_without_the_loops_the_graph_is_left_alone():
    forward, x = relu_and_pool("halves"), images((2, 3, 8, 8))
    tensors = x, gradient_for(forward, x)
    traced = joint(forward, *tensors)
    with on(False):
        assert_same_results(*rewritten(traced, *tensors))
    assert OWN.max_pool.default not in targets(traced)
