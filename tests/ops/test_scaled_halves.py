"""FP32 numbers as FP16 ones with an exponent for each block."""

from __future__ import annotations

import pytest
import torch

from amp_compiler.ops.scaled_halves import BLOCK, filled, packed, unpacked

HALF_A_STEP = 2.0**-11  # of 11 bits


@pytest.mark.parametrize("count", [1, 5, BLOCK, 3 * BLOCK])
@pytest.mark.parametrize("size", [2.0**-126, 1e-30, 1.0, 1e37])
def test_eleven_bits_are_kept_of_any_size(count, size):
    generator = torch.Generator().manual_seed(0)
    values = (1 + torch.rand(2, count, generator=generator)) * size * torch.tensor([[1.0], [-1.0]])
    rows = torch.stack([packed(one) for one in values])
    assert rows.dtype is torch.float16 and rows.shape[1] == count + -(-count // BLOCK)
    assert float(((unpacked(rows) - values) / values).abs().max()) <= HALF_A_STEP


def test_small_numbers_beside_large_ones_keep_eleven_bits_over_28_powers_of_two():
    values = torch.tensor([1.0, *(2.0**-power * (1 + 2.0**-10) for power in range(29))])
    assert torch.equal(unpacked(packed(values)[None])[0], values)


def test_blocks_do_not_see_one_another_and_what_is_not_finite_stays_so():
    values = torch.full((2 * BLOCK,), 1e-12)
    values[0], values[1], values[2], values[3] = 1e30, float("inf"), float("-inf"), float("nan")
    found = unpacked(packed(values)[None])[0]
    assert float(found[1]) == float("inf") and float(found[2]) == float("-inf") and bool(found[3].isnan())
    assert float(found[0]) == pytest.approx(1e30, rel=HALF_A_STEP) and float(found[4]) == 0.0
    torch.testing.assert_close(found[BLOCK:], values[BLOCK:], rtol=HALF_A_STEP, atol=0)
    assert torch.equal(unpacked(packed(torch.zeros(3))[None])[0], torch.zeros(3))
    assert packed(torch.zeros(0)).shape == (0,)


def test_numbers_are_filled_up_to_whole_blocks():
    assert [filled(count) for count in (1, 7, BLOCK, BLOCK + 1, 2 * BLOCK)] == [1, 7, BLOCK, 2 * BLOCK, 2 * BLOCK]
