"""The operator that counts the binary exponents of a tensor's elements.

`floor(log2|x|)` runs from -149, the least number that FP32 has, to 127. Zeros, infinities and NaN have places of their
own, so that every element is counted once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from amp_compiler.ops.layout import is_dense, same_layout

LOWEST = -149  # exponent of the first place
HIGHEST = 127
ZERO, INFINITE, NAN = 277, 278, 279  # places behind those of the exponents
BINS = 280
_NORMAL, _RAISED = 23, 64  # place of FP32's least normal exponent; by how many the numbers below it become normal
_SHORT = (torch.float16, torch.bfloat16)  # their numbers are counted bit by bit, FP32's by the first bits alone:
_DROPPED, _KEPT = 21, 1 << 10  # by exponent and two bits more, for to count in one place again at once has to wait
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
    value, exact, looks = value.detach(), value.dtype in _SHORT, _looks(value)
    counts = _by_exponent(_patterns(value), value.dtype)
    if not exact and (not looks or counts[ZERO]):  # and numbers that are not normal
        raised = _by_exponent(_patterns(value.float() * 2.0**_RAISED), torch.float32)
        counts[:_NORMAL], counts[ZERO] = raised[_RAISED:][:_NORMAL], raised[ZERO]
    if not exact and (not looks or counts[INFINITE]):  # and NaN whose first bits are those of infinity
        nans = value.isnan().sum()
        counts[INFINITE], counts[NAN] = counts[INFINITE:].sum() - nans, nans
    return counts


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
    zeros = (torch.zeros(size, dtype=torch.int64, device=before.device) for size in (_KEPT, 1, 1, 1))
    patterns, nonzero, *changed = zeros
    for old, new in ((one.float(), two.float()) for one, two in _chunks(before.detach(), after.detach())):
        fall = old - new
        these = _count_bits((fall / old).view(torch.int32).bitwise_right_shift_(_DROPPED), _KEPT)
        if not _looks(old) or these[-_KEPT // 256 :].any():  # weights that are zero, and what is not finite
            nonzero += ((old == 0) & (fall != 0)).sum()
            these = _patterns((fall / old).where(old != 0, 0.0))
        patterns += these
        for number, dtype in zip(changed, _SHORT, strict=True):
            number += _changed(old.to(dtype), fall)
    counts = _by_exponent(patterns, torch.float32)
    nonzero += before.numel() - counts[ZERO]  # a change is 2^-24 of the weight or more: no ratio is zero but for it
    return counts, torch.cat([nonzero, *(nonzero - number for number in changed)])


def _changed(low: Tensor, fall: Tensor) -> Tensor:
    """How many 16-bit weights are others behind a step of an update; 0 and -0 are one number."""
    old, new = low.view(torch.int16), low.float().sub_(fall).to(low.dtype).view(torch.int16)
    differ = old ^ new
    if not _looks(low) or not len(low) or differ.min() == -(2**15):  # in the sign alone
        differ *= (old | new).bitwise_left_shift_(1).bool()
    return differ.count_nonzero()


def _chunks(*values: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some elements after others: equal places of all values, in whatever order."""
    alike = all(is_dense(one) and same_layout(one, values[0]) for one in values)
    flat = [one.as_strided((one.numel(),), (1,)) if alike else one.reshape(-1) for one in values]
    size = _CHUNK << 2 * (values[0].dtype in _SHORT) if values[0].is_cpu else _ELSEWHERE
    yield from zip(*(one.split(size) for one in flat), strict=True)


def _looks(part: Tensor) -> bool:
    """Whether the host can look at a number without waiting for a device."""
    return part.is_cpu


def _patterns(value: Tensor) -> Tensor:
    """How many numbers have each pattern of the bits behind the sign that are counted: int64 [2^15 or `_KEPT`]."""
    if value.dtype in _SHORT:
        counts = (_count_bits(part.view(torch.int16), 1 << 15) for (part,) in _chunks(value))
    else:
        counts = (_count_bits(part.float().view(torch.int32) >> _DROPPED, _KEPT) for (part,) in _chunks(value))
    return functools.reduce(Tensor.add_, counts)


def _count_bits(bits: Tensor, size: int) -> Tensor:
    """How many whole numbers have each pattern of their last bits."""
    places = bits.to(torch.int16) & size - 1
    if _looks(bits):  # as bincount does
        return torch.bincount(places, minlength=size)
    return bits.new_zeros(size, dtype=torch.int64).scatter_add_(0, places.long(), torch.ones_like(places).long())


def _by_exponent(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """The counts of patterns of bits, which are in the order of magnitude, as those of exponents: int64 [`BINS`]."""
    sums = counts.cumsum(0)[_last_patterns(dtype if dtype in _SHORT else torch.float32, counts.device)]
    parts = sums.diff()
    return torch.cat([parts[:ZERO], sums[:1], parts[ZERO:]])


@functools.cache
def _last_patterns(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of zero, of every exponent, of infinity and of NaN the last pattern that is counted for it: int64 [`BINS`]."""
    powers = (2.0 ** torch.arange(LOWEST, HIGHEST + 2, dtype=torch.float64)).to(dtype)  # the last one is infinity
    integer, dropped, size = (torch.int16, 0, 1 << 15) if dtype in _SHORT else (torch.int32, _DROPPED, _KEPT)
    starts = (powers.view(integer) >> dropped).long().clamp(min=1 if dtype in _SHORT else _KEPT // 256)
    return torch.cat([starts - 1, starts[-1:], starts.new_tensor([size - 1])]).to(device)


_LIBRARY.impl("count_exponents", count_exponents, "CompositeExplicitAutograd")
torch.library.register_fake(
    "amp_compiler::count_exponents", lambda values: values[0].new_empty(len(values), BINS, dtype=torch.int64)
)
