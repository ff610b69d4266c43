"""The operator that counts the binary exponents of a tensor's elements.

`floor(log2|x|)` runs from -149, the least number that FP32 has, to 127. Zeros, infinities and NaN have places of their
own, so that every element is counted once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.ops.cpu import exponents as on_cpu

LOWEST = -149  # exponent of the first place
HIGHEST = 127
ZERO, INFINITE, NAN = 277, 278, 279  # places behind those of the exponents
BINS = 280

_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
_LIBRARY.define(
    "count_exponents(Tensor[] values) -> Tensor", tags=(torch.Tag.flexible_layout,)
)  # how values lie in memory does not matter
COUNT = torch.ops.amp_compiler.count_exponents.default


def reference(value: Tensor) -> Tensor:
    """How many elements have each exponent, in torch calls.

    Args:
        value: floating point, any shape; FP64 as FP32 holds it.

    Returns:
        int64 [`BINS`].

    Example:
        >>> found = reference(torch.tensor([1.0, 1.5, -0.25, 0.0]))
        >>> found[0 - LOWEST].item(), found[-2 - LOWEST].item(), found[ZERO].item()
        (2, 1, 1)
    """
    flat = value.detach().reshape(-1).to(torch.float32)
    _, exponent = torch.frexp(flat)  # of a mantissa from 1/2
    place = exponent.to(torch.int64) - 1 - LOWEST
    place = torch.where(flat == 0, ZERO, place)
    place = torch.where(flat.isinf(), INFINITE, place)
    place = torch.where(flat.isnan(), NAN, place)
    return torch.zeros(BINS, dtype=torch.int64, device=value.device).scatter_add_(0, place, torch.ones_like(place))


def count_exponents(values: Sequence[Tensor]) -> Tensor:
    """As `reference`, by the quickest way that there is.

    Args:
        values: of any shapes, on one device.

    Returns:
        int64 [number of values, `BINS`].
    """
    if all(map(on_cpu.can_run, values)):
        counts = torch.zeros(len(values), BINS, dtype=torch.int64)
        on_cpu.count(values, counts)
        return counts
    return torch.stack([reference(one) for one in values])


def update_reference(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """What an update did to a weight, in torch calls.

    Args:
        before: FP32, any shape.
        after: of the same shape.

    Returns:
        int64 [`BINS`], the exponents of `|after - before| / |before|`, zero where the weight was; and int64 [3]: how
        many elements changed, and of these how many changes would have left a weight in FP16, and one in BF16, as it
        was.
    """
    change = after - before
    made = change != 0
    ratio = torch.where(before == 0, 0.0, change.abs() / before.abs())
    lost = []
    for dtype in (torch.float16, torch.bfloat16):
        low = before.to(dtype)
        moved = (low.float() + change).to(dtype)
        lost.append((made & (low.view(torch.int16) == moved.view(torch.int16))).sum())
    return reference(ratio), torch.stack([made.sum(), *lost])


def count_update(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """As `update_reference`, by the quickest way that there is for the tensors."""
    dense = before.is_contiguous() and after.is_contiguous() and before.dtype == after.dtype == torch.float32
    if not dense or not on_cpu.can_run(before):
        return update_reference(before.float(), after.float())
    counts, found = torch.zeros(BINS, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    on_cpu.count_update(before, after, counts, found)
    return counts, found


def keep(target: Tensor, source: Tensor) -> None:
    """Copy a tensor that is counted much later, past the caches where that can be done.

    Args:
        target: of the form of the source, in memory of its own.
        source: any type, shape and device.
    """
    dense = torch.ops.aten.is_non_overlapping_and_dense(source) and source.stride() == target.stride()
    if dense and source.dtype == target.dtype and on_cpu.can_run(source) and target.device == source.device:
        on_cpu.copy(target, source)
    else:
        target.copy_(source)


_LIBRARY.impl("count_exponents", count_exponents, "CompositeExplicitAutograd")
torch.library.register_fake(
    "amp_compiler::count_exponents", lambda values: values[0].new_empty(len(values), BINS, dtype=torch.int64)
)
