"""Operators on host values: the arithmetic of shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import host_op, op
from amp_compiler.onnx.importing.ops.values import DTYPES, Host, as_host, host_dtype, numbers, slices


def _array(values: list[Any]) -> Host:
    if all(isinstance(one, int) for one in values):
        return np.array(values, dtype=np.int64)
    array = np.empty(len(values), dtype=object)
    for place, one in enumerate(values):
        array[place] = one
    return array


@op("Shape")
def shape_of(x: Tensor, *, start: int = 0, end: int | None = None) -> Host:
    """The sizes of a tensor as a host value."""
    return _array(list(x.shape)[start:end])


@op("Size")
def size_of(x: Tensor) -> Host:
    """The number of elements of a tensor as a host value."""
    return as_host(x.numel())


@host_op("Shape")
def _shape(x: Host, *, start: int = 0, end: int | None = None) -> Host:
    return np.array(x.shape, dtype=np.int64)[start:end]


@host_op("Size")
def _size(x: Host) -> Host:
    return np.asarray(x.size)


_BINARY: dict[str, Any] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Equal": np.equal, "Less": np.less,
    "LessOrEqual": np.less_equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "And": np.logical_and,
    "Or": np.logical_or, "Xor": np.logical_xor, "Min": np.minimum, "Max": np.maximum,
}  # fmt: skip
_UNARY: dict[str, Any] = {
    "Neg": np.negative, "Abs": np.abs, "Not": np.logical_not, "Floor": np.floor, "Ceil": np.ceil, "Round": np.round,
    "Sqrt": np.sqrt, "Sign": np.sign, "Exp": np.exp, "Log": np.log,
}  # fmt: skip


@host_op(*_BINARY)
def _binary(*values: Host, kind: str) -> Host:
    result: Any = values[0]
    for other in values[1:]:
        result = as_host(_BINARY[kind](result, other))
    return as_host(result)


@host_op(*_UNARY)
def _unary(x: Host, *, kind: str) -> Host:
    if x.dtype == object and kind not in ("Neg", "Abs"):
        results = [_number_of(one, kind) for one in numbers(x)]
        return _array(results).reshape(x.shape)
    return as_host(_UNARY[kind](x))


def _number_of(one: Any, kind: str) -> Any:
    if kind == "Floor":
        return one.__floor__() if hasattr(one, "__floor__") else one
    if kind == "Ceil":
        return one.__ceil__() if hasattr(one, "__ceil__") else one
    if kind == "Sqrt":
        return one**0.5
    return _UNARY[kind](one)


@host_op("Div")
def _div(a: Host, b: Host) -> Host:
    parts = np.broadcast_arrays(a, b)
    whole = all(part.dtype == object or np.issubdtype(part.dtype, np.integer) for part in parts)
    if whole and not any(_is_float(one) for part in parts for one in numbers(part)):
        if object in (a.dtype, b.dtype):  # symbolic sizes are not negative
            return as_host(np.floor_divide(a, b))
        quotient = np.abs(a) // np.abs(b) * (np.sign(a) * np.sign(b))
        return as_host(np.asarray(quotient).astype(a.dtype))
    return as_host(np.true_divide(a, b))


def _is_float(one: Any) -> bool:
    return type(one).__name__ in ("float", "SymFloat")


@host_op("Mod")
def _mod(a: Host, b: Host, *, fmod: int = 0) -> Host:
    return as_host((np.fmod if fmod else np.mod)(a, b))


@host_op("Pow")
def _pow(a: Host, b: Host) -> Host:
    result = as_host(np.power(a, b))
    return result if a.dtype == object or result.dtype == object else result.astype(a.dtype)


@host_op("Identity")
def _identity(x: Host) -> Host:
    return x


@host_op("Cast")
def _cast(x: Host, *, to: int, saturate: int = 1, round_mode: str = "up") -> Host:
    dtype = DTYPES[to]
    if x.dtype != object:
        return x.astype(host_dtype(dtype))
    if dtype.is_floating_point:
        return _array([one * 1.0 for one in numbers(x)]).reshape(x.shape)
    if any(_is_float(one) for one in numbers(x)):
        return _array([one.__trunc__() for one in numbers(x)]).reshape(x.shape)
    return x


@host_op("Gather")
def _gather(x: Host, indices: Host, *, axis: int = 0) -> Host:
    return as_host(np.take(x, indices.astype(np.int64), axis=axis))


@host_op("Concat")
def _concat(*values: Host, axis: int) -> Host:
    return np.concatenate(values, axis=axis)


@host_op("Squeeze")
def _squeeze(x: Host, axes_input: Host | None = None, *, axes: Any = None) -> Host:
    axes = axes if axes is not None else None if axes_input is None else numbers(axes_input)
    return as_host(np.squeeze(x, None if axes is None else tuple(axes)))


@host_op("Unsqueeze")
def _unsqueeze(x: Host, axes_input: Host | None = None, *, axes: Any = None) -> Host:
    return np.expand_dims(x, tuple(axes if axes is not None else numbers(axes_input)))


@host_op("Reshape", "Flatten")
def _reshape(x: Host, shape: Host | None = None, *, kind: str, axis: int = 1, allowzero: int = 0) -> Host:
    if kind == "Flatten":
        return x.reshape(int(np.prod(x.shape[:axis])), -1)
    sizes = numbers(shape)
    return x.reshape([x.shape[place] if size == 0 and not allowzero else size for place, size in enumerate(sizes)])


@host_op("Transpose")
def _transpose(x: Host, *, perm: Any = None) -> Host:
    return np.transpose(x, perm)


@host_op("Slice")
def _slice(x: Host, *inputs: Host | None, starts: Any = None, ends: Any = None, axes: Any = None) -> Host:
    cut = [slice(None)] * x.ndim
    for axis, a, b, c in slices(inputs, starts, ends, axes):
        cut[axis] = slice(a, b if c > 0 or b > -(2**31) else None, c)
    return x[tuple(cut)]


@host_op("Where")
def _where(condition: Host, a: Host, b: Host) -> Host:
    return as_host(np.where(condition.astype(bool), a, b))


_REDUCE: dict[str, Any] = {"ReduceProd": np.prod, "ReduceSum": np.sum, "ReduceMax": np.max, "ReduceMin": np.min}


@host_op(*_REDUCE)
def _reduce(
    x: Host, axes_input: Host | None = None, *, kind: str, axes: Any = None, keepdims: int = 1,
    noop_with_empty_axes: int = 0,
) -> Host:  # fmt: skip
    chosen = axes if axes is not None else None if axes_input is None else numbers(axes_input)
    if not chosen and noop_with_empty_axes:
        return x
    return as_host(_REDUCE[kind](x, axis=tuple(chosen) if chosen else None, keepdims=bool(keepdims)))


@host_op("ConstantOfShape")
def _constant_of_shape(shape: Host, *, value: tuple[Any, str] = (0.0, "float32")) -> Host:
    return np.full(numbers(shape), value[0], dtype=value[1])
