"""What keeps a graph of operators from being replayed as a CUDA graph, found by reading it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

_CONSTANTS = frozenset({torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default})


def graph_obstacle(graph: fx.Graph) -> str:
    """Why an ATen graph cannot be replayed: a shape is symbolic, or a value is computed on the host.

    A host value would be recorded once and stay as it was. Scalars that are constants may.

    Args:
        graph: with `meta["val"]` on its nodes.

    Returns:
        The reason, empty where there is none.
    """
    home: torch.device | None = None
    for node in graph.nodes:
        for value in _values(node.meta.get("val")):
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return f"'{node.name}' is a number that is known only when the step runs"
            if any(isinstance(size, torch.SymInt) for size in value.shape):
                return f"the shape of '{node.name}' is dynamic"
            home = value.device if home is None or home.type == "cpu" else home
    for node in graph.nodes:
        for value in _values(node.meta.get("val")):
            if isinstance(value, Tensor) and value.device != home and not _is_constant(node, value):
                return f"'{node.name}' is on {value.device}, other values are on {home}"
    return ""


def _values(meta: Any) -> Iterator[Any]:
    if isinstance(meta, (list, tuple)):
        for item in meta:
            yield from _values(item)
    elif isinstance(meta, (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield meta


def _is_constant(node: fx.Node, value: Tensor) -> bool:
    moved = any(user.target is torch.ops.aten._to_copy.default for user in node.users)
    return node.target in _CONSTANTS and value.numel() == 1 and not moved
