"""Reads the text of an FX graph, as `fx.text` writes it or as it was written by hand."""

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_compiler.fx.graph import torch_dtype
from amp_compiler.fx.meta import Key
from amp_compiler.fx.text import FUNCTIONS
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import Pin

_BY_SHORT = {dtype.short: dtype for dtype in DType}
_LINE = re.compile(r"(?P<name>\w+)(?:: (?P<type>[^=]+))? = (?P<function>[\w.]+)\((?P<arguments>.*)\)")
_TENSOR = re.compile(
    r"(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:\{(?P<stride>[^}]*)\})?(?:@(?P<device>[\w:]+))?(?P<parameter>!)?"
)


def _group(text: str) -> tuple[str, int]:
    name, _, ranks = text.rpartition(":")
    return name, int(ranks)


def _low(text: str) -> tuple[str, torch.dtype]:
    name, _, dtype = text.partition(":")
    return name, torch_dtype(_BY_SHORT[dtype])


def _state(text: str) -> tuple[str | int, ...]:
    return tuple(int(part) if part.isdigit() else part for part in text.split("/"))


# How marks are read that are not as their key says.
_MARKS: dict[Key, Callable[[str], Any]] = {
    Key.PIN: lambda text: Pin(text, "from text"),
    Key.GROUP: _group,
    Key.BACKWARD: lambda text: torch_dtype(_BY_SHORT[text]),
    Key.LOW: _low,
    Key.STATE: _state,
}


def parse_fx(text: str) -> fx.GraphModule:
    """The graph that `format_fx` wrote, or that was written by hand, with fake tensors on every node.

    Args:
        text: as `format_fx` writes it. Blank lines and lines that begin with `#` say nothing.

    Raises:
        ValueError: there is no graph in it.
    """
    blocks: dict[str, list[str]] = {"": []}
    current = blocks[""]
    for line in text.splitlines():
        if line.startswith("graph "):
            current = blocks.setdefault(line.removeprefix("graph ").strip(), [])
        elif line.strip() and not line.lstrip().startswith("#"):
            current.append(line.strip())
    root = torch.nn.Module()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for name in sorted(blocks, key=lambda path: -path.count(".") - (path != "")):  # inner graphs first
        graph_module = _Reader(mode, root if not name else torch.nn.Module()).read(blocks[name])
        if not name:
            return graph_module
        root.add_module(name, graph_module)
    raise ValueError("there is no graph in this text")


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


class _Names(dict[str, Any]):
    """What names in a text stand for; those that are not here are namespaces of operators."""

    def __missing__(self, name: str) -> Any:
        return getattr(torch.ops, name)


_PYTHON = {"torch": torch, "operator": operator, "math": math, "inf": math.inf, "nan": math.nan, "slice": slice}
_FUNCTIONS = _Names({**_PYTHON, "device": torch.device, **FUNCTIONS})


class _Reader:
    """Reads the lines of one graph."""

    def __init__(self, mode: FakeTensorMode, root: torch.nn.Module) -> None:
        self.mode, self.root, self.graph = mode, root, fx.Graph()
        self.names = _Names({**_FUNCTIONS, "given": lambda *arguments, **keywords: (arguments, keywords)})

    def read(self, lines: list[str]) -> fx.GraphModule:
        for line in lines:
            self._read(line)
        module = fx.GraphModule(self.root, self.graph)
        module.graph.lint()
        return module

    def _read(self, line: str) -> None:
        content, _, marks = line.partition("  # ")
        if content.split(" ")[0] == "return":
            self.graph.output(self._given(content.removeprefix("return"))[0])
            return
        if content.startswith("in "):
            name, _, kind = content.removeprefix("in ").partition(": ")
            node = self.graph.create_node("placeholder", name, name=name)
        else:
            match = _LINE.fullmatch(content)
            if match is None:
                raise ValueError(f"a node is written 'name: type = op(arguments)', not {content!r}")
            name, kind = match["name"], match["type"] or ""
            node = self._call(name, match["function"], *self._given(match["arguments"]))
        assert node.name == name
        if kind or node.op == "call_function":
            node.meta["val"] = self._value(kind.strip()) if kind else None
        for mark in marks.split():
            self._mark(node, mark)
        self.names[name] = node

    def _given(self, text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments and keywords of a call, of which the text stands between its parentheses."""
        return eval(f"given({text})", {}, self.names)  # type: ignore[no-any-return]

    def _call(self, name: str, function: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> fx.Node:
        if function == "attribute":
            if not hasattr(self.root, arguments[0]):
                setattr(self.root, arguments[0], torch.nn.Module())
            return self.graph.create_node("get_attr", arguments[0], name=name)
        if function in ("call_method", "call_module"):
            return self.graph.create_node(function, arguments[0], arguments[1:], keywords, name)
        return self.graph.create_node("call_function", eval(function, {}, _FUNCTIONS), arguments, keywords, name)

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
        key = Key(f"amp_{name}")
        node.meta[key] = _MARKS.get(key, key.kind)(value or "true")
