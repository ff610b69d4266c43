"""The values of one graph that `onnx_to_fx` builds: inputs, weights, constants, and what comes from outer graphs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn

from amp_compiler.errors import CaptureError
from amp_compiler.onnx.importing.load import Names, is_weight, tensor_of
from amp_compiler.onnx.importing.ops import values
from amp_compiler.onnx.importing.values import Entry

Trainable = Callable[[str, torch.Tensor], bool] | None


class Scope:
    """The graph of one ONNX graph: the model's, or that of a body with `parent` around it."""

    def __init__(self, model: ir.Model, trainable: Trainable, parent: Scope | None = None) -> None:
        self.model, self.trainable, self.parent = model, trainable, parent
        self.graph = fx.Graph()
        self.attributes: dict[str, Any] = {}
        self.onnx_names: dict[str, str] = {}
        self.captured: list[Entry] = []
        self.names = Names()
        self.node_names = Names()
        self._entries: dict[ir.Value, Entry] = {}
        self._outer: dict[int, Entry] = {}
        self.like: fx.Node | None = None  # any tensor of the graph, for its device
        self._last_input: fx.Node | None = None

    def add_input(self, value: ir.Value, *, host: bool = False) -> Entry:
        """A placeholder for an input."""
        entry = self.placeholder(value.name or "input", host)
        self._entries[value] = entry
        return entry

    def placeholder(self, name: str, host: bool) -> Entry:
        """A placeholder after the others."""
        with self.graph.inserting_after(self._last_input) if self._last_input else self.graph.inserting_before():
            self._last_input = self.graph.placeholder(self.node_names.give(name))
        self.like = self.like if host or self.like is not None else self._last_input
        return Entry(name, self._last_input, host)

    def add_initializers(self, graph: ir.Graph) -> None:
        """Parameters for weights, constants for the rest."""
        for name, value in graph.initializers.items():
            if value.const_value is None:
                raise CaptureError(
                    "an initializer has no value", where=name, mend="load the model with its external data"
                )
            tensor = tensor_of(value.const_value)
            decide = is_weight(value, tensor) if self.trainable is None else self.trainable(name, tensor)
            if decide and tensor.is_floating_point():
                self._entries[value] = self._attribute(name, nn.Parameter(tensor))
            else:
                self.set_constant(value, tensor)

    def set_constant(self, value: ir.Value, tensor: torch.Tensor) -> None:
        """Note a value that is known now."""
        self._entries[value] = Entry(value.name or "constant", constant=tensor, shape=tuple(tensor.shape))

    def bind(self, value: ir.Value, entry: Entry | None) -> None:
        """Give a value an entry that exists; none for an optional input that is left out."""
        if entry is None:
            self._entries.pop(value, None)
        else:
            self._entries[value] = entry

    def holds(self, value: ir.Value) -> bool:
        """Whether the value is one of this graph's own."""
        return value in self._entries

    def find(self, value: ir.Value) -> Entry:
        """The entry of a value; one of an outer graph becomes an input of this one."""
        entry = self._entries.get(value)
        if entry is not None:
            return entry
        if self.parent is None:
            raise CaptureError(
                "a value has no producer", where=str(value.name), mend="check the model with onnx.checker"
            )
        return self._from_outside(self.parent.find(value))

    def _from_outside(self, outer: Entry) -> Entry:
        if outer.constant is not None:
            if id(outer) not in self._outer:
                self._outer[id(outer)] = Entry(outer.name, constant=outer.constant, shape=outer.shape)
            return self._outer[id(outer)]
        if id(outer) not in self._outer:
            entry = self.placeholder(outer.name, outer.host)
            entry.shape, entry.small = outer.shape, outer.small
            self._outer[id(outer)] = entry
            self.captured.append(outer)
        return self._outer[id(outer)]

    def _attribute(self, name: str, tensor: torch.Tensor) -> Entry:
        target = self.names.give(name, dotted=True)
        self.attributes[target], self.onnx_names[target] = tensor, name
        node = self.graph.get_attr(target)
        self.like = self.like or node
        return Entry(name, node, shape=tuple(tensor.shape))

    def tensor(self, entry: Entry) -> fx.Node:
        """The node of a value as a tensor."""
        if entry.constant is not None:
            if entry.tensor_node is None:
                held = entry.constant.clone(memory_format=torch.contiguous_format)  # a folded Expand shares memory
                entry.tensor_node = self._attribute(entry.name, held).node
            return entry.tensor_node  # type: ignore[return-value]
        if not entry.host:
            return entry.node  # type: ignore[return-value]
        if entry.tensor_node is None:
            entry.tensor_node = self.call(values.to_tensor, (entry.node, self.like), {}, f"{entry.name}_tensor")
        return entry.tensor_node

    def numbers(self, entry: Entry) -> fx.Node:
        """The node of a value as plain numbers."""
        if entry.constant is not None:
            if entry.numbers_node is None:
                array = entry.constant.numpy()
                literal = (tuple(array.reshape(-1).tolist()), tuple(array.shape), str(array.dtype), self.like)
                entry.numbers_node = self.call(values.constant, literal, {}, entry.name)
            return entry.numbers_node
        if entry.host:
            return entry.node  # type: ignore[return-value]
        if entry.numbers_node is None:
            entry.numbers_node = self.call(values.to_host, (entry.node,), {}, f"{entry.name}_numbers")
        return entry.numbers_node

    def call(self, function: Any, args: Any, kwargs: dict[str, Any], name: str) -> fx.Node:
        """A call node, named after its ONNX value."""
        node = self.graph.create_node("call_function", function, tuple(args), kwargs, self.node_names.give(name))
        if inspect.isfunction(function):  # so that a saved module, which FX traces anew, keeps the call as it is
            node.meta["is_wrapped"] = True
        return node

    def finish(self, results: Any, name: str) -> fx.GraphModule:
        """The graph module, with the result `results`."""
        self.graph.output(results)
        self.graph.eliminate_dead_code()
        kept = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        held = {target: one for target, one in self.attributes.items() if target in kept}
        module = fx.GraphModule(held, self.graph, name)
        module.meta["onnx_names"] = {target: one for target, one in self.onnx_names.items() if target in kept}
        return module
