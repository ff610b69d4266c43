"""`MultiplyConvolutions`: which convolutions become products, that the values stay, and what the new nodes carry.

The golden text is in `tests/golden/multiply_convolutions`. ATen's BF16 convolution, which the product stands for, is
what errors are compared with; both are held to FP64.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import amp_compiler as amp
from amp_compiler.errors import PassError
from amp_compiler.fx.graph import canonical_op, module_of
from amp_compiler.fx.meta import Key
from amp_compiler.passes.device.multiply_convolutions import MultiplyConvolutions

aten = torch.ops.aten
BF16 = torch.bfloat16
MULTIPLY = MultiplyConvolutions()
POINTWISE = ["permute", "reshape", "reshape", "linear", "reshape", "permute"]
PATCHES = ["patches", "reshape", "linear", "reshape", "permute"]
QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def tensor(*shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def traced(function, *tensors):
    return make_fx(function, tracing_mode="fake", pre_dispatch=True)(*tensors)


def graph_of(x, weight, *options, op=aten.conv2d.default, dtype=BF16):
    """One convolution of random values of these shapes."""
    return traced(lambda *inputs: (op(*inputs, *options),), tensor(*x, dtype=dtype), tensor(*weight, dtype=dtype))


def ops(graph_module):
    """Names of the ops in order, without those that only lay a result out in memory."""
    names = [canonical_op(n.target).partition(".")[2] for n in graph_module.graph.nodes if n.op == "call_function"]
    return [name for name in names if name not in ("clone", "contiguous")]


def general(stride=(1, 1), padding=(0, 0), dilation=(1, 1), transposed=False, groups=1):
    """The arguments of `aten.convolution` behind the weight."""
    return None, list(stride), list(padding), list(dilation), transposed, [0, 0], groups


CONVOLUTION = {"op": aten.convolution.default}
REWRITTEN = {
    "1 x 1": (((2, 8, 40, 40), (4, 8, 1, 1)), {}, POINTWISE),
    "1 x 1, every other row and column": (((2, 8, 40, 40), (4, 8, 1, 1), None, [2]), {}, PATCHES),
    "1 x 1, every third column": (((2, 8, 4, 40), (4, 8, 1, 1), None, [1, 3]), {}, PATCHES),
    "1 x 1, dilated in vain": (((2, 8, 40, 40), (4, 8, 1, 1), None, [1], [0], [3]), {}, POINTWISE),
    "1 x 1, padded, few pixels": (((1, 8, 2, 2), (8, 8, 1, 1), None, [1], [1]), {}, PATCHES),
    "3 x 3, as many pixels as may be": (((2, 3, 4, 4), (16, 3, 3, 3), None, [1], [1]), {}, PATCHES),
    "rectangles": (((2, 3, 9, 8), (24, 3, 3, 2), None, [2, 3], [1, 0], [1, 2]), {}, PATCHES),
    "as large as the image": (((4, 8, 5, 6), (2, 8, 5, 6)), {}, PATCHES),
    "convolution, 1 x 1": (((2, 8, 40, 40), (4, 8, 1, 1), *general()), CONVOLUTION, POINTWISE),
    "convolution, few pixels": (((2, 3, 9, 8), (24, 3, 3, 2), *general((2, 3), (1, 0), (1, 2))), CONVOLUTION, PATCHES),
}  # fmt: skip
LEFT_ALONE = {
    "one pixel too many": (((3, 3, 1, 11), (16, 3, 1, 3), None, [1], [0, 1]), {}),
    "1 x 1, padded, many pixels": (((1, 8, 9, 9), (4, 8, 1, 1), None, [1], [1]), {}),
    "groups": (((1, 8, 2, 2), (8, 4, 1, 1), None, [1], [0], [1], 2), {}),
    "groups of a convolution": (((1, 8, 2, 2), (8, 4, 1, 1), *general(groups=2)), CONVOLUTION),
    "transposed": (((1, 8, 2, 2), (8, 8, 1, 1), *general(transposed=True)), CONVOLUTION),
    "conv_transpose2d": (((1, 8, 2, 2), (8, 8, 1, 1)), {"op": aten.conv_transpose2d.input}),
    "fp32": (((1, 8, 2, 2), (8, 8, 1, 1)), {"dtype": torch.float32}),
    "fp16": (((1, 8, 2, 2), (8, 8, 1, 1)), {"dtype": torch.float16}),
    "padding by name": (((1, 8, 2, 2), (8, 8, 1, 1), None, [1], "same"), {"op": aten.conv2d.padding}),
    "no batch": (((8, 2, 2), (8, 8, 1, 1)), {}),
    "an empty batch": (((0, 8, 2, 2), (8, 8, 1, 1)), {}),
    "one dimension": (((1, 8, 2), (8, 8, 1), *general((1,), (0,), (1,))[:5], [0], 1), CONVOLUTION),
    "three dimensions": (((1, 8, 1, 1, 1), (8, 8, 1, 1, 1)), {"op": aten.conv3d.default}),
}


@pytest.mark.parametrize("case", list(REWRITTEN))
def test_what_is_a_product_is_written_as_one(case):
    arguments, options, expected = REWRITTEN[case]
    given_ = graph_of(*arguments, **options)
    before = given_.graph.output_node().args[0][0].meta["val"]
    result = MULTIPLY(given_)
    after = result.subject.graph.output_node().args[0][0].meta["val"]
    assert result.modified and ops(result.subject) == expected
    assert (after.shape, after.dtype) == (before.shape, before.dtype)
    assert not MULTIPLY(result.subject).modified and ops(result.subject) == expected


@pytest.mark.parametrize("case", list(LEFT_ALONE))
def test_what_is_left_alone(case):
    arguments, options = LEFT_ALONE[case]
    subject = graph_of(*arguments, **options)
    code = subject.code
    result = MULTIPLY(subject)
    assert not result.modified and result.subject.code == code


def test_gradients_of_a_type_of_their_own_keep_the_convolution():
    subject = graph_of((2, 8, 4, 4), (4, 8, 1, 1))
    (node,) = subject.graph.find_nodes(op="call_function", target=aten.conv2d.default)
    node.meta[Key.BACKWARD] = torch.float32
    assert not MULTIPLY(subject).modified and ops(subject) == ["conv2d"]


def exported(model, x, **options):
    return torch.export.export(model.to(BF16), (x,), strict=False, **options).graph_module


def test_sizes_that_are_not_known_keep_the_convolution():
    batch = ({0: torch.export.Dim("batch", min=2, max=64)},)
    subject = exported(nn.Conv2d(8, 4, 1), tensor(2, 8, 4, 4), dynamic_shapes=batch)
    assert not MULTIPLY(subject).modified and ops(subject) == ["conv2d"]
    assert MULTIPLY(exported(nn.Conv2d(8, 4, 1), tensor(2, 8, 4, 4))).modified


@pytest.mark.parametrize("kernels", [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_one_that_reads_another_is_rewritten_too(kernels):
    first, second = kernels
    model = nn.Sequential(nn.Conv2d(8, 16, first, padding=first // 2), nn.Conv2d(16, 8, second, padding=second // 2))
    x = tensor(1, 8, 4, 4)
    subject = MULTIPLY(exported(model, x)).subject
    assert ops(subject) == [op for kernel in kernels for op in (POINTWISE if kernel == 1 else PATCHES)]
    found = subject(*(parameter.detach() for parameter in model.parameters()), x)[0]
    torch.testing.assert_close(found, model(x).detach(), rtol=2**-7, atol=2**-7)


def test_new_nodes_say_where_they_come_from():
    subject = exported(nn.Sequential(nn.ReLU(), nn.Conv2d(8, 4, 1)), tensor(2, 8, 40, 40))
    (node,) = subject.graph.find_nodes(op="call_function", target=aten.conv2d.default)
    node.meta["amp_phase"], trace = "forward", node.meta["stack_trace"]
    MULTIPLY(subject)
    made = [one for one in subject.graph.nodes if one.op == "call_function"][1:]
    assert len(made) >= len(POINTWISE)
    for one in made:
        assert module_of(one) == ("1", "Conv2d")
        assert one.meta["stack_trace"] == trace and one.meta["amp_phase"] == "forward"
        assert isinstance(one.meta["val"], torch.Tensor) and one.meta["val"].dtype == BF16


def test_a_graph_without_types_is_refused():
    graph = torch.fx.Graph()
    graph.output((graph.call_function(aten.relu.default, (graph.placeholder("x"),)),))
    with pytest.raises(PassError, match="carries no example value"):
        MULTIPLY(torch.fx.GraphModule({}, graph))


READERS = {
    "view": lambda y: y.view(2, -1) + 1,
    "contiguous and view": lambda y: y.contiguous().view(2, -1) + 1,
    "view of a view": lambda y: y.view(2, 4, 4, 16).view(2, 256) + 1,
    "view of another op's result": lambda y: F.relu(y).view(2, -1) + 1,
    "as_strided": lambda y: y.as_strided((2, 8), (1, 2)) + 1,
    "none": lambda y: y,
}


class Read(nn.Module):
    def __init__(self, reader) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution, self.reader = nn.Conv2d(8, 16, 1), reader

    def forward(self, x):
        return self.reader(self.convolution(x))


@pytest.mark.parametrize("name", list(READERS))
def test_readers_that_know_how_memory_lies_read_what_they_did(name):
    model, x = Read(READERS[name]).to(BF16), tensor(2, 8, 4, 4)
    subject = MULTIPLY(exported(model, x)).subject
    found = subject(*(parameter.detach() for parameter in model.parameters()), x)[0]
    torch.testing.assert_close(found, model(x).detach(), rtol=2**-7, atol=2**-7)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["view", pytest.param("none", marks=pytest.mark.slow)])
def test_a_result_lies_in_compiled_memory_as_it_did(name):
    model, x = Read(READERS[name]), tensor(2, 8, 4, 4, dtype=torch.float32)
    with torch.no_grad():
        found, expected = (amp.compile(model, dtype="bf16", backend=backend)(x) for backend in ("inductor", "eager"))
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
    assert found.stride() == expected.stride()


@st.composite
def convolutions(draw):
    """Sizes of images and of a weight, whether there is a bias, stride, padding and dilation; most are rewritten."""
    sizes = tuple(draw(st.integers(1, most)) for most in (3, 6, 6, 6))
    kernel, stride, dilation = ([draw(st.integers(1, 3)) for _ in range(2)] for _ in range(3))
    padding = [draw(st.integers(0, 2)) for _ in range(2)]
    if draw(st.booleans()):
        kernel, padding = [1, 1], [0, 0]
    reach = [dilation[dim] * (kernel[dim] - 1) + 1 for dim in (0, 1)]
    assume(all(sizes[2 + dim] + 2 * padding[dim] >= reach[dim] for dim in (0, 1)))
    return (
        sizes,
        (draw(st.sampled_from([1, 7, 32, 54])), sizes[1], *kernel),
        draw(st.booleans()),
        stride,
        padding,
        dilation,
    )


def results(run, inputs, seed):
    """The result, and the gradients of all inputs, in FP64."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    made = run(*leaves)
    return [one.detach().double() for one in (made, *torch.autograd.grad(made, leaves, seed.to(made.dtype)))]


def error(found, exact):
    return float((found - exact).norm() / exact.norm()) if float(exact.norm()) else float(found.norm())


@pytest.mark.long
@QUICK
@given(case=convolutions(), last=st.booleans(), number=st.integers(0, 99))
def test_values_and_gradients_are_as_exact_as_the_convolutions(case, last, number):
    sizes, weight, biased, *numbers = case
    layout = torch.channels_last if last else torch.contiguous_format
    inputs = [
        tensor(*size, seed=number + place).contiguous(memory_format=layout)
        for place, size in enumerate((sizes, weight))
    ]
    inputs += [tensor(weight[0], seed=number + 2)] * biased

    def run(*operands):
        return F.conv2d(operands[0], operands[1], operands[2] if biased else None, *numbers)

    subject = traced(lambda *operands: (run(*operands),), *inputs)
    made = run(*inputs)
    few = made.shape[0] * made[0, 0].numel() <= 2 * weight[0]
    assert MULTIPLY(subject).modified is (few or (weight[2:] == (1, 1) and numbers[1] == [0, 0]))
    seed = tensor(*made.shape, seed=number + 3)
    exact = results(run, [one.double() for one in inputs], seed)
    products = results(lambda *operands: subject(*operands)[0], inputs, seed)
    for product, convolution, reference in zip(products, results(run, inputs, seed), exact, strict=True):
        assert product.shape == reference.shape
        assert error(product, reference) <= 1.1 * error(convolution, reference) + 2.0**-8
