"""Counts what a region of eager code casts, so that `torch.autocast` can be compared with a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from amp_compiler.fx.graph import hint
from amp_compiler.fx.torch_private.runtime import TorchDispatchMode

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CastCounter(TorchDispatchMode):
    """Counts float-to-float casts while it is active.

    It sees every `aten._to_copy` that reaches the dispatcher, whoever asked for it: autocast, the model's own
    `.float()`, or a composite op. A cast that torch takes from autocast's weight cache is not made, so not counted.

    Attributes:
        cast_bytes: memory traffic of the casts: elements times (size of source + size of target).
        casts: number of casts.

    Example:
        >>> with CastCounter() as counter:
        ...     _ = torch.zeros(8).to(torch.bfloat16)
        >>> counter.cast_bytes
        48
    """

    def __init__(self) -> None:
        super().__init__()
        self.cast_bytes = 0
        self.casts = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, and count it."""
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self._count_cast(args[0].dtype, result)
        return result

    def _count_cast(self, src: torch.dtype, result: torch.Tensor) -> None:
        if src != result.dtype and src in _FLOATS and result.dtype in _FLOATS:
            self.casts += 1
            elements = math.prod(map(hint, result.shape))  # a symbolic size counts as large as it was seen
            self.cast_bytes += elements * (src.itemsize + result.dtype.itemsize)
