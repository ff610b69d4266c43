"""A traced graph as plain data that JSON can hold, and back: exactly, or not at all.

`fx.text` writes graphs for people, and leaves out what they do not ask for, such as the number of a device. Here
nothing is left out that anybody reads: whatever has no exact form is `Unrecordable`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from amp_compiler.errors import AmpError
from amp_compiler.fx.meta import Key
from amp_compiler.ops.fp8 import fp8_product
from amp_compiler.ops.typed_op import typed_op

Record = list[Any]
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "fp8_product": fp8_product,
    "getitem": operator.getitem,
    "typed_op": typed_op,
}
_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_OURS_AND_TORCHS = frozenset({"aten", "prims", "prim", "amp_compiler", "_c10d_functional"})
_OF_TORCH: tuple[tuple[str, type], ...] = (
    ("dtype", torch.dtype),
    ("layout", torch.layout),
    ("memory_format", torch.memory_format),
)
# In `node.meta`, and read by nobody behind the trace: by torch's own tracer, profiler and exporter alone.
UNREAD = frozenset({"seq_nr", "original_aten", "from_node", "torch_fn", "source_fn_stack", "tensor_meta", "desc"})
_OWN = {
    str(key): key for key in (Key.PHASE, Key.PLANNED, Key.SEED, Key.CHECKPOINT)
}  # written by the trace itself, as plain values


class Unrecordable(AmpError):
    """A graph holds what has no exact form as data, such as an operator of the user's or a size that is a symbol."""


def marks_of(node: fx.Node) -> list[str]:
    """The keys in a node's `meta` that somebody may read, sorted, without its example."""
    return sorted(str(key) for key in node.meta if key not in UNREAD and key != "val")


def record_of(graph: fx.Graph, origins: Mapping[str, int] | None = None, sources: Sequence[fx.Node] = ()) -> Record:
    """The graph as data: one list for each node.

    Args:
        graph: with examples on its nodes, without inner graphs and attributes.
        origins: by name of a node, the place in `sources` of the one that it was made for, whose metadata it has.
        sources: see there. Without `origins` each node tells only which keys its metadata has.

    Raises:
        Unrecordable: something in it has no exact form.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    rows = []
    for node in graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise Unrecordable(f"node '{node.name}' is a {node.op}")
        target = _target(node.target) if node.op == "call_function" else str(node.target)
        example = _example(node.meta["val"]) if "val" in node.meta else None
        origin = None if origins is None else origins.get(node.name)
        marks = marks_of(node) if origins is None else _marks(node, None if origin is None else sources[origin])
        call = [_encoded(node.args, places), _encoded(node.kwargs, places)]
        rows.append([node.op, node.name, target, *call, example, "val" in node.meta, origin, marks])
    return rows


def graph_of(record: Record, sources: Sequence[fx.Node], mode: FakeTensorMode) -> fx.Graph:
    """The graph that `record_of` wrote, with examples of `mode`.

    Args:
        record: of a graph with origins.
        sources: the nodes that they count, each with the metadata that the copies are to have.
        mode: of fake tensors.

    Raises:
        Unrecordable: the data is of another form.
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    try:
        for op, name, target, args, kwargs, example, has_example, origin, marks in record:
            function = _function(target) if op == "call_function" else target
            node = graph.create_node(op, function, _decoded(args, nodes), _decoded(kwargs, nodes), name)
            if node.name != name:
                raise Unrecordable(f"'{name}' is no name of a node")
            if has_example:
                node.meta["val"] = _made(example, mode)
            source = {} if origin is None else sources[origin].meta
            node.meta.update({key: source[key] for key in marks["same"]})
            node.meta.update({_OWN[key]: value for key, value in marks["own"].items()})
            nodes.append(node)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as cause:
        raise Unrecordable(f"this is no record of a graph: {cause}") from cause
    return graph


def _marks(node: fx.Node, source: fx.Node | None) -> dict[str, Any]:
    """What metadata it shares with its source, and what it has of its own."""
    own = {name: node.meta[key] for name, key in _OWN.items() if key in node.meta}
    same = [key for key in marks_of(node) if key not in own]
    theirs = {} if source is None else source.meta
    for key in same:
        if key not in theirs or not _is_same(theirs[key], node.meta[key]):
            raise Unrecordable(f"'{key}' of node '{node.name}' comes from nowhere")
    return {"own": own, "same": same}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of metadata are the same; tensors only where they are one, for `==` would compute."""
    return one is other or (not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and one == other)


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _OURS_AND_TORCHS:
        return str(target)
    if target in _NAMES:
        return _NAMES[target]
    raise Unrecordable(f"{target} is no operator of torch's or ours")


def _function(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    op: Any = torch.ops
    for part in name.split("."):
        op = getattr(op, part)
    if not isinstance(op, torch._ops.OpOverload):
        raise ValueError(f"'{name}' is no operator")
    return op


def _encoded(value: Any, places: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": places[value]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_encoded(item, places) for item in value]}
    if isinstance(value, dict):
        return {"dict": {str(key): _encoded(item, places) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [_encoded(item, places) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, of in _OF_TORCH:
        if isinstance(value, of):
            return {kind: str(value).removeprefix("torch.")}
    if callable(value):
        return {"function": _target(value)}
    raise Unrecordable(f"{value!r} has no exact form")


def _decoded(value: Any, nodes: Sequence[fx.Node]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "node":
        return nodes[held]
    if kind in ("tuple", "list", "slice"):
        items = [_decoded(item, nodes) for item in held]
        return items if kind == "list" else tuple(items) if kind == "tuple" else slice(*items)
    if kind == "dict":
        return {key: _decoded(item, nodes) for key, item in held.items()}
    if kind == "device":
        return torch.device(held)
    return _function(held) if kind == "function" else getattr(torch, held)


def _example(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_example(item) for item in value]}
    numbers = [*value.shape, *value.stride(), value.storage_offset()] if _is_plain(value) else [None]
    if any(type(number) is not int for number in numbers):
        raise Unrecordable(f"an example of type {type(value).__name__} has no exact form")
    where = [str(value.dtype).removeprefix("torch."), str(value.device), value.requires_grad]
    return {"tensor": [list(value.shape), list(value.stride()), value.storage_offset(), *where]}


def _is_plain(value: Any) -> bool:
    ordinary = type(value) is FakeTensor and value.layout is torch.strided and value.constant is None
    return ordinary and not (value.is_conj() or value.is_neg() or value.is_quantized)


def _made(example: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(example, dict):
        return example
    ((kind, held),) = example.items()
    if kind != "tensor":
        return {"tuple": tuple, "list": list}[kind]([_made(item, mode) for item in held])
    shape, stride, offset, dtype, device, requires_grad = held
    kind = {"dtype": getattr(torch, dtype), "device": "meta"}
    bare = torch.empty_strided(shape, stride, **kind)
    if offset:
        reach = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        bare = torch.empty(reach, **kind).as_strided(shape, stride, offset)
    tensor = FakeTensor(mode, bare, torch.device(device))  # as the mode makes it of a factory's, in a fifth of the time
    return tensor.requires_grad_() if requires_grad else tensor
