"""Torch's ONNX exporter: what it is given and how its model is tidied up and named."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence

import onnx_ir as ir
import torch

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.model.edit import unique

ORIGIN = "amp_compiler.origin"
_TRACE, _NAME = "pkg.torch.onnx.stack_trace", "\nnode of the program: "


def run_exporter(
    program: torch.export.ExportedProgram, opset: int, inputs: Sequence[str] | None, outputs: Sequence[str]
) -> ir.Model:
    """Export a program, whose casts are written out already.

    Args:
        program: what to export.
        opset: ONNX opset.
        inputs: names of the inputs; those of the program without.
        outputs: names of the outputs.

    Raises:
        OnnxError: the exporter cannot export it, or the names do not fit.
    """
    for node in program.graph.nodes:  # its name is changed when the exporter traces the program anew, and this is kept
        node.meta["stack_trace"] = f"{node.meta.get('stack_trace', '')}{_NAME}{node.name}"
    with quiet_exporter():
        try:
            # The exporter's optimizer merges a batch norm into a convolution without heed of their types.
            exported = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False, opset_version=opset)
            if exported is not None:
                _tidy(exported.model)
                _note_origins(exported.model)
        except Exception as cause:  # the exporter raises its own errors, and whatever its translations raise
            lines = [line for line in str(cause).splitlines() if line.strip()]
            raise OnnxError(
                f"torch.onnx.export cannot export it: {_innermost_message(cause, lines)}",
                hint="export the FP32 model with torch.onnx.export to see whether it can be exported at all",
            ) from cause
        if exported is None:
            raise OnnxError("torch.onnx.export gave no model", hint="use a torch with the dynamo exporter")
    _name_ends(exported.model, inputs, outputs)
    return exported.model


def _note_origins(model: ir.Model) -> None:
    """Say of each node which one of the program it comes from (`meta[ORIGIN]`)."""
    for node in model.graph.all_nodes():
        trace, mark, name = node.metadata_props.get(_TRACE, "").rpartition(_NAME)
        if mark:
            node.meta[ORIGIN] = name
            node.metadata_props[_TRACE] = trace


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
    wanted = {value: name for values, names in ends for value, name in zip(values, names, strict=True)}
    everything = [*model.graph.inputs, *model.graph.initializers.values()]
    everything += [value for node in model.graph.all_nodes() for value in node.outputs]
    taken = {value.name or "" for value in everything} | set(wanted.values())
    for value in everything:
        if value not in wanted and value.name in wanted.values():
            value.name = unique(f"{value.name}_inner", taken)
    for value in wanted:  # first out of each other's way
        value.name = unique(f"{value.name}_end", taken)
    for value, name in wanted.items():
        value.name = name


def _innermost_message(cause: BaseException, lines: list[str]) -> str:
    """The innermost message: those around it only list the steps that were tried."""
    inner = cause
    while inner.__cause__ is not None:
        inner = inner.__cause__
    first = next((line for line in str(inner).splitlines() if line.strip()), lines[0] if lines else "")
    return f"{type(inner).__name__}: {first}"


def _tidy(model: ir.Model) -> None:
    """Compute what depends on constants alone, and remove what nobody reads; no type changes."""
    import onnx_ir.passes.common as common
    from onnxscript import optimizer

    common.InlinePass()(model)
    optimizer.fold_constants(model)
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
