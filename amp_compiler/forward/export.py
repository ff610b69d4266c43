"""`amp.export`: the rewritten forward as a program of `torch.export`, which runs without this package."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from amp_compiler.errors import AmpError, CaptureError, first_line
from amp_compiler.forward.program import plan_captured
from amp_compiler.forward.settings import device_of, make_settings
from amp_compiler.forward.unwrap import unwrapped_model
from amp_compiler.fx.capture.export import captured_from_program, export_module
from amp_compiler.fx.capture.mixed_types import refuse_mixed_types
from amp_compiler.fx.captured import Captured, Source
from amp_compiler.fx.examples import split_example
from amp_compiler.fx.graph import CAST, results_of, torch_dtype
from amp_compiler.fx.sign_of_life import sign_of_life
from amp_compiler.ir.dtypes import DTypeArgument
from amp_compiler.ops.fp8 import fp8_product
from amp_compiler.passes.pipeline import Pipeline
from amp_compiler.passes.step.place_operands import open_call
from amp_compiler.passes.step.place_weights import PlaceWeights
from amp_compiler.policy.unused import warn_of_unused

EXPORT = Pipeline(  # INFERENCE without operators of this package, and without forms for its own compilation
    "EXPORT",
    ("apply_plan", "scale_products", "widen_math", "legalize"),
    "The plan carried out for a program of torch.export.",
)


@sign_of_life("amp.export")
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
        CaptureError: the model is not one graph, or its rewritten one none that torch.export has.

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
        program = export_module(model, args, kwargs, dynamic_shapes)
        captured = captured_from_program(program)
        refuse_mixed_types(captured.graph_module)
        plan = plan_captured(captured, settings, low)
        EXPORT.run(captured.graph_module, {"plan": plan, "ops": settings.ops, "differentiable": False})
        for node in captured.graph_module.graph.find_nodes(op="call_function", target=fp8_product):
            open_call(node, fp8_product, "")
        warn_of_unused(plan.unused_rules, type(model).__name__)
        stored = dict.fromkeys(_read_low(captured, torch_dtype(low)), torch_dtype(low))
        PlaceWeights(stored, ()).run(captured.graph_module)
    state = dict(program.state_dict)
    for entry in captured.inputs:
        if entry.source is Source.PARAMETER:
            value = state[entry.target].detach()
            value = value.to(stored.get(entry.name, value.dtype))
            state[entry.target] = nn.Parameter(value, requires_grad=False)
    signature = copy.deepcopy(program.graph_signature)
    for spec, node in zip(signature.output_specs, results_of(captured.graph_module.graph), strict=True):
        if isinstance(node, fx.Node):  # which may be a cast of what it was
            spec.arg = dataclasses.replace(spec.arg, name=node.name)
    try:
        return torch.export.ExportedProgram(
            captured.graph_module,
            captured.graph_module.graph,
            signature,
            state,
            program.range_constraints,
            program.module_call_graph,
            program.example_inputs,
            program.constants,
            verifiers=program.verifiers,
        )
    except Exception as cause:  # whatever torch's verifier says of a graph
        raise CaptureError(
            f"the rewritten graph of {type(model).__name__} is no program of torch.export: {first_line(cause)}",
            hint="export the model with amp.export_onnx",
        ) from cause


def _read_low(captured: Captured, low: torch.dtype) -> list[str]:
    """Placeholders of FP32 parameters of which only casts to 16 bits are read."""
    names = {entry.name for entry in captured.inputs if entry.source is Source.PARAMETER}

    def is_low(user: fx.Node) -> bool:
        return user.target is CAST and user.args[1] is low

    nodes = captured.graph_module.graph.find_nodes(op="placeholder")
    return [node.name for node in nodes if node.name in names and node.users and all(map(is_low, node.users))]
