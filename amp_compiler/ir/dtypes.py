"""Element types, without torch, ONNX or NumPy: the frontends translate theirs to these."""

from __future__ import annotations

import difflib
import enum
import math
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

from amp_compiler.errors import AmpError

if TYPE_CHECKING:
    import torch

# What `dtype=` takes: of a file, which is made for no one device, and where `"auto"` asks the device.
LowName = Literal["fp16", "bf16", "float16", "bfloat16", "half"]
LowArgument: TypeAlias = LowName | "torch.dtype"
DTypeArgument: TypeAlias = Literal[LowName, "auto"] | "torch.dtype"
ShortName = Literal["fp16", "bf16"]
AUTO: Literal["auto"] = "auto"


class FloatFormat(NamedTuple):
    """Facts of a binary floating-point format (IEEE 754-2019; bfloat16 as in torch)."""

    max: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float

    @property
    def exponents(self) -> tuple[int, int, int]:
        """The binary exponents of the least subnormal number, the least normal one and the largest."""
        least, normal, largest = (math.frexp(one)[1] - 1 for one in (self.smallest_subnormal, *self[1::-1]))
        return least, normal, largest


class DType(enum.Enum):
    """Element type of a value; `.value` is the name that torch and NumPy use.

    Example:
        >>> DType("bfloat16").short, DType.FLOAT32.itemsize
        ('bf16', 4)
    """

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    FLOAT8 = "float8"
    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    UINT8 = "uint8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    UINT64 = "uint64"
    BOOL = "bool"
    COMPLEX32 = "complex32"
    COMPLEX64 = "complex64"
    COMPLEX128 = "complex128"
    OTHER = "other"  # strings, quantized, sub-byte types, symbolic scalars: never touched

    __hash__ = object.__hash__  # that of `Enum` is written in Python, and types are looked up for every value

    @property
    def itemsize(self) -> int:
        """Bytes per element (0 where an element has no fixed size)."""
        return _ITEMSIZE.get(self, 0)

    @property
    def is_float(self) -> bool:
        """True for the real floating-point types that casts may be placed on."""
        return self in FLOATS

    @property
    def short(self) -> str:
        """The short name that tables and graph text use: `fp16`, `bf16`, `fp32`, `i64`, …"""
        return _SHORT[self]

    @property
    def format(self) -> FloatFormat:
        """Range and precision of a real floating-point type."""
        return _FORMATS[self]


FLOATS = frozenset({DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64})
INTEGERS = frozenset(
    {DType.INT8, DType.INT16, DType.INT32, DType.INT64, DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64}
)
LOW_TYPES = {"fp16": DType.FLOAT16, "bf16": DType.BFLOAT16}

_ITEMSIZE = {
    DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.FLOAT32: 4, DType.FLOAT64: 8, DType.FLOAT8: 1,
    DType.INT8: 1, DType.INT16: 2, DType.INT32: 4, DType.INT64: 8,
    DType.UINT8: 1, DType.UINT16: 2, DType.UINT32: 4, DType.UINT64: 8,
    DType.BOOL: 1, DType.COMPLEX32: 4, DType.COMPLEX64: 8, DType.COMPLEX128: 16,
}  # fmt: skip
_SHORT = {dtype: dtype.value for dtype in DType} | {
    DType.FLOAT16: "fp16", DType.BFLOAT16: "bf16", DType.FLOAT32: "fp32", DType.FLOAT64: "fp64",
    DType.FLOAT8: "fp8", DType.INT8: "i8", DType.INT16: "i16", DType.INT32: "i32", DType.INT64: "i64",
    DType.UINT8: "u8", DType.UINT16: "u16", DType.UINT32: "u32", DType.UINT64: "u64",
    DType.COMPLEX32: "c32", DType.COMPLEX64: "c64", DType.COMPLEX128: "c128",
}  # fmt: skip
_FORMATS = {
    DType.FLOAT16: FloatFormat(65504.0, 2.0**-14, 2.0**-24, 2.0**-10),
    DType.BFLOAT16: FloatFormat(float.fromhex("0x1.fep127"), 2.0**-126, 2.0**-133, 2.0**-7),
    DType.FLOAT32: FloatFormat(float.fromhex("0x1.fffffep127"), 2.0**-126, 2.0**-149, 2.0**-23),
    DType.FLOAT64: FloatFormat(float.fromhex("0x1.fffffffffffffp1023"), 2.0**-1022, 2.0**-1074, 2.0**-52),
}
_BY_SHORT = {dtype.short: dtype for dtype in DType}
_BY_NAME = _BY_SHORT | {dtype.value: dtype for dtype in DType} | {"half": DType.FLOAT16}


def dtype_from_short(short: str) -> DType:
    """The type of a short name, such as `bf16`, or of the one that torch and NumPy use.

    Raises:
        AmpError: for a name that no type has.
    """
    if short not in _BY_NAME:
        raise AmpError(f"'{short}' names no element type", hint=f"use one of {', '.join(sorted(_BY_SHORT))}")
    return _BY_NAME[short]


def element_type(dtype: object) -> DType | None:
    """The type of a name, or of a type of torch or NumPy; `None` where it is none."""
    name = dtype if isinstance(dtype, str) else str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    return _BY_NAME.get(name)


def low_type(dtype: object, taken: str = "'fp16' or 'bf16'") -> DType:
    """The 16-bit type that a user names.

    Args:
        dtype: one of `LowName`, or torch's or NumPy's type.
        taken: what may be given, for the error.

    Raises:
        AmpError: for anything else. `"auto"` is resolved by whoever knows the device.

    Example:
        >>> low_type("half"), low_type("bfloat16").short
        (<DType.FLOAT16: 'float16'>, 'bf16')
    """
    element = element_type(dtype)
    if element in (DType.FLOAT16, DType.BFLOAT16):
        return element
    near = [] if element or str(dtype) == AUTO else difflib.get_close_matches(str(dtype), [*get_args(LowName), AUTO], 1)
    hint = f"did you mean '{near[0]}'?" if near else f"use {taken}; rules say what stays in FP32"
    raise AmpError(f"dtype={dtype!r} is no 16-bit type", hint=hint)


def low_name(dtype: object) -> Literal[ShortName, "auto"]:
    """The short name of the 16-bit type that a user names, or `"auto"` as it is.

    Args:
        dtype: as for `low_type`, or `"auto"`.

    Raises:
        AmpError: for anything else.
    """
    if isinstance(dtype, str) and dtype == AUTO:
        return AUTO
    return short_name(low_type(dtype, f"'fp16', 'bf16' or '{AUTO}'"))


def short_name(low: DType) -> ShortName:
    """The name of a 16-bit type as `dtype=` takes it."""
    return "fp16" if low is DType.FLOAT16 else "bf16"
