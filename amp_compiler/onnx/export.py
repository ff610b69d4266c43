"""`amp.export_onnx`: a torch model in, an ONNX model in mixed precision out: torch exports it, and it is converted."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.utils._pytree as pytree
from onnx_ir.tensor_adapters import TorchTensor
from torch import fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

from amp_compiler.errors import CaptureError, OnnxError
from amp_compiler.fx.alias import written_operands
from amp_compiler.fx.capture.export import export_module
from amp_compiler.fx.examples import split_example
from amp_compiler.fx.graph import results_of, schema_argument
from amp_compiler.fx.sign_of_life import sign_of_life
from amp_compiler.fx.stand_in import StandIn
from amp_compiler.ir.dtypes import DType, LowArgument, low_type
from amp_compiler.ir.files import output_file
from amp_compiler.ir.graph import Pin
from amp_compiler.onnx import needs_onnx
from amp_compiler.onnx.check.batches import check_batches
from amp_compiler.onnx.convert import Conversion, convert_onnx
from amp_compiler.onnx.exporting.exporter import run_exporter
from amp_compiler.onnx.later_opset import checked_opset
from amp_compiler.onnx.lowering.scale_products import FIRST_OPSET
from amp_compiler.onnx.model.model import OnnxFile, open_model
from amp_compiler.onnx.model.save import INLINE_LIMIT
from amp_compiler.passes.pipeline import CAPTURE, ONNX_CAPTURE
from amp_compiler.policy.loader import load_rules
from amp_compiler.policy.rules import RuleSet
from amp_compiler.policy.targets import Target, load_target

logger = logging.getLogger("amp_compiler")
_EVAL = "call model.eval() before the export"
DEFAULT_OPSET = {DType.FLOAT16: 20, DType.BFLOAT16: 22}  # convolutions take bfloat16 from opset 22 on


@needs_onnx()
@sign_of_life("amp.export_onnx")
def export_onnx(
    model: nn.Module,
    example_args: Any,
    output: str | Path | None = None,
    *,
    rules: Any = "default",
    dtype: LowArgument = "fp16",
    example_kwargs: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
    keep_io_types: bool | Iterable[str] = True,
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    calibration: Iterable[Any] | None = None,
    target: Target | None = None,
) -> Conversion:
    """Export a torch model to ONNX in mixed precision.

    The model is captured by `torch.export`, torch's own exporter (`torch.onnx.export`) writes it in FP32, and that is
    converted as `convert_onnx` does it. Rules may name modules and their types. Nodes of an autocast region stay as the
    region says, and what the model casts to FP32 itself is FP32. Weights that are read in 16 bits alone are stored in
    16 bits.

    Args:
        model: an `nn.Module`, in eval mode; it is not changed.
        example_args: as for `amp.explain`.
        output: file to write, atomically; without it the model is returned. Data of 1.9 GB in FP32 and more go to
            `<output>.data`.
        rules: a preset name, a path, a dict or a `RuleSet`, on the ops of ONNX.
        dtype: `"fp16"` or `"bf16"`, or a `torch.dtype` or its name.
        example_kwargs: further keyword arguments.
        dynamic_shapes: as for `torch.export.export`.
        keep_io_types: as for `convert_onnx`.
        opset: ONNX opset; 20 for FP16, 22 for BF16 and at least 21 for `math: fp8` by default.
        input_names: names of the inputs; those of `forward`'s arguments by default.
        output_names: names of the outputs; the keys of a dict that `forward` returns, else `output`, or `output_0` and
            so on.
        calibration: batches, each as `example_args`; as for `convert_onnx`.
        target: as for `convert_onnx`.

    Returns:
        As of `convert_onnx`: the plan of the file's nodes, with the model or its path.

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
    if target is not None:
        load_target(target, low)
    if isinstance(model, StandIn):
        model = model._amp_original
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"amp.export_onnx takes an nn.Module, not a {type(model).__name__}",
            hint="for an ONNX file there is amp.convert_onnx",
        )
    if output is not None:
        output_file(output, OnnxError)
    args, kwargs = split_example(example_args)
    version = _opset(opset, low, rule_set)
    program = export_module(model, args, {**kwargs, **(example_kwargs or {})}, dynamic_shapes)
    _refuse_changes(program)
    _prepare(program)
    if any(map(_drops, program.graph.nodes)):
        logger.warning("in train mode its dropout drops in the file too, as with torch.onnx.export; %s", _EVAL)
    exported, pins = run_exporter(program, version, input_names, output_names or _output_names(program))
    if (least := exported.opset_imports[""]) > version:
        raise OnnxError(
            f"torch.onnx.export writes this model in opset {least}, and in none below",
            where=f"opset {version}",
            hint=f"give opset={least} or more, or leave it out",
        )
    names = [value.name or "" for value in exported.graph.inputs]
    with _opened(exported, pins) as opened:
        return convert_onnx(
            opened,
            output,
            rules=rule_set,
            dtype=dtype,
            calibration=None if calibration is None else _feeds(program, names, calibration, example_kwargs or {}),
            keep_io_types=keep_io_types,
            opset=version,
            target=target,
        )


def _opset(requested: int | None, low: DType, rules: RuleSet) -> int:
    """The opset to export in."""
    if requested is None:
        return max(DEFAULT_OPSET[low], FIRST_OPSET if rules.in_fp8 else 0)
    return checked_opset(requested)


def _refuse_changes(program: torch.export.ExportedProgram) -> None:
    """Refuse a model that changes its data, which are stored in a file, or returns what no file gives.

    Raises:
        CaptureError: names the data, or what is returned.
    """
    for item in results_of(program.graph):
        if item is not None and not isinstance(item, fx.Node):
            raise CaptureError(
                f"the model returns {item!r}, which is no tensor and no result of a file",
                hint="return tensors, or None in its place",
            )
    specs = program.graph_signature.input_specs
    stored = {spec.arg.name: spec.target for spec in specs if spec.kind is not InputKind.USER_INPUT}
    for node in program.graph.nodes:
        if False in (schema_argument(node, "training"), schema_argument(node, "use_input_stats")):
            continue  # a norm that only reads its statistics
        for operand in written_operands(node):
            if operand.name in stored:
                raise CaptureError(
                    f"the model changes '{stored[operand.name]}' when it runs, which a model file cannot hold",
                    where=node.name,
                    hint=_EVAL,
                )


def _drops(node: fx.Node) -> bool:
    """True for a dropout that drops elements."""
    return "dropout" in str(node.target) and bool(schema_argument(node, "train") and schema_argument(node, "p"))


def _prepare(program: torch.export.ExportedProgram) -> None:
    """Bring a program into the form that is exported, in place."""
    CAPTURE.run(program.graph_module, {})
    ONNX_CAPTURE.run(program.graph_module, {})
    for spec, item in zip(program.graph_signature.output_specs, results_of(program.graph), strict=True):
        if isinstance(spec.arg, TensorArgument) and isinstance(item, fx.Node):
            spec.arg = TensorArgument(item.name)
    program.graph.lint()
    program.graph_module.recompile()


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


@contextlib.contextmanager
def _opened(exported: ir.Model, pins: Mapping[str, Pin]) -> Iterator[OnnxFile]:
    """The exported model in one message, or where that is too large in a file that is there as long as it is used."""
    tensors = (value.const_value for value in exported.graph.initializers.values())
    if sum(tensor.nbytes for tensor in tensors if tensor is not None) <= INLINE_LIMIT:
        yield OnnxFile(ir.serde.serialize_model(exported), pins=pins)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        ir.save(exported, path, external_data="model.onnx.data")
        yield replace(open_model(path), pins=pins)


def _feeds(
    program: torch.export.ExportedProgram, names: Sequence[str], batches: Iterable[Any], kwargs: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Batches of arguments as the inputs of the file."""
    hint = "give a list of batches, each as the example arguments: [(x,), (x,)]"
    check_batches(batches, "calibration", hint, dict | str | Path | torch.Tensor)
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    for index, batch in enumerate(batches):
        args, named = split_example(batch)
        flat, spec = pytree.tree_flatten((args, {**named, **kwargs}))
        if spec != program.call_spec.in_spec:
            raise OnnxError(
                "its arguments are not those of the example",
                where=f"batch {index}",
                hint="give them in the form of example_args",
            )
        values = [one for one, known in zip(flat, specs, strict=True) if not isinstance(known.arg, ConstantArgument)]
        yield {
            name: TorchTensor(one.detach()).numpy() if isinstance(one, torch.Tensor) else np.asarray(one)
            for name, one in zip(names, values, strict=True)
        }
