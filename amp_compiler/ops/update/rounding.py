"""How a weight without an FP32 master is stored: to nearest, stochastically, or with its rounding error beside it.

The random bits are Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a function of
a key and a counter only: the same key, update number, tensor and element always give the same bits, on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import AmpError, LoweringError

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


class Storage(IntEnum):
    """How the new value of a low-precision weight is stored.

    `NEAREST` rounds to nearest even. `STOCHASTIC` rounds up or down at random so that the mean is the value itself.
    `KAHAN` rounds to nearest and keeps the error, in the same low type, in a second tensor that the next update adds.
    """

    NEAREST = 0
    STOCHASTIC = 1
    KAHAN = 2


@dataclass(frozen=True)
class WeightStorage:
    """The `weights` section of the rules.

    Args:
        low: whether the weights have no FP32 masters.
        rounding: how a new value is stored where they have none.
        skips: whether a step that would store a number beyond the largest finite one of the low type does not count;
            else that largest one is stored.
    """

    low: bool = False
    rounding: Storage = Storage.NEAREST
    skips: bool = False


class RoundingState:
    """The random state of stochastic rounding: int64 [2] on the device, a key and the number of updates made.

    The key is drawn from torch's default generator, so `torch.manual_seed` decides it; nothing is drawn in other modes.

    Args:
        storage: how weights are stored.
        device: where the state lives.
    """

    def __init__(self, storage: WeightStorage, device: torch.device) -> None:
        self.used = storage.rounding is Storage.STOCHASTIC
        key = int(torch.randint(2**63 - 1, ())) if self.used else 0
        self.tensor = torch.tensor([key, 0], dtype=torch.int64, device=device)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, for which it waits for the device; empty in a mode that is not random."""
        return {"rounding": [int(number) for number in self.tensor.tolist()]} if self.used else {}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over a saved state; one without random rounding changes nothing.

        Raises:
            AmpError: the saved state is not two whole numbers.
        """
        numbers = saved.get("rounding")
        if numbers is None or not self.used:
            return
        if not isinstance(numbers, (list, tuple)) or len(numbers) != 2 or any(type(n) is not int for n in numbers):
            raise AmpError(f"the saved rounding state is {numbers!r}", hint="save it with step.state_dict()")
        self.tensor.copy_(torch.tensor(numbers, dtype=torch.int64))


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32-bit product; in halves, because a 64-bit signed product would overflow."""
    high, low = factor * (word >> 16), factor * (word & 0xFFFF)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _WORD


def philox(key: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words per counter.

    Args:
        key: int64 [], both halves are used.
        counter: four int64 tensors of one shape (or broadcastable), each holding a 32-bit word.

    Returns:
        Four int64 tensors with values in [0, 2**32).
    """
    key0, key1 = key & _WORD, (key >> 32) & _WORD
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + _WEYL[0]) & _WORD, (key1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def random_words(like: Tensor, rng: Tensor, index: int) -> Tensor:
    """A random 32-bit word for every element of a tensor.

    Element `e` in memory order takes word `e % 4` of the counter `(e // 4, index, update number)`.

    Args:
        like: gives shape and strides; must be dense, as kernels walk over memory.
        rng: int64 [2]: the key, and the number of updates made.
        index: the tensor's place in its group.

    Returns:
        int64 of the shape of `like`, values in [0, 2**32).
    """
    count = like.numel()
    group = torch.arange((count + 3) // 4, device=like.device)
    place = torch.full_like(group, index)
    words = philox(rng[0], (group & _WORD, group >> 32, place, (rng[1] & _WORD).expand(group.shape)))
    flat = torch.stack(words, dim=1).flatten()[:count]
    return flat.as_strided(like.size(), like.stride())


def round_stochastically(value: Tensor, words: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to one of the two neighbours in a low type, each with the probability that makes the mean exact.

    Adds a random number below one unit in the last place to the magnitude and drops the lower bits (Gupta et al. 2015,
    "Deep learning with limited numerical precision"). Infinities and NaN are converted as they are. A magnitude above
    the largest finite one may become infinite, as with any rounding.

    Args:
        value: fp32, any shape.
        words: int64 of the same shape, 32 random bits each.
        dtype: `torch.bfloat16` or `torch.float16`.
    """
    dropped = dropped_bits(dtype)
    mask = (1 << dropped) - 1
    noisy = (value.view(torch.int32).long() & _WORD) + (words & mask)
    signed = torch.where(noisy >= 1 << 31, noisy - (1 << 32), noisy)
    result = (signed & ~mask).int().view(torch.float32).to(dtype)
    if dtype is torch.float16:
        # Below the smallest normal number the spacing no longer shrinks, so the bits to drop are not a constant.
        units = value.abs() * 2.0**24
        whole = torch.floor(units)
        up = (words >> 8).float() * 2.0**-24 < units - whole
        small = torch.copysign((whole + up.float()) * 2.0**-24, value)
        result = torch.where(value.abs() < 2.0**-14, small.to(dtype), result)
    return torch.where(torch.isfinite(value), result, value.to(dtype))


def dropped_bits(dtype: torch.dtype) -> int:
    """How many of the 23 mantissa bits of fp32 a low type lacks.

    Raises:
        LoweringError: for a type that weights are not stored in.
    """
    if dtype is torch.bfloat16:
        return 16
    if dtype is torch.float16:
        return 13
    raise LoweringError(f"weights cannot be rounded stochastically to {dtype}", hint="store them as fp16 or bf16")


def differs(value: Tensor, rounded: Tensor) -> Tensor:
    """Where a 16-bit tensor is not another one rounded to nearest, bit for bit, but that every NaN is one.

    In whole numbers: a compiler may leave out a conversion to 16 bits and back.

    Args:
        value: fp32, any shape.
        rounded: fp16 or bf16, of the same shape.
    """
    dropped = dropped_bits(rounded.dtype)
    bits = value.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    wanted = (magnitude + ((1 << (dropped - 1)) - 1) + ((magnitude >> dropped) & 1)) >> dropped
    if rounded.dtype is torch.float16:
        small = torch.round(value.abs().clamp(max=1.0) * 2.0**24).int()
        wanted = torch.where(value.abs() < 2.0**-14, small, (wanted - (112 << 10)).clamp(max=0x7C00))
    held = rounded.view(torch.int16).int() & 0xFFFF
    differing = (wanted | ((bits >> 16) & 0x8000)) != held
    return torch.where(value.isnan() | rounded.isnan(), value.isnan() != rounded.isnan(), differing)


def saturated(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The values, with the largest finite one of a low type in the place of finite ones beyond it (NVCaffe's clipping).

    Infinities and NaN stay: they tell of something else than storage. NVCaffe clips infinities too.

    Args:
        value: fp32, any shape.
        dtype: the type to be stored in; fp32 holds every value.
    """
    if dtype is torch.float32:
        return value
    largest = torch.finfo(dtype).max
    return torch.where(value.abs() < torch.inf, value.clamp(-largest, largest), value)


def outgrows(value: Tensor, dtype: torch.dtype) -> Tensor:
    """bool []: whether a finite value is beyond what a low type can hold, so that `saturated` is seen.

    Args:
        value: fp32, any shape.
        dtype: the type to be stored in.
    """
    return (torch.isinf(value.to(dtype)) & (value.abs() < torch.inf)).any()


def widen(weight: Tensor, compensation: Tensor | None) -> Tensor:
    """The weight in fp32, with the error of earlier roundings added where it is kept.

    An error that is too large to be one of this weight's roundings is left out: the weight was written since.

    Args:
        weight: fp16, bf16 or fp32, any shape.
        compensation: of the same type and shape; `None` where no error is kept.
    """
    wide = weight.float()
    if compensation is None:
        return wide
    error = compensation.float()
    # Half of a rounding error moves no weight, not even below a power of two, where the spacing halves.
    return wide + torch.where((wide + error * 0.5).to(weight.dtype) == weight, error, 0.0)


def narrow(value: Tensor, weight: Tensor, mode: int, rng: Tensor | None, index: int) -> tuple[Tensor, Tensor | None]:
    """Store a new fp32 value in the type of the weight.

    Kahan's summation (Kahan 1965) is kept in its two-word form: weight + compensation is the value, so the step itself
    is computed on both and nothing but the last rounding of the compensation is lost. A value beyond the largest finite
    one is stored as that, whatever the mode; see `saturated`.

    Args:
        value: fp32, any shape.
        weight: gives type, shape and strides.
        mode: a `Storage`.
        rng: int64 [2], key and number of updates; needed for `STOCHASTIC`.
        index: the tensor's place in its group.

    Returns:
        The stored weight, and the compensation where the mode is `KAHAN`.
    """
    value = saturated(value, weight.dtype)
    if mode == Storage.STOCHASTIC:
        if rng is None:
            raise LoweringError("stochastic rounding has no random state", hint="pass `rng`, int64 [2]")
        return round_stochastically(value, random_words(weight, rng, index), weight.dtype), None
    stored = value.to(weight.dtype)
    if mode == Storage.KAHAN:
        return stored, (value - stored.float()).to(weight.dtype)
    return stored, None
