"""What native updates count of their weights, against counts behind the update, in torch calls."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lesser_processors import compiler_without
from test_products import made, product
from update_arguments import EVERY, NAMES, tensors_of, update_arguments

from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.exponents import reference, update_reference
from amp_compiler.ops.update.counts import UpdateCounts
from amp_compiler.ops.update.fused import FusedOptimizer
from amp_compiler.ops.update.product import Product

SIZES = (0, 1, 255, 257, 513, 16384, 3 * 16384 + 700)  # around the numbers of elements that are counted together

pytestmark = pytest.mark.skipif(not cpu_update.available(), reason="no C++ compiler on this machine")


def assert_counted(one: FusedOptimizer, arguments: list[Any]) -> UpdateCounts:
    """The update is what it is uncounted, to the bit, and so are the counts."""
    name, plain, counts = one.operator(low=False), copy.deepcopy(arguments), UpdateCounts()
    weights, gradients = arguments[:2]
    before = [weight.clone() for weight in weights]
    squares = cpu_update.counting(counts)[name](*arguments)
    assert squares == cpu_update.FUNCTIONS[name](*plain)
    assert all(map(torch.equal, tensors_of(arguments), tensors_of(plain)))
    for old, weight, gradient in zip(before, weights, gradients, strict=True):
        found = counts.take(weight)
        assert found is not None
        # A library may sum a product in another order, so that its bits are known from an update alone.
        gradient = made([gradient])[0][0].view(weight.shape) if isinstance(gradient, Product) else gradient
        ratios, changes = update_reference(old, weight)
        assert torch.equal(torch.from_numpy(found.gradient), reference(gradient))
        assert torch.equal(torch.from_numpy(found.ratios), ratios)
        assert found.found.tolist() == changes.tolist()
    assert all(counts.take(weight) is None for weight in weights if weight.numel())
    return counts


def of_all_magnitudes(count: int) -> torch.Tensor:
    """Numbers of all exponents that FP32 has, and what is not finite, in any order."""
    numbers = (1 + torch.rand(count, dtype=torch.float64)) * 2.0 ** torch.randint(-149, 128, (count,)).double()
    numbers[::50], numbers[1::70], numbers[2::90], numbers[3::110] = 0.0, torch.inf, torch.nan, -0.0
    return numbers.float()[torch.randperm(count)]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("one", "flags"), EVERY[:: len(EVERY) // 4], ids=NAMES[:: len(EVERY) // 4])
def test_updates_count_what_they_change(one: FusedOptimizer, flags: dict[str, bool], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        arguments = update_arguments(one, flags, SIZES, more=0.01)
        assert_counted(one, arguments)
        assert_counted(one, arguments)  # the tables of addresses are known now
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("one", [EVERY[0], EVERY[-1]], ids=[NAMES[0], NAMES[-1]])
def test_numbers_of_all_magnitudes(one: tuple[FusedOptimizer, dict[str, bool]]) -> None:
    """Zeros, subnormal numbers and what is not finite, in gradients and in weights."""
    optimizer, flags = one
    arguments = update_arguments(optimizer, flags, (3000, 3000, 3000))
    for number, gradient in enumerate(arguments[1]):
        gradient.copy_(of_all_magnitudes(3000))
        gradient[: 1000 * number] = 0.0
    arguments[0][0].copy_(of_all_magnitudes(3000))
    assert_counted(optimizer, arguments)


@pytest.mark.parametrize("one", [EVERY[0], EVERY[-1]], ids=[NAMES[0], NAMES[-1]])
def test_products_are_counted_as_the_update_makes_them(one: tuple[FusedOptimizer, dict[str, bool]]) -> None:
    optimizer, flags = one
    torch.manual_seed(0)
    products = [product(*shape) for shape in ((1, 1, 1), (5, 17, 33), (33, 65, 513), (70, 64, 700), (9, 3, 8193))]
    products += [
        products[1].transposed(),
        products[3].plus_rows(torch.randn(6, 700), torch.tensor([1, 1, 0, 2, 9, 63]), 9),
    ]
    arguments = update_arguments(optimizer, flags, tuple(one.numel() for one in products))
    for column in range(2 + len(optimizer.states)):
        arguments[column] = [one.view(grad.shape) for one, grad in zip(arguments[column], products, strict=False)]
    arguments[1] = products
    assert_counted(optimizer, arguments)


def test_a_skipped_update_changes_nothing() -> None:
    optimizer, flags = EVERY[0]
    arguments = update_arguments(optimizer, flags, (700, 300))
    torch.manual_seed(0)
    arguments[1][0] = product(5, 20, 35).reshaped(700)
    arguments[1][1][3] = torch.inf
    skip = [one.name for one in optimizer.parameters(low=False)].index("skip")
    arguments[skip] = torch.tensor(1.0)
    before, counts = copy.deepcopy(arguments[0]), UpdateCounts()
    cpu_update.counting(counts)[optimizer.operator(low=False)](*arguments)
    for old, weight, gradient in zip(before, *arguments[:2], strict=True):
        found = counts.take(weight)
        assert torch.equal(old, weight) and found is not None and found.found.tolist() == [0, 0, 0]
        gradient = gradient.tensor() if isinstance(gradient, Product) else gradient
        assert torch.equal(torch.from_numpy(found.gradient), reference(gradient))
        assert torch.equal(torch.from_numpy(found.ratios), update_reference(weight, weight)[0])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("without", ["avx512f", "avx512f avx2"])
def test_processors_that_can_do_less(without: str, tmp_path: Path) -> None:
    compiler, macros = compiler_without(without)
    assert not any(f"__{feature.upper()}__" in macros for feature in without.split())
    chosen = "not less and not triton"
    code = (
        "import pytest, sys, amp_compiler.ops.cpu.build as b; b._SUFFIXES = ('update.cpp', 'exponents.cpp', '.h');"
        "tests = ['ops/test_update_counts.py', 'diagnose/test_exponents.py'];"
        f"sys.exit(pytest.main([*tests, '-p', 'no:xdist', '-k{chosen}']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=300,
        env={**os.environ, "CXX": " ".join(compiler), "AMP_COMPILER_CACHE": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
