"""Numbers that are inputs of a graph: those with which C computes otherwise than Python are none."""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from amp_compiler.fx.torch_private.dynamo import restart_with_plain_numbers, source_text

_DIVIDES = frozenset({operator.truediv, operator.floordiv, operator.mod})
_LARGE = 2**31  # a factor with which a product may be beyond 64 bits


def settle_numbers(graph_module: fx.GraphModule) -> None:
    """Take those numbers as they are with which a graph does what C and Python do not do alike.

    C divides by zero, takes an integer beyond 64 bits for another one, and gives no complex root; Python raises, or
    is exact. Another value of such a number compiles again. What is divided by is guarded not to be zero, and what a
    power with a fraction is taken of to be positive, where they are.

    Args:
        graph_module: Dynamo's graph. Whole numbers are replaced in it by their values; for others Dynamo starts anew.
    """
    inexact = {symbol for node in graph_module.graph.nodes for symbol in _inexact(node)}
    if not inexact:
        return
    restart_with_plain_numbers(graph_module, inexact)
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.SymInt) and _symbols(value) & inexact and ".size()" not in source_text(node):
            node.meta["example_value"] = int(value)  # from now on Dynamo guards it


def _inexact(node: fx.Node) -> Iterator[str]:
    """The symbols with which a node computes what Python may compute otherwise."""
    if node.op != "call_function" or len(node.args) != 2 or not _is_symbolic(node.meta.get("example_value")):
        return
    first, second = (one.meta.get("example_value") if isinstance(one, fx.Node) else one for one in node.args)
    constants = [one for one in (first, second) if isinstance(one, (int, float))]
    divides = node.target in _DIVIDES and _is_symbolic(second)
    if (divides and not (node.target is operator.truediv and bool(second != 0))) or (
        node.target is operator.mul and any(abs(one) >= _LARGE for one in constants if isinstance(one, int))
    ):
        yield from _symbols(first) | _symbols(second)
    if node.target is operator.pow and not _is_plain_power(first, second):
        yield from _symbols(first) | _symbols(second)


def _is_plain_power(base: Any, exponent: Any) -> bool:
    if _is_symbolic(exponent):
        return isinstance(base, float) and base > 0
    if isinstance(base, torch.SymFloat) and exponent >= 0 and float(exponent).is_integer():
        return True
    return bool(base > 0) and isinstance(exponent, float)


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _symbols(value: Any) -> set[str]:
    return {str(one) for one in value.node.expr.free_symbols} if _is_symbolic(value) else set()
