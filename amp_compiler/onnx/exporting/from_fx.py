"""Between an exported program and its FX graph: ONNX's typing, stored data that do not fit, data rounded at the end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from amp_compiler.errors import CaptureError
from amp_compiler.fx.alias import written_operands
from amp_compiler.fx.graph import neutral_dtype, node_tensor, results_of, schema_argument
from amp_compiler.fx.meta import Key
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.facts import StoredNumbers
from amp_compiler.ir.graph import Pin, PrecisionGraph, ValueKind
from amp_compiler.policy.rules import OpTable

_KINDS = {
    InputKind.PARAMETER: ValueKind.PARAMETER,
    InputKind.BUFFER: ValueKind.CONSTANT,  # nothing writes it in a model file
    InputKind.CONSTANT_TENSOR: ValueKind.CONSTANT,
    InputKind.USER_INPUT: ValueKind.INPUT,
}
_STORED = frozenset(_KINDS) - {InputKind.USER_INPUT}


def onnx_typing(ops: OpTable) -> OpTable:
    """The op table for graphs that become ONNX models.

    ONNX ops do not promote: operands of one type variable have one type. Scale and bias of a normalisation have the
    type of the data, save those of `BatchNormalization`.

    Args:
        ops: the op table for FX graphs.
    """
    infos = {}
    for name, info in ops.ops.items():
        if info.promotes:
            info = replace(info, promotes=False, any=frozenset())
        if info.onnx_keep is not None:
            info = replace(info, keep=info.onnx_keep)
        infos[name] = info
    return OpTable(infos, ops.families)


def value_kinds(program: torch.export.ExportedProgram) -> dict[str, ValueKind]:
    """The kind of each placeholder by name: buffers are stored data like the rest.

    Raises:
        CaptureError: where the model changes one of them.
    """
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
                    hint="call model.eval() before the export",
                )
    return {spec.arg.name: _KINDS[spec.kind] for spec in specs if spec.kind in _KINDS}


# ---- stored data


def pin_misfits(graph: PrecisionGraph, program: torch.export.ExportedProgram, low: DType, ops: OpTable) -> None:
    """Pin to FP32 what reads stored data that the low type cannot hold. Changes `graph`.

    Those are numbers beyond its range, and numbers that would become zero; the latter do not count in a factor of a
    product or a table of rows whose largest element is a normal number of the low type. So do single numbers among the
    arguments of arithmetic.

    Args:
        graph: the neutral graph.
        program: where the data are.
        low: the 16-bit type.
        ops: the op table.
    """
    import onnx_ir as ir

    from amp_compiler.onnx.model.data import examine

    for node in list(graph.nodes.values()):
        numbers = [one for one in node.attrs.values() if isinstance(one, float)]
        lost = [one for one in numbers if 0 < abs(one) <= low.format.smallest_subnormal / 2]
        if lost and node.pin is None and ops.info(node.op).family in ("elementwise", "movement"):
            why = f"its number {lost[0]:g} would become zero in {low.short}"
            graph.nodes[node.name] = replace(node, pin=Pin("fp32", why))
    for spec in program.graph_signature.input_specs:
        value = graph.values.get(spec.arg.name)
        tensor = stored_tensor(program, spec)
        if value is None or tensor is None or value.dtype is not DType.FLOAT32 or not tensor.numel():
            continue
        held = examine(ir.tensor(tensor.detach().cpu().contiguous().numpy()), low)
        over = held.largest > low.format.max
        if not over and not held.lost:
            continue
        readers = _readers(graph, value.name, ops)
        infos = [ops.info(graph.nodes[name].op) for name in readers]
        embedded = any(info.name == "aten.embedding" for info in infos)
        sinks = [info for info in infos if info.moves not in ("shape", "place")]
        tolerant = held.largest >= low.format.smallest_normal and (embedded or all(info.factors for info in sinks))
        if not over and tolerant:
            continue
        what = (
            f"'{spec.target}' holds numbers up to {held.largest:g}, beyond {low.short}"
            if over
            else f"{held.lost} of the numbers in '{spec.target}' would become zero in {low.short}"
        )
        for name in readers:
            if graph.nodes[name].pin is None:
                graph.nodes[name] = replace(graph.nodes[name], pin=Pin("fp32", what))


def stored_numbers(program: torch.export.ExportedProgram, low: DType) -> Callable[[str], StoredNumbers | None]:
    """What says of the data behind a placeholder what is known of them; `None` where there are no floats.

    Args:
        program: where the data are.
        low: the 16-bit type.
    """
    import onnx_ir as ir

    from amp_compiler.onnx.model.data import examine

    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}

    @functools.cache
    def numbers_of(name: str) -> StoredNumbers | None:
        tensor = stored_tensor(program, specs[name]) if name in specs else None
        if tensor is None or not tensor.numel() or not tensor.is_floating_point():
            return None
        return examine(ir.tensor(tensor.detach().cpu().float().contiguous().numpy()), low)

    return numbers_of


def _readers(graph: PrecisionGraph, name: str, ops: OpTable) -> list[str]:
    """The nodes that read a value, or what a node that only moves its elements made of it."""
    readers: dict[str, None] = {}
    pending = [name]
    while pending:
        for node, _ in graph.users(pending.pop()):
            if node.name not in readers:
                readers[node.name] = None
                if ops.info(node.op).moves in ("shape", "place"):
                    pending += [out for out in node.outputs if graph.values[out].dtype is DType.FLOAT32]
    return list(readers)


def stored_tensor(program: torch.export.ExportedProgram, spec: InputSpec) -> torch.Tensor | None:
    """The data behind a placeholder; `None` for an input of the user."""
    if spec.kind not in _STORED or spec.target is None:
        return None
    if spec.target in program.state_dict:
        held: torch.Tensor = program.state_dict[spec.target]
        return held
    known = program.constants.get(spec.target)
    return known if isinstance(known, torch.Tensor) else None


def mark_stored(program: torch.export.ExportedProgram) -> None:
    """Mark the placeholders of stored data with the names of the data, for the passes of the pipeline ONNX_EXPORT."""
    names = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.kind in _STORED}
    for node in program.graph.find_nodes(op="placeholder"):
        if names.get(node.name) is not None:
            node.meta[Key.STORED] = names[node.name]


def settle(program: torch.export.ExportedProgram) -> None:
    """Let a program say what its graph now is: data rounded to the types that they have there, inputs and outputs.

    Args:
        program: its graph went through the pipeline ONNX_EXPORT. Changed in place.
    """
    _settle_inputs(program)
    for spec, item in zip(program.graph_signature.output_specs, results_of(program.graph), strict=True):
        if isinstance(spec.arg, TensorArgument) and isinstance(item, fx.Node):
            spec.arg = TensorArgument(item.name)
    program.graph.lint()
    program.graph_module.recompile()


def _settle_inputs(program: torch.export.ExportedProgram) -> None:
    """Round stored data, and enter the placeholders that came to stand beside another one of the same data."""
    by_name = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    by_data = {spec.target: spec for spec in by_name.values() if spec.kind in _STORED}
    settled: list[InputSpec] = []
    rounded: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for node in program.graph.find_nodes(op="placeholder"):
        origin = by_name.get(node.name) or by_data[node.meta[Key.STORED]]
        data, result = stored_tensor(program, origin), node_tensor(node)
        spec = origin
        if node.name not in by_name and result is not None:
            target = f"{origin.target}_{neutral_dtype(result.dtype).short}"
            spec = InputSpec(origin.kind, TensorArgument(node.name), target, origin.persistent)
        settled.append(spec)
        if data is not None and result is not None and result.dtype is not data.dtype:
            store: Any = program.state_dict if origin.target in program.state_dict else program.constants
            rounded.append((store, str(spec.target), _rounded(data, result.dtype)))
    program.graph_signature.input_specs[:] = settled
    for store, target, tensor in rounded:
        store[target] = tensor


def _rounded(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result = data.detach().to(dtype)
    return nn.Parameter(result, requires_grad=False) if isinstance(data, nn.Parameter) else result
