"""Norms that stand in parts are kept apart from the casts in front of them."""

from __future__ import annotations

import onnx_ir as ir

from amp_compiler.onnx.lowering.lowered import Lowered
from amp_compiler.onnx.model.edit import names_of, new_node, unique

_ONE_TYPE = 17  # the first opset whose LayerNormalization ties the types of data and scale


def guard_norms(lowered: Lowered) -> None:
    """Keep ONNX Runtime from fusing a norm with the cast in front of it. Changes the model, after a plan was applied.

    Where nothing but a written-out layer norm reads an upcast value, its fusion takes the 16-bit value itself beside
    the FP32 scale. The `LayerNormalization` of opset 17 and later has one type for both, and the model does not load
    (seen in ONNX Runtime 1.31). A `Reshape` to the shape that the value has, which moves no data, keeps the cast apart.
    """
    if lowered.model.opset("") < _ONE_TYPE:
        return
    norms = ([lowered.nodes[name] for name in names] for names in lowered.graph.compounds)
    heads = [head for nodes in norms if (head := _cast_head(nodes)) is not None]
    if not heads:
        return
    taken = set.union(*names_of(lowered.model.graphs))
    values, nodes = set(taken), taken
    for mean, difference in heads:
        source = difference.inputs[0]
        if source is None:
            continue
        name = f"{source.name}_whole"
        sizes = f"{name}_shape"
        shape = new_node("Shape", [source], unique(sizes, values), unique(sizes, nodes))
        whole = new_node("Reshape", [source, shape.outputs[0]], unique(name, values), unique(name, nodes))
        for node in (mean, difference):
            node.replace_input_with(0, whole.outputs[0])
        producer = source.producer()
        if producer is not None and producer.graph is mean.graph:
            producer.append((shape, whole))
        else:
            mean.prepend((shape, whole))


def _cast_head(nodes: list[ir.Node]) -> tuple[ir.Node, ir.Node] | None:
    """The mean and the difference of a layer norm with a bias, where they alone read the result of a cast."""
    difference = next((node for node in nodes if node.op_type == "Sub"), None)
    if difference is None or nodes[-1].op_type != "Add":
        return None
    value, centre = difference.inputs
    mean = centre.producer() if centre is not None else None
    maker = value.producer() if value is not None else None
    if value is None or maker is None or maker.op_type != "Cast" or mean is None or mean.graph is not difference.graph:
        return None
    readers = {node for node, _ in value.uses()}
    return (mean, difference) if readers == {mean, difference} and not value.is_graph_output() else None
