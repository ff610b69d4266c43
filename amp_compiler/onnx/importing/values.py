"""What `onnx_to_fx` knows of each ONNX value while it builds the graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from amp_compiler.onnx.importing.ops import values

FEW = 4096
"""Constants up to this size may stand in the graph as plain numbers."""


@dataclass
class Entry:
    """One value.

    Args:
        node: the FX node that makes it; `None` for a constant.
        host: it is a NumPy array of plain numbers, not a tensor.
        constant: its tensor where that is known now.
        shape: its sizes where these are known now: of parameters and constants.
        small: it is a shape of a shape: what it sizes is plain numbers too.
        numbers_node: a constant's node as plain numbers.
        tensor_node: a constant's, or a host value's, node as a tensor.
        name: the ONNX name of the value.
    """

    name: str
    node: fx.Node | None = None
    host: bool = False
    constant: torch.Tensor | None = None
    shape: tuple[int, ...] | None = None
    small: bool = False
    numbers_node: fx.Node | None = None
    tensor_node: fx.Node | None = None

    @property
    def is_few(self) -> bool:
        """A constant that may stand in the graph as plain numbers."""
        held = self.constant
        return held is not None and held.numel() <= FEW and values.host_dtype(held.dtype) is not None


def attribute_value(attribute: Any, tensor_of: Any) -> Any:
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
