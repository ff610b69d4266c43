"""ONNX's stored data as torch's: tensors, attributes, constants, and which initializers are trained."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch

from amp_compiler.errors import OnnxCaptureError, OnnxError
from amp_compiler.onnx.importing.ops.registry import find_op
from amp_compiler.onnx.model.data import array_of

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"  # torch's exporter writes what an initializer was
_LARGEST_WEIGHT = 1e30  # masks hold values such as -3.4e38, weights do not
_STATISTICS = {"BatchNormalization": (3, 4), "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), "OneHot": (2,)}
_NOT_IN_NUMPY = {"FLOAT8E4M3FN": "float8_e4m3fn", "FLOAT8E5M2": "float8_e5m2", "BFLOAT16": "bfloat16"}


def tensor_of(value: ir.TensorProtocol) -> torch.Tensor:
    """An ONNX tensor as a torch tensor of its own memory.

    Raises:
        OnnxError: for a type that torch does not have, such as strings and 4-bit numbers; or the file that the data
            lie in cannot be read.
    """
    name = value.dtype.name
    try:
        array = array_of(value)
        if name in _NOT_IN_NUMPY:  # read the bits
            bits = array.view("uint16" if name == "BFLOAT16" else "uint8")
            return torch.from_numpy(bits.copy()).view(getattr(torch, _NOT_IN_NUMPY[name]))
        return torch.from_numpy(array.copy())
    except TypeError as cause:
        raise OnnxError(
            f"torch has no tensors of type {name}", where=str(value.name), hint="store it in a type that torch has"
        ) from cause


def attribute_value(attribute: ir.Attr) -> Any:
    """An ONNX attribute as a literal of an FX graph; a tensor of one element as (number, type)."""
    kind = attribute.type.name
    if kind == "TENSOR":
        tensor = tensor_of(attribute.value)
        return tensor.reshape(-1)[0].item(), str(tensor.dtype).removeprefix("torch.")
    if kind == "STRING":
        return attribute.as_string()
    if kind in ("INTS", "FLOATS", "STRINGS"):
        return tuple(attribute.value)
    return attribute.value


def constant_of(attributes: dict[str, ir.Attr]) -> torch.Tensor:
    """The tensor of a `Constant` node.

    Args:
        attributes: of the node: one, which names the form of its data.

    Raises:
        OnnxCaptureError: for strings and sparse tensors, and where there is no data.
    """
    name, attribute = next(iter(attributes.items()), ("", None))
    if attribute is not None and name == "value":
        return tensor_of(attribute.value)
    if attribute is not None and name in ("value_int", "value_ints"):
        return torch.tensor(attribute.value, dtype=torch.int64)
    if attribute is not None and name in ("value_float", "value_floats"):
        return torch.tensor(attribute.value, dtype=torch.float32)
    raise OnnxCaptureError(
        f"a Constant with '{name}' is not supported", hint="give it numbers in a dense tensor: `value`"
    )


def is_weight(value: ir.Value, tensor: torch.Tensor) -> bool:
    """Whether an initializer is trained.

    A floating-point initializer is, unless torch's exporter says that it was a buffer or a constant, it is a single
    number, it holds values that no weight has (infinities, the low end of a mask), or all its uses are inputs that are
    no weights (statistics of BatchNormalization, scales of Resize, bounds of Clip).
    """
    if not tensor.is_floating_point():
        return False
    kind = value.metadata_props.get(_KIND)
    if kind is not None:
        return "PARAMETER" in kind
    if tensor.dim() == 0 or not bool((tensor.abs() <= _LARGEST_WEIGHT).all()):
        return False
    uses = list(value.uses())
    return not uses or not all(_no_weight(use) for use in uses)


def _no_weight(use: Any) -> bool:
    node, place = (use.node, use.idx) if hasattr(use, "node") else use
    if node.op_type in _STATISTICS:
        return place in _STATISTICS[node.op_type]
    entry = find_op(node.domain, node.op_type)
    if entry is not None and place in entry.host:
        return True
    return node.op_type in ("Clip", "Pad") and place > 0
