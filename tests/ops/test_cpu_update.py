"""The native CPU updates against their reference, bit for bit, around block boundaries, in every mix of types."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cpu import build as cpu_build
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.update import reference
from amp_compiler.ops.update.adam import ADAM
from amp_compiler.ops.update.formulas import exact_sqrt
from amp_compiler.ops.update.operators import FUSED

BLOCK = 16384  # kRun in cpu_pieces.h
SIZES = (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LOWS = (torch.float16, torch.bfloat16)
FLAGS = st.booleans()

pytestmark = pytest.mark.skipif(not cpu_update.available(), reason="no C++ compiler on this machine")


def tensors(dtypes=(torch.float32,), scale=1.0):
    return [(scale * torch.randn(size)).to(dtype) for size, dtype in zip(SIZES, itertools.cycle(dtypes), strict=False)]


def number(value):
    return torch.tensor(value, dtype=torch.float32)


def hyper(*values):
    return torch.tensor(values, dtype=torch.float64)


def clone(value):
    if isinstance(value, list):
        return [item.clone() for item in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def same(first, second):
    """Equal bits, with any NaN equal to any other."""
    return first.dtype == second.dtype and torch.equal(first.isnan(), second.isnan()) and torch.equal(
        first.nan_to_num(0.5), second.nan_to_num(0.5)
    )  # fmt: skip


def by_reference(name, arguments):
    """The update in torch calls, with the square root that all kernels are held to."""
    (optimizer,) = (one for one in FUSED if one.operator(low=False) == name)
    reference.update(optimizer, optimizer.bound(False, arguments), exact_sqrt)


def assert_alike(name, arguments):
    mine, theirs = clone_all(arguments), clone_all(arguments)
    cpu_update.FUNCTIONS[name](*mine)
    if not float(arguments[-4 if name == "adam_update" else -3]):
        by_reference(name, theirs)
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(a, list):
            assert all(same(x, y) for x, y in zip(a, b, strict=True))
        elif isinstance(a, torch.Tensor):
            assert same(a, b)


def clone_all(arguments):
    return [clone(argument) for argument in arguments]


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    amsgrad=FLAGS,
    maximize=FLAGS,
    decoupled=FLAGS,
    low_weights=st.booleans(),
    step=st.sampled_from([0.0, 1.0, 999.0]),
    beta1=st.sampled_from([0.0, 0.5, 0.9]),
    decay=st.sampled_from([0.0, 0.1]),
    l1=st.sampled_from([0.0, 0.01]),
    skip=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_adam_is_bit_equal_to_its_reference(
    amsgrad, maximize, decoupled, low_weights, step, beta1, decay, l1, skip, seed
):
    torch.manual_seed(seed)
    weights, seconds = tensors(), [tensor.square() for tensor in tensors()]
    arguments = [
        weights, tensors(FLOATS, 100.0), tensors(), seconds, [s * 1.1 for s in seconds] if amsgrad else [],
        [w.to(t) for w, t in zip(weights, itertools.cycle(LOWS), strict=False)] if low_weights else [],
        [number(step) for _ in weights], hyper(1e-2, beta1, 0.999, 1e-8, decay, l1), number(0.013), number(skip),
        amsgrad, maximize, decoupled,
    ]  # fmt: skip
    assert_alike("adam_update", arguments)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    steps=st.one_of(st.sampled_from([0, 1, 2, 9, 999, 12345, 2**24]), st.integers(0, 10**5)),
    lr=st.one_of(st.sampled_from([0.0, 1e-3, 1e300]), st.floats(0, 10)),
    beta1=st.one_of(st.sampled_from([0.0, 0.9, 1.0]), st.floats(0, 1)),
    beta2=st.one_of(st.sampled_from([0.0, 0.999, 1.0]), st.floats(0, 1)),
    decay=st.sampled_from([0.0, 1e-2, 0.1, 3.0]),
    l1=st.sampled_from([0.0, 0.01]),
)
def test_numbers_of_one_step_are_bit_equal_to_those_of_many(steps, lr, beta1, beta2, decay, l1):
    given_ = hyper(lr, beta1, beta2, 1e-8, decay, l1)
    steps = [number(float(steps))] * 20
    given_ = ADAM.bound(False, [[]] * 6 + [steps, given_, number(1.0), number(0.0), False, False, False])
    mine = torch.from_numpy(cpu_update._step_numbers(ADAM, given_))[0]
    for row in reference.step_numbers(ADAM, steps, given_.hyper):
        assert same(mine, row) and torch.equal(mine[~mine.isnan()].signbit(), row[~row.isnan()].signbit())


@pytest.mark.parametrize("amsgrad", [False, True])
def test_parameters_of_different_ages_are_updated_as_in_the_reference(amsgrad):
    torch.manual_seed(0)
    weights, seconds = tensors(), [tensor.square() for tensor in tensors()]
    ages = [3.0, 0.0, 999.0, 3.0, 1.0, 0.0, 12345.0]
    arguments = [
        weights, tensors(FLOATS, 100.0), tensors(), seconds, [s * 1.1 for s in seconds] if amsgrad else [], [],
        [number(age) for age in ages], hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, 0.01), number(0.013), number(0.0),
        amsgrad, False, True,
    ]  # fmt: skip
    assert_alike("adam_update", arguments)


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    momentum=st.sampled_from([None, 0.5, 0.9]),
    dampening=st.sampled_from([0.0, 0.3]),
    decay=st.sampled_from([0.0, 0.1]),
    l1=st.sampled_from([0.0, 0.01]),
    started=st.sampled_from([0.0, 1.0]),
    skip=st.sampled_from([0.0, 0.0, 1.0]),
    low_weights=st.booleans(),
    nesterov=FLAGS,
    maximize=FLAGS,
    seed=st.integers(0, 99),
)
def test_sgd_is_bit_equal_to_its_reference(
    momentum, dampening, decay, l1, started, skip, low_weights, nesterov, maximize, seed
):
    torch.manual_seed(seed)
    weights = tensors()
    arguments = [
        weights, tensors(FLOATS, 100.0), tensors() if momentum else [],
        [w.to(t) for w, t in zip(weights, itertools.cycle(LOWS), strict=False)] if low_weights else [], number(started),
        hyper(1e-2, momentum or 0.0, dampening, decay, l1), number(0.013), number(skip),
        bool(momentum) and nesterov, maximize,
    ]  # fmt: skip
    assert_alike("sgd_update", arguments)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e38, 1e-42, -0.0])
def test_odd_values_come_out_as_in_the_reference(value):
    torch.manual_seed(0)
    weights, grads = tensors(), tensors(FLOATS)
    for tensor in (*weights, *grads):
        if tensor.numel():
            tensor[0] = value
    arguments = [
        weights, grads, tensors(), [t.square() for t in tensors()], [],
        [w.to(t) for w, t in zip(weights, itertools.cycle(LOWS), strict=False)], [number(3.0) for _ in weights],
        hyper(1e-2, 0.9, 0.999, 1e-8, 0.1, 0.0), number(1.0), number(0.0), False, False, True,
    ]  # fmt: skip
    assert_alike("adam_update", arguments)


@pytest.mark.parametrize("bad", [None, float("inf"), float("-inf"), float("nan")])
def test_the_check_finds_the_tensor_and_the_norm(bad):
    torch.manual_seed(0)
    grads = tensors(FLOATS)
    if bad is not None:
        grads[5][BLOCK] = bad  # the only element of its second block
    norm, nonfinite, flags = cpu_update.grad_check(grads, number(0.25))
    expected = reference.grad_check(grads, number(0.25))
    assert torch.equal(flags, expected[2]) and torch.equal(nonfinite, expected[1])
    assert flags.tolist() == [0, 0, 0, 0, 0, int(bad is not None), 0]
    exact = torch.cat([grad.double() * 0.25 for grad in grads]).norm()
    assert norm.dtype == torch.float32
    assert bad is not None or abs(float(norm) / float(exact) - 1) < 1e-6


def test_the_norm_is_the_same_for_any_number_of_threads():
    torch.manual_seed(0)
    grads, before = tensors(FLOATS), torch.get_num_threads()
    try:
        norms = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            norms.append(cpu_update.grad_check(grads, number(1.0))[0])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(norms[0], norms[1]) and torch.equal(norms[0], norms[2])


def test_a_gradient_of_other_strides_is_read_at_the_right_places():
    torch.manual_seed(0)
    weight, grad = torch.randn(33, 17), torch.randn(17, 33).t()
    expected = weight.clone()
    arguments = ([], [], number(1.0), hyper(0.5, 0, 0, 0, 0), number(1.0), number(0.0), False, False)
    cpu_update.FUNCTIONS["sgd_update"]([weight], [grad], *arguments)
    by_reference("sgd_update", ([expected], [grad.contiguous()], *arguments))
    assert torch.equal(weight, expected)
    norm, _, _ = cpu_update.grad_check([grad[::2]], number(1.0))
    torch.testing.assert_close(norm, grad[::2].norm())


def test_no_tensors_at_all():
    norm, nonfinite, flags = cpu_update.grad_check([], number(1.0))
    assert float(norm) == 0 and float(nonfinite) == 0 and flags.numel() == 0


def test_what_the_loops_cannot_take_is_an_error():
    weight, strided = torch.ones(4, 4), torch.ones(8, 4)[::2]
    rest = ([], number(1.0), hyper(0.5, 0.9, 0, 0, 0), number(1.0), number(0.0), False, False)
    with pytest.raises(LoweringError, match="strides"):
        cpu_update.FUNCTIONS["sgd_update"]([weight], [weight], [strided], *rest)
    with pytest.raises(LoweringError, match="float64"):
        cpu_update.FUNCTIONS["sgd_update"]([weight], [weight.double()], [], *rest)


@pytest.fixture
def fresh_build(tmp_path, monkeypatch):
    monkeypatch.setenv("AMP_COMPILER_CACHE", str(tmp_path))
    cpu_build.library.cache_clear()
    yield tmp_path
    cpu_build.library.cache_clear()


@pytest.fixture
def few_sources(monkeypatch):
    """A library of the smallest source alone: what is tested is how it is built."""
    monkeypatch.setattr(cpu_build, "_SUFFIXES", ("patches.cpp", ".h"))


@pytest.mark.usefixtures("few_sources")
def test_the_library_is_built_once_into_the_cache(fresh_build):
    assert cpu_build.library() is not None
    (made,) = fresh_build.iterdir()
    stamp = made.stat().st_mtime_ns
    cpu_build.library.cache_clear()
    assert cpu_build.library() is not None and made.stat().st_mtime_ns == stamp


def test_without_a_compiler_the_reason_is_logged(fresh_build, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    assert not cpu_update.available()
    assert "/nonexistent/c++" in caplog.text
    with pytest.raises(LoweringError, match="CXX"):
        cpu_update.grad_check([torch.ones(2)], number(1.0))


def test_memory_that_comes_back_as_another_type_or_layout_is_not_taken_for_the_old():
    weights, memory = [torch.randn(4, 6)], torch.zeros(4, 6, dtype=torch.int16)
    for low in (torch.float16, torch.bfloat16):
        low_weights = [memory.view(low)]
        arguments = (
            weights,
            [torch.ones(4, 6)],
            [],
            low_weights,
            number(1.0),
            hyper(0.1, 0, 0, 0, 0),
            number(1.0),
            number(0.0),
        )
        cpu_update.FUNCTIONS["sgd_update"](*arguments, False, False)
        assert torch.equal(low_weights[0], weights[0].to(low))
    turned = [weights[0].as_strided((4, 6), (1, 4))]
    with pytest.raises(LoweringError, match="strides"):
        cpu_update.FUNCTIONS["sgd_update"](turned, *arguments[1:], False, False)


@pytest.mark.usefixtures("few_sources")
def test_a_compiler_with_arguments_and_a_user_without_a_name(monkeypatch, tmp_path):
    """As with `CXX="ccache g++"`, and in a container whose user is no more than a number."""

    def nameless():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", nameless)
    monkeypatch.setattr(cpu_build.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv("AMP_COMPILER_CACHE", raising=False)
    compiler = cpu_build.shutil.which("g++") or cpu_build.shutil.which("clang++")
    monkeypatch.setenv("CXX", f"env {compiler} -DEXTRA=1")
    assert cpu_build.library.__wrapped__() is not None
    assert [path.suffix for folder in tmp_path.iterdir() for path in folder.iterdir()] == [".so"]
