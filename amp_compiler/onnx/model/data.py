"""Stored data of an ONNX model: what they hold, and how they are rounded."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from amp_compiler.errors import OnnxError
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import StoredNumbers
from amp_compiler.onnx.model.types import ir_type

_CHUNK = 1 << 20  # elements looked at in one go
_FILTERS = 1 << 15  # elements up to which it is looked for differences
_BALANCE = 1 / 32  # that of `x[1:] - 0.97 * x[:-1]` is 1 / 66
_EAGER = 1 << 12  # elements up to which a tensor is rounded at once, rather than when it is written


def tensor_of(value: ir.Value) -> ir.TensorProtocol | None:
    """The data behind an initializer, a `Constant` or a `ConstantOfShape`; `None` where there are none."""
    if value.const_value is not None and value.producer() is None:
        return value.const_value
    node = value.producer()
    if node is None:
        return None
    for name in ("value", "value_float", "value_floats"):
        if name in node.attributes:
            held = node.attributes[name].value
            return held if name == "value" else ir.tensor(np.asarray(held, np.float32))
    return None


def array_of(tensor: ir.TensorProtocol) -> np.ndarray:
    """The elements; external data are mapped as long as the array, or a view of it, lives.

    Raises:
        OnnxError: external data cannot be read.
    """
    try:
        array = np.asarray(tensor.numpy())
    except (OSError, ValueError) as cause:
        raise OnnxError(
            f"the data of '{tensor.name}' cannot be read: {cause}",
            hint="keep the data files beside the model, and give the path of the model",
        ) from cause
    if isinstance(tensor, ir.ExternalTensor):
        tensor.raw = None  # which `release` would close beneath the array: it is closed with its last reader
        tensor.release()
    return array


def examine(tensor: ir.TensorProtocol, low: DType) -> StoredNumbers:
    """What is known of stored data, and what rounding them to a low type would come to, looked at in chunks.

    Args:
        tensor: real numbers or whole ones.
        low: FP16 or BF16. Ties go to even, so a magnitude of half the smallest subnormal becomes zero.
    """
    fmt = low.format
    normal, tiny = np.float32(fmt.smallest_normal), np.float32(fmt.smallest_subnormal / 2)
    array = array_of(tensor)
    number = float(np.asarray(array, np.float64).reshape(())) if array.size == 1 else None
    lowest, highest, lost, subnormal, infinite = math.inf, -math.inf, 0, False, False
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        stored = flat[start : start + _CHUNK]
        chunk = stored if stored.dtype == np.float32 else stored.astype(np.float64)
        size = np.abs(chunk)
        finite = chunk
        if not math.isfinite(float(size.max())):
            infinite = True
            finite = chunk[np.isfinite(size)]
        if finite.size:
            lowest, highest = min(lowest, float(finite.min())), max(highest, float(finite.max()))
        below = size < normal
        if below.any():
            small = size[below]
            subnormal = subnormal or bool(small.any())
            lost += int(np.count_nonzero(small[small <= tiny]))
    if lowest > highest:  # there is no finite element
        lowest = highest = 0.0
    mixed = lowest < 0 < highest and not infinite and array.size <= _FILTERS
    return StoredNumbers(
        lowest, highest, number, lost, subnormal, infinite, _balanced(array) if mixed else (False, False)
    )


def _balanced(array: np.ndarray) -> tuple[bool, bool]:
    """Whether all rows, and whether all columns, sum to less than chance makes of many numbers, and so the whole."""
    filters = np.atleast_2d(np.asarray(array, np.float64))

    def is_small(axes: tuple[int, ...] | int | None) -> bool:
        return bool((np.abs(filters.sum(axes)) <= _BALANCE * np.sqrt(np.square(filters).sum(axes))).all())

    whole = is_small(None)
    return whole and is_small(tuple(range(1, filters.ndim))), whole and is_small(-2)


def convert(tensor: ir.TensorProtocol, dtype: DType, *, name: str, floor: float | None = None) -> ir.TensorProtocol:
    """The data in another type, rounded to nearest, ties to even; a large tensor is rounded when it is written.

    Args:
        tensor: FP32, FP16 or BF16 data.
        dtype: the type wanted.
        name: name of the new tensor.
        floor: finite elements below it become it (the number that an attention mask adds); none do without it.
    """

    def make() -> ir.Tensor:
        array = array_of(tensor)
        if floor is not None:
            array = np.where(np.isfinite(array) & (array < floor), np.float32(floor), array)
        with np.errstate(over="ignore", invalid="ignore"):
            result = array.astype(ir_type(dtype).numpy())
        return ir.Tensor(result, dtype=ir_type(dtype), name=name, doc_string=tensor.doc_string)

    shape = ir.Shape(tuple(tensor.shape.numpy()))
    if math.prod(shape.numpy()) <= _EAGER:
        return make()
    return ir.LazyTensor(make, ir_type(dtype), shape, name=name, doc_string=tensor.doc_string)
