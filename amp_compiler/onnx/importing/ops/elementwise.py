"""Elementwise arithmetic, comparison and logic."""

from __future__ import annotations

import operator
from typing import Any, Literal

import torch
from torch import Tensor

from amp_compiler.errors import CaptureError
from amp_compiler.onnx.importing.ops.registry import op
from amp_compiler.onnx.importing.ops.values import DTYPES, names_known_type

_UNARY: dict[str, Any] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "BitwiseNot": torch.bitwise_not, "Ceil": torch.ceil, "Cos": torch.cos,
    "Cosh": torch.cosh, "Det": torch.det, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor,
    "IsNaN": torch.isnan, "Log": torch.log, "Neg": torch.neg, "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Round": torch.round, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh,
    "Sqrt": torch.sqrt, "Tan": torch.tan, "Tanh": torch.tanh,
}  # fmt: skip
_BINARY = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Equal": operator.eq, "Less": operator.lt,
    "LessOrEqual": operator.le, "Greater": operator.gt, "GreaterOrEqual": operator.ge,
}  # fmt: skip
for _name, _function in _BINARY.items():
    op(_name, scalars=True)(_function)

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_NO_NUMBER = 464.0  # the last number that is rounded to 448, the largest of float8_e4m3fn, and no further

_LOGIC = {
    "And": torch.logical_and, "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip
for _name, _function in (_UNARY | _LOGIC).items():
    op(_name)(_function)


@op("Identity", "OptionalGetElement")
def _identity(x: Any) -> Any:
    return x


@op("Div", scalars=True)
def _div(a: Any, b: Any) -> Tensor:
    tensor = a if isinstance(a, Tensor) else b
    if tensor.is_floating_point() or tensor.is_complex():
        return a / b  # type: ignore[no-any-return]
    return torch.div(torch.as_tensor(a), b, rounding_mode="trunc")


@op("Pow", scalars=True)
def _pow(a: Any, b: Any) -> Tensor:
    result: Tensor = a**b
    # ONNX gives the type of the base; a constant base has the type of the exponent.
    return result.to(a.dtype) if isinstance(a, Tensor) and result.dtype != a.dtype else result


@op("Mod", scalars=True)
def _mod(a: Any, b: Any, *, fmod: int = 0) -> Tensor:
    if fmod:
        return torch.fmod(torch.as_tensor(a), b)
    return torch.remainder(a, b)


@op("BitShift")
def _bit_shift(a: Tensor, b: Tensor, *, direction: Literal["LEFT", "RIGHT"]) -> Tensor:
    shift = torch.bitwise_left_shift if direction == "LEFT" else torch.bitwise_right_shift
    if a.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return shift(a.to(torch.int64), b.to(torch.int64)).to(a.dtype)
    return shift(a, b)


@op("BitCast", when=names_known_type)
def _bit_cast(x: Tensor, *, to: int) -> Tensor:
    return x.view(DTYPES[to])


@op("IsInf")
def _is_inf(x: Tensor, *, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    if detect_negative and detect_positive:
        return torch.isinf(x)
    if detect_positive:
        return torch.isposinf(x)
    return torch.isneginf(x) if detect_negative else torch.zeros_like(x, dtype=torch.bool)


@op("Max", "Min", "Sum", "Mean")
def _variadic(*values: Tensor, kind: str) -> Tensor:
    result = values[0]
    combine = {"Max": torch.maximum, "Min": torch.minimum}.get(kind, torch.add)
    for value in values[1:]:
        result = combine(result, value)
    return result / len(values) if kind == "Mean" else result


@op("Clip", scalars=True)
def _clip(
    x: Tensor, low: Any = None, high: Any = None, *, min: float | None = None, max: float | None = None
) -> Tensor:
    low, high = min if low is None else low, max if high is None else high
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        if low is not None:
            x = torch.maximum(x, torch.as_tensor(low, dtype=x.dtype, device=x.device))
        return x if high is None else torch.minimum(x, torch.as_tensor(high, dtype=x.dtype, device=x.device))
    return x if low is None and high is None else torch.clamp(x, low, high)


@op("Where", scalars=True)
def _where(condition: Tensor, a: Any, b: Any) -> Tensor:
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        raise CaptureError(
            "Where has two constant branches", hint="fold it: onnxscript.optimizer.fold_constants(model)"
        )
    return torch.where(condition, a, b)


@op("Cast", when=names_known_type)
def _cast(x: Tensor, *, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return _converted(x, DTYPES[to], bool(saturate))


@op("CastLike")
def _cast_like(x: Tensor, like: Tensor, *, saturate: int = 1, round_mode: str = "up") -> Tensor:
    return _converted(x, like.dtype, bool(saturate))


def _converted(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    """A cast; one to FP8 makes what is out of range the largest number, or without `saturate` no number or infinity.

    Versions of torch differ in what they make of it, so that nothing out of range is left to them.
    """
    if dtype not in _FP8:
        return x.to(dtype)
    wide = x if x.is_floating_point() and x.dtype not in _FP8 else x.to(torch.float32)
    if saturate:
        largest = torch.finfo(dtype).max
        wide = wide.clamp(-largest, largest)
    elif dtype is torch.float8_e4m3fn:
        wide = torch.where(wide.abs() > _NO_NUMBER, torch.nan, wide)
    return wide.to(dtype)


@op("CumSum", "CumProd", host=(1,))
def _cumulate(x: Tensor, axis: Any, *, kind: str, exclusive: int = 0, reverse: int = 0) -> Tensor:
    place = int(axis.reshape(-1)[0]) % x.dim()
    function = torch.cumsum if kind == "CumSum" else torch.cumprod
    x = x.flip(place) if reverse else x
    if exclusive:
        start = torch.full_like(x.narrow(place, 0, 1), 0 if kind == "CumSum" else 1)
        x = torch.cat([start, x.narrow(place, 0, x.shape[place] - 1)], place)
    result = function(x, place, dtype=x.dtype)
    return result.flip(place) if reverse else result
