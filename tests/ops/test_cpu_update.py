"""What surrounds the native loops of the updates on a CPU; what they compute is held in `test_fused_optimizers.py`."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from update_arguments import BY_NAME, FLOATS, assert_same_bits, hyper, number

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cpu import build as cpu_build
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.update import reference
from amp_compiler.ops.update.adam import ADAM
from amp_compiler.ops.update.formulas import exact_sqrt

BLOCK = 16384  # kRun in ops/cpu/chunks.h
SIZES = (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)

pytestmark = pytest.mark.skipif(not cpu_update.available(), reason="no C++ compiler on this machine")


def gradients():
    torch.manual_seed(0)
    return [torch.randn(size).to(dtype) for size, dtype in zip(SIZES, itertools.cycle(FLOATS), strict=False)]


def by_reference(name, arguments):
    """The update in torch calls, with the square root that all kernels are held to."""
    optimizer = BY_NAME[name.partition("_")[0]]
    reference.update(optimizer, optimizer.bound(False, arguments), exact_sqrt)


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
        assert_same_bits(mine, row)


@pytest.mark.parametrize("bad", [None, float("inf"), float("-inf"), float("nan")])
def test_the_check_finds_the_tensor_and_the_norm(bad):
    grads = gradients()
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
    grads, before = gradients(), torch.get_num_threads()
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
    (result,) = fresh_build.iterdir()
    stamp = result.stat().st_mtime_ns
    cpu_build.library.cache_clear()
    assert cpu_build.library() is not None and result.stat().st_mtime_ns == stamp


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
        numbers = (number(1.0), hyper(0.1, 0, 0, 0, 0), number(1.0), number(0.0))
        arguments = (weights, [torch.ones(4, 6)], [], low_weights, *numbers)
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


def test_of_those_that_ask_together_one_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("AMP_COMPILER_CACHE", str(tmp_path))
    compiled = []

    def compile_slowly(command, **options):
        compiled.append(command)
        time.sleep(0.2)
        Path(command[-1]).write_text("library")

    monkeypatch.setattr(cpu_build.subprocess, "run", compile_slowly)
    with ThreadPoolExecutor(3) as pool:
        result = list(pool.map(lambda _: cpu_build._built(["g++"], {"a.cpp": ""}), range(3)))
    assert len(compiled) == 1 and len(set(result)) == 1
    assert result[0].read_text() == "library"
    assert cpu_build._built(["g++"], {"a.cpp": "other"}) != result[0] and len(compiled) == 2
