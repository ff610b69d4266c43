"""The values of one graph that `onnx_to_fx` builds, what is known of each, and their names."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch
from torch import fx, nn

from amp_compiler.errors import OnnxCaptureError
from amp_compiler.fx.torch_private.tracing import wrap_while_it_lives
from amp_compiler.onnx.importing.load import is_weight, tensor_of
from amp_compiler.onnx.importing.ops import values

FEW = 4096
"""Constants up to this size may stand in the graph as plain numbers."""
_ONNX_VALUES = "onnx_values"
Trainable = Callable[[str, torch.Tensor], bool] | None


def onnx_values(node: fx.Node) -> tuple[str, ...]:
    """The ONNX names of what a node makes or is part of, in the graph of `onnx_to_fx` and in one captured of it."""
    custom = node.meta.get("custom")
    return tuple(custom.get(_ONNX_VALUES, ())) if isinstance(custom, dict) else ()


@dataclass
class Entry:
    """What is known of one ONNX value.

    Args:
        name: the ONNX name of the value.
        node: the FX node that makes it; `None` for a constant.
        host: it is a NumPy array of plain numbers, not a tensor.
        constant: its tensor where that is known now.
        shape: its sizes where these are known now: of parameters and constants.
        small: it is a shape of a shape: what it sizes is plain numbers too.
        numbers_node: a constant's node as plain numbers.
        tensor_node: a constant's, or a host value's, node as a tensor.
    """

    name: str
    node: fx.Node | None = None
    host: bool = False
    constant: torch.Tensor | None = None
    shape: tuple[int, ...] | None = None
    small: bool = False
    numbers_node: fx.Node | None = None
    tensor_node: fx.Node | None = None

    @property
    def is_few(self) -> bool:
        """A constant that may stand in the graph as plain numbers."""
        held = self.constant
        return held is not None and held.numel() <= FEW and values.host_dtype(held.dtype) is not None


class Scope:
    """The values of one ONNX graph, and the FX graph that they become nodes of.

    It knows nothing of operators: `build.Builder` says which call makes a value, and binds the value to it.

    Args:
        trainable: which floating-point initializers are parameters; see `onnx_to_fx`.
        parent: the scope around a body, whose values the body may read: they become inputs of its own.
    """

    def __init__(self, trainable: Trainable, parent: Scope | None = None) -> None:
        self.trainable, self.parent = trainable, parent
        self.graph = fx.Graph()
        self.captured: list[Entry] = []  # values of the parent that became inputs, in the order of the inputs
        self.like: fx.Node | None = None  # any tensor of the graph, for its device
        self._attributes: dict[str, Any] = {}
        self._onnx_names: dict[str, str] = {}
        self._names, self._node_names = Names(), Names()
        self._entries: dict[ir.Value, Entry] = {}
        self._absent: set[ir.Value] = set()
        self._outer: dict[int, Entry] = {}
        self._last_input: fx.Node | None = None

    # ---- where values come from

    def add_input(self, value: ir.Value, *, host: bool = False) -> None:
        """A placeholder for an input; `host` says that it is plain numbers."""
        self._entries[value] = self._placeholder(value.name or "input", host)

    def add_initializers(self, graph: ir.Graph) -> None:
        """Parameters for weights, constants for the rest.

        Raises:
            OnnxCaptureError: an initializer has no data.
        """
        for name, value in graph.initializers.items():
            if value.const_value is None:
                raise OnnxCaptureError(
                    "an initializer has no value", where=name, hint="load the model with its external data"
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
        self._entries.pop(value, None)
        self._absent.discard(value)
        if entry is None:
            self._absent.add(value)
        else:
            self._entries[value] = entry

    def add_body(self, name: str, module: fx.GraphModule) -> fx.Node:
        """The node of a graph module that calls refer to."""
        target = self._names.give(name)
        self._attributes[target] = module
        self._onnx_names.update({f"{target}.{inner}": one for inner, one in module.meta["onnx_names"].items()})
        return self.graph.get_attr(target)

    def _placeholder(self, name: str, host: bool) -> Entry:
        """A placeholder after the others."""
        with self.graph.inserting_after(self._last_input) if self._last_input else self.graph.inserting_before():
            self._last_input = self.graph.placeholder(self._node_names.give(name))
        self.like = self.like if host or self.like is not None else self._last_input
        return Entry(name, self._last_input, host)

    def _attribute(self, name: str, tensor: torch.Tensor) -> Entry:
        target = self._names.give(name, dotted=True)
        self._attributes[target], self._onnx_names[target] = tensor, name
        node = self.graph.get_attr(target)
        self.like = self.like or node
        return Entry(name, node, shape=tuple(tensor.shape))

    # ---- what a value is

    def find(self, value: ir.Value | None) -> Entry | None:
        """What an operand is; `None` for an optional one that was left out, here or where a function was called.

        Raises:
            OnnxCaptureError: nothing makes the value.
        """
        if value is None or self._is_absent(value):
            return None
        return self.entry(value)

    def entry(self, value: ir.Value) -> Entry:
        """The entry of a value that must be there; one of an outer graph becomes an input of this one.

        Raises:
            OnnxCaptureError: nothing makes the value.
        """
        entry = self._entries.get(value)
        if entry is not None:
            return entry
        if self.parent is None:
            raise OnnxCaptureError(
                "a value has no producer", where=str(value.name), hint="check the model with onnx.checker"
            )
        return self._from_outside(self.parent.entry(value))

    def _is_absent(self, value: ir.Value) -> bool:
        if value in self._entries or value in self._absent:
            return value in self._absent
        return self.parent is not None and self.parent._is_absent(value)

    def _from_outside(self, outer: Entry) -> Entry:
        if id(outer) not in self._outer:
            if outer.constant is not None:
                self._outer[id(outer)] = Entry(outer.name, constant=outer.constant, shape=outer.shape)
            else:
                entry = self._placeholder(outer.name, outer.host)
                entry.shape, entry.small = outer.shape, outer.small
                self._outer[id(outer)] = entry
                self.captured.append(outer)
        return self._outer[id(outer)]

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

    # ---- the FX graph

    def call(self, function: Any, args: Any, kwargs: dict[str, Any], name: str, values: Sequence[str] = ()) -> fx.Node:
        """A call node, named after its ONNX value; where it makes several, `values` are their names."""
        node = self.graph.create_node("call_function", function, tuple(args), kwargs, self._node_names.give(name))
        node.meta["custom"] = {_ONNX_VALUES: list(values) or [name]}  # torch.export hands it on
        if inspect.isfunction(function):  # so that a saved module, which FX traces anew, keeps the call as it is
            node.meta["is_wrapped"] = True
        return node

    def finish(self, results: Any, name: str) -> fx.GraphModule:
        """The graph module, with the result `results`."""
        self.graph.output(results)
        self.graph.eliminate_dead_code()
        kept = {str(node.target) for node in self.graph.nodes if node.op == "get_attr"}
        held = {target: one for target, one in self._attributes.items() if target in kept}
        module = fx.GraphModule(held, self.graph, name)
        wrap_while_it_lives(module)
        module.meta["onnx_names"] = {target: one for target, one in self._onnx_names.items() if target in kept}
        return module


class Names:
    """Valid, unique names made from ONNX's, in the order of asking.

    Example:
        >>> names = Names()
        >>> names.give("encoder.0.weight", dotted=True), names.give("a/b:0"), names.give("a/b:0")
        ('encoder.0.weight', 'a_b_0', 'a_b_0_1')
    """

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._prefixes: set[str] = set()

    def give(self, name: str, *, dotted: bool = False) -> str:
        """A name for `name`; `dotted` keeps its dots, as qualified names of modules have."""
        parts = [_valid(part, first=not place) for place, part in enumerate(name.split("."))] if dotted else []
        wanted = ".".join(parts) if parts and all(parts) else _valid(name.replace(".", "_"), first=True)
        wanted = wanted.replace(".", "_") if self._clashes(wanted) else wanted
        stem, number = wanted, 0
        while self._clashes(wanted):
            number += 1
            wanted = f"{stem}_{number}"
        self._taken.add(wanted)
        segments = wanted.split(".")
        self._prefixes.update(".".join(segments[:end]) for end in range(1, len(segments)))
        return wanted

    def _clashes(self, name: str) -> bool:
        segments = name.split(".")
        above = {".".join(segments[:end]) for end in range(1, len(segments))}
        reserved = segments[0] in _OF_GRAPH_MODULE or any(segment in _OF_MODULE for segment in segments)
        return name in self._taken or name in self._prefixes or bool(above & self._taken) or reserved


_OF_MODULE = frozenset(dir(torch.nn.Module()))
_OF_GRAPH_MODULE = frozenset(dir(torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())))


def _valid(name: str, first: bool) -> str:
    text = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_") or ("value" if first else "")
    text = f"v_{text}" if first and text[:1].isdigit() else text
    return f"{text}_" if keyword.iskeyword(text) else text
