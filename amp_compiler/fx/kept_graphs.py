"""Graphs that were traced from other graphs, kept from process to process, so that a second one need not trace.

What a trace gives follows from the graph it starts from, from torch and its settings, and from our own source. All
three are in the name of the file, exactly; where one of them cannot be told, nothing is kept. A file is written only
after it was read back into the same graph, node for node. Module names and source lines come from the graph at hand.
"""

import functools
import gzip
import hashlib
import inspect
import io
import logging
import operator
import pickle
import sys
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from amp_compiler.errors import AmpError
from amp_compiler.fx.cache_file import keep
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.inductor import keeps_compiled
from amp_compiler.fx.torch_private.tracing import trace_settings
from amp_compiler.ir.files import write_atomically
from amp_compiler.ops.cache_folder import cache_folder
from amp_compiler.ops.fp8 import fp8_product
from amp_compiler.ops.typed_op import typed_op

_LOG = logging.getLogger(__name__)
_ROOMS = ("fx", "ops")  # of this package: all that says what an operator is and how it is traced
_FUNCTIONS = (operator.getitem, typed_op, fp8_product)
_OURS_AND_TORCHS = frozenset({"aten", "prims", "prim", "amp_compiler", "_c10d_functional"})
_EXAMPLE = "val"  # in `node.meta`
# In `node.meta`, and read by nobody behind the trace: by torch's own tracer, profiler and exporter alone.
_UNREAD = frozenset({"seq_nr", "original_aten", "from_node", "torch_fn", "source_fn_stack", "tensor_meta", "desc"})
_OWN = (Key.PHASE, Key.PLANNED, Key.SEED, Key.CHECKPOINT)  # written by the trace itself, as plain values
_UNREADABLE = (
    *(OSError, EOFError, zlib.error, pickle.PickleError, AssertionError),
    *(ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError),
)


class Unrecordable(AmpError):
    """A graph holds what has no exact form as data, such as an operator of the user's or a size that is a symbol."""


class _Writer(pickle.Pickler):
    """Writes nodes by their places, operators by their names and examples by their forms; equal graphs alike."""

    def __init__(self, file: io.BytesIO, nodes: Sequence[fx.Node]) -> None:
        super().__init__(file)
        self.fast = True  # no word of which equal values are one object
        self._places = {node: place for place, node in enumerate(nodes)}

    def persistent_id(self, obj: Any) -> Any:
        if obj is None or isinstance(obj, (str, int, float, tuple, list, dict)):  # most of all
            return None
        if isinstance(obj, fx.Node):
            return "node", self._places[obj]
        if isinstance(obj, torch._ops.OpOverload) and obj.namespace in _OURS_AND_TORCHS:
            return "operator", str(obj)
        if isinstance(obj, (torch.dtype, torch.layout, torch.memory_format)):
            return "torch", str(obj).removeprefix("torch.")
        if isinstance(obj, torch.Tensor):
            return "tensor", *_form(obj)
        functions = (torch._ops.OpOverload, types.FunctionType, types.BuiltinFunctionType)
        symbolic = isinstance(obj, (torch.SymInt, torch.SymFloat, torch.SymBool))
        if symbolic or (isinstance(obj, functions) and obj not in _FUNCTIONS):
            raise Unrecordable(f"{obj} has no exact form")
        return None


class _Reader(pickle.Unpickler):
    """Reads what `_Writer` wrote."""

    def __init__(self, file: io.BytesIO, nodes: Sequence[fx.Node], mode: FakeTensorMode) -> None:
        super().__init__(file)
        self._nodes, self._mode = nodes, mode

    def persistent_load(self, pid: Any) -> Any:
        kind, *said = pid
        if kind == "tensor":
            return _made(self._mode, *said)
        if kind == "node":
            return self._nodes[said[0]]
        return operator.attrgetter(said[0])(torch if kind == "torch" else torch.ops)


@dataclass(frozen=True)
class KeptGraph:
    """Where a graph is kept that is traced from another one; it may not be there yet.

    Args:
        file: its file.
        sources: the nodes of the graph that it is traced from.
        mode: of the examples.
    """

    file: Path
    sources: list[fx.Node]
    mode: FakeTensorMode

    @classmethod
    def of(cls, graph: fx.Graph, options: Any, identity: str) -> Self | None:
        """The place of what is traced from a graph; `None` where it may not be kept.

        That is a graph with inner graphs, sizes that are symbols or operators of the user's; one that is traced under
        modes or kernels of the user's; any, where torch is told to keep nothing either.

        Args:
            graph: what is traced.
            options: what else the trace depends on, as plain data.
            identity: name of the module that traces.
        """
        settings = trace_settings() if keeps_compiled() else None
        source = _own_source(identity)
        examples = [node.meta.get(_EXAMPLE) for node in graph.find_nodes(op="placeholder")]
        mode = next((value.fake_mode for value in examples if isinstance(value, FakeTensor)), None)
        if settings is None or mode is None or not source:
            return None
        try:
            content = _record_of(graph) + repr((options, settings, source)).encode()
            folder = cache_folder()
        except (Unrecordable, *_UNREADABLE) as cause:
            _LOG.debug("the joint graph is not kept: %s", cause)
            return None
        return cls(folder / f"joint_{hashlib.sha256(content).hexdigest()[:32]}.gz", list(graph.nodes), mode)

    def load(self) -> fx.Graph | None:
        """The graph, where it is kept."""
        try:
            graph = self._graph_of(gzip.decompress(self.file.read_bytes()))
            keep(self.file)
        except FileNotFoundError:
            return None
        except _UNREADABLE as cause:  # a damaged pickle may raise any of them
            _LOG.warning("%s cannot be read, and is made anew: %s", self.file, cause)
            return None
        return graph

    def store(self, graph: fx.Graph, origins: Mapping[str, int]) -> None:
        """Keep a graph; nothing is done where it has no exact form.

        Args:
            graph: what was traced.
            origins: by name of its nodes, the place in `sources` of the node that each was made for.
        """
        try:
            record = _record_of(graph, origins, self.sources)
            if _record_of(self._graph_of(record), origins, self.sources) != record:
                raise Unrecordable("what is read back is another graph")
            write_atomically(self.file, gzip.compress(record, 1))
            keep(self.file)
        except (AmpError, pickle.PicklingError, *_UNREADABLE) as cause:
            _LOG.debug("the joint graph is not kept: %s", cause)

    def _graph_of(self, record: bytes) -> fx.Graph:
        """The graph that `_record_of` wrote with origins."""
        graph, nodes = fx.Graph(), list[fx.Node]()
        reader = _Reader(io.BytesIO(record), nodes, self.mode)
        for _ in range(reader.load()):
            op, name, target, args, kwargs, example, origin, same, own = reader.load()
            node = graph.create_node(op, target, args, kwargs, name)
            source = {} if origin is None else self.sources[origin].meta
            node.meta = {**example, **{key: source[key] for key in same}, **own}
            nodes.append(node)
        return graph


def _record_of(graph: fx.Graph, origins: Mapping[str, int] | None = None, sources: Sequence[fx.Node] = ()) -> bytes:
    """The graph as data, with examples on its nodes, without inner graphs and attributes.

    Args:
        graph: the graph.
        origins: by name of a node, the place in `sources` of the one that it was made for, whose metadata it has.
        sources: see there. Without `origins` each node tells only which keys its metadata has.

    Raises:
        Unrecordable: something in it has no exact form.
    """
    file, nodes = io.BytesIO(), list(graph.nodes)
    writer = _Writer(file, nodes)
    writer.dump(len(nodes))
    for node in nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise Unrecordable(f"node '{node.name}' is a {node.op}")
        origin = None if origins is None else origins.get(node.name)
        own = {} if origins is None else {str(key): node.meta[key] for key in _OWN if key in node.meta}
        same = [key for key in marks_of(node) if key not in own]
        theirs = {} if origin is None else sources[origin].meta
        for key in same if origins is not None else ():
            if key not in theirs or not _is_same(theirs[key], node.meta[key]):
                raise Unrecordable(f"'{key}' of node '{node.name}' comes from nowhere")
        example = {_EXAMPLE: node.meta[_EXAMPLE]} if _EXAMPLE in node.meta else {}
        writer.dump((node.op, node.name, node.target, node.args, node.kwargs, example, origin, same, own))
    return file.getvalue()


def marks_of(node: fx.Node) -> list[str]:
    """The keys in a node's `meta` that somebody may read, sorted, without its example."""
    return sorted(str(key) for key in node.meta if key not in _UNREAD and key != _EXAMPLE)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two values of metadata are the same; tensors only where they are one, for `==` would compute."""
    return one is other or (not isinstance(one, torch.Tensor) and not isinstance(other, torch.Tensor) and one == other)


def _form(tensor: torch.Tensor) -> Iterator[Any]:
    ordinary = type(tensor) is FakeTensor and tensor.layout is torch.strided and tensor.constant is None
    numbers = [*tensor.shape, *tensor.stride(), tensor.storage_offset()] if ordinary else [None]
    if any(type(one) is not int for one in numbers) or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise Unrecordable(f"an example of type {type(tensor).__name__} has no exact form")
    yield from (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
    yield from (tensor.dtype, tensor.device, tensor.requires_grad)


def _made(
    mode: FakeTensorMode, shape: Any, stride: Any, offset: int, dtype: Any, device: Any, requires_grad: bool
) -> torch.Tensor:
    kind = {"dtype": dtype, "device": "meta"}
    bare = torch.empty_strided(shape, stride, **kind)
    if offset:
        reach = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
        bare = torch.empty(reach, **kind).as_strided(shape, stride, offset)
    tensor = FakeTensor(mode, bare, device)  # as the mode makes it of a factory's, in a fifth of the time
    return tensor.requires_grad_() if requires_grad else tensor


@functools.cache
def _own_source(tracer: str) -> str:
    """Stands for all that this package says about operators and how they are traced; empty where it has no source.

    Args:
        tracer: name of the module that traces.
    """
    package = Path(__file__).parents[1]
    files = sorted(file for room in _ROOMS for file in (package / room).rglob("*.py"))
    digest = hashlib.sha256()
    try:
        for file in (*files, Path(inspect.getfile(sys.modules[tracer]))):
            digest.update(file.name.encode() + b"\0" + file.read_bytes())
    except (OSError, TypeError):  # as in a program that was frozen into one file
        return ""
    return digest.hexdigest() if files else ""
