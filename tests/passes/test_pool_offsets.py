"""`use_offsets` on graphs of a forward and a backward: the same results, with one byte per pooled pixel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pooling_cases import CASES, EACH, LAID_OUT, NATIVE, TYPED, images, on
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.passes.device.pool_offsets import use_offsets

ATEN, OWN = torch.ops.aten, torch.ops.amp_compiler
POOL, POOL_BACKWARD = ATEN.max_pool2d_with_indices.default, ATEN.max_pool2d_with_indices_backward.default
MASK = ATEN.threshold_backward.default


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
