"""Histograms of binary exponents: each element counted once, whatever its type, as NumPy counts it."""

import numpy as np
import pytest
import torch
from counted_by_numpy import counted_by_numpy, update_by_numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_compiler.diagnose.exponents import Histogram
from amp_compiler.ir.ranges import RANGES
from amp_compiler.ops import exponents
from amp_compiler.ops.exponents import count, count_exponents, count_update

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
EDGES = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 2.0**-149, -(2.0**-126), 2.0**-133, 2.0**-24, 65504.0]


@pytest.fixture(params=["on a CPU", "as on a GPU"])
def looks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the host looks at numbers in between."""
    if request.param != "on a CPU":
        monkeypatch.setattr(exponents, "_looks", lambda part: False)


def assert_update_is_counted(before: torch.Tensor, after: torch.Tensor) -> None:
    (counts, result), (expected, numbers) = count_update(before, after), update_by_numpy(before, after)
    np.testing.assert_array_equal(counts, expected)
    assert result.tolist() == numbers


def spread(count: int, seed: int = 0) -> torch.Tensor:
    """Numbers of all magnitudes that FP32 has, with every edge among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-149, 128, (count,), generator=generator).double()
    numbers = torch.rand(count, generator=generator, dtype=torch.float64) + 1
    return torch.cat([numbers * 2.0**exponents, torch.tensor(EDGES, dtype=torch.float64)])


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_element_is_counted_once_as_numpy_counts_it(dtype: torch.dtype) -> None:
    values = spread(3000).to(dtype)
    expected = counted_by_numpy(values)
    assert expected.sum() == values.numel()
    np.testing.assert_array_equal(count(values), expected)
    np.testing.assert_array_equal(count_exponents([values[:7], values])[1], expected)


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_number_of_a_16_bit_type(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    np.testing.assert_array_equal(count(values), counted_by_numpy(values))


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


@pytest.mark.parametrize("size", [1, 65535, 65536, 65537, 300_003])
def test_chunks(size: int) -> None:
    """The last of them has numbers of all magnitudes, those before have not."""
    for dtype in TYPES:
        values = torch.cat([torch.ones(max(size - 1000, 0), dtype=dtype), spread(1000)[-min(size, 1000) :].to(dtype)])
        np.testing.assert_array_equal(count(values), counted_by_numpy(values))
    before = torch.cat([torch.ones(max(size - 1000, 0)), spread(1000)[-min(size, 1000) :].float()])
    assert_update_is_counted(before, before.roll(1))


@pytest.mark.usefixtures("looks")
def test_a_weight_of_zero_that_becomes_minus_zero_did_not_notice_its_update() -> None:
    _, result = count_update(torch.tensor([0.0, -0.0, 1e-9, 0.0]), torch.tensor([-1e-9, 1e-9, -1e-9, -1.0]))
    assert result.tolist() == [4, 3, 0]  # BF16 has them all


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("size", [1, 256, 4097])
def test_updates_of_all_magnitudes(size: int) -> None:
    normal = torch.randn(size, generator=torch.Generator().manual_seed(2))
    ratios = 1 + 2.0 ** torch.randint(-23, 2, (size,), generator=torch.Generator().manual_seed(3))
    every, other = spread(size)[-size:].float(), spread(size, 1)[-size:].float().flip(0)
    nearby = torch.nextafter(normal, torch.tensor(torch.inf))
    for before, after in (
        (normal, normal * ratios), (normal * 1e-38, normal * 1e-38 * ratios), (normal, nearby), (nearby, 2 * normal),
        (every, other), (every, normal), (normal, every), (every, every),
    ):  # fmt: skip
        assert_update_is_counted(before, after)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_updates_of_weights_of_any_type_and_layout(dtype: torch.dtype) -> None:
    for before in (torch.randn(6, 8).t(), torch.randn(12, 9)[::2, ::3], torch.randn(2, 3, 4, 5).permute(0, 2, 3, 1)):
        old = before.to(dtype)
        for after in (old * 1.01, (old * 1.01).contiguous()):
            assert_update_is_counted(old, after)


@pytest.mark.parametrize(("dtype", "torch_type"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_fractions_are_what_a_cast_does(dtype: str, torch_type: torch.dtype) -> None:
    values = spread(20_000)[:20_000].float()
    values = values[values != 0]
    cast, tiny = values.to(torch_type), torch.finfo(torch_type).tiny
    result = Histogram(count(values).numpy()).fractions(dtype)
    slack = 2 / (RANGES[dtype].exponents[2] - RANGES[dtype].exponents[0])  # one exponent at either end, told as a whole
    assert result.zero == pytest.approx(float((cast == 0).double().mean()), abs=slack)
    assert result.infinite == pytest.approx(float(cast.isinf().double().mean()), abs=slack)
    assert result.subnormal == pytest.approx(float(((cast != 0) & (cast.abs() < tiny)).double().mean()), abs=slack)


@settings(deadline=None)
@given(by=st.integers(-60, 60))
def test_a_shift_is_a_product_with_a_power_of_two(by: int) -> None:
    values = torch.randn(500, generator=torch.Generator().manual_seed(2))
    shifted = Histogram(count(values).numpy()).shifted(by)
    assert shifted == Histogram(count(values.double() * 2.0**by).numpy())


def test_what_leaves_the_histogram_stays_at_its_ends() -> None:
    result = Histogram(count(torch.tensor([1.0, 2.0**100])).numpy()).shifted(60)
    assert (result.lowest, result.highest, result.total) == (60, 127, 2)
