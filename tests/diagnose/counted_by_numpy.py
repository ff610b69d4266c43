"""Counts of exponents by NumPy, which those of `ops.exponents` are compared with."""

import numpy as np
import numpy.typing as npt
import torch

from amp_compiler.ops.exponents import BINS, INFINITE, LOWEST, NAN, ZERO

Counts = npt.NDArray[np.int64]


def counted_by_numpy(values: torch.Tensor) -> Counts:
    """As `ops.exponents.count`."""
    numbers = values.detach().float().double().numpy().reshape(-1)
    counts = np.zeros(BINS, np.int64)
    counts[[ZERO, INFINITE, NAN]] = (numbers == 0).sum(), np.isinf(numbers).sum(), np.isnan(numbers).sum()
    _, exponents = np.frexp(numbers[np.isfinite(numbers) & (numbers != 0)])  # of a mantissa from 1/2
    np.add.at(counts, exponents - 1 - LOWEST, 1)
    return counts


def update_by_numpy(before: torch.Tensor, after: torch.Tensor) -> tuple[Counts, list[int]]:
    """As `ops.exponents.count_update`."""
    old, new = (one.detach().float().numpy() for one in (before, after))
    with np.errstate(all="ignore"):
        change = new - old
        result, ratio = change != 0, np.where(old == 0, np.float32(0), np.abs(change) / np.abs(old))
        pairs = [(low(old), low(wide(low(old)) + change)) for low, wide in (_FP16, _BF16)]
        lost = [int((result & ((one == two) | ((one | two) & 0x7FFF == 0))).sum()) for one, two in pairs]
    return counted_by_numpy(torch.from_numpy(ratio)), [int(result.sum()), *lost]


def _bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


# The bits of FP32 numbers in a type, and the numbers of such bits.
_FP16 = (
    lambda values: values.astype(np.float16).view(np.uint16),
    lambda bits: bits.view(np.float16).astype(np.float32),
)
_BF16 = (_bf16_bits, lambda bits: (bits.astype(np.uint32) << 16).view(np.float32))
