"""`amp.export_onnx`: a torch model in, an ONNX model in mixed precision out, by torch's own exporter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
import torch.utils._pytree as pytree
from google.protobuf.message import EncodeError
from torch import nn

from amp_compiler.errors import CaptureError, OnnxError
from amp_compiler.fx.capture.export import export_module
from amp_compiler.fx.examples import split_example
from amp_compiler.fx.lower import lower_graph
from amp_compiler.fx.stand_in import StandIn
from amp_compiler.ir.dtypes import DType, LowArgument, low_type
from amp_compiler.ir.files import output_file
from amp_compiler.ir.graph import Pin
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx import needs_onnx
from amp_compiler.onnx.exporting.calibrate import measure
from amp_compiler.onnx.exporting.exporter import run_exporter
from amp_compiler.onnx.exporting.from_fx import (
    mark_stored,
    onnx_typing,
    pin_misfits,
    settle,
    stored_numbers,
    value_kinds,
)
from amp_compiler.onnx.exporting.misfits import pinned_nodes, unfit_nodes
from amp_compiler.onnx.lowering.lower import FILE
from amp_compiler.onnx.lowering.scale_products import fp8_nodes
from amp_compiler.onnx.model.model import OnnxModel
from amp_compiler.onnx.model.save import save
from amp_compiler.passes.onnx_plan.pin_calibrated import PinCalibrated
from amp_compiler.passes.pipeline import CAPTURE, ONNX_CAPTURE, ONNX_EXPORT
from amp_compiler.passes.plan.make_plan import make_plan
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import Context, RuleSet
from amp_compiler.policy.targets import Target, load_target
from amp_compiler.policy.unused import warn_of_unused

DEFAULT_OPSET = {DType.FLOAT16: 20, DType.BFLOAT16: 22}  # convolutions take bfloat16 from opset 22 on
_ROUNDS = 4  # exports until every op has types that ONNX admits


@dataclass(frozen=True)
class Export:
    """What `export_onnx` did.

    Args:
        plan: every node's verdict and every cast, by the names of the torch graph.
        model: the model; `None` where it was written to a file.
        path: the file that was written; `None` where there is none.
    """

    plan: PrecisionPlan
    model: onnx.ModelProto | None = None
    path: Path | None = None


@needs_onnx()
def export_onnx(
    model: nn.Module,
    example_args: Any,
    output: str | Path | None = None,
    *,
    rules: Any = "default",
    dtype: LowArgument = "fp16",
    example_kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    keep_io_types: bool = True,
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    calibration: Iterable[Any] | None = None,
    target: Target | None = None,
) -> Export:
    """Export a torch model to ONNX in mixed precision.

    The model is captured and planned as `amp.compile` does it, with module names, autocast regions and explicit
    casts, and the rewritten graph goes through torch's own exporter (`torch.onnx.export`), casts and all. Weights
    that are read in 16 bits alone are stored in 16 bits. As an ONNX file runs anywhere, the plan is that for the device
    `onnx`, as with `convert_onnx`.

    Args:
        model: an `nn.Module`, in eval mode; it is not changed.
        example_args: as for `amp.explain`.
        output: file to write, atomically; without it the model is returned. Data of 1.9 GB and more go to
            `<output>.data`.
        rules: a preset name, a path, a dict or a `RuleSet`.
        dtype: `"fp16"` or `"bf16"`, or a `torch.dtype` or its name.
        example_kwargs: further keyword arguments.
        dynamic_shapes: as for `torch.export.export`.
        keep_io_types: inputs and outputs keep their types. With `False`, outputs have the type in which they are made,
            and inputs that are read in the low type alone have it.
        opset: ONNX opset; 20 for FP16 and 22 for BF16 by default.
        input_names: names of the inputs; those of `forward`'s arguments by default.
        output_names: names of the outputs; the keys of a dict that `forward` returns, else `output`, or `output_0` and
            so on.
        calibration: batches, each as `example_args`: the FP32 model runs over them, and the magnitudes that its values
            reach decide too, as with `convert_onnx`.
        target: as for `convert_onnx`.

    Returns:
        The plan, with the model or its path.

    Raises:
        AmpError: there is no such target, or it does not know the type.
        CaptureError: the model cannot be captured as one graph, or changes its buffers.
        OnnxError: torch's exporter cannot export it, or the file cannot be written.
        RuleError: the rules cannot be loaded.

    Example:
        ```python
        done = amp.export_onnx(model.eval(), (x,), "m.fp16.onnx", rules="default", dtype="fp16")
        print(done.plan)
        ```
    """
    low, rule_set = low_type(dtype), load_rules(rules)
    providers = None if target is None else load_target(target, low)
    if isinstance(model, StandIn):
        model = model.original
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"amp.export_onnx takes an nn.Module, not a {type(model).__name__}",
            hint="for an ONNX file there is amp.convert_onnx",
        )
    if not isinstance(keep_io_types, bool):
        raise OnnxError(
            "it takes no names here", where="keep_io_types", hint="give True or False; amp.convert_onnx takes names"
        )
    path = None if output is None else Path(output)
    if output is not None:
        output_file(output, OnnxError)
    args, kwargs = split_example(example_args)
    version = DEFAULT_OPSET[low] if opset is None else opset
    if not isinstance(version, int) or not 1 <= version <= onnx.defs.onnx_opset_version():
        raise OnnxError(
            f"{version!r} is no opset", hint=f"give a number up to {onnx.defs.onnx_opset_version()}, or leave it out"
        )
    pins: dict[str, str] = {}
    ranges: dict[str, float] | None = None
    for _ in range(_ROUNDS):
        program = export_module(model, args, {**kwargs, **(example_kwargs or {})}, dynamic_shapes)
        _prepare(program, low, version)
        if calibration is not None and ranges is None:
            ranges = measure(program, calibration, example_kwargs or {})
        plan = _rewrite(program, rule_set, low, keep_io_types, pins, ranges or {})
        exported = run_exporter(program, version, input_names, output_names or _output_names(program))
        misfits = {
            **pinned_nodes(exported, low, rule_set, plan, ranges or {}),
            **unfit_nodes(exported, low, plan, providers),
        }
        unfit = {name: why for name, why in misfits.items() if name not in pins}
        if not unfit:
            break
        pins.update(unfit)
    warn_of_unused(plan.unused_rules, type(model).__name__)
    return _deliver(plan, exported, path)


def _prepare(program: torch.export.ExportedProgram, low: DType, opset: int) -> None:
    """Bring a program into the form that is planned, in place."""
    CAPTURE.run(program.graph_module, {})
    ONNX_CAPTURE.run(program.graph_module, {"low": low, "opset": opset})


def _rewrite(
    program: torch.export.ExportedProgram,
    rules: RuleSet,
    low: DType,
    keep_io_types: bool,
    pins: dict[str, str],
    ranges: Mapping[str, float],
) -> PrecisionPlan:
    """Plan a program and carry the plan out on it, in place."""
    kinds = value_kinds(program)
    graph_module = program.graph_module
    rules = replace(rules, ops=onnx_typing(rules.ops))
    graph = lower_graph(graph_module, kinds)
    graph.device, graph.execution = "onnx", FILE
    graph.stored_numbers = stored_numbers(program, low)
    pin_misfits(graph, program, low, rules.ops)
    known = {name: largest for name, largest in ranges.items() if name in graph.values}
    graph = PinCalibrated()(Draft(graph, rules, Context(low, graph.device), ranges=known)).subject.graph
    for name, why in pins.items():
        graph.nodes[name] = replace(graph.nodes[name], pin=Pin("fp32", why))
    plan = make_plan(graph, rules, low, ranges=known)
    for node, _ in fp8_nodes(plan)[:1]:
        raise OnnxError(
            "'math: fp8' is for files that are converted, and no export writes it",
            where=f"node '{node.name}' ({node.op})",
            hint="write an FP32 file by torch.onnx.export, then call amp.convert_onnx with rules and calibration=",
        )
    mark_stored(program)
    pipeline = ONNX_EXPORT.skip("open_ends") if keep_io_types else ONNX_EXPORT
    pipeline.run(graph_module, {"plan": plan, "low": low, "ops": rules.ops, "differentiable": False, "device": "onnx"})
    settle(program)
    return plan


def _output_names(program: torch.export.ExportedProgram) -> list[str]:
    """Names of the tensors that the program returns, after their places in what `forward` returns."""
    results = program.graph.output_node().args[0]
    whole = pytree.tree_unflatten(list(range(len(results))), program.call_spec.out_spec)  # type: ignore[arg-type]
    names = [f"output_{index}" for index in range(len(results))] if len(results) > 1 else ["output"]  # type: ignore[arg-type]
    try:
        paths = [path for path, _ in pytree.tree_flatten_with_path(whole)[0]]
    except ValueError:  # a container that does not tell its keys
        paths = []
    for index, path in enumerate(paths):
        keys = [key.key if isinstance(key, pytree.MappingKey) else None for key in path]
        if keys and isinstance(keys[0], str):
            rest = [str(getattr(key, "idx", getattr(key, "key", ""))) for key in path[1:]]
            names[index] = "_".join([keys[0], *rest])
    tensors = [isinstance(item, torch.fx.Node) for item in results]  # type: ignore[union-attr]
    chosen = [name for name, tensor in zip(names, tensors, strict=True) if tensor]
    taken = {spec.arg.name for spec in program.graph_signature.input_specs}
    return [f"{name}_out" if name in taken else name for name in chosen]


def _deliver(plan: PrecisionPlan, exported: ir.Model, target: Path | None) -> Export:
    if target is None:
        proto = ir.serde.serialize_model(exported)
        _check(proto)
        return Export(plan, proto)
    described = set(exported.graph.initializers.values())
    save(OnnxModel(onnx.ModelProto(), exported, described=described), target, _check_at)
    return Export(plan, path=target)


def _check_at(proto: onnx.ModelProto, folder: Path) -> None:
    """Check a model about to be written; one with data in a file of their own is read from there."""
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in proto.graph.initializer):
        (path,) = [path for path in folder.iterdir() if not path.name.endswith(".data")]
        _check(path)
    else:
        _check(proto)


def _check(model: onnx.ModelProto | Path) -> None:
    try:
        onnx.checker.check_model(model if isinstance(model, onnx.ModelProto) else str(model), full_check=True)
    except (ValueError, EncodeError) as cause:  # a message beyond 2 GiB
        raise OnnxError(f"the exported model cannot be checked: {cause}", hint="name a file to write") from cause
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as cause:
        raise OnnxError(
            f"the exported model is not valid: {str(cause).strip().splitlines()[0]}",
            hint="give a later opset, or a rule that keeps the node in FP32",
        ) from cause
