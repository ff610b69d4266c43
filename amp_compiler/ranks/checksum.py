"""Checksums by which ranks compare tensors: of all bits and of where they stand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK = 2**17  # elements that are widened to INT64 at a time
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element; wider ones are several INT32
_MIXERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # of splitmix64


def checksums(tensors: Sequence[Tensor]) -> list[str]:
    """A number for each tensor, in hexadecimal: the same on every device, another one for the same values elsewhere.

    It is the sum, modulo 2⁶⁴, of each element's bits times an odd number that belongs to its place, so that it is exact
    in any order of adding. Where one element differs, so does the sum.

    Args:
        tensors: of any type; strides do not count.

    Example:
        >>> one = torch.tensor([1.0, 2.0, 3.0])
        >>> first, turned, again = checksums([one, one.flip(0), one.clone()])
        >>> first == again, first == turned
        (True, False)
    """
    sums = [_checksum(tensor.detach()) for tensor in tensors]
    on_host = torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []
    return [f"{number % 2**64:016x}" for number in on_host]


def _checksum(tensor: Tensor) -> Tensor:
    """INT64 scalar, on the tensor's device."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    bits = flat.view(_BITS.get(flat.element_size(), torch.int32))
    places = _odd_numbers(min(len(bits), _CHUNK), bits.device)
    sums = torch.stack([(one.long() * places[: len(one)]).sum() for one in bits.split(_CHUNK)])
    return (sums * _odd_numbers(len(sums), bits.device)).sum()


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """The first so many of a fixed row of odd numbers without pattern, INT64."""
    first, *others = _MIXERS
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * first
    for factor in others:
        mixed = (mixed ^ (mixed >> 31)) * factor
    return mixed ^ (mixed >> 31) | 1
