"""Builds the FX graph of an ONNX model, one call per node, with what is constant computed once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from amp_compiler.errors import AmpError, CaptureError
from amp_compiler.onnx.importing import bodies
from amp_compiler.onnx.importing.check import MEND, check_operators, node_label, schema_has_body
from amp_compiler.onnx.importing.load import tensor_of
from amp_compiler.onnx.importing.ops import Op, find_host_op, find_op
from amp_compiler.onnx.importing.scope import Scope, Trainable
from amp_compiler.onnx.importing.values import Entry, attribute_value

DATA_FIRST = ("Gather", "Reshape", "Slice", "Squeeze", "Unsqueeze")
HOST_RESULTS = ("Shape", "Size", "SequenceLength")
LARGEST_FOLD = 1 << 24
"""A constant of more elements is left to be computed at run time."""


def build_module(model: ir.Model, trainable: Trainable) -> fx.GraphModule:
    """The module of a model; see `onnx_to_fx`."""
    check_operators(model)
    builder = Builder(model, trainable)
    initialized = set(model.graph.initializers)
    for value in model.graph.inputs:
        if value.name not in initialized:
            builder.add_input(value)
    builder.add_initializers(model.graph)
    builder.add_nodes(model.graph, dict(model.graph.opset_imports), {})
    results = tuple(builder.tensor(builder.find(value)) for value in model.graph.outputs)
    return builder.finish(results[0] if len(results) == 1 else results, "OnnxModule")


class Builder(Scope):
    """The graph of one ONNX graph: the model's, or that of a body with `parent` around it."""

    def add_nodes(self, graph: Any, opsets: dict[str, int], given: dict[str, Any]) -> None:
        """Convert the nodes of a graph in order; `given` holds the attributes that a function is called with."""
        for node in graph:
            try:
                self.add_node(node, opsets, given)
            except AmpError as error:
                if error.where:
                    raise
                raise type(error)(
                    error.what, where=f"node {node_label(node)} ({node.op_type})", mend=error.mend
                ) from error

    def add_node(self, node: ir.Node, opsets: dict[str, int], given: dict[str, Any]) -> None:
        """Convert one node."""
        domain = "" if node.domain == "ai.onnx" else node.domain
        attributes = self._attributes(node, given)
        function = self.model.functions.get((domain, node.op_type, node.overload))
        if function is not None:
            self._inline(function, node, attributes)
        elif not domain and node.op_type == "Constant":
            self.set_constant(node.outputs[0], bodies.constant_of(attributes))
        elif not domain and node.op_type in ("If", "Loop", "Scan"):
            bodies.add_control(self, node, attributes, opsets, given)
        else:
            self._add_op(node, domain, opsets, attributes)

    def _attributes(self, node: ir.Node, given: dict[str, Any]) -> dict[str, Any]:
        found = {}
        for name, attribute in node.attributes.items():
            if not attribute.is_ref():
                found[name] = attribute
            elif attribute.ref_attr_name in given:
                found[name] = given[attribute.ref_attr_name]
        return found

    def _inline(self, function: ir.Function, node: ir.Node, attributes: dict[str, Any]) -> None:
        inputs = [None if value is None else self.find(value) for value in node.inputs]
        defaults = {name: one for name, one in function.attributes.items() if one.value is not None}
        for place, value in enumerate(function.inputs):
            self.bind(value, inputs[place] if place < len(inputs) else None)
        self.add_nodes(function.graph, dict(function.opset_imports), {**defaults, **attributes})
        for inner, outer in zip(function.outputs, node.outputs, strict=False):
            self.bind(outer, self.find(inner))

    def _add_op(self, node: ir.Node, domain: str, opsets: dict[str, int], attributes: dict[str, Any]) -> None:
        entry_op = find_op(domain, node.op_type)
        inputs = [self._input(value) for value in node.inputs]
        literal = {name: attribute_value(one, tensor_of) for name, one in attributes.items()}
        used = [bool(one.name) and (bool(one.uses()) or one.is_graph_output()) for one in node.outputs]
        given = [one is not None for one in inputs]
        if entry_op is None or (entry_op.when is not None and not entry_op.when(literal, given, used)):
            if not schema_has_body(domain, node.op_type, opsets):
                raise CaptureError("there is no conversion for this form of the operator", mend=MEND)
            self._inline(bodies.schema_function(node, domain, opsets, attributes), node, attributes)
            return
        while inputs and inputs[-1] is None:
            inputs.pop()
        if node.op_type in HOST_RESULTS and inputs[0] is not None and inputs[0].shape is not None:
            inputs = [Entry("shape", constant=torch.empty(inputs[0].shape, device="meta"), shape=inputs[0].shape)]
        self._emit(node, self._choose(node, domain, entry_op, inputs), inputs, literal, opsets.get(domain, 1))

    def _input(self, value: ir.Value | None) -> Entry | None:
        if value is None:
            return None
        if self._is_absent(value):
            return None
        return self.find(value)

    def _is_absent(self, value: ir.Value) -> bool:
        """An optional input of a function that its caller left out."""
        scope: Scope | None = self
        while scope is not None:
            if scope.holds(value):
                return False
            scope = scope.parent
        return value.producer() is None and not value.is_initializer()

    def _choose(self, node: ir.Node, domain: str, entry_op: Op, inputs: Sequence[Entry | None]) -> Op:
        """The operator on plain numbers where all inputs are such, else the one on tensors."""
        host_op = find_host_op(domain, node.op_type)
        live = [one for one in inputs if one is not None and one.constant is None]
        if host_op is None or not live or not all(one.host for one in live):
            return entry_op
        if node.op_type == "ConstantOfShape" and not live[0].small:
            return entry_op
        if node.op_type in DATA_FIRST and (inputs[0] is None or inputs[0].constant is not None):
            return entry_op  # a table of data, cut or read by numbers
        return (
            host_op if all(one.is_few for one in inputs if one is not None and one.constant is not None) else entry_op
        )

    def _emit(
        self, node: ir.Node, entry_op: Op, inputs: Sequence[Entry | None], literal: dict[str, Any], opset: int
    ) -> None:
        unknown = sorted(set(literal) - entry_op.attributes)
        if unknown:
            raise CaptureError(f"attribute '{unknown[0]}' is not supported here", mend=MEND)
        asked: dict[str, Any] = {"kind": node.op_type, "opset": opset, "outputs": len(node.outputs)}
        options = {**literal, **{name: asked[name] for name in entry_op.asked if name in asked}}
        is_host = entry_op is not find_op("" if node.domain == "ai.onnx" else node.domain, node.op_type)
        if entry_op.pure and all(one is None or one.constant is not None for one in inputs):
            folded = self._fold(entry_op, inputs, options, is_host)
            if folded is not None:
                for value, one in zip(node.outputs, folded, strict=False):
                    self.set_constant(value, one)
                return
        if "like" in entry_op.asked:
            options["like"] = self.like
        args = [self._argument(node, entry_op, place, inputs, is_host) for place in range(len(inputs))]
        names = [one.name or node.name or node.op_type for one in node.outputs]
        if not entry_op.many:
            made = self.call(entry_op.function, args, options, names[0])
            small = is_host and node.op_type == "Shape"
            host = is_host or node.op_type in HOST_RESULTS
            self.bind(node.outputs[0], Entry(names[0], made, host, small=small))
            return
        whole = self.call(entry_op.function, args, options, node.name or f"{names[0]}_all")
        for place, value in enumerate(node.outputs):
            if value.name:
                part = self.call(operator.getitem, (whole, place), {}, names[place])
                self.bind(value, Entry(names[place], part))

    def _argument(self, node: ir.Node, entry_op: Op, place: int, inputs: Sequence[Entry | None], is_host: bool) -> Any:
        entry = inputs[place]
        if entry is None:
            return None
        if is_host or place in entry_op.host:
            return self.numbers(entry)
        first = 1 if node.op_type == "Where" else 0
        if entry_op.scalars and place >= first and entry.constant is not None and entry.constant.dim() == 0:
            others = [one for at, one in enumerate(inputs) if at >= first and at not in entry_op.host and at != place]
            live = any(one is not None and (one.constant is None or one.constant.dim()) for one in others)
            if live and entry.constant.dtype in (torch.float32, torch.int64, torch.int32, torch.float64):
                return entry.constant.item()
        return self.tensor(entry)

    def _fold(
        self, entry_op: Op, inputs: Sequence[Entry | None], options: dict[str, Any], is_host: bool
    ) -> list[torch.Tensor] | None:
        """The results of a node of constants, or `None` where they are left to run time."""
        args: list[Any] = []
        for place, entry in enumerate(inputs):
            held = None if entry is None else entry.constant
            if held is not None and held.device.type != "meta" and (is_host or place in entry_op.host):
                args.append(held.numpy())
            else:
                args.append(held)
        with torch.no_grad():
            made = entry_op.function(*args, **options)
        results = list(made) if entry_op.many else [made]
        tensors = [torch.from_numpy(np.array(one)) if isinstance(one, np.ndarray) else one for one in results]
        plain = all(one is None or isinstance(one, torch.Tensor) for one in tensors)
        if not plain or any(one is not None and one.numel() > LARGEST_FOLD for one in tensors):
            return None
        return tensors
