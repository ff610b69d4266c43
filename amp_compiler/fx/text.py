r"""An FX graph as text, and back: for reading stages, for golden files, for diffs.

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

from __future__ import annotations

import ast
import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_compiler.errors import GraphError
from amp_compiler.fx.graph import module_of, neutral_dtype, torch_dtype
from amp_compiler.fx.meta import Key
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Pin
from amp_compiler.ops.cpu.update import complete_norm
from amp_compiler.ops.fp8 import fp8_product
from amp_compiler.ops.typed_op import typed_op
from amp_compiler.ops.update.product import Product
from amp_compiler.ops.update.wide_sum import WideSum

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "fp8_product": fp8_product,
    "typed_op": typed_op,
    "Product": Product,
    "Product.zeros": Product.zeros,
    "WideSum": WideSum,
    "complete_norm": complete_norm,
}
_NAMES: dict[Any, str] = {function: name for name, function in _FUNCTIONS.items()}
_BY_SHORT = {dtype.short: dtype for dtype in DType}
_LINE = re.compile(r"(?P<name>\w+)(?:: (?P<type>[^=]+))? = (?P<call>.*)")
_TENSOR = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\{(?P<stride>[^}]*)\})?(?:@(?P<device>[\w:]+))?(?P<parameter>!)?"
)


def format_fx(graph_module: fx.GraphModule) -> str:
    """The graph as text, the same for equal graphs.

    Args:
        graph_module: a graph whose nodes carry their fake tensors in `meta["val"]`.

    Example:
        >>> print(format_fx(parse_fx("in x: fp32[2]\nneg: fp32[2] = aten.neg.default(x)\nreturn neg")), end="")
        in x: fp32[2]
        neg: fp32[2] = aten.neg.default(x)
        return neg
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
        inner = graph_module.get_submodule(name) if _has_module(graph_module, name) else None
        if isinstance(inner, fx.GraphModule):
            yield f"graph {path}{name}\n"
            yield from _blocks(inner, f"{path}{name}.", written)


def _has_module(module: torch.nn.Module, name: str) -> bool:
    return name in {path for path, _ in module.named_modules()}


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


# What passes tell one another in node.meta, in the order of the text: key, how it is written, how it is read.
_MARKS: tuple[tuple[str, Callable[[Any], str], Callable[[str], Any]], ...] = (
    (Key.PHASE, lambda value: f"phase={value}", str),
    (Key.SEED, lambda value: "seed", bool),
    (Key.PIN, lambda value: f"pin={value.precision}", lambda text: Pin(text, "from text")),
    (
        Key.GROUP,
        lambda value: f"group={value[0]}:{value[1]}",
        lambda text: (text.rpartition(":")[0], int(text.rpartition(":")[2])),
    ),
    (Key.VOLATILE, lambda value: "volatile", bool),
    (Key.PLACED, lambda value: "cast", str),
    (Key.MATH, lambda value: "math", str),
    (Key.BACKWARD_MATH, lambda value: "backward_math", str),
    (Key.BACKWARD, lambda value: f"backward={neutral_dtype(value).short}", lambda text: torch_dtype(_BY_SHORT[text])),
    (
        Key.LOW,
        lambda value: f"low={value[0]}:{neutral_dtype(value[1]).short}",
        lambda text: (text.partition(":")[0], torch_dtype(_BY_SHORT[text.partition(":")[2]])),
    ),
    (Key.MASTER, lambda value: f"master={value}", str),
    (Key.WIDE, lambda value: f"wide={value}", str),
    (Key.RECOMPUTED, lambda value: "recomputed", bool),
    (Key.CHECKPOINT, lambda value: f"checkpoint={value}", int),
    (
        Key.STATE,
        lambda value: f"state={'/'.join(map(str, value))}",
        lambda text: tuple(int(part) if part.isdigit() else part for part in text.split("/")),
    ),
)


def _marks(node: fx.Node) -> str:
    marks = [write(node.meta[key]) for key, write, _ in _MARKS if node.meta.get(key) not in (None, False)]
    if node.op == "call_function":
        module, kind = module_of(node)
        if module or kind:
            marks.append(f"at={module}:{kind}")
    return " ".join(marks)


def parse_fx(text: str) -> fx.GraphModule:
    """The graph that `format_fx` wrote, or that was written by hand, with fake tensors on every node.

    Args:
        text: as `format_fx` writes it. Blank lines and lines that begin with `#` say nothing.

    Raises:
        GraphError: the text is malformed; the message names the line.
    """
    blocks: dict[str, list[tuple[int, str]]] = {"": []}
    current = blocks[""]
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("graph "):
            current = blocks.setdefault(line.removeprefix("graph ").strip(), [])
        elif line.strip() and not line.lstrip().startswith("#"):
            current.append((number, line.strip()))
    root = torch.nn.Module()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for name in sorted(blocks, key=lambda path: -path.count(".") - (path != "")):  # inner graphs first
        graph_module = _Reader(mode, root if not name else torch.nn.Module()).read(blocks[name])
        if not name:
            return graph_module
        root.add_module(name, graph_module)
    raise GraphError("there is no graph in this text", hint="end it with a line `return …`")


def _parts(text: str) -> list[str]:
    """The types of several results, of which some may be lists of results themselves."""
    parts: list[str] = []
    for part in re.split(r", (?=[a-z(])", text) if text else []:
        inside = bool(parts) and parts[-1].count("(") > parts[-1].count(")")
        if inside:
            parts[-1] += f", {part}"
        else:
            parts.append(part)
    return parts


class _Reader:
    """Reads the lines of one graph."""

    def __init__(self, mode: FakeTensorMode, root: torch.nn.Module) -> None:
        self.mode, self.root, self.graph = mode, root, fx.Graph()
        self.made: dict[str, fx.Node] = {}

    def read(self, lines: list[tuple[int, str]]) -> fx.GraphModule:
        for number, line in lines:
            try:
                self._read(line)
            except (SyntaxError, ValueError, KeyError, AttributeError, TypeError) as cause:
                raise GraphError(
                    f"'{line}' is no line of an FX graph: {cause}",
                    where=f"line {number}",
                    hint="the docstring of amp_compiler.fx.text shows the form of a line",
                ) from cause
        module = fx.GraphModule(self.root, self.graph)
        module.graph.lint()
        return module

    def _read(self, line: str) -> None:
        content, _, marks = line.partition("  # ")
        if content.split(" ")[0] == "return":
            tree = ast.parse(f"[{content.removeprefix('return').strip()}]", mode="eval").body
            self.graph.output(tuple(self._evaluate(tree)))
            return
        if content.startswith("in "):
            name, _, kind = content.removeprefix("in ").partition(": ")
            node = self.graph.create_node("placeholder", name, name=name)
        else:
            match = _LINE.fullmatch(content)
            if match is None:
                raise ValueError("a node is written 'name: type = op(arguments)'")
            name, kind = match["name"], match["type"] or ""
            node = self._call(name, ast.parse(match["call"], mode="eval").body)
        if node.name != name:
            raise ValueError(f"there are two nodes '{name}', or it is no name of a node")
        if kind or node.op == "call_function":
            node.meta["val"] = self._value(kind.strip()) if kind else None
        for mark in marks.split():
            self._mark(node, mark)
        self.made[name] = node

    def _call(self, name: str, call: ast.expr) -> fx.Node:
        if not isinstance(call, ast.Call):
            raise ValueError("there is no call behind '='")
        arguments = tuple(self._evaluate(one) for one in call.args)
        keywords = {str(one.arg): self._evaluate(one.value) for one in call.keywords}
        function = ast.unparse(call.func)
        if function == "attribute":
            if not hasattr(self.root, arguments[0]):
                setattr(self.root, arguments[0], torch.nn.Module())
            return self.graph.create_node("get_attr", arguments[0], name=name)
        if function in ("call_method", "call_module"):
            return self.graph.create_node(function, arguments[0], arguments[1:], keywords, name)
        return self.graph.create_node("call_function", _function(function), arguments, keywords, name)

    def _evaluate(self, tree: ast.expr) -> Any:
        if isinstance(tree, ast.Name):
            if tree.id in self.made:
                return self.made[tree.id]
            if tree.id in ("inf", "nan"):
                return getattr(math, tree.id)
            return _function(tree.id)
        if isinstance(tree, ast.Attribute):
            return _function(ast.unparse(tree))
        if isinstance(tree, ast.List):
            return [self._evaluate(item) for item in tree.elts]
        if isinstance(tree, ast.Tuple):
            return tuple(self._evaluate(item) for item in tree.elts)
        if isinstance(tree, ast.Dict):
            return {ast.literal_eval(k): self._evaluate(v) for k, v in zip(tree.keys, tree.values, strict=True)}  # type: ignore[arg-type]
        if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
            return -self._evaluate(tree.operand)
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.id in ("device", "slice"):
            arguments = [self._evaluate(one) for one in tree.args]
            return torch.device(*arguments) if tree.func.id == "device" else slice(*arguments)
        return ast.literal_eval(tree)

    def _value(self, text: str) -> Any:
        if text.startswith("("):
            return tuple(None if part == "none" else self._value(part) for part in _parts(text[1:-1]))
        match = _TENSOR.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is no type")
        dtype = (
            torch_dtype(_BY_SHORT[match["dtype"]]) if match["dtype"] in _BY_SHORT else getattr(torch, match["dtype"])
        )
        shape = [int(size) for size in match["shape"].split(",") if size.strip()]
        device = match["device"] or "cpu"
        with self.mode:
            if match["stride"] is None:
                return torch.empty(shape, dtype=dtype, device=device)
            return torch.empty_strided(shape, [int(s) for s in match["stride"].split(",")], dtype=dtype, device=device)

    def _mark(self, node: fx.Node, mark: str) -> None:
        name, _, value = mark.partition("=")
        if name == "at":
            module, _, kind = value.partition(":")
            node.meta["nn_module_stack"] = {module: (module, kind)}
            return
        for key, _, read in _MARKS:
            if key.removeprefix("amp_") == name:
                node.meta[key] = read(value or "true")
                return
        raise ValueError(f"there is no mark '{mark}'")


def _function(name: str) -> Any:
    """The function, operator or constant of torch that a dotted name stands for."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    first, _, rest = name.partition(".")
    value: Any = {"torch": torch, "operator": operator, "math": math}.get(first)
    if first == "higher_order":
        return getattr(torch.ops.higher_order, rest)
    if value is None:
        value, rest = torch.ops, name
    for part in rest.split("."):
        value = getattr(value, part)
    if value is None or isinstance(value, torch._ops.OpOverloadPacket):
        raise ValueError(f"'{name}' names no operator; write its overload too")
    return value
