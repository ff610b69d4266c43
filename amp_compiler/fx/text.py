r"""An FX graph as text: for reading stages, for golden files, for diffs.

The text is ours, so that it is the same under every version of torch. One line is one node::

    in w: fp32[4, 4]
    in x: bf16[4, 4]  # low=w:bf16
    mul: fp32[4, 4] = aten.mul.Tensor(w, x)  # forward at=mlp.fc1:Linear
    max_1: (fp32[4], i64[4]) = aten.max.dim(mul, 0)
    getitem: fp32[4] = getitem(max_1, 0)
    return getitem, None

A tensor that is not contiguous says its strides (`fp32[4, 8]{1, 4}`), one that is not on the CPU its device
(`fp32[4]@cuda`). Behind `#` stand the marks that passes leave for one another, see `_MARKS`. A graph that a node refers
to stands behind the one that does, under a line `graph <name>`.
"""

import functools
import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from amp_compiler.fx.graph import module_of, neutral_dtype
from amp_compiler.fx.meta import Key
from amp_compiler.ir.dtypes import DType
from amp_compiler.ops.cpu.update import complete_norm
from amp_compiler.ops.fp8 import fp8_product
from amp_compiler.ops.typed_op import typed_op
from amp_compiler.ops.update.product import Product

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "fp8_product": fp8_product,
    "typed_op": typed_op,
    "Product": Product,
    "Product.zeros": Product.zeros,
    "complete_norm": complete_norm,
}
_NAMES: dict[Any, str] = {function: name for name, function in FUNCTIONS.items()}


def format_fx(graph_module: fx.GraphModule) -> str:
    """The graph as text, the same for equal graphs.

    Args:
        graph_module: a graph whose nodes carry their fake tensors in `meta["val"]`.
    """
    return Lines().format(graph_module)


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """What a node's line was written from, and the line. What is immutable is compared by its identity."""

    name: str
    call: tuple[Any, ...]  # target, arguments, keywords
    meta: list[Any]  # keys, and what stands under them
    sources: list[str]
    line: str


class Lines:
    """Writes graphs as `format_fx` does, again and again: of a node that stayed as it was, the line is kept.

    A pass changes a few nodes of hundreds, and its contract asks for the text behind every pass. An example whose sizes
    are changed in place keeps the line that it had.
    """

    def __init__(self) -> None:
        self._seen: dict[fx.Node, _Seen] = {}

    def format(self, graph_module: fx.GraphModule) -> str:
        """The graph as text, see `format_fx`."""
        return "".join(_blocks(graph_module, "", self._line))

    def clear(self) -> None:
        """Forget the nodes."""
        self._seen.clear()

    def _line(self, node: fx.Node) -> str:
        call = (node.target, node.args, node.kwargs)
        meta, sources = [*node.meta, *node.meta.values()], [source.name for source in node.all_input_nodes]
        seen = self._seen.get(node)
        if (
            seen is not None
            and seen.name == node.name
            and seen.sources == sources
            and all(map(operator.is_, seen.call, call))
            and len(seen.meta) == len(meta)
            and all(map(operator.is_, seen.meta, meta))
        ):
            return seen.line
        line = _line(node)
        self._seen[node] = _Seen(node.name, call, meta, sources, line)
        return line


def _blocks(graph_module: fx.GraphModule, path: str, written: Callable[[fx.Node], str]) -> Iterator[str]:
    lines = [written(node) for node in graph_module.graph.nodes]
    yield "\n".join(lines) + "\n"
    named = dict.fromkeys(str(n.target) for n in graph_module.graph.nodes if n.op in ("get_attr", "call_module"))
    for name in named:
        inner = graph_module.get_submodule(name) if name in dict(graph_module.named_modules()) else None
        if isinstance(inner, fx.GraphModule):
            yield f"graph {path}{name}\n"
            yield from _blocks(inner, f"{path}{name}.", written)


def _line(node: fx.Node) -> str:
    marks = _marks(node)
    behind = f"  # {marks}" if marks else ""
    if node.op == "output":
        results: Any = node.args[0]
        flat = results if isinstance(results, (list, tuple)) else [results]
        return f"return {', '.join(map(_argument, flat))}".rstrip() + behind
    kind = _value(node.meta.get("val"))
    typed = f"{node.name}: {kind}" if kind else node.name
    if node.op == "placeholder":
        return f"in {typed}{behind}"
    arguments = [*map(_argument, node.args), *(f"{key}={_argument(value)}" for key, value in node.kwargs.items())]
    if node.op == "get_attr":
        return f"{typed} = attribute({json.dumps(node.target)}){behind}"
    if node.op in ("call_method", "call_module"):
        return f"{typed} = {node.op}({', '.join([json.dumps(node.target), *arguments])}){behind}"
    return f"{typed} = {_target(node.target)}({', '.join(arguments)}){behind}"


def _target(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    if target in _NAMES:
        return _NAMES[target]
    module = (getattr(target, "__module__", "") or "builtins").lstrip("_")
    name = getattr(target, "__qualname__", getattr(target, "__name__", str(target)))
    return str(name) if module.startswith("amp_compiler") else f"{module}.{name}"


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_value(item) or 'none' for item in value)})"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"sym {value}"
    return "" if value is None else type(value).__name__


@functools.cache
def _short(dtype: torch.dtype) -> str:
    neutral = neutral_dtype(dtype)
    return str(dtype).removeprefix("torch.") if neutral in (DType.FLOAT8, DType.OTHER) else neutral.short


def _tensor(tensor: torch.Tensor) -> str:
    text = f"{_short(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"
    if tensor.layout is torch.strided and not _is_contiguous(tensor):
        text += f"{{{', '.join(map(str, tensor.stride()))}}}"
    if tensor.device.type != "cpu":
        text += f"@{tensor.device.type}"
    return text


def _is_contiguous(tensor: torch.Tensor) -> bool:
    """As the tensor says; where a size is not known, as its strides are written, which asks nothing of that size."""
    if all(type(size) is int for size in (*tensor.shape, *tensor.stride())):
        return tensor.is_contiguous()
    expected: Any = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if str(stride) != str(expected):
            return False
        expected = expected * size
    return True


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple):
        return f"({', '.join(map(_argument, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{json.dumps(key)}: {_argument(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({_argument(value.start)}, {_argument(value.stop)}, {_argument(value.step)})"
    if isinstance(value, str):
        return (
            json.dumps(value) if value.isascii() else repr(value)
        )  # JSON's pairs for rare characters are not Python's
    if isinstance(value, torch.device):
        return f'device("{value.type}")'
    if callable(value):
        return _target(value)
    return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)


# What passes tell one another in node.meta, in the order of the text, and how it is written.
_MARKS: dict[str, Callable[[Any], str]] = {
    Key.PHASE: lambda value: f"phase={value}",
    Key.SEED: lambda value: "seed",
    Key.PIN: lambda value: f"pin={value.precision}",
    Key.GROUP: lambda value: f"group={value[0]}:{value[1]}",
    Key.VOLATILE: lambda value: "volatile",
    Key.PLACED: lambda value: "cast",
    Key.MATH: lambda value: "math",
    Key.BACKWARD_MATH: lambda value: "backward_math",
    Key.BACKWARD: lambda value: f"backward={neutral_dtype(value).short}",
    Key.LOW: lambda value: f"low={value[0]}:{neutral_dtype(value[1]).short}",
    Key.MASTER: lambda value: f"master={value}",
    Key.WIDE: lambda value: f"wide={value}",
    Key.RECOMPUTED: lambda value: "recomputed",
    Key.CHECKPOINT: lambda value: f"checkpoint={value}",
    Key.STATE: lambda value: f"state={'/'.join(map(str, value))}",
}


def _marks(node: fx.Node) -> str:
    marks = [write(node.meta[key]) for key, write in _MARKS.items() if node.meta.get(key) not in (None, False)]
    if node.op == "call_function":
        module, kind = module_of(node)
        if module or kind:
            marks.append(f"at={module}:{kind}")
    return " ".join(marks)
