"""`MultiplyConvolutions`: that the values stay, and what the new nodes carry.

Which convolutions become products is golden text in `tests/golden/multiply_convolutions`. ATen's BF16 convolution,
which the product stands for, is what errors are compared with; both are held to FP64.
"""

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
QUICK = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def tensor(*shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def traced(function, *tensors):
    return make_fx(function, tracing_mode="fake", pre_dispatch=True)(*tensors)


def ops(graph_module):
    """Names of the ops in order, without those that only lay a result out in memory."""
    names = [canonical_op(n.target).partition(".")[2] for n in graph_module.graph.nodes if n.op == "call_function"]
    return [name for name in names if name not in ("clone", "contiguous")]


def test_gradients_of_a_type_of_their_own_keep_the_convolution():
    subject = traced(lambda *inputs: (aten.conv2d.default(*inputs),), tensor(2, 8, 4, 4), tensor(4, 8, 1, 1))
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


def test_new_nodes_say_where_they_come_from():
    subject = exported(nn.Sequential(nn.ReLU(), nn.Conv2d(8, 4, 1)), tensor(2, 8, 40, 40))
    (node,) = subject.graph.find_nodes(op="call_function", target=aten.conv2d.default)
    node.meta["amp_phase"], trace = "forward", node.meta["stack_trace"]
    MULTIPLY(subject)
    result = [one for one in subject.graph.nodes if one.op == "call_function"][1:]
    assert len(result) >= 6  # a permutation, two reshapes, the product, and back
    for one in result:
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
    "contiguous, view of a view": lambda y: y.contiguous().view(2, 4, 4, 16).view(2, 256) + 1,
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
    result = subject(*(parameter.detach() for parameter in model.parameters()), x)[0]
    torch.testing.assert_close(result, model(x).detach(), rtol=2**-7, atol=2**-7)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["view", pytest.param("none", marks=pytest.mark.slow)])
def test_a_result_lies_in_compiled_memory_as_it_did(name):
    model, x = Read(READERS[name]), tensor(2, 8, 4, 4, dtype=torch.float32)
    with torch.no_grad():
        result, expected = (amp.compile(model, dtype="bf16", backend=backend)(x) for backend in ("inductor", "eager"))
    torch.testing.assert_close(result, expected, rtol=2**-7, atol=2**-7)
    assert result.stride() == expected.stride()


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
    weight = (draw(st.sampled_from([1, 7, 32, 54])), sizes[1], *kernel)
    return sizes, weight, draw(st.booleans()), stride, padding, dilation


def results(run, inputs, seed):
    """The result, and the gradients of all inputs, in FP64."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    result = run(*leaves)
    return [one.detach().double() for one in (result, *torch.autograd.grad(result, leaves, seed.to(result.dtype)))]


def error(matches, exact):
    return float((matches - exact).norm() / exact.norm()) if float(exact.norm()) else float(matches.norm())


@pytest.mark.long
@QUICK
@given(case=convolutions(), last=st.booleans(), number=st.integers(0, 99))
def test_values_and_gradients_are_as_exact_as_the_convolutions(case, last, number):
    sizes, weight, biased, *numbers = case
    layout = torch.channels_last if last else torch.contiguous_format
    images, kernels = tensor(*sizes, seed=number), tensor(*weight, seed=number + 1)
    inputs = [one.contiguous(memory_format=layout) for one in (images, kernels)]
    inputs += [tensor(weight[0], seed=number + 2)] * biased

    def run(*operands):
        return F.conv2d(operands[0], operands[1], operands[2] if biased else None, *numbers)

    subject = traced(lambda *operands: (run(*operands),), *inputs)
    result = run(*inputs)
    few = result.shape[0] * result[0, 0].numel() <= 2 * weight[0]
    assert MULTIPLY(subject).modified is (few or (weight[2:] == (1, 1) and numbers[1] == [0, 0]))
    seed = tensor(*result.shape, seed=number + 3)
    exact = results(run, [one.double() for one in inputs], seed)
    products = results(lambda *operands: subject(*operands)[0], inputs, seed)
    for product, convolution, reference in zip(products, results(run, inputs, seed), exact, strict=True):
        assert product.shape == reference.shape
        assert error(product, reference) <= 1.1 * error(convolution, reference) + 2.0**-8
