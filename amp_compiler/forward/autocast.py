"""What `torch.autocast` would cast in a captured forward, counted without running it on data."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from amp_compiler.fx.captured import Captured, Source
from amp_compiler.fx.graph import hint, torch_dtype
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.runtime import TorchDispatchMode
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.plan import AutocastTotals

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


def autocast_totals(captured: Captured, low: DType, device: str, frozen: Collection[str] = ()) -> AutocastTotals | None:
    """Run a forward on fake tensors under `torch.autocast`, and count its casts.

    A weight that is trained is cast once, as autocast keeps it. What the model's own regions leave out of autocast is
    left out here too.

    Args:
        captured: in normal form, as it was planned.
        low: the 16-bit type.
        device: type of the device that it was planned for.
        frozen: names of parameters that require no gradient, whose casts autocast does not keep.

    Returns:
        `None` where the tensors are on another device, or an op has no result without data.
    """
    values = [node.meta.get("val") for node in captured.graph_module.graph.find_nodes(op="placeholder")]
    tensors = [value for value in values if isinstance(value, FakeTensor)]
    if not tensors or any(value.device.type != device for value in tensors):
        return None
    entries = {entry.name: entry for entry in captured.inputs if entry.source is Source.PARAMETER}
    trained = {name for name, entry in entries.items() if entry.target not in frozen}
    with tensors[0].fake_mode, contextlib.suppress(RuntimeError, AssertionError, TypeError):
        inputs = [_leaf(node, trained) for node in captured.graph_module.graph.find_nodes(op="placeholder")]
        under = _UnderAutocast(captured.graph_module, device, low)
        with torch.autocast(device, dtype=torch_dtype(low)), CastCounter() as counter:
            under.run(*inputs, enable_io_processing=False)
        return AutocastTotals(counter.casts, counter.cast_bytes, under.low)
    return None


def _leaf(node: fx.Node, trained: set[str]) -> Any:
    """What stands for an input: autocast keeps the casts of leaves that require a gradient."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(node.name in trained and value.is_floating_point())


class _UnderAutocast(fx.Interpreter):
    """Runs the nodes, and counts those that make 16-bit tensors."""

    def __init__(self, graph_module: fx.GraphModule, device: str, low: DType) -> None:
        super().__init__(graph_module)
        self.device, self.dtype, self.low = device, torch_dtype(low), 0

    def run_node(self, n: fx.Node) -> Any:
        """Outside of autocast where the model says so."""
        pinned = n.op == "call_function" and Key.PIN in n.meta
        with torch.autocast(self.device, enabled=False) if pinned else contextlib.nullcontext():
            result = super().run_node(n)
        first = result[0] if isinstance(result, (tuple, list)) and result else result
        is_tensor_op = n.op == "call_function" and n.target is not operator.getitem and isinstance(first, torch.Tensor)
        self.low += is_tensor_op and first.dtype is self.dtype
        return result
