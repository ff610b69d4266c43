"""FP32 numbers as FP16 ones with an exponent for each block of them: 11 bits of each, and no overflow but FP32's."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 1024
_TOP = 15  # the largest number of a block is made to lie below two to this
_LEAST = -110  # a smaller exponent would ask for a factor beyond FP32


def filled(count: int) -> int:
    """The least number of numbers, from `count` on, that `packed` takes."""
    return count if count <= BLOCK else -(-count // BLOCK) * BLOCK


def packed(values: Tensor) -> Tensor:
    """Round to FP16, each block by a power of two of its own; what is not finite stays so.

    Numbers down to 2**-28 of the largest of their block keep 11 bits; BF16 has 8.

    Args:
        values: FP32 [n], where n is at most `BLOCK`, which is one block then, or a multiple of it.

    Returns:
        FP16 [n + blocks]: the numbers, and behind them the exponents.

    Example:
        >>> float(unpacked(packed(torch.tensor([3e38, 1.0]))[None])[0, 0])
        3.0001...e+38
    """
    if not values.numel():
        return values.half()
    blocks = values.view(max(values.numel() // BLOCK, 1), -1)
    largest = torch.nan_to_num(blocks, 0.0, 0.0, 0.0).abs().amax(1, keepdim=True)
    exponents = torch.frexp(largest).exponent.clamp(min=_LEAST)
    halves = torch.ldexp(blocks, _TOP - exponents).half()
    return torch.cat([halves.view(-1), exponents.view(-1).half()])  # whole numbers below 2048 are exact


def unpacked(rows: Tensor) -> Tensor:
    """The numbers that `packed` was given, rounded.

    Args:
        rows: FP16 [rows, n + blocks], each as `packed` gives it.

    Returns:
        FP32 [rows, n].
    """
    whole = rows.shape[1]
    blocks = max(whole // (BLOCK + 1), 1)
    count = whole - blocks
    halves, exponents = rows.split([count, blocks], dim=1)
    values = halves.float().reshape(rows.shape[0], blocks, -1)
    return torch.ldexp(values, exponents.float()[:, :, None] - _TOP).view(rows.shape[0], count)
