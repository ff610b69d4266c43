"""Reads an ONNX model for `onnx_to_fx`, names its values and tells weights from constants."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from amp_compiler.errors import AmpError, OnnxError
from amp_compiler.onnx.importing.ops.registry import find_op

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"  # torch's exporter writes what an initializer was
_LARGEST_WEIGHT = 1e30  # masks hold values such as -3.4e38, weights do not
_STATISTICS = {"BatchNormalization": (3, 4), "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), "OneHot": (2,)}


def load_model(model: Any) -> ir.Model:
    """An ONNX model as `onnx_ir.Model`.

    Args:
        model: a path, an `onnx.ModelProto` or an `onnx_ir.Model`.

    Raises:
        OnnxError: where the file cannot be read.
        AmpError: for anything else.
    """
    if isinstance(model, ir.Model):
        return model
    if isinstance(model, onnx.ModelProto):
        return ir.from_proto(model)
    if not isinstance(model, str | Path):
        raise AmpError(
            f"onnx_to_fx cannot read a {type(model).__name__}", mend="pass a path, a ModelProto or an ir.Model"
        )
    if not Path(model).is_file():
        raise OnnxError("there is no such file", where=str(model), mend="name an ONNX file that exists")
    try:
        return ir.load(str(model))
    except Exception as cause:  # protobuf and onnx_ir raise errors of their own
        raise OnnxError(f"it is no ONNX model: {cause}", where=str(model), mend="check it with onnx.checker") from cause


def tensor_of(value: ir.TensorProtocol) -> torch.Tensor:
    """An ONNX tensor as a torch tensor of its own memory.

    Raises:
        OnnxError: for a type that torch does not have, such as strings and 4-bit numbers.
    """
    names = {"FLOAT8E4M3FN": "float8_e4m3fn", "FLOAT8E5M2": "float8_e5m2", "BFLOAT16": "bfloat16"}
    name = value.dtype.name
    try:
        array = value.numpy()
        if name in names:  # NumPy has no such type: read the bits
            bits = array.view("uint16" if name == "BFLOAT16" else "uint8")
            return torch.from_numpy(bits.copy()).view(getattr(torch, names[name]))
        return torch.from_numpy(array.copy())
    except TypeError as cause:
        raise OnnxError(f"torch has no tensors of type {name}", where=str(value.name)) from cause


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


class Names:
    """Valid, unique names made from ONNX's, in the order of asking.

    Example:
        >>> names = Names()
        >>> names.give("encoder.0.weight", dotted=True), names.give("a/b:0"), names.give("a/b:0")
        ('encoder.0.weight', 'a_b_0', 'a_b_0_1')
    """

    def __init__(self, taken: tuple[str, ...] = ()) -> None:
        self._taken = set(taken)
        self._prefixes: set[str] = set()

    def give(self, name: str, *, dotted: bool = False) -> str:
        """A name for `name`; `dotted` keeps its dots, as qualified names of modules have."""
        parts = [_valid(part, first=not place) for place, part in enumerate(name.split("."))] if dotted else []
        wanted = ".".join(parts) if parts and all(parts) else _valid(name.replace(".", "_"), first=True)
        wanted = wanted.replace(".", "_") if self._clashes(wanted) else wanted
        stem, number = wanted, 0
        while self._clashes(wanted):
            number += 1
            wanted = f"{stem}_{number}"
        self._taken.add(wanted)
        pieces = wanted.split(".")
        self._prefixes.update(".".join(pieces[:end]) for end in range(1, len(pieces)))
        return wanted

    def _clashes(self, name: str) -> bool:
        pieces = name.split(".")
        above = {".".join(pieces[:end]) for end in range(1, len(pieces))}
        reserved = pieces[0] in _OF_GRAPH_MODULE or any(piece in _OF_MODULE for piece in pieces)
        return name in self._taken or name in self._prefixes or bool(above & self._taken) or reserved


_OF_MODULE = frozenset(dir(torch.nn.Module()))
_OF_GRAPH_MODULE = frozenset(dir(torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())))


def _valid(name: str, first: bool) -> str:
    text = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_") or ("value" if first else "")
    text = f"v_{text}" if first and text[:1].isdigit() else text
    return f"{text}_" if keyword.iskeyword(text) else text
