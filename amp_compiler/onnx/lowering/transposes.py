"""Transposes that would crash ONNX Runtime stand in a form that it loads."""

from __future__ import annotations

import onnx_ir as ir

from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.model.edit import graph_of, names_of, new_node, take_place, unique
from amp_compiler.planner.typing import LOW

_AXES_ARE_READ = 13  # the first opset in which the axes of `Unsqueeze` and `Squeeze` are an input
_PRODUCTS = ("MatMul", "FusedMatMul")
_PASSED = ("Cast", "Identity")  # what ONNX Runtime looks through between a transpose and a product


def guard_transposes(lowered: Lowered, plan: PrecisionPlan) -> bool:
    """Keep ONNX Runtime from ending the process at a transpose. Changes the model, after a plan was applied.

    Where a cast stands between a product and a `Transpose` that moves the first axis behind the others of a batch, as
    behind an LSTM with `batch_first`, its fusion leaves values without a type, and the next optimization crashes (seen
    in ONNX Runtime 1.31 and 1.32, on a CPU, which has no 16-bit product and so puts in the casts by itself). With one
    more axis of size 1 in front the fusion leaves the transpose alone. Neither `Unsqueeze` nor `Squeeze` moves data.

    Returns:
        Whether there was such a transpose.
    """
    turned = [node for node in lowered.nodes.values() if _is_turned(node)]
    if not turned:
        return False
    low = {lowered.nodes[name] for name, label in plan.labels.items() if label == LOW and name in lowered.nodes}
    transposes = [node for node in turned if _reaches_product(node, low)]
    values, nodes = names_of(lowered.model.graphs)
    for node in transposes:
        _raise_rank(node, lowered.model.opset(""), values, nodes)
    return bool(transposes)


def _is_turned(node: ir.Node) -> bool:
    """Whether it is a transpose that moves the first axis behind the others, but perhaps for the last."""
    if node.op_type != "Transpose" or "perm" not in node.attributes:
        return False
    perm = list(node.attributes["perm"].as_ints())
    rest = [*range(1, len(perm))]
    return len(perm) > 2 and perm in ([*rest, 0], [*rest[:-1], 0, rest[-1]])


def _reaches_product(node: ir.Node, low: set[ir.Node]) -> bool:
    pending = [(node.outputs[0], False)]
    while pending:
        value, cast = pending.pop()
        for reader, _ in value.uses():
            if reader.op_type in _PRODUCTS and (cast or reader in low):
                return True
            if reader.op_type in _PASSED:
                pending.append((reader.outputs[0], cast or reader.op_type == "Cast"))
    return False


def _raise_rank(node: ir.Node, opset: int, values: set[str], nodes: set[str]) -> None:
    """Let a transpose have one more axis in front."""
    graph, result = graph_of(node), node.outputs[0]
    axes: list[ir.Value] = []
    if opset >= _AXES_ARE_READ:
        name = unique(f"{result.name}_axes", values)
        axes = [ir.Value(name=name, const_value=ir.tensor([0], ir.DataType.INT64, name=name))]
        graph.register_initializer(axes[0])

    def move(op: str, source: ir.Value, value: str) -> ir.Node:
        attributes, name = [] if axes else [ir.AttrInt64s("axes", [0])], unique(value, values)
        return new_node(op, [source, *axes], name, unique(name, nodes), attributes)

    before = move("Unsqueeze", node.inputs[0], f"{result.name}_unsqueezed")  # type: ignore[arg-type]
    after = move("Squeeze", result, f"{result.name}_squeezed")
    node.replace_input_with(0, before.outputs[0])
    node.attributes["perm"] = ir.AttrInt64s("perm", [0, *(axis + 1 for axis in node.attributes["perm"].as_ints())])
    graph.insert_before(node, before)
    take_place(result, after.outputs[0], after, after.outputs[0].name or "")
    result.shape = None
    graph.insert_after(node, after)
