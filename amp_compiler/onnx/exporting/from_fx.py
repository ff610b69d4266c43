"""From a rewritten FX graph to what torch's ONNX exporter takes: ONNX's typing, 16-bit data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from amp_compiler.errors import CaptureError
from amp_compiler.fx.alias import written_operands
from amp_compiler.fx.graph import CAST, node_tensor, schema_argument, torch_dtype
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Pin, PrecisionGraph, ValueKind
from amp_compiler.policy.rules import OpTable

_KINDS = {
    InputKind.PARAMETER: ValueKind.PARAMETER,
    InputKind.BUFFER: ValueKind.CONSTANT,  # nothing writes it in a model file
    InputKind.CONSTANT_TENSOR: ValueKind.CONSTANT,
    InputKind.USER_INPUT: ValueKind.INPUT,
}


def onnx_typing(ops: OpTable) -> OpTable:
    """The op table for graphs that become ONNX models.

    ONNX ops do not promote: operands of one type variable have one type. Scale and bias of a normalisation have the
    type of the data, save those of `BatchNormalization`.

    Args:
        ops: the op table for FX graphs.
    """
    made = {}
    for name, info in ops.ops.items():
        if info.promotes:
            info = replace(info, promotes=False, any=frozenset())
        if info.onnx_keep is not None:
            info = replace(info, keep=info.onnx_keep)
        made[name] = info
    return OpTable(made, ops.families)


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
                    mend="call model.eval() before the export",
                )
    return {spec.arg.name: _KINDS[spec.kind] for spec in specs if spec.kind in _KINDS}


# ---- stored data


def pin_misfits(graph: PrecisionGraph, program: torch.export.ExportedProgram, low: DType, ops: OpTable) -> None:
    """Pin to FP32 what reads stored data that the low type cannot hold. Changes `graph`.

    Those are numbers beyond its range, and numbers that would become zero; the latter do not count in a factor of a
    product or a table of rows whose largest element is a normal number of the low type.

    Args:
        graph: the neutral graph.
        program: where the data are.
        low: the 16-bit type.
        ops: the op table.
    """
    import onnx_ir as ir

    from amp_compiler.onnx.model.data import examine

    for spec in program.graph_signature.input_specs:
        value = graph.values.get(spec.arg.name)
        tensor = stored_tensor(program, spec)
        if value is None or tensor is None or value.dtype is not DType.FLOAT32 or not tensor.numel():
            continue
        held = examine(ir.tensor(tensor.detach().cpu().contiguous().numpy()), low)
        if not held.over and not held.lost:
            continue
        readers = _readers(graph, value.name, ops)
        infos = [ops.info(graph.nodes[name].op) for name in readers]
        embedded = any(info.name == "aten.embedding" for info in infos)
        sinks = [info for info in infos if info.moves not in ("shape", "place")]
        tolerant = held.largest >= low.format.smallest_normal and (embedded or all(info.factors for info in sinks))
        if not held.over and tolerant:
            continue
        what = (
            f"'{spec.target}' holds numbers up to {held.largest:g}, beyond {low.short}"
            if held.over
            else f"{held.lost} of the numbers in '{spec.target}' would become zero in {low.short}"
        )
        for name in readers:
            if graph.nodes[name].pin is None:
                graph.nodes[name] = replace(graph.nodes[name], pin=Pin("fp32", what))


def _readers(graph: PrecisionGraph, name: str, ops: OpTable) -> list[str]:
    """The nodes that read a value, or what a node that only moves its elements made of it."""
    found: dict[str, None] = {}
    pending = [name]
    while pending:
        for node, _ in graph.users(pending.pop()):
            if node.name not in found:
                found[node.name] = None
                if ops.info(node.op).moves in ("shape", "place"):
                    pending += [out for out in node.outputs if graph.values[out].dtype is DType.FLOAT32]
    return list(found)


def stored_tensor(program: torch.export.ExportedProgram, spec: InputSpec) -> torch.Tensor | None:
    """The data behind a placeholder; `None` for an input of the user."""
    if spec.kind not in _KINDS or spec.kind is InputKind.USER_INPUT or spec.target is None:
        return None
    if spec.target in program.state_dict:
        held: torch.Tensor = program.state_dict[spec.target]
        return held
    found = program.constants.get(spec.target)
    return found if isinstance(found, torch.Tensor) else None


def fold_stored_casts(program: torch.export.ExportedProgram) -> bool:
    """Do the casts of stored data on the data themselves, in place.

    Before: `w16 = to(w, float16)` beside the FP32 parameter `w`. After: the parameter holds FP16; where something reads
    `w` in FP32 too, `w` stays and `w_fp16` stands beside it.

    Returns:
        Whether there were any.
    """
    signature, graph = program.graph_signature, program.graph
    by_name = {spec.arg.name: spec for spec in signature.input_specs}
    changed = False
    for source in graph.find_nodes(op="placeholder"):
        spec = by_name[source.name]
        data = stored_tensor(program, spec)
        casts = [user for user in source.users if user.target is CAST and user.meta.get("amp_cast")]
        if data is None or not casts:
            continue
        changed = True
        groups: dict[torch.dtype, list[fx.Node]] = {}
        for cast in casts:
            groups.setdefault(cast.args[1], []).append(cast)  # type: ignore[arg-type]
        alone = len(groups) == 1 and len(casts) == len(source.users)
        for dtype, nodes in groups.items():
            rounded = data.detach().to(dtype)
            if isinstance(data, torch.nn.Parameter):
                rounded = torch.nn.Parameter(rounded, requires_grad=False)
            place = source if alone else _twin(program, source, spec, dtype)
            target = spec.target if alone else f"{spec.target}_{_short(dtype)}"
            store = program.state_dict if spec.target in program.state_dict else program.constants
            store[target] = rounded  # type: ignore[index]
            place.meta["val"] = nodes[0].meta["val"]
            for node in nodes:
                node.replace_all_uses_with(place)
                graph.erase_node(node)
    if changed:
        program.graph_module.recompile()
    return changed


def _short(dtype: torch.dtype) -> str:
    return "fp16" if dtype is torch.float16 else "bf16"


def _twin(program: torch.export.ExportedProgram, source: fx.Node, spec: InputSpec, dtype: torch.dtype) -> fx.Node:
    """A further placeholder beside one that keeps FP32."""
    with program.graph.inserting_after(source):
        made: fx.Node = program.graph.placeholder(f"{source.name}_{_short(dtype)}")
    made.meta = dict(source.meta)
    specs = program.graph_signature.input_specs
    copy = InputSpec(spec.kind, TensorArgument(made.name), f"{spec.target}_{_short(dtype)}", spec.persistent)
    specs.insert(specs.index(spec) + 1, copy)
    return made


# ---- inputs and outputs


def open_ends(program: torch.export.ExportedProgram, low: DType) -> None:
    """Give inputs that are read in the low type alone, and outputs that are made in it, that type. In place."""
    wanted, graph = torch_dtype(low), program.graph
    output = graph.output_node()
    results = [
        item.args[0] if isinstance(item, fx.Node) and _is_cast(item) and _type(item.args[0]) is wanted else item
        for item in output.args[0]  # type: ignore[union-attr]
    ]
    output.args = (tuple(results),)
    graph.eliminate_dead_code()
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.USER_INPUT:
            continue
        (source,) = [node for node in graph.find_nodes(op="placeholder") if node.name == spec.arg.name]
        users = list(source.users)
        if users and all(_is_cast(user) and user.args[1] is wanted for user in users):
            source.meta["val"] = users[0].meta["val"]
            for user in users:
                user.replace_all_uses_with(source)
                graph.erase_node(user)


def _is_cast(node: fx.Node) -> bool:
    return node.target is CAST and bool(node.meta.get("amp_cast"))


def _type(node: Any) -> torch.dtype | None:
    made = node_tensor(node) if isinstance(node, fx.Node) else None
    return made.dtype if made is not None else None


def settle(program: torch.export.ExportedProgram) -> None:
    """Let the program's signature name the outputs that its graph now has."""
    for spec, item in zip(program.graph_signature.output_specs, program.graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
        if isinstance(spec.arg, TensorArgument) and isinstance(item, fx.Node):
            spec.arg = TensorArgument(item.name)
    program.graph.lint()
    program.graph_module.recompile()
