"""If, Loop and Scan, whose bodies become graph modules; and the function bodies that ONNX defines operators by."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from torch import fx

from amp_compiler.errors import OnnxCaptureError
from amp_compiler.onnx.importing.check import HINT, schema_of
from amp_compiler.onnx.importing.ops import control
from amp_compiler.onnx.importing.scope import Entry, Scope

CONTROL = ("If", "Loop", "Scan")
Convert = Callable[[Scope, ir.Graph], None]


@dataclass(frozen=True)
class ControlFlow:
    """An If, Loop or Scan about to become a call.

    Args:
        scope: where it stands.
        node: the node.
        attributes: of the node, references to those of a function resolved.
        convert: converts the nodes of a body in a scope.
        opset: version of ONNX's own domain.
    """

    scope: Scope
    node: ir.Node
    attributes: Mapping[str, ir.Attr]
    convert: Convert
    opset: int

    def add(self) -> None:
        """Convert it.

        Raises:
            OnnxCaptureError: for a form without a conversion.
        """
        {"If": self._if, "Loop": self._loop, "Scan": self._scan}[self.node.op_type]()

    def _if(self) -> None:
        (condition,) = (self._operand(value) for value in self.node.inputs)
        if condition.constant is not None:
            graph = self._graph("then_branch" if bool(condition.constant) else "else_branch")
            self.scope.add_initializers(graph)
            self.convert(self.scope, graph)
            for inner, outer in zip(graph.outputs, self.node.outputs, strict=True):
                self.scope.bind(outer, self.scope.entry(inner))
            return
        chosen, captured = self._body("then_branch")
        other, others = self._body("else_branch")
        self._call(control.run_if, condition.node, chosen, other, captured, others)

    def _loop(self) -> None:
        trips, start = (self._optional(place) for place in range(2))
        count = None if trips is None else self.scope.numbers(trips)
        condition = None if start is None else start.node if start.constant is None else self.scope.numbers(start)
        states = tuple(self.scope.tensor(self._operand(value)) for value in self.node.inputs[2:])
        body, captured = self._body("body", hosts=2)
        scans = len(self._graph("body").outputs) - 1 - len(states)
        self._call(control.run_loop, count, condition, body, states, captured, scans, self.scope.like)

    def _scan(self) -> None:
        if self.opset < 9:
            raise OnnxCaptureError("Scan before opset 9 has another meaning, which is not supported", hint=HINT)
        count = self._attribute("num_scan_inputs").as_int()
        tensors = [self.scope.tensor(self._operand(value)) for value in self.node.inputs]
        states, scanned = tuple(tensors[: len(tensors) - count]), tuple(tensors[len(tensors) - count :])
        body, captured = self._body("body")
        stacked = len(self.node.outputs) - len(states)
        self._call(
            control.run_scan, body, states, scanned, captured, self._integers("scan_input_axes", count),
            self._integers("scan_input_directions", count), self._integers("scan_output_axes", stacked),
            self._integers("scan_output_directions", stacked),
        )  # fmt: skip

    # ---- parts

    def _operand(self, value: ir.Value | None) -> Entry:
        entry = self.scope.find(value)
        if entry is None:
            raise OnnxCaptureError("an operand is missing", hint="check the model with onnx.checker")
        return entry

    def _optional(self, place: int) -> Entry | None:
        return self.scope.find(self.node.inputs[place]) if place < len(self.node.inputs) else None

    def _attribute(self, name: str) -> ir.Attr:
        if name not in self.attributes:
            raise OnnxCaptureError(f"the attribute '{name}' is missing", hint="check the model with onnx.checker")
        return self.attributes[name]

    def _graph(self, name: str) -> ir.Graph:
        return self._attribute(name).as_graph()

    def _integers(self, name: str, length: int) -> tuple[int, ...]:
        return tuple(self.attributes[name].as_ints()) if name in self.attributes else (0,) * length

    def _body(self, name: str, hosts: int = 0) -> tuple[fx.Node, tuple[fx.Node | None, ...]]:
        """A body as a module of its own: its node in the outer graph, and the outer values that it needs.

        Args:
            name: the attribute.
            hosts: how many of its first inputs are plain numbers; then its first result is, too, where it can be.
        """
        graph = self._graph(name)
        inner = Scope(self.scope.trainable, self.scope)
        for place, value in enumerate(graph.inputs):
            inner.add_input(value, host=place < hosts)
        inner.add_initializers(graph)
        self.convert(inner, graph)
        results = []
        for place, value in enumerate(graph.outputs):
            entry = inner.entry(value)
            plain = place == 0 and hosts > 0 and (entry.host or entry.is_few)
            results.append(inner.numbers(entry) if plain else inner.tensor(entry))
        module = inner.finish(tuple(results), "OnnxBody")
        held = self.scope.add_body(f"{self.node.name or self.node.op_type}_{name}", module)
        return held, tuple(entry.node for entry in inner.captured)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        name = self.node.name or self.node.op_type.lower()
        whole = self.scope.call(function, args, {}, name, [one.name or name for one in self.node.outputs])
        for place, value in enumerate(self.node.outputs):
            if value.name:
                part = self.scope.call(operator.getitem, (whole, place), {}, value.name)
                self.scope.bind(value, Entry(value.name, part))


def schema_function(
    node: ir.Node, domain: str, opsets: Mapping[str, int], attributes: Mapping[str, ir.Attr]
) -> ir.Function:
    """The function that ONNX defines an operator by.

    Args:
        node: a node of that operator.
        domain: its domain; the default one is empty.
        opsets: version by domain.
        attributes: of the node, references resolved.

    Raises:
        OnnxCaptureError: where it depends on input types that the model does not tell.
    """
    version = opsets.get(domain, 1)
    schema = schema_of(domain, node.op_type, version)
    if schema.has_function:
        proto = schema.function_body
        function = schema.get_function_with_opset_version(schema.since_version)
        proto = onnx.FunctionProto.FromString(function) if isinstance(function, bytes) and function else proto
    else:
        types = [_type_of(value) for value in node.inputs]
        plain = ir.to_proto(node)
        del plain.attribute[:]
        plain.attribute.extend(ir.to_proto(one) for one in attributes.values())
        function = schema.get_context_dependent_function_with_opset_version(
            schema.since_version, plain.SerializeToString(), types
        )
        proto = onnx.FunctionProto.FromString(function)
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
        raise OnnxCaptureError(
            f"the type of '{value.name}' is not known", hint="run onnx.shape_inference.infer_shapes on the model first"
        )
    return ir.to_proto(value).type.SerializeToString()  # type: ignore[no-any-return]
