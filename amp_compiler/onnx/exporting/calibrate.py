"""Calibration of a torch model that is exported: the largest magnitude of every value over a user's batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.export.graph_signature import InputKind

from amp_compiler.errors import OnnxError, first_line
from amp_compiler.fx.examples import split_example
from amp_compiler.onnx.exporting.from_fx import stored_tensor

_MASK = -1e30  # what lies below stands for minus infinity


def measure(
    program: torch.export.ExportedProgram, batches: Iterable[Any], kwargs: Mapping[str, Any]
) -> dict[str, float]:
    """Run the FP32 graph of a program over batches.

    Args:
        program: its graph is run as it is.
        batches: each as the example arguments of the export.
        kwargs: keyword arguments of every batch.

    Returns:
        By name of the value the largest finite magnitude, masks left out.

    Raises:
        OnnxError: there is no batch, or one does not run.
    """
    meter: _Meter | None = None
    for index, batch in enumerate(_listed(batches)):
        where = f"batch {index}"
        args, named = split_example(batch)
        inputs = _inputs(program, args, {**named, **kwargs}, where)
        meter = meter or _Meter(program.graph_module)
        try:
            with torch.no_grad():
                meter.run(*inputs)
        except Exception as cause:
            raise OnnxError(
                f"the model does not run on it: {first_line(cause)}",
                where=where,
                hint="give batches of the example's shapes, or say with dynamic_shapes= which dimensions differ",
            ) from cause
    if meter is None:
        raise OnnxError("there is no batch in it", where="calibration", hint="give at least one batch of arguments")
    return meter.ranges


def _listed(batches: Iterable[Any]) -> Iterable[Any]:
    wrong = isinstance(batches, dict | str | torch.Tensor) or not isinstance(batches, Iterable)
    if wrong:
        raise OnnxError(
            f"it is a {type(batches).__name__}",
            where="calibration",
            hint="give a list of batches, each as the example arguments: [(x,), (x,)]",
        )
    return batches


def _inputs(
    program: torch.export.ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any], where: str
) -> list[Any]:
    """What the placeholders of a program hold for a batch: its data, and the user's arguments in their order."""
    flat, spec = pytree.tree_flatten((args, dict(kwargs)))
    if spec != program.call_spec.in_spec:
        raise OnnxError(
            "its arguments are not those of the example", where=where, hint="give them in the form of example_args"
        )
    user_args = iter(flat)
    return [
        next(user_args) if one.kind is InputKind.USER_INPUT else stored_tensor(program, one)
        for one in program.graph_signature.input_specs
    ]


class _Meter(fx.Interpreter):
    """Runs a graph and notes the largest finite magnitude of each floating-point value."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.ranges: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run one node, and look at what it makes."""
        result = super().run_node(n)
        if isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel() and n.op != "output":
            seen = result.detach().double()
            seen = seen[torch.isfinite(seen) & (seen > _MASK)]
            largest = float(seen.abs().max()) if seen.numel() else 0.0
            self.ranges[n.name] = max(self.ranges.get(n.name, 0.0), largest)
        return result
