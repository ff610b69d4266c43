"""Torch's ONNX exporter: what it is given and how its model is tidied up and named."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common
import torch
from torch import fx

from amp_compiler.errors import OnnxError
from amp_compiler.fx.graph import CAST, node_tensor
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.tracing import forget_real_tensors
from amp_compiler.ir.graph import Pin
from amp_compiler.onnx.model.validate import refused

_TRACE, _NAME = "pkg.torch.onnx.stack_trace", "\nnode of the program: "
_HELD = torch.ops.aten.alias_copy.default  # which no model calls


def run_exporter(
    program: torch.export.ExportedProgram, opset: int, inputs: Sequence[str] | None, outputs: Sequence[str]
) -> tuple[ir.Model, dict[str, Pin]]:
    """Export a program.

    Args:
        program: what to export, in normal form. Changed in place.
        opset: ONNX opset.
        inputs: names of the inputs; those of the program without.
        outputs: names of the outputs.

    Returns:
        The model, and by name of its nodes what the text of the torch model demands of them.

    Raises:
        OnnxError: the exporter cannot export it, or the names do not fit.
    """
    demands, pins = _demands(program.graph), dict[str, Pin]()
    for node in program.graph.nodes:  # its name is changed when the exporter traces the program anew, and this is kept
        node.meta["stack_trace"] = f"{node.meta.get('stack_trace', '')}{_NAME}{node.name}"
    with quiet_exporter():
        try:
            # With the exporter's optimizer stored data would not keep their names.
            exported = torch.onnx.export(
                program, dynamo=True, verbose=False, optimize=False, opset_version=opset,
                custom_translation_table={_HELD: _hold},
            )  # fmt: skip
            if exported is not None:
                _tidy(exported.model)
                pins = _pins(exported.model, demands)
        except Exception as cause:  # the exporter raises its own errors, and whatever its translations raise
            hint = "export the FP32 model with torch.onnx.export to see whether it can be exported at all"
            raise refused(cause, "", "torch.onnx.export cannot export it", hint) from cause
        if exported is None:
            raise OnnxError("torch.onnx.export gave no model", hint="use a torch with the dynamo exporter")
    for one in (program, exported.exported_program):  # which the exporter makes of it
        if one is not None:
            forget_real_tensors(one.graph)
    _name_ends(exported.model, inputs, outputs)
    return exported.model, pins


def _demands(graph: fx.Graph) -> dict[str, Pin]:
    """The pins of a graph by name of the node; casts of FP32 to FP32 are marked, which the exporter would drop."""
    demands = {}
    for node in graph.nodes:
        pin = node.meta.get(Key.PIN)
        if pin is not None:
            demands[node.name] = Pin("fp32", pin.reason) if pin.precision == "cast" else pin
    for cast in graph.find_nodes(op="call_function", target=CAST):
        source = node_tensor(cast.args[0]) if isinstance(cast.args[0], fx.Node) else None
        if source is not None and source.dtype is cast.args[1] is torch.float32:
            cast.target, cast.args, cast.kwargs = _HELD, cast.args[:1], {}
    return demands


def _hold(x: Any) -> Any:
    """The translation of a cast that is to stay: nothing that tidies up knows a `Max` of one operand."""
    from onnxscript import opset18

    return opset18.Max(x)


def _pins(model: ir.Model, demands: dict[str, Pin]) -> dict[str, Pin]:
    """What is demanded of each node; casts that were held become casts, and the notes for it are taken away."""
    pins = {}
    for node in model.graph.all_nodes():
        trace, mark, origin = node.metadata_props.get(_TRACE, "").rpartition(_NAME)
        if not mark:
            continue
        node.metadata_props[_TRACE] = trace
        if node.op_type == "Max" and len(node.inputs) == 1:
            node.op_type = "Cast"
            node.attributes["to"] = ir.AttrInt64("to", ir.DataType.FLOAT.value)
            pins[node.name or ""] = Pin("cast", "the model's own cast")
        elif origin in demands:
            pins[node.name or ""] = demands[origin]
    return pins


def _name_ends(model: ir.Model, inputs: Sequence[str] | None, outputs: Sequence[str]) -> None:
    """Name inputs and outputs; a value within that has such a name gets another one."""
    ends = [
        (model.graph.inputs, inputs or [value.name or "" for value in model.graph.inputs]),
        (model.graph.outputs, outputs),
    ]
    for values, names in ends:
        if len(values) != len(names) or len(set(names)) < len(names):
            raise OnnxError(
                f"the names {', '.join(map(str, names))} are not one for each of {len(values)} values",
                hint="give as many different names as the model has inputs, or tensors that it returns",
            )
    common.OutputFixPass()(model)  # an input, or one value twice, is given out as a copy
    for values, names in ((model.graph.inputs, ends[0][1]), (model.graph.outputs, outputs)):
        for value, name in zip(values, names, strict=True):
            value.name = name
    common.NameFixPass()(model)  # inputs and outputs come first: a value within that has such a name gets another one


def _tidy(model: ir.Model) -> None:
    """Compute what depends on constants alone, and remove what nobody reads; no type changes."""
    from onnxscript import optimizer

    common.InlinePass()(model)
    optimizer.fold_constants(model, onnx_shape_inference=True)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)
    common.RemoveUnusedOpsetsPass()(model)


@contextlib.contextmanager
def quiet_exporter() -> Iterator[None]:
    """No progress, no warnings: what matters is raised."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    quiet = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
