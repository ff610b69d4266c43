"""Builds the FX graph of an ONNX model, one call per node, with what is constant computed once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx import TensorProto
from torch import fx

from amp_compiler.errors import AmpError, CaptureError, OnnxCaptureError, OnnxError
from amp_compiler.onnx.importing.bodies import CONTROL, ControlFlow, schema_function
from amp_compiler.onnx.importing.check import (
    HINT,
    check_operators,
    default_attributes,
    node_label,
    opset_versions,
    schema_has_body,
)
from amp_compiler.onnx.importing.load import attribute_value, constant_of
from amp_compiler.onnx.importing.ops.registry import Op, find_host_op, find_op
from amp_compiler.onnx.importing.ops.values import DTYPES
from amp_compiler.onnx.importing.scope import Entry, Scope, Trainable
from amp_compiler.onnx.model.types import canonical_domain

DATA_FIRST = ("Gather", "Reshape", "Slice", "Squeeze", "Unsqueeze")
HOST_RESULTS = ("Shape", "Size", "SequenceLength")
_CHECK = "check the model with onnx.checker.check_model(model, full_check=True)"
LARGEST_FOLD = 1 << 24
"""A constant of more elements is left to be computed at run time."""


def build_module(model: ir.Model, trainable: Trainable) -> fx.GraphModule:
    """The module of a model; see `onnx_to_fx`."""
    check_operators(model)
    scope = Scope(trainable)
    initialized = set(model.graph.initializers)
    for value in model.graph.inputs:
        if value.name not in initialized:
            scope.add_input(value)
    scope.add_initializers(model.graph)
    Builder(scope, model.functions, opset_versions(model.graph.opset_imports), {}).add_nodes(model.graph)
    results = tuple(scope.tensor(scope.entry(value)) for value in model.graph.outputs)
    return scope.finish(results[0] if len(results) == 1 else results, "OnnxModule")


@dataclass(frozen=True)
class Builder:
    """Converts nodes into calls. A body gets a builder with a scope of its own, a function one with its own opsets.

    Args:
        scope: where values are found, and where the calls go.
        functions: the functions that the model defines.
        opsets: version by domain.
        arguments: the attributes that the function around the nodes is called with.
    """

    scope: Scope
    functions: Mapping[ir.OperatorIdentifier, ir.Function]
    opsets: Mapping[str, int]
    arguments: Mapping[str, ir.Attr]

    def add_nodes(self, nodes: Iterable[ir.Node]) -> None:
        """Convert nodes in order.

        Raises:
            AmpError: what cannot be converted, with the node.
        """
        for node in nodes:
            where = f"node {node_label(node)} ({node.op_type})"
            try:
                self._add_node(node)
            except AmpError as error:
                if error.where:
                    raise
                kind = OnnxCaptureError if isinstance(error, CaptureError) else OnnxError
                raise kind(error.what, where=where, hint=error.hint) from error
            except Exception as cause:  # torch and NumPy refuse constants that do not fit together
                raise OnnxCaptureError(
                    f"it cannot be converted: {type(cause).__name__}: {cause}",
                    where=where,
                    hint=_CHECK,
                ) from cause

    def _add_node(self, node: ir.Node) -> None:
        domain = canonical_domain(node.domain)
        attributes = self._attributes(node)
        function = self.functions.get((domain, node.op_type, node.overload))
        if function is not None:
            self._inline(function, node, attributes)
        elif not domain and node.op_type == "Constant":
            self.scope.set_constant(node.outputs[0], constant_of(attributes))
        elif not domain and node.op_type in CONTROL:
            ControlFlow(self.scope, node, attributes, self._add_body, self.opsets.get("", 1)).add()
        else:
            self._add_op(node, domain, attributes)

    def _add_body(self, scope: Scope, graph: ir.Graph) -> None:
        replace(self, scope=scope).add_nodes(graph)

    def _attributes(self, node: ir.Node) -> dict[str, ir.Attr]:
        """The attributes of a node, those that stand for a function's resolved."""
        attributes = {}
        for name, attribute in node.attributes.items():
            held = self.arguments.get(attribute.ref_attr_name or "") if attribute.is_ref() else attribute
            if held is not None:
                attributes[name] = held
        return attributes

    def _inline(self, function: ir.Function, node: ir.Node, attributes: dict[str, ir.Attr]) -> None:
        inputs = [self.scope.find(value) for value in node.inputs]
        defaults = {name: one for name, one in function.attributes.items() if one.value is not None}
        for place, value in enumerate(function.inputs):
            self.scope.bind(value, inputs[place] if place < len(inputs) else None)
        inner = replace(self, opsets=opset_versions(function.opset_imports), arguments={**defaults, **attributes})
        inner.add_nodes(function.graph)
        for output, outer in zip(function.outputs, node.outputs, strict=False):
            self.scope.bind(outer, self.scope.entry(output))

    def _add_op(self, node: ir.Node, domain: str, attributes: dict[str, ir.Attr]) -> None:
        op = find_op(domain, node.op_type)
        inputs = [self.scope.find(value) for value in node.inputs]
        literal = {name: attribute_value(one) for name, one in attributes.items()}
        used = [bool(one.name) and (bool(one.uses()) or one.is_graph_output()) for one in node.outputs]
        present = [one is not None for one in inputs]
        if op is None or (op.when is not None and not op.when(literal, present, used)):
            if not schema_has_body(domain, node.op_type, self.opsets):
                raise OnnxCaptureError(
                    f"there is no conversion for this form of the operator{_foreign_type(literal)}", hint=HINT
                )
            attributes = default_attributes(domain, node.op_type, self.opsets) | attributes
            self._inline(schema_function(node, domain, self.opsets, attributes), node, attributes)
            return
        while inputs and inputs[-1] is None:
            inputs.pop()
        if node.op_type in HOST_RESULTS and inputs[0] is not None and inputs[0].shape is not None:
            inputs = [Entry("shape", constant=torch.empty(inputs[0].shape, device="meta"), shape=inputs[0].shape)]
        host = _host_op(node, domain, inputs)
        call = _Call(node, host or op, tuple(inputs), literal, self.opsets.get(domain, 1), host is not None)
        call.add(self.scope)


def _foreign_type(literal: Mapping[str, Any]) -> str:
    """That the element type which a node names is none of torch's; empty where it names none, or one of them."""
    for name in ("to", "dtype"):
        number = literal.get(name)
        if isinstance(number, int) and number not in DTYPES and number in TensorProto.DataType.values():
            return f": torch has no tensors of type {TensorProto.DataType.Name(number)}"
    return ""


def _host_op(node: ir.Node, domain: str, inputs: list[Entry | None]) -> Op | None:
    """The operator on plain numbers, where all inputs are such."""
    op = find_host_op(domain, node.op_type)
    live = [one for one in inputs if one is not None and one.constant is None]
    if op is None or not live or not all(one.host for one in live):
        return None
    if node.op_type == "ConstantOfShape" and not live[0].small:
        return None
    if node.op_type in DATA_FIRST and (inputs[0] is None or inputs[0].constant is not None):
        return None  # a table of data, cut or read by numbers
    return op if all(one.is_few for one in inputs if one is not None and one.constant is not None) else None


@dataclass(frozen=True)
class _Call:
    """One node about to become a call, or constants.

    Args:
        node: the node.
        op: what is called.
        inputs: its operands, `None` for one that is left out.
        literal: its attributes.
        opset: version of its domain.
        host: the call is on plain numbers.
    """

    node: ir.Node
    op: Op
    inputs: tuple[Entry | None, ...]
    literal: Mapping[str, Any]
    opset: int
    host: bool

    def add(self, scope: Scope) -> None:
        """Put the results into a scope.

        Raises:
            OnnxCaptureError: the call does not take one of the attributes.
        """
        unknown = sorted(set(self.literal) - self.op.attributes)
        if unknown:
            raise OnnxCaptureError(f"attribute '{unknown[0]}' is not supported here", hint=HINT)
        for name, allowed in self.op.choices.items():
            held = self.literal.get(name, allowed[0])
            if held not in allowed:
                known = ", ".join(f"'{one}'" for one in allowed if one)
                raise OnnxCaptureError(f"attribute {name}='{held}' is none of {known}", hint=_CHECK)
        facts = {"kind": self.node.op_type, "opset": self.opset, "outputs": len(self.node.outputs)}
        options = {**self.literal, **{name: facts[name] for name in sorted(self.op.requested) if name in facts}}
        folded = self._fold(options)
        if folded is not None:
            for value, one in zip(self.node.outputs, folded, strict=False):
                scope.set_constant(value, one)
            return
        if "like" in self.op.requested:
            options["like"] = scope.like
        args = [self._argument(place, scope) for place in range(len(self.inputs))]
        names = [one.name or self.node.name or self.node.op_type for one in self.node.outputs]
        if not self.op.many:
            result = scope.call(self.op.function, args, options, names[0])
            small = self.host and self.node.op_type == "Shape"
            numbers = self.host or self.node.op_type in HOST_RESULTS
            scope.bind(self.node.outputs[0], Entry(names[0], result, numbers, small=small))
            return
        whole = scope.call(self.op.function, args, options, self.node.name or f"{names[0]}_all", names)
        for place, value in enumerate(self.node.outputs):
            if value.name:
                part = scope.call(operator.getitem, (whole, place), {}, names[place])
                scope.bind(value, Entry(names[place], part))

    def _argument(self, place: int, scope: Scope) -> Any:
        entry = self.inputs[place]
        if entry is None:
            return None
        if self._is_host(place):
            return scope.numbers(entry)
        held = entry.constant
        return held.item() if held is not None and self._is_scalar(place, held) else scope.tensor(entry)

    def _is_host(self, place: int) -> bool:
        return self.host or place in self.op.host

    def _is_scalar(self, place: int, held: torch.Tensor) -> bool:
        """Whether a constant goes in as a Python number, beside another operand that says the type."""
        first = 1 if self.node.op_type == "Where" else 0
        if not self.op.scalars or place < first or held.dim():
            return False
        others = [self.inputs[at] for at in range(first, len(self.inputs)) if at != place and not self._is_host(at)]
        live = any(one is not None and (one.constant is None or one.constant.dim()) for one in others)
        return live and held.dtype in (torch.float32, torch.int64, torch.int32, torch.float64)

    def _fold(self, options: dict[str, Any]) -> list[torch.Tensor] | None:
        """The results of a node of constants, or `None` where there are none, or they are left to run time."""
        if not self.op.pure or not all(one is None or one.constant is not None for one in self.inputs):
            return None
        args: list[Any] = []
        for place, entry in enumerate(self.inputs):
            held = None if entry is None else entry.constant
            if held is not None and held.device.type != "meta" and self._is_host(place):
                args.append(held.numpy())
            else:
                args.append(held)
        with torch.no_grad():
            if _is_too_large(self.op, args, options):
                return None
            result = self.op.function(*args, **options)
        results = list(result) if self.op.many else [result]
        tensors = [torch.from_numpy(np.array(one)) if isinstance(one, np.ndarray) else one for one in results]
        plain = all(one is None or isinstance(one, torch.Tensor) for one in tensors)
        if not plain or any(one is not None and one.numel() > LARGEST_FOLD for one in tensors):
            return None
        return tensors


def _is_too_large(op: Op, args: list[Any], options: dict[str, Any]) -> bool:
    """Whether a call would make more elements than are folded, by a call on tensors without data.

    A few numbers may ask for a tensor that no memory holds (`ConstantOfShape`, `Expand`, `Range`).
    """
    try:
        with torch.device("meta"):
            result = op.function(*(one.to("meta") if isinstance(one, torch.Tensor) else one for one in args), **options)
    except Exception:  # noqa: BLE001  a function that reads its numbers: the call itself tells what is wrong
        return False
    results = result if op.many else [result]
    return any(isinstance(one, torch.Tensor) and one.numel() > LARGEST_FOLD for one in results)
