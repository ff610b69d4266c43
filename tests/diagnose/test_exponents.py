"""Histograms of binary exponents: each element counted once, whatever its type, by every implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_compiler.diagnose.exponents import RANGES, Histogram
from amp_compiler.ops.exponents import (
    BINS,
    INFINITE,
    LOWEST,
    NAN,
    ZERO,
    count_exponents,
    count_update,
    keep,
    reference,
    update_reference,
)

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EDGES = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 2.0**-149, -(2.0**-126), 2.0**-133, 2.0**-24, 65504.0]


def counted_by_numpy(values: torch.Tensor) -> np.ndarray:
    """An independent count, of an array's elements one by one."""
    counts = np.zeros(BINS, np.int64)
    for value in values.double().reshape(-1).tolist():
        value = float(np.float32(value))
        if value != value:
            counts[NAN] += 1
        elif value in (float("inf"), -float("inf")):
            counts[INFINITE] += 1
        elif value == 0:
            counts[ZERO] += 1
        else:
            counts[int(np.floor(np.log2(abs(np.float64(value))))) - LOWEST] += 1
    return counts


def spread(count: int, seed: int = 0) -> torch.Tensor:
    """Numbers of all magnitudes that FP32 has, with every edge among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-149, 128, (count,), generator=generator).double()
    numbers = torch.rand(count, generator=generator, dtype=torch.float64) + 1
    return torch.cat([numbers * 2.0**exponents, torch.tensor(EDGES, dtype=torch.float64)])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_element_is_counted_once_as_numpy_counts_it(dtype: torch.dtype) -> None:
    values = spread(3000).to(dtype)
    expected = counted_by_numpy(values)
    assert expected.sum() == values.numel()
    np.testing.assert_array_equal(reference(values), expected)
    np.testing.assert_array_equal(count_exponents([values])[0], expected)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=4),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 99),
    turned=st.booleans(),
)
def test_shapes_strides_and_types(shape: list[int], dtype: torch.dtype, seed: int, turned: bool) -> None:
    size = int(np.prod(shape)) if shape else 1
    values = spread(size, seed)[:size].to(dtype).reshape(shape)
    if turned and values.dim():
        values = values.transpose(0, -1)[..., ::2]
    np.testing.assert_array_equal(count_exponents([values])[0], counted_by_numpy(values))


@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 39, 40, 41, 90])
def test_blocks_of_few_and_of_many_exponents(dtype: torch.dtype, width: int) -> None:
    """Those of few are counted one exponent after the other, with zeros and what is not finite beside them."""
    generator = torch.Generator().manual_seed(width)
    for top in (-110, -14, 0, 15, 127):
        exponents = top - torch.randint(0, width, (5000,), generator=generator)
        values = (2.0 ** exponents.double() * (1 + torch.rand(5000, generator=generator))).to(dtype)
        values[::7], values[1::91], values[2::97], values[3::89] = 0.0, torch.inf, torch.nan, -0.0
        np.testing.assert_array_equal(count_exponents([values])[0], reference(values))


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 100_003])
def test_blocks_and_threads(size: int) -> None:
    for dtype in TYPES[:3]:
        values = spread(size).to(dtype)
        assert torch.equal(count_exponents([values, values[:1]])[0], reference(values))


def test_an_update_is_counted_as_torch_counts_it() -> None:
    before = (torch.randn(9000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 3).float()
    before[:7] = 0.0
    change = before * 2.0 ** torch.randint(-20, 1, before.shape, generator=torch.Generator().manual_seed(1))
    after = before + torch.where(torch.arange(9000) % 3 == 0, 0.0, change)
    (counts, found), (expected, numbers) = count_update(before, after), update_reference(before, after)
    assert torch.equal(counts, expected) and torch.equal(found, numbers)
    assert 0 < found[1] < found[2] < found[0] < 9000


@pytest.mark.parametrize("size", [1, 255, 256, 257, 4097])
def test_updates_of_all_magnitudes(size: int) -> None:
    """Of numbers that are not normal or not finite a quotient tells, of all others a difference of their bits."""
    normal = torch.randn(size, generator=torch.Generator().manual_seed(2))
    ratios = 1 + 2.0 ** torch.randint(-23, 2, (size,), generator=torch.Generator().manual_seed(3))
    every, other = spread(size)[-size:].float(), spread(size, 1)[-size:].float().flip(0)
    nearby = torch.nextafter(normal, torch.tensor(torch.inf))
    for before, after in (
        (normal, normal * ratios), (normal * 1e-38, normal * 1e-38 * ratios), (normal, nearby), (nearby, 2 * normal),
        (every, other), (every, normal), (normal, every), (every, every),
    ):  # fmt: skip
        (counts, found), (expected, numbers) = count_update(before, after), update_reference(before, after)
        assert torch.equal(counts, expected) and torch.equal(found, numbers)


@pytest.mark.parametrize("one", [torch.nan, torch.inf, -torch.inf, 1e-40, 0.0, -0.0, 3e38, 65519.0])
def test_updates_beside_one_that_is_not_plain(one: float) -> None:
    """In its block every number is told by a division, and none in the others."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(3000, generator=generator)
    after = before + 1e-3 * torch.randn(3000, generator=generator)
    for changed in (before, after):
        kept = changed[700].item()
        changed[700] = one
        for mine, other in zip(count_update(before, after), update_reference(before, after), strict=True):
            assert torch.equal(mine, other)
        changed[700] = kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_kept_is_a_copy(dtype: torch.dtype) -> None:
    whole = torch.arange(64 * 37 + 5, dtype=torch.float64).to(dtype)
    for source in (whole, whole[1:], whole[3:10], whole[:0], whole[: 64 * 37].view(64, 37).t(), whole[::2]):
        target = torch.empty_strided(source.shape, source.stride(), dtype=dtype).zero_()
        keep(target, source)
        assert torch.equal(target, source)


@pytest.mark.parametrize(("dtype", "torch_type"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_fractions_are_what_a_cast_does(dtype: str, torch_type: torch.dtype) -> None:
    values = spread(20_000)[:20_000].float()
    values = values[values != 0]
    cast, tiny = values.to(torch_type), torch.finfo(torch_type).tiny
    found = Histogram(reference(values).numpy()).fractions(dtype)
    slack = 2 / (RANGES[dtype].greatest - RANGES[dtype].least)  # one exponent at either end, told as a whole
    assert found.zero == pytest.approx(float((cast == 0).double().mean()), abs=slack)
    assert found.infinite == pytest.approx(float(cast.isinf().double().mean()), abs=slack)
    assert found.subnormal == pytest.approx(float(((cast != 0) & (cast.abs() < tiny)).double().mean()), abs=slack)


@given(by=st.integers(-60, 60))
def test_a_shift_is_a_product_with_a_power_of_two(by: int) -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(2))
    shifted = Histogram(reference(values).numpy()).shifted(by)
    assert shifted == Histogram(reference(values.double() * 2.0**by).numpy())


def test_what_leaves_the_histogram_stays_at_its_ends() -> None:
    found = Histogram(reference(torch.tensor([1.0, 2.0**100])).numpy()).shifted(60)
    assert (found.lowest, found.highest, found.total) == (60, 127, 2)


def test_unused_exponents() -> None:
    found = Histogram(reference(torch.tensor([2.0**-10, 4.0])).numpy())
    assert found.unused("fp16") == (4, 13)
    assert Histogram.empty().unused("fp16") == (30, 0)
