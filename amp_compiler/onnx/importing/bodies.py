"""Bodies of If, Loop and Scan, constants, and the function bodies that ONNX defines operators by."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import onnx
import onnx_ir as ir
import torch

from amp_compiler.errors import CaptureError
from amp_compiler.onnx.importing.check import MEND, schema_of
from amp_compiler.onnx.importing.load import tensor_of
from amp_compiler.onnx.importing.ops import control
from amp_compiler.onnx.importing.values import Entry

if TYPE_CHECKING:
    from amp_compiler.onnx.importing.build import Builder


def constant_of(attributes: dict[str, Any]) -> torch.Tensor:
    """The tensor of a Constant node.

    Raises:
        CaptureError: for strings and sparse tensors.
    """
    name, attribute = next(iter(attributes.items()))
    if name == "value":
        return tensor_of(attribute.value)
    if name in ("value_int", "value_ints"):
        return torch.tensor(attribute.value, dtype=torch.int64)
    if name in ("value_float", "value_floats"):
        return torch.tensor(attribute.value, dtype=torch.float32)
    raise CaptureError(f"a Constant with '{name}'", mend="only numbers in dense tensors are supported")


def schema_function(node: ir.Node, domain: str, opsets: dict[str, int], attributes: dict[str, Any]) -> ir.Function:
    """The function that ONNX defines an operator by.

    Raises:
        CaptureError: where it depends on input types that the model does not tell.
    """
    version = opsets.get(domain, 1)
    schema = schema_of(domain, node.op_type, version)
    if schema.has_function:
        proto = schema.function_body
        made = schema.get_function_with_opset_version(schema.since_version)
        proto = onnx.FunctionProto.FromString(made) if isinstance(made, bytes) and made else proto
    else:
        types = [_type_of(value) for value in node.inputs]
        plain = ir.to_proto(node)
        del plain.attribute[:]
        plain.attribute.extend(ir.to_proto(one) for one in attributes.values())
        made = schema.get_context_dependent_function_with_opset_version(
            schema.since_version, plain.SerializeToString(), types
        )
        proto = onnx.FunctionProto.FromString(made)
    produced = {name for one in proto.node for name in one.output} | set(proto.input)
    for name in proto.output:  # bodies leave out what the node does not ask for
        if name not in produced:
            proto.node.append(onnx.helper.make_node("Constant", [], [name], value_float=0.0))
    for imported in opsets:
        if imported not in {one.domain for one in proto.opset_import}:
            proto.opset_import.append(onnx.helper.make_opsetid(imported, opsets[imported]))
    return ir.from_proto(proto)  # type: ignore[no-any-return]


def _type_of(value: ir.Value | None) -> bytes:
    if value is None:
        return onnx.TypeProto().SerializeToString()  # type: ignore[no-any-return]
    if value.type is None:
        raise CaptureError(
            f"the type of '{value.name}' is not known", mend="run onnx.shape_inference.infer_shapes on the model first"
        )
    return ir.to_proto(value).type.SerializeToString()  # type: ignore[no-any-return]


def add_control(
    builder: Builder, node: ir.Node, attributes: dict[str, Any], opsets: dict[str, int], given: dict[str, Any]
) -> None:
    """Convert an If, Loop or Scan."""
    inputs = [None if value is None else builder.find(value) for value in node.inputs]
    if node.op_type == "If":
        _add_if(builder, node, attributes, opsets, given, inputs)
    elif node.op_type == "Loop":
        _add_loop(builder, node, attributes, opsets, given, inputs)
    else:
        _add_scan(builder, node, attributes, opsets, given, inputs)


def _body(
    builder: Builder, node: ir.Node, attribute: Any, opsets: dict[str, int], given: dict[str, Any], hosts: int = 0
) -> tuple[Any, tuple[Any, ...]]:
    """A body as a module of its own: its node in the outer graph, and the outer values that it needs."""
    graph = attribute.as_graph()
    inner = type(builder)(builder.model, builder.trainable, builder)
    for place, value in enumerate(graph.inputs):
        inner.add_input(value, host=place < hosts)
    inner.add_initializers(graph)
    inner.add_nodes(graph, opsets, given)
    results = []
    for place, value in enumerate(graph.outputs):
        entry = inner.find(value)
        results.append(entry.node if place == 0 and hosts and entry.host else inner.tensor(entry))
        if place == 0 and hosts and entry.constant is not None and entry.is_few:
            results[0] = inner.numbers(entry)
    module = inner.finish(tuple(results), "OnnxBody")
    target = builder.names.give(f"{node.name or node.op_type}_{attribute.name}")
    builder.attributes[target] = module
    builder.onnx_names.update({f"{target}.{name}": one for name, one in module.meta["onnx_names"].items()})
    captured = tuple(entry.node for entry in inner.captured)
    return builder.graph.get_attr(target), captured


def _results(builder: Builder, node: ir.Node, whole: Any) -> None:
    for place, value in enumerate(node.outputs):
        if value.name:
            part = builder.call(operator.getitem, (whole, place), {}, value.name)
            builder.bind(value, Entry(value.name, part))


def _add_if(builder: Builder, node: ir.Node, attributes: dict[str, Any], opsets: Any, given: Any, inputs: Any) -> None:
    condition = inputs[0]
    if condition.constant is not None:
        graph = attributes["then_branch" if bool(condition.constant) else "else_branch"].as_graph()
        builder.add_initializers(graph)
        builder.add_nodes(graph, opsets, given)
        for inner, outer in zip(graph.outputs, node.outputs, strict=True):
            builder.bind(outer, builder.find(inner))
        return
    chosen, captured = _body(builder, node, attributes["then_branch"], opsets, given)
    other, others = _body(builder, node, attributes["else_branch"], opsets, given)
    args = (condition.node, chosen, other, captured, others)
    _results(builder, node, builder.call(control.run_if, args, {}, node.name or "if"))


def _add_loop(
    builder: Builder, node: ir.Node, attributes: dict[str, Any], opsets: Any, given: Any, inputs: Any
) -> None:
    trips = None if inputs[0] is None else builder.numbers(inputs[0])
    start = inputs[1] if len(inputs) > 1 else None
    condition = None if start is None else start.node if start.constant is None else builder.numbers(start)
    states = tuple(builder.tensor(entry) for entry in inputs[2:])
    body, captured = _body(builder, node, attributes["body"], opsets, given, hosts=2)
    scans = len(attributes["body"].as_graph().outputs) - 1 - len(states)
    args = (trips, condition, body, states, captured, scans, builder.like)
    _results(builder, node, builder.call(control.run_loop, args, {}, node.name or "loop"))


def _add_scan(
    builder: Builder, node: ir.Node, attributes: dict[str, Any], opsets: Any, given: Any, inputs: Any
) -> None:
    if opsets.get("", 1) < 9:
        raise CaptureError("Scan before opset 9 has another meaning", mend=MEND)
    count = attributes["num_scan_inputs"].as_int()
    tensors = [builder.tensor(entry) for entry in inputs]
    states, scanned = tuple(tensors[: len(tensors) - count]), tuple(tensors[len(tensors) - count :])
    body, captured = _body(builder, node, attributes["body"], opsets, given)
    stacked = len(node.outputs) - len(states)

    def listed(name: str, length: int) -> tuple[int, ...]:
        return tuple(attributes[name].as_ints()) if name in attributes else (0,) * length

    args = (
        body, states, scanned, captured, listed("scan_input_axes", count), listed("scan_input_directions", count),
        listed("scan_output_axes", stacked), listed("scan_output_directions", stacked),
    )  # fmt: skip
    _results(builder, node, builder.call(control.run_scan, args, {}, node.name or "scan"))
