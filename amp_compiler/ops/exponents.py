"""The operator that counts the binary exponents of a tensor's elements.

`floor(log2|x|)` runs from -149, the least number that FP32 has, to 127. Zeros, infinities and NaN have places of their
own, so that every element is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
        >>> found = count(torch.tensor([1.0, 1.5, -0.25, 0.0]))
        >>> found[0 - LOWEST].item(), found[-2 - LOWEST].item(), found[ZERO].item()
        (2, 1, 1)
    """
    return _counted((part for (part,) in _chunks(value.detach())), value.device)


def count_exponents(values: Sequence[Tensor]) -> Tensor:
    """As `count`, of several tensors.

    Args:
        values: of any shapes, on one device.

    Returns:
        int64 [number of values, `BINS`].
    """
    return torch.stack([count(one) for one in values])


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
    changes = torch.zeros(3, dtype=torch.int64, device=before.device)

    def ratios() -> Iterator[Tensor]:
        for old, new in _chunks(before.detach(), after.detach()):
            fall = (old - new).add_(0.0)  # never -0: so a low weight minus no fall is the same, -0 as well
            changed = _nonzeros(fall)
            same = [
                changed - _nonzeros(_changed_bits(old.to(dtype), fall)) for dtype in (torch.float16, torch.bfloat16)
            ]
            changes.add_(torch.stack([changed, *same]))
            ratio = fall.div_(old)
            yield ratio.where(old != 0, 0.0) if not _looks(old) or _nonzeros(old) < len(old) else ratio

    return _counted(ratios(), before.device), changes


def _changed_bits(low: Tensor, fall: Tensor) -> Tensor:
    """Bits of 16-bit weights that are others behind a step of an update."""
    return low.float().sub_(fall).to(low.dtype).view(torch.int16).bitwise_xor_(low.view(torch.int16))


def _chunks(*values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some elements after others, as FP32: equal places of all values, in whatever order."""
    if all(is_dense(one) and same_layout(one, values[0]) for one in values):
        flat = [one.as_strided((one.numel(),), (1,)) for one in values]
    else:
        flat = [one.reshape(-1) for one in values]
    size = _CHUNK if flat[0].is_cpu else _ELSEWHERE
    for parts in zip(*(one.split(size) for one in flat), strict=True):
        yield tuple(part.float() for part in parts)


def _counted(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    """As `count`, of FP32 numbers in rows."""
    fields, raised, others = (torch.zeros(size, dtype=torch.int64, device=device) for size in (256, 256, 2))
    for part in parts:
        these, looks = _exponent_fields(part), _looks(part)
        fields += these
        if not looks or these[0]:  # zeros, and numbers that are not normal
            zeros = len(part) - _nonzeros(part)
            others[0] += zeros
            if not looks or zeros < these[0]:
                raised += _exponent_fields(part * 2.0**_RAISED)
        if not looks or these[-1]:
            others[1] += part.isnan().sum()
    small = raised[LOWEST + _RAISED + _BIAS :][:_NORMAL]
    return torch.cat([small, fields[1:-1], others[:1], fields[-1:] - others[1:], others[1:]])


def _looks(part: Tensor) -> bool:
    """Whether the host can look at a number without waiting for a device."""
    return part.is_cpu


def _nonzeros(part: Tensor) -> Tensor:
    """How many elements are not zero, without the branches of `torch.count_nonzero`, which take a CPU much longer."""
    return part.bool().sum(dtype=torch.int32)


def _exponent_fields(part: Tensor) -> Tensor:
    """How many FP32 numbers have each exponent field: int64 [256]."""
    fields = (part.view(torch.int32) >> 23).to(torch.uint8)  # the sign before them does not fit in
    if _looks(part):  # as bincount does
        return torch.bincount(fields, minlength=256)
    places = fields.long()
    return places.new_zeros(256).scatter_add_(0, places, torch.ones_like(places))


_LIBRARY.impl("count_exponents", count_exponents, "CompositeExplicitAutograd")
torch.library.register_fake(
    "amp_compiler::count_exponents", lambda values: values[0].new_empty(len(values), BINS, dtype=torch.int64)
)
