"""The operator that counts the binary exponents of a tensor's elements.

`floor(log2|x|)` runs from -149, the least number that FP32 has, to 127. Zeros, infinities and NaN have places of their
own, so that every element is counted once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amp_compiler.ops.layout import is_dense, same_layout

LOWEST = -149  # exponent of the first place
HIGHEST = 127
ZERO, INFINITE, NAN = 277, 278, 279  # places behind those of the exponents
BINS = 280
_BIAS, _NORMAL = 127, 23  # of FP32: what its exponent field adds; the place of its least normal exponent
_RAISED = 64  # exponents by which a number that is not normal becomes so
_CHUNK, _ELSEWHERE = 1 << 16, 1 << 22  # elements that are looked at together: in a CPU's caches; by another device

_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
_LIBRARY.define(
    "count_exponents(Tensor[] values) -> Tensor", tags=(torch.Tag.flexible_layout,)
)  # how values lie in memory does not matter
COUNT = torch.ops.amp_compiler.count_exponents.default


def count(value: Tensor) -> Tensor:
    """How many elements have each exponent.

    Args:
        value: floating point, any shape; FP64 as FP32 holds it.

    Returns:
        int64 [`BINS`].

    Example:
        >>> counts = count(torch.tensor([1.0, 1.5, -0.25, 0.0]))
        >>> counts[0 - LOWEST].item(), counts[-2 - LOWEST].item(), counts[ZERO].item()
        (2, 1, 1)
    """
    fields, raised, zeros, nans = (
        torch.zeros(size, dtype=torch.int64, device=value.device) for size in (256, 256, 1, 1)
    )
    for (part,) in _chunks(value.detach()):
        these, looks = _exponent_fields(part), _looks(part)
        fields += these
        if not looks or these[0]:  # zeros, and numbers that are not normal
            part_zeros = len(part) - _nonzeros(part)
            zeros += part_zeros
            if not looks or part_zeros < these[0]:
                raised += _exponent_fields(part.float() * 2.0**_RAISED)
        if not looks or these[-1]:
            nans += part.isnan().sum()
    small = raised[LOWEST + _RAISED + _BIAS :][:_NORMAL]
    return torch.cat([small, fields[1:-1], zeros, fields[-1:] - nans, nans])


def count_exponents(values: Sequence[Tensor]) -> Tensor:
    """As `count`, of several tensors.

    Args:
        values: of any shapes, on one device.

    Returns:
        int64 [number of values, `BINS`].
    """
    counts = [count(one) for one in values]
    return torch.stack(counts) if counts else torch.zeros(0, BINS, dtype=torch.int64)


def count_update(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """What an update did to a weight.

    Args:
        before: floating point, any shape; FP64 as FP32 holds it.
        after: of the same shape.

    Returns:
        int64 [`BINS`], the exponents of `|after - before| / |before|`, zero where the weight was; and int64 [3]: how
        many elements changed, and of these how many changes would have left a weight in FP16, and one in BF16, as it
        was.
    """
    zeros = (torch.zeros(size, dtype=torch.int64, device=before.device) for size in (256, 1, 1, 1, 1))
    fields, nonzero, nans, *changed = zeros
    for old, new in ((one.float(), two.float()) for one, two in _chunks(before.detach(), after.detach())):
        fall = old - new
        ratio = fall / old
        if not _looks(old) or not ratio.sum().isfinite():  # weights that are zero, and what is not finite
            nonzero += ((old == 0) & (fall != 0)).sum()
            ratio = ratio.where(old != 0, 0.0)
            nans += ratio.isnan().sum()
        fields += _exponent_fields(ratio)
        for number, dtype in zip(changed, (torch.float16, torch.bfloat16), strict=True):
            number += _changed(old.to(dtype), fall)
    nonzero += fields[1:].sum()  # a change is 2^-24 of the weight or more: no ratio is zero but for it, or subnormal
    counts = torch.cat([fields.new_zeros(_NORMAL), fields[1:-1], fields[:1], fields[-1:] - nans, nans])
    return counts, torch.cat([nonzero, *(nonzero - number for number in changed)])


def _changed(low: Tensor, fall: Tensor) -> Tensor:
    """How many 16-bit weights are others behind a step of an update; 0 and -0 are one number."""
    old, new = low.view(torch.int16), low.float().sub_(fall).to(low.dtype).view(torch.int16)
    either = (old | new).bitwise_left_shift_(1).bool()  # without the signs
    return (old ^ new).bool().logical_and_(either).count_nonzero()


def _chunks(*values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some elements after others: equal places of all values, in whatever order."""
    alike = all(is_dense(one) and same_layout(one, values[0]) for one in values)
    flat = [one.as_strided((one.numel(),), (1,)) if alike else one.reshape(-1) for one in values]
    yield from zip(*(one.split(_CHUNK if one.is_cpu else _ELSEWHERE) for one in flat), strict=True)


def _looks(part: Tensor) -> bool:
    """Whether the host can look at a number without waiting for a device."""
    return part.is_cpu


def _nonzeros(part: Tensor) -> Tensor:
    """How many elements are not zero."""
    return part.bool().count_nonzero()  # of other types `torch.count_nonzero` branches at each element


def _exponent_fields(part: Tensor) -> Tensor:
    """How many numbers, as FP32 holds them, have each exponent field: int64 [256]."""
    if part.dtype is torch.bfloat16:
        fields = (part.view(torch.int16) >> 7).to(torch.uint8)  # the sign before them does not fit in
    else:
        fields = (part.float().view(torch.int32) >> 23).to(torch.uint8)
    if _looks(part):  # as bincount does
        return torch.bincount(fields, minlength=256)
    places = fields.long()
    return places.new_zeros(256).scatter_add_(0, places, torch.ones_like(places))


_LIBRARY.impl("count_exponents", count_exponents, "CompositeExplicitAutograd")
torch.library.register_fake(
    "amp_compiler::count_exponents", lambda values: values[0].new_empty(len(values), BINS, dtype=torch.int64)
)
