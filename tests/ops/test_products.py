"""Gradients left as products of two bf16 matrices, against the same updates of gradients that torch has made.

FP32 sums may be taken in any order, and their subnormal parts may be zero because bf16 hardware flushes them. With one
or two inner elements there is one sum only, so its bits are known.
"""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_cpu_update import by_reference
from update_arguments import BY_NAME, EVERY, copies, hyper, number, update_arguments

from amp_compiler.ops.cpu import build as cpu_build
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.update.operators import FUSED
from amp_compiler.ops.update.product import Product

INNERS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 64, 70)
SIDES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65)
WIDE = (511, 512, 513, 1025, 4096, 4097, 8191, 8192, 8193, 8225)
# Inner elements, rows, columns.
MIXED = ((1, 1, 1), (2, 17, 33), (16, 65, 64), (70, 31, 129), (9, 64, 513), (0, 5, 6), (33, 0, 4))
LARGEST, SMALLEST = 3.3895313892515355e38, 2.0**-126  # of bf16 that are not subnormal
COEF = 0.013
FLAGS = st.booleans()
QUICK = settings(max_examples=12, deadline=None, derandomize=True, database=None)

pytestmark = pytest.mark.skipif(not cpu_update.available(), reason="no C++ compiler on this machine")


def random(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16)


LAYOUTS = {
    "rows": random,
    "columns": lambda rows, columns: random(columns, rows).t(),
    "gaps in rows": lambda rows, columns: random(rows + 1, 2 * columns + 3)[1:, 3::2],
    "gaps everywhere": lambda rows, columns: random(3 * columns, 2 * rows)[::3, ::2].t(),
    "one row for all": lambda rows, columns: random(1, columns).expand(rows, columns),
    "one column for all": lambda rows, columns: random(rows, 1).expand(rows, columns),
}
ALL_LAYOUTS = list(itertools.product(LAYOUTS, LAYOUTS))
PAIRS = st.sampled_from(ALL_LAYOUTS)


def product(inner, rows, columns, layouts=("columns", "rows")):
    return Product(LAYOUTS[layouts[0]](rows, inner), LAYOUTS[layouts[1]](inner, columns))


def as_added(products, transposed=False):
    """The gradients as an update sees them, and the squares that it gives: SGD adds them to weights of zero."""
    weights = [torch.zeros(one.shape) for one in products]
    weights = [weight.t().contiguous().t() for weight in weights] if transposed else weights
    options = (number(1.0), hyper(-1.0, 0, 0, 0, 0), number(1.0), number(0.0), False, False)
    squares = cpu_update.FUNCTIONS["sgd_update"](weights, products, [], [], *options)
    return weights, squares


def materialised(one):
    return (one.left.float() @ one.right.float()).bfloat16()


def summation_error(one):
    """What the order of FP32 sums may change in an element."""
    return one.left.shape[1] * 2.0**-23 * (one.left.double().abs() @ one.right.double().abs())


def flushed(one):
    """What is lost because a processor's products of bf16 read subnormal numbers as zeros."""
    left, right = ((side.double().abs(), side.double().abs() < SMALLEST) for side in (one.left, one.right))
    return left[1].double() * SMALLEST @ right[0] + left[0] @ (right[1].double() * SMALLEST)


def assert_made(products, transposed=False):
    gradients, squares = as_added(products, transposed)
    for one, gradient in zip(products, gradients, strict=True):
        assert torch.equal(gradient, gradient.bfloat16().float())
        exact, inner = one.left.double() @ one.right.double(), one.left.shape[1]
        most = 2.0**-8 * exact.abs() + 1.01 * summation_error(one) + inner * SMALLEST + flushed(one)
        assert bool(((gradient - exact).abs() <= most).all())
        few = (exact.abs() > 4 * SMALLEST) & (inner <= 2) & (flushed(one) == 0)
        assert torch.equal(gradient[few], materialised(one)[few].float())
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients)
    if expected < 3e38:  # what FP32 holds
        assert squares == pytest.approx(expected, rel=1e-5)
    else:  # the sum of a few elements may be beyond it, as in the check
        assert squares == math.inf or squares == pytest.approx(expected, rel=1e-5)
    return gradients


@pytest.mark.parametrize("inner", INNERS)
def test_sides_around_the_sizes_of_tiles_and_panels(inner):
    torch.manual_seed(inner)
    layouts = itertools.cycle(ALL_LAYOUTS)
    products = [product(inner, *shape, next(layouts)) for shape in itertools.product(SIDES, SIDES)]
    assert_made(products)
    assert_made(products, transposed=True)


@pytest.mark.parametrize("inner", [2, 8, 9, 70])
def test_rows_that_are_longer_than_blocks_and_panels(inner):
    torch.manual_seed(inner)
    for columns, rows in zip(WIDE, itertools.cycle((33, 1, 65)), strict=False):
        assert_made([product(inner, rows, columns)])
        assert_made([product(inner, columns, rows)], transposed=True)


@QUICK
@example(1, 1, 1, ("rows", "rows"), False, 1e24)
@given(st.integers(1, 80), st.integers(1, 150), st.integers(1, 150), PAIRS, FLAGS, st.sampled_from([1e-38, 1.0, 1e24]))
def test_any_shape_and_any_strides(inner, rows, columns, layouts, transposed, scale):
    torch.manual_seed(inner)
    one = product(inner, rows, columns, layouts)
    one.left.as_strided((one.left.untyped_storage().nbytes() // 2,), (1,), 0).mul_(scale)
    assert_made([one], transposed)


def test_products_of_several_batches_are_those_made_one_by_one():
    torch.manual_seed(0)
    shapes = [(70, 33, 3000)] * 6 + [(70, 17, 8193), (2, 65, 70), (64, 9, 4100), (31, 64, 65)]
    products = [product(*shape) for shape in shapes]
    together = assert_made(products)
    assert all(torch.equal(gradient, as_added([one])[0][0]) for one, gradient in zip(products, together, strict=True))


def group(transposed):
    """Products and other gradients in turns, and their weights."""
    products = [product(*shape, layouts) for shape, layouts in zip(MIXED, ALL_LAYOUTS[::5], strict=False)]
    others = [torch.randn(3, 7), random(700), torch.randn(5, 4).half(), torch.randn(()), random(1, 9)]
    grads = [grad for pair in itertools.zip_longest(products, others) for grad in pair if grad is not None]
    weights = [torch.randn(grad.shape) for grad in grads]
    return grads, [weight.t().contiguous().t() if transposed and weight.dim() == 2 else weight for weight in weights]


def update_of(one, flags, grads, weights, **numbers):
    inputs = update_arguments(one, flags, weights=weights, coef=COEF, **numbers)
    return [inputs[0], grads, *inputs[2:]]


def written(arguments):
    columns = [column for place, column in enumerate(arguments) if place != 1 and isinstance(column, list)]
    return [tensor for column in columns for tensor in column]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@settings(QUICK, max_examples=24)
@given(st.sampled_from(EVERY), st.sampled_from([0.0, 0.1]), st.sampled_from([0.0, 1.0]), FLAGS)
def test_updates_are_the_references_of_the_gradients_made_first(case, more, started, transposed):
    weights, grads, *rest = update_of(*case, *group(transposed), more=more, started=started)
    name = case[0].operator(low=False)
    inputs = [as_added([grad])[0][0].bfloat16() if isinstance(grad, Product) else grad for grad in grads]
    mine, theirs = copies([weights, grads, *rest]), copies([weights, inputs, *rest])
    squares = cpu_update.FUNCTIONS[name](*mine)
    by_reference(name, theirs)
    assert equal(written(mine), written(theirs))
    known = torch.cat([one.double().flatten() for one, grad in zip(inputs, grads, strict=True) if one is not grad])
    assert squares == pytest.approx(float((COEF * known).square().sum()), rel=1e-5)


def test_moments_differ_from_those_of_torchs_gradient_by_its_last_bit():
    torch.manual_seed(0)
    products = [product(inner, 65, 70) for inner in INNERS]
    torchs, zeros = [materialised(one) for one in products], [torch.zeros(65, 70) for _ in INNERS]
    moments = []
    for grads in (products, torchs):
        arguments = update_of(BY_NAME["adam"], {}, grads, copies(zeros))
        arguments[2], arguments[3] = copies(zeros), copies(zeros)
        cpu_update.FUNCTIONS["adam_update"](*arguments)
        moments.append(zip(arguments[2], arguments[3], strict=True))
    for (first, second), (other, square), one, grad in zip(*moments, products, torchs, strict=True):
        assert one.left.shape[1] > 2 or (torch.equal(first, other) and torch.equal(second, square))
        grad = grad.double().abs() * COEF
        error = 2.0**-7 * grad + 2.1 * COEF * summation_error(one)
        assert bool(((first - other).abs() <= 0.1 * error * 1.001).all())
        assert bool(((second - square).abs() <= 0.001 * (2 * grad + error) * error * 1.001 + 1e-6 * square).all())


@pytest.mark.parametrize("one", FUSED, ids=lambda one: one.name)
@pytest.mark.parametrize("skip", [0.0, 1.0])
def test_the_norm_is_that_of_check_and_update_and_a_skipped_update_changes_nothing(one, skip):
    arguments = update_of(one, {}, *group(transposed=True), more=0.1, started=0.0, skip=skip)
    norm, nonfinite, flags = cpu_update.grad_check(arguments[1], number(COEF))
    before = copies(arguments)
    complete = cpu_update.complete_norm(norm, cpu_update.FUNCTIONS[one.operator(low=False)](*arguments))
    exact = float(torch.cat([grad.float().double().flatten() for grad in arguments[1]]).norm() * COEF)
    assert float(norm) < 0.9 * exact and float(nonfinite) == 0 and not flags.any()
    assert equal(written(before), written(arguments)) == bool(skip)
    assert float(complete) == (float(norm) if skip else pytest.approx(exact, rel=1e-5))
    assert not one.started or float(arguments[4]) == 1.0 - skip


@pytest.mark.parametrize(("side", "inner"), list(itertools.product(("left", "right"), (2, 9, 33))))
def test_a_factor_that_is_not_finite_is_found(side, inner):
    for bad in (float("inf"), float("-inf"), float("nan")):
        products = [product(inner, 40, 70, layouts) for layouts in ALL_LAYOUTS[:15:7]]
        getattr(products[1], side)[1, 1] = bad
        norm, nonfinite, flags = cpu_update.grad_check([*products, random(5)], number(1.0))
        assert flags.tolist() == [0, 1, 0, 0] and float(nonfinite) == 1 and not norm.isfinite()
        as_added([Product(torch.full((64, 96), bad).bfloat16(), products[1].right[:1].expand(96, -1))])
        assert_made([product(33, 64, 40), product(5, 64, 40)])  # nothing is left of what was there before


@pytest.mark.parametrize("zeros", [0, 7, 31])
@pytest.mark.parametrize(
    ("left", "right", "finite"),
    [
        ([3e38, 0.0], [3e38, 0.0], False),
        ([2e38, 2e38], [1.0, 1.0], False),
        ([LARGEST, 2.0**119], [1.0, 1.0], False),  # a finite sum in FP32
        ([LARGEST, 2.0**118], [1.0, 1.0], True),
        ([3e38, 3e38], [1.0, -1.0], True),
        ([1e30, 1e-20], [0.0, 1e20], True),
    ],
)
def test_products_near_the_end_of_the_range_are_made_to_be_checked(left, right, finite, zeros):
    left, right = (torch.tensor([side + [0.0] * zeros]).bfloat16() for side in (left, right))
    one, tiny = Product(left.expand(20, -1), right.t().expand(-1, 40)), 2.0**-100
    norm, nonfinite, flags = cpu_update.grad_check([one], number(tiny))
    assert flags.tolist() == [not finite] and float(nonfinite) == (not finite)
    for transposed in (False, True):
        (gradient,), squares = as_added([one], transposed)
        assert torch.equal(gradient, materialised(one).float()) and bool(gradient.isfinite().all()) == finite
        assert squares == 0.0  # counted already
    if finite:
        assert float(norm) == pytest.approx(float((gradient.double() * tiny).norm()), rel=1e-5)


def test_products_without_elements():
    for inner, rows, columns in ((0, 5, 40), (3, 0, 4), (40, 5, 0), (0, 0, 0)):
        one = product(inner, rows, columns)
        one.right.fill_(float("inf"))
        assert cpu_update.grad_check([one], number(1.0))[2].tolist() == [0]
        (gradient,), squares = as_added([one])
        assert gradient.shape == (rows, columns) and not gradient.any() and squares == 0.0


def test_results_are_the_same_for_any_number_of_threads():
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            grads, weights = group(transposed=False)
            grads += [product(70, 33, 3000) for _ in range(4)]
            weights += [torch.randn(33, 3000) for _ in range(4)]
            grads[0].left.fill_(3e38)
            arguments = update_of(BY_NAME["adam"], {}, grads, weights, more=0.1)
            norm, _, flags = cpu_update.grad_check(grads, number(1.0))
            squares = torch.tensor(cpu_update.FUNCTIONS["adam_update"](*arguments), dtype=torch.float64)
            results.append([tensor.nan_to_num(0.5) for tensor in (norm, flags, squares, *written(arguments))])
    finally:
        torch.set_num_threads(before)
    assert equal(results[0], results[1]) and equal(results[0], results[2])


def compiler_without(features: str) -> tuple[list[str], str]:
    """A command of g++ that leaves features (as g++ names them) out, and the macros that it then defines."""
    compiler = ["g++", *(f"-mno-{feature}" for feature in features.split())]
    requested = [*compiler, *cpu_build._FLAGS, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        return compiler, subprocess.run(requested, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no g++ that knows these flags")


@pytest.mark.long
@pytest.mark.parametrize(
    "without", [pytest.param("amx-tile amx-bf16", marks=pytest.mark.slow), "avx512bf16 amx-tile amx-bf16"]
)
def test_processors_that_can_do_less(without, tmp_path):
    compiler, macros = compiler_without(without)
    pairs = "__AVX512BF16__" in macros
    assert "__AMX_BF16__" not in macros and not (pairs and "avx512bf16" in without)
    core = "sides and ([1] or [7] or [9] or [33]) or strides or batches or moments or end_of_the_range"
    few = "b._SUFFIXES = ('update.cpp', '.h')"  # quicker to build
    run = f"import test_products as t; print(t.cpu_update.most_inner()); exit(pytest.main([t.__file__, '-k{core}']))"
    code = f"import pytest, amp_compiler.ops.cpu.build as b; {few}; {run}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent,
        capture_output=True, text=True, timeout=200,
        env={
            **os.environ,
            "CXX": " ".join(compiler),
            "AMP_COMPILER_CACHE": os.environ.get("AMP_COMPILER_CACHE", str(tmp_path)),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(tmp_path / "hypothesis"),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.split()[0] == ("32" if pairs else "0")


@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_is_made_as_an_update_reads_it(transposed):
    """SGD with a rate of 1 takes it from the weights, in one rounding."""
    torch.manual_seed(0)
    products = [product(*shape) for shape in ((1, 1, 1), (5, 17, 33), (33, 65, 513), (70, 64, 700), (9, 3, 8193))]
    if not transposed:
        products.append(products[3].plus_rows(torch.randn(6, 700), torch.tensor([1, 1, 0, 2, 9, 63]), 9))
    for gradient in products:
        weight = torch.randn(gradient.shape)
        weight = weight.t().contiguous().t() if transposed else weight
        result, before = cpu_update.made_gradient(gradient, weight.clone()), weight.clone()
        options = (number(1.0), hyper(1.0, 0, 0, 0, 0), number(1.0), number(0.0), False, False)
        cpu_update.FUNCTIONS["sgd_update"]([weight], [gradient], [], [], *options)
        assert torch.equal(weight, before - result) and result.stride() == weight.stride()
