"""The kernels of a program that Inductor writes, for `kernel_costs.py`: written, and neither compiled nor run.

Inductor knows of every kernel that it makes which elements of which buffers it reads and writes. Bytes are counted as a
kernel at its best moves them: each element of a buffer once, however often the kernel comes back to it; of a lookup no
more than is looked up; nothing for what only the kernel itself reads. Libraries' kernels (matrix products,
convolutions, attention) read their operands and write their results once; their operations are counted by
`torch.utils.flop_counter`, and a causal attention does half of them.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import sympy
import torch
from kernel_costs import (
    ATTENTION,
    CONVOLUTION,
    FUSED,
    MATMUL,
    OTHER,
    PRECISION,
    RECURRENCE,
    TF32,
    Kernel,
    classifier_loss_kernels,
)
from torch import fx
from torch._inductor import codecache, config, ir, scheduler
from torch._inductor.dependencies import Dep, MemoryDep, WeakDep
from torch._inductor.fx_utils import count_flops_fx
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily

# Kernels that a call of a library launches, where it is not one. A backward of a convolution is one for the images and
# one for the weights; that of attention first multiplies the result with its gradient, and FlashAttention's turns the
# gradient of the queries into 16 bits behind it.
_LAUNCHES = {
    "convolution_backward": 2,
    "_scaled_dot_product_flash_attention_backward": 3,
    "_scaled_dot_product_efficient_attention_backward": 2,
    "_scaled_dot_product_cudnn_attention_backward": 3,
    "_cudnn_rnn": 4,
    "_cudnn_rnn_backward": 8,
}
_KINDS = {"mm": MATMUL, "dot_product": ATTENTION, "attention": ATTENTION, "conv": CONVOLUTION, "rnn": RECURRENCE}


@contextlib.contextmanager
def recorded() -> Iterator[list[Kernel]]:
    """Within it, what Inductor compiles is added to a list of kernels, and gives empty tensors when it is called."""
    kernels: list[Kernel] = []

    def not_loaded(cls: Any, key: str, path: str, *rest: Any, **named: Any) -> Any:
        graph = V.graph
        kernels.extend(one for node in graph.scheduler.nodes for one in kernels_of(node))
        return SimpleNamespace(call=_returning_empty(graph), __file__=path)

    settings = {"force_disable_caches": True, "triton.cudagraphs": False}
    replaced = mock.patch.object(codecache.PyCodeCache, "load_by_key_path", classmethod(not_loaded))
    with config.patch(settings), replaced:
        yield kernels


def _returning_empty(graph: Any) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Results of the right form; those that are an input are that input."""
    places = {name: place for place, name in enumerate(graph.graph_input_names)}
    made = [_form(one, places) for one in graph.graph_outputs]

    def call(given: list[Any]) -> tuple[Any, ...]:
        with unset_fake_temporarily():
            results = tuple(make(given) for make in made)
        given.clear()
        return results

    return call


def _form(output: Any, places: dict[str, int]) -> Callable[[list[Any]], Any]:
    if isinstance(output, ir.NoneAsConstantBuffer):
        return lambda given: None
    if isinstance(output, ir.ShapeAsConstantBuffer):
        value = _number(output.expr)
        return lambda given: value
    place = places.get(output.get_name())
    if place is not None:
        return lambda given: given[place]
    sizes, strides = list(map(_number, output.get_size())), list(map(_number, output.get_stride()))
    dtype, device = output.get_dtype(), output.get_device()
    return lambda given: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _number(expression: Any) -> int:
    hint = getattr(V.graph.sizevars, "optimization_hint", None) or V.graph.sizevars.size_hint
    return int(expression) if isinstance(expression, int) else int(hint(expression))


def kernels_of(node: Any) -> list[Kernel]:
    """What a node of Inductor's scheduler launches: nothing, or one kernel or call of a library."""
    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return []
    if isinstance(node, scheduler.GroupedSchedulerNode):
        return [one for inner in node.snodes for one in kernels_of(inner)]
    read, written = _bytes(node)
    if isinstance(node, scheduler.ExternKernelSchedulerNode):
        if isinstance(node.node, (ir.MultiOutput, ir.MultiOutputLayout)):
            return []
        return _chunks(node.node) or [_library(node, read, written)]
    return [Kernel(_told(node), FUSED, read, written)]


def _told(node: Any) -> str:
    """A fused kernel for people: which operators of the graph are in it, whether it reduces."""
    nodes = [one.node for one in _parts(node) if getattr(one, "node", None) is not None]
    names = {re.sub(r"(_\d+)+$", "", origin.name) for one in nodes for origin in getattr(one, "origins", ())}
    return f"{'reduces: ' if node.is_reduction() else ''}{', '.join(sorted(names)) or node.get_name()}"


def _chunks(buffer: Any) -> list[Kernel]:
    """The kernels of our operators that go over a classifier's rows in chunks; none for all others."""
    name = _operator(buffer, None)
    source = next((one for one in buffer.origins if getattr(one.target, "__name__", "") == f"{name}.default"), None)
    if name not in ("classifier_loss", "classifier_loss_gradients") or source is None:
        return []
    arguments = [one.meta["val"] if isinstance(one, fx.Node) else one for one in source.args]
    x, weight, *rest = arguments[name == "classifier_loss_gradients" :]
    sizes = (*x.shape, weight.shape[0], x.dtype.itemsize, rest[6])
    return classifier_loss_kernels(*sizes, name == "classifier_loss_gradients", _precision(source, MATMUL))


def _library(node: Any, read: int, written: int) -> Kernel:
    """A call of a library, or of an operator that Inductor leaves as it is."""
    origins = [node.node.get_origin_node()] if node.node.get_origin_node() is not None else list(node.node.origins)
    counted = {one: count_flops_fx(one) or 0 for one in origins if isinstance(one, fx.Node)}
    source = max(counted, key=lambda one: counted[one], default=None)
    name = _operator(node.node, source)
    flops = counted[source] if source is not None else 0
    kind = next((kind for part, kind in _KINDS.items() if part in name), OTHER)
    if kind == ATTENTION and source is not None and _is_causal(source):
        flops //= 2
    return Kernel(name, kind, read, written, int(flops), _precision(source, kind), _LAUNCHES.get(name, 1))


def _operator(buffer: Any, source: fx.Node | None) -> str:
    target = getattr(buffer, "op_overload", None) or (source.target if source is not None else None)
    packet = getattr(target, "overloadpacket", target)
    return getattr(packet, "__name__", None) or type(buffer).__name__


def _is_causal(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return given.get("is_causal") is True


def _precision(source: fx.Node | None, kind: str) -> str:
    """Of the elements that are multiplied: the narrowest among the tensors that are read."""
    values = [one.meta.get("val") for one in source.all_input_nodes] if source is not None else []
    types = [one.dtype for one in values if isinstance(one, torch.Tensor) and one.dtype in PRECISION]
    found = PRECISION[min(types, key=lambda dtype: dtype.itemsize)] if types else "16 bits"
    if found == "fp32":
        convolves = kind in (CONVOLUTION, RECURRENCE)
        rounds = torch.backends.cudnn.allow_tf32 if convolves else torch.backends.cuda.matmul.allow_tf32
        return TF32 if rounds else found
    return found


def _bytes(node: Any) -> tuple[int, int]:
    """Bytes that a node reads and writes; see the head of this file."""
    inner = _parts(node)
    written_here = {dep.name for dep in node.read_writes.writes}
    outputs = {name for name in written_here if _outlives(name, inner, node)}
    sums = [0, 0]
    for place, deps in enumerate((node.read_writes.reads, node.read_writes.writes)):
        touched: dict[str, int] = {}
        for dep in deps:
            if _is_access(dep, node) and (dep.name not in written_here or dep.name in outputs):
                touched[dep.name] = touched.get(dep.name, 0) + _touched(dep, node)
                if getattr(dep, "mode", None) == "atomic_add":
                    sums[0] += _touched(dep, node)
        if place == 0:  # what is written here and read again by the same kernel is still at hand
            touched = {name: count for name, count in touched.items() if name not in outputs}
        sums[place] += sum(min(count, _stored(name, node)) for name, count in touched.items())
    return sums[0], sums[1]


def _is_access(dep: Dep, node: Any) -> bool:
    """Whether something is read or written; else it says only what has to come before."""
    extern = isinstance(node, scheduler.ExternKernelSchedulerNode)
    return isinstance(dep, MemoryDep) or (extern and not isinstance(dep, WeakDep))


def _parts(node: Any) -> set[Any]:
    """The nodes that were fused into one, and itself."""
    return {node}.union(*map(_parts, getattr(node, "snodes", ())))


def _outlives(name: str, inner: set[Any], node: Any) -> bool:
    buffer = node.scheduler.name_to_buf.get(name)
    return buffer is None or any(user.node not in inner and not user.is_weak for user in buffer.users)


def _stored(name: str, node: Any) -> int:
    """Bytes of a whole buffer; of several where an operator gives them together."""
    buffer = V.graph.try_get_buffer(name) if hasattr(V.graph, "try_get_buffer") else V.graph.get_buffer(name)
    layout = getattr(buffer, "layout", None)
    if isinstance(layout, ir.MultiOutputLayout):
        users = [user.node for user in node.scheduler.name_to_buf[name].users]
        outputs = [one.node for one in users if isinstance(getattr(one, "node", None), ir.MultiOutput)]
        return sum(_stored(one.get_name(), node) for one in outputs)
    if buffer is None or isinstance(layout, ir.NoneLayout) or isinstance(buffer, ir.TorchBindObject):
        names = buffer.get_mutation_names() if isinstance(layout, ir.NoneLayout) else []
        return sum(_stored(one, node) for one in names)
    return _number(sympy.prod(buffer.get_size())) * buffer.get_dtype().itemsize


def _touched(dep: Dep, node: Any) -> int:
    """Bytes of the elements that one read or write touches, at most: a lookup may take the same row twice."""
    whole = _stored(dep.name, node)
    if not isinstance(dep, MemoryDep) or whole == 0:
        return whole
    used = dep.index.free_symbols
    looks_up = dep.is_indirect()
    sizes = [size for name, size in zip(dep.var_names, dep.size, strict=True) if looks_up or name in used]
    return min(whole, _number(sympy.prod(sizes)) * V.graph.get_dtype(dep.name).itemsize)
