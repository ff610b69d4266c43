"""Values of a converted graph that are no tensors: sizes, axes and counts as NumPy arrays.

ONNX computes shapes with the same operators as data. A converted graph keeps what comes from `Shape` as a NumPy array
on the host: of a number type where the sizes are known, of objects where `torch.export` gives symbolic sizes. So
`Reshape` gets plain integers, and a graph can be exported with static and with dynamic shapes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

DTYPES: dict[int, torch.dtype] = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16, 6: torch.int32, 7: torch.int64,
    9: torch.bool, 10: torch.float16, 11: torch.float64, 12: torch.uint32, 13: torch.uint64, 14: torch.complex64,
    15: torch.complex128, 16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2, 20: torch.float8_e5m2fnuz,
}  # fmt: skip
"""ONNX's element types, by number."""
AutoPad = Literal["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID", ""]
"""How a convolution or pooling pads."""
_TYPE_ATTRIBUTES = ("to", "dtype", "output_datatype")
_NUMPY = {
    torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64, torch.int32: np.int32,
    torch.int16: np.int16, torch.int8: np.int8, torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip
Host = np.ndarray


def names_known_type(attributes: dict[str, Any], inputs: list[bool], outputs: list[bool]) -> bool:
    """Whether the element type that a node's attributes name is one that torch has: `when=` of `op`."""
    return all(attributes[name] in DTYPES for name in _TYPE_ATTRIBUTES if attributes.get(name) is not None)


def as_host(value: Any) -> Host:
    """A number, a symbolic size or an array as an array; symbolic sizes are kept as objects."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, np.generic | bool | int | float):
        return np.asarray(value)
    array = np.empty((), dtype=object)
    array[()] = value
    return array


def constant(values: Sequence[Any], shape: Sequence[int], dtype: str, anchor: Any = None) -> Host:
    """The array that a graph holds as flat `values`, a `shape` and NumPy's name of its type.

    `anchor` is any input of the graph: it keeps the call a node where FX traces a saved module anew.
    """
    return np.array(list(values), dtype=dtype).reshape(list(shape))


def host_dtype(dtype: torch.dtype) -> Any:
    """NumPy's type for a torch type, or `None` where host values are not kept in it."""
    return _NUMPY.get(dtype)


def numbers(value: Any) -> list[Any]:
    """A host value as a flat list of Python numbers (or symbolic sizes)."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1).tolist()
    if isinstance(value, Tensor):
        return value.reshape(-1).tolist()
    return list(value) if isinstance(value, list | tuple) else [value]


def number(value: Any) -> Any:
    """A host value of one element as a Python number (or symbolic size)."""
    return numbers(value)[0]


def to_host(tensor: Tensor) -> Host:
    """A tensor's values as a host value: what a shape that depends on data needs."""
    values = tensor.reshape(-1).tolist()
    if all(isinstance(one, bool | int | float) for one in values):
        return np.array(values, dtype=host_dtype(tensor.dtype) or object).reshape(tuple(tensor.shape))
    array = np.empty(len(values), dtype=object)
    for place, one in enumerate(values):
        array[place] = one
    return array.reshape(tuple(tensor.shape))


def to_tensor(value: Host, like: Tensor | None = None) -> Tensor:
    """A host value as a tensor on the device of `like`."""
    device = like.device if isinstance(like, Tensor) else None
    if value.dtype != object:
        return torch.tensor(value.tolist(), dtype=torch.from_numpy(np.empty(0, value.dtype)).dtype, device=device)
    items = numbers(value)
    if any(isinstance(one, bool | torch.SymBool) for one in items):
        dtype = torch.bool
    else:
        dtype = torch.float32 if any(isinstance(one, float | torch.SymFloat) for one in items) else torch.int64
    results = [torch.scalar_tensor(one, dtype=dtype, device=device) for one in items]
    return (
        torch.stack(results).reshape(value.shape) if results else torch.empty(value.shape, dtype=dtype, device=device)
    )


def axes_of(axes: Any, rank: int) -> list[int]:
    """Axes as numbers from 0 on."""
    return [int(axis) % max(rank, 1) for axis in numbers(axes)]


def slices(inputs: Sequence[Any], starts: Any, ends: Any, axes: Any) -> Iterator[tuple[int, Any, Any, int]]:
    """Axis, start, end and step of each cut of a Slice; the attributes, before opset 10, go before the inputs."""
    pairs = itertools.zip_longest((starts, ends, axes, None), inputs)
    first, last, over, step = (held if attribute is None else attribute for attribute, held in pairs)
    begin = numbers(first)
    where = range(len(begin)) if over is None else numbers(over)
    return zip(where, begin, numbers(last), [1] * len(begin) if step is None else numbers(step), strict=True)


def broadcastable(vector: Tensor, rank: int, axis: int = 1) -> Tensor:
    """A vector shaped to broadcast along one axis of a tensor of that rank."""
    return vector.reshape([-1 if place == axis else 1 for place in range(rank)])
