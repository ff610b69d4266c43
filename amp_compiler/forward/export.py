"""`amp.export`: the rewritten forward as a program of `torch.export`, which runs without this package."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from amp_compiler.errors import AmpError, CaptureError
from amp_compiler.forward.program import plan_captured
from amp_compiler.forward.settings import device_of, make_settings
from amp_compiler.forward.unwrap import unwrapped_model
from amp_compiler.fx.capture.export import captured_from_program, export_module
from amp_compiler.fx.capture.mixed_types import refuse_mixed_types
from amp_compiler.fx.captured import Captured, Source, tensor_getter
from amp_compiler.fx.examples import split_example
from amp_compiler.fx.graph import CAST, torch_dtype
from amp_compiler.ir.dtypes import DTypeArgument
from amp_compiler.passes.pipeline import Pipeline
from amp_compiler.passes.step.place_weights import PlaceWeights
from amp_compiler.policy.unused import warn_of_unused

EXPORT = Pipeline(  # INFERENCE without operators of this package, and without forms for its own compilation
    "EXPORT",
    ("apply_plan", "widen_math", "legalize"),
    "The plan carried out for a program of torch.export.",
)


def export(
    model: nn.Module,
    example_args: Any,
    *,
    rules: Any = "default",
    dtype: DTypeArgument = "auto",
    dynamic_shapes: Any = None,
) -> torch.export.ExportedProgram:
    """Export a module in mixed precision, for inference.

    The graph holds ATen ops alone, casts among them: it can be saved, loaded and run where this package is not
    installed, and compiled ahead of time by AOTInductor. Weights that are read in 16 bits alone are stored in 16 bits.

    Args:
        model: an `nn.Module`, in eval mode; it is not changed.
        example_args: as for `amp.explain`.
        rules: as for `amp.compile`.
        dtype: as for `amp.compile`, for the device that the model is on.
        dynamic_shapes: as for `torch.export.export`.

    Returns:
        The program, with the names and the arguments of the model.

    Raises:
        AmpError: it is no module.
        CaptureError: the model is no one graph, or gives up where it is exported again.

    Example:
        >>> import torch, amp_compiler as amp
        >>> program = amp.export(torch.nn.Linear(8, 4).eval(), (torch.ones(2, 8),), dtype="bf16")
        >>> program.module()(torch.ones(2, 8)).dtype
        torch.float32
    """
    settings = make_settings(rules, dtype, "eager", dynamic_shapes)
    model = unwrapped_model(model, "export the model inside")
    if not isinstance(model, nn.Module):
        what = f"amp.export takes an nn.Module, not a {type(model).__name__}"
        raise AmpError(what, hint="for an ONNX file there is amp.convert_onnx")
    args, kwargs = split_example(example_args)
    low = settings.low(device_of([*pytree.tree_leaves((args, kwargs)), *model.parameters()]))
    with torch.no_grad():
        captured = captured_from_program(export_module(model, args, kwargs, dynamic_shapes))
        refuse_mixed_types(captured.graph_module)
        plan = plan_captured(captured, settings, low)
        EXPORT.run(captured.graph_module, {"plan": plan, "ops": settings.ops, "differentiable": False})
        warn_of_unused(plan.unused_rules, type(model).__name__)
        rewritten = _Rewritten(model, captured, torch_dtype(low))
        try:
            return torch.export.export(rewritten, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        except Exception as cause:  # whatever torch.export raises of a graph that it has given before
            raise CaptureError(
                f"the rewritten graph of {type(model).__name__} cannot be exported: {str(cause).splitlines()[0]}",
                hint="leave dynamic_shapes out, or export the model with amp.export_onnx",
            ) from cause


class _Rewritten(nn.Module):
    """A rewritten graph with the parameters, buffers and arguments of its model."""

    def __init__(self, model: nn.Module, captured: Captured, low: torch.dtype) -> None:
        super().__init__()
        self._out, self._places = captured.out_spec, [*captured.inputs]
        stored = dict.fromkeys(_read_low(captured, low), low)
        for entry in captured.inputs:
            if entry.source is Source.USER:
                continue
            value = tensor_getter(model, captured, entry)().detach()
            owner, name = self._owner(entry.target)
            if entry.name in stored:
                value = value.to(low)
            if entry.source is Source.PARAMETER:
                owner.register_parameter(name, nn.Parameter(value, requires_grad=False))
            else:
                owner.register_buffer(name, value)
        PlaceWeights(stored, ()).run(captured.graph_module)
        self._graph = captured.graph_module
        self.__dict__["forward"] = self._forward_like(model)

    def _owner(self, path: str) -> tuple[nn.Module, str]:
        *parts, name = path.split(".")
        owner: nn.Module = self
        for part in parts:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        return owner, name

    def _forward_like(self, model: nn.Module) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves = iter(pytree.tree_leaves((args, kwargs)))
            inputs = [
                next(leaves) if entry.source is Source.USER else self._tensor(entry.target) for entry in self._places
            ]
            return pytree.tree_unflatten(list(self._graph(*inputs)), self._out)

        forward.__signature__ = inspect.signature(model.forward)  # type: ignore[attr-defined]  # names of the inputs
        return forward

    def _tensor(self, path: str) -> torch.Tensor:
        owner, name = self._owner(path)
        value: torch.Tensor = getattr(owner, name)
        return value


def _read_low(captured: Captured, low: torch.dtype) -> list[str]:
    """Placeholders of FP32 parameters of which only casts to 16 bits are read."""
    names = {entry.name for entry in captured.inputs if entry.source is Source.PARAMETER}

    def is_low(user: fx.Node) -> bool:
        return user.target is CAST and user.args[1] is low

    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    return [node.name for node in nodes if node.name in names and node.users and all(map(is_low, node.users))]
