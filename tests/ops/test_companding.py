"""FP32 numbers in 16 bits each, by their fourth roots."""

from __future__ import annotations

import pytest
import torch

from amp_compiler.ops.companding import BLOCK, filled, packed, unpacked

LARGEST = torch.finfo(torch.float32).max


def returned(values):
    return unpacked(packed(values)[None])[0]


def errors(values):
    return ((returned(values).double() - values.double()) / values.double()).abs()


@pytest.mark.parametrize("count", [2, 6, BLOCK, 3 * BLOCK - 6])
@pytest.mark.parametrize("size", [2.0**-126, 1e-30, 1.0, 1e37])
def test_numbers_of_one_size_are_off_by_a_part_in_sixteen_thousand(count, size):
    generator = torch.Generator().manual_seed(0)
    values = (1 + torch.rand(2, count, generator=generator)) * size * torch.tensor([[1.0], [-1.0]])
    rows = torch.stack([packed(one) for one in values])
    assert rows.dtype is torch.int32 and rows.shape[1] == count // 2 + -(-count // BLOCK)
    assert float(((unpacked(rows) - values) / values).abs().max()) <= 2.0**-13.7  # of half the largest: 2**(1/4 - 14)


def test_small_numbers_beside_large_ones_lose_a_bit_for_each_four_powers_of_two():
    powers = torch.arange(0, 40)
    values = torch.ldexp(1 + torch.rand(40, 512, generator=torch.Generator().manual_seed(0)), -powers[:, None])
    for power, row in zip(powers.tolist(), values, strict=True):
        row[0] = 2.0  # the largest, of which the others are 2**-1 to 2**-(power + 1)
        assert float(errors(row).max()) <= 2.0 ** ((power + 1) / 4 - 14) * 1.01, power
    torch.testing.assert_close(returned(torch.tensor([1.0, 2.0**-70])), torch.tensor([1.0, 0.0]), rtol=0, atol=0)


def test_normally_distributed_numbers_are_rounded_three_times_as_finely_as_by_fp16():
    values = torch.randn(64 * BLOCK, generator=torch.Generator().manual_seed(0))
    values = values[values != 0][: 63 * BLOCK]
    halves = ((values.half().double() - values) / values).square().mean().sqrt()
    assert 2.5 * errors(values).square().mean().sqrt() < halves


def test_blocks_do_not_see_one_another_and_what_is_not_finite_stays_so():
    values = torch.full((2 * BLOCK,), 1e-30)
    values[0], values[1], values[2], values[3] = 1e30, float("inf"), float("-inf"), float("nan")
    found = returned(values)
    assert float(found[1]) == float("inf") and float(found[2]) == float("-inf") and bool(found[3].isnan())
    assert float(found[0]) == values[0] and float(found[4]) == 0.0
    assert torch.equal(found[BLOCK:], values[BLOCK:])  # each is the largest of its block
    for one in (float("inf"), float("nan")):
        assert str(returned(torch.tensor([one, 0.0])).tolist()) == str([one, 0.0])


def test_the_largest_number_zero_and_nothing_are_kept_to_the_bit():
    for values in ([LARGEST, -LARGEST], [-0.1, 0.0], [0.0, 0.0], [2.0**-149, 0.0]):
        assert returned(torch.tensor(values)).tolist() == torch.tensor(values).tolist()
    assert unpacked(packed(torch.zeros(0)).expand(3, 0)).shape == (3, 0)


def test_numbers_are_filled_up_to_blocks_of_one_even_length():
    for count, taken in {0: 0, 1: 2, 7: 8, BLOCK: BLOCK, BLOCK + 1: BLOCK + 4, 3 * BLOCK - 1: 3 * BLOCK}.items():
        assert filled(count) == taken
    for count in range(2, 5 * BLOCK, 61):
        values = torch.linspace(1.0, 2.0, filled(count))
        row = packed(values)
        assert row.numel() == values.numel() // 2 + -(-count // BLOCK)
        torch.testing.assert_close(unpacked(row[None])[0], values, rtol=2.0**-13, atol=0)
