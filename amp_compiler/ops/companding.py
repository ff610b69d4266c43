"""FP32 numbers in 16 bits each: the fourth roots of a block of them, evenly spaced, and the largest of the block.

Roots spend the bits where numbers are large (companding). In a block of normally distributed numbers the error is a
third of that of FP16, which spends most of its range on numbers that are not there, and with an outlier among them it
grows slowly.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2048  # the most numbers of one
_TOP = 32766  # the code of the largest number; those beyond it: infinity, and minus 32768 for NaN


def filled(count: int) -> int:
    """The least number of numbers, from `count` on, that `packed` takes: blocks of one even length."""
    blocks = -(-count // BLOCK)
    return blocks and -(-count // (2 * blocks)) * 2 * blocks


def packed(values: Tensor) -> Tensor:
    """Round to 16 bits; what is not finite stays so.

    A number that is 2**-n of the largest of its block is off by at most about 2**(n/4 - 14) of itself: large ones by
    2**-14, those down to 2**-12 by 2**-11, which is FP16's rounding, those down to 2**-24 by 2**-8, which is BF16's.

    Args:
        values: FP32 [n], where `filled(n)` is n.

    Returns:
        int32 [n / 2 + blocks]: two codes each, of a number in the first half of a block and of its like in the
        second; and behind them the largest number of each block.

    Example:
        >>> float(unpacked(packed(torch.tensor([3e38, 1.0]))[None])[0, 0])
        3.0000...e+38
    """
    if not values.numel():
        return values.to(torch.int32)
    blocks = values.view(-(-values.numel() // BLOCK), -1)
    sizes = blocks.abs()
    largest = torch.nan_to_num(sizes, 0.0, 0.0).amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest, 1.0)
    codes = torch.round((sizes / scales).sqrt().sqrt() * _TOP).clamp(max=_TOP + 1)
    codes = torch.where(codes.isnan(), -_TOP - 2, codes.copysign(blocks)).to(torch.int32)
    first, second = codes.chunk(2, dim=1)
    pairs = first & 0xFFFF | second << 16  # in 32 bits: gloo sends no int16, and Inductor has no vectors of them
    return torch.cat([pairs.view(-1), scales.view(-1).view(torch.int32)])


def unpacked(rows: Tensor) -> Tensor:
    """The numbers that `packed` was given, rounded.

    One division by a constant and products are all that is computed, which give the same bits on all ranks.

    Args:
        rows: int32 [rows, n / 2 + blocks], each as `packed` gives it.

    Returns:
        FP32 [rows, n].
    """
    count, whole = rows.shape
    if not whole:
        return rows.float()
    blocks = -(-whole // (BLOCK // 2 + 1))
    pairs, scales = rows.split([whole - blocks, blocks], dim=1)
    left = 16 - 16 * torch.arange(2, dtype=torch.int32, device=rows.device)[:, None]
    codes: Tensor = (pairs.reshape(count, blocks, 1, -1) << left >> 16).float()
    roots, beyond = codes / _TOP, (_TOP + 2 - codes.abs()) * float("inf")  # of infinity's code infinity, of NaN's NaN
    factors = torch.where(codes.abs() > _TOP, beyond, scales.reshape(count, blocks, 1, 1).view(torch.float32))
    return (roots * roots.abs() * (roots * roots) * factors).view(count, -1)
