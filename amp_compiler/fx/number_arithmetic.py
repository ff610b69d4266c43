"""Arithmetic with numbers of Python that are inputs of a graph: Python does it, in front of the graph.

A compiler would do it in C, where a division by zero gives infinity or ends the process, and where whole numbers are of
64 bits. In Python `1 / k` and `k**3 % 1000` are what they are where the model runs as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from amp_compiler.errors import NumberError
from amp_compiler.fx.numbers import Number

_ITEM, _SIZE = torch.ops.aten.item.default, torch.ops.aten.sym_size.int
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
Read = Callable[[Sequence[Any]], Any]


def compute_in_python(
    graph: fx.Graph, numbers: Mapping[str, Number], places: Mapping[str, int], leaves: Sequence[Any]
) -> dict[str, Number]:
    """Put placeholders in the place of what a captured graph computes with numbers alone, and with sizes of its inputs.

    Args:
        graph: the graph.
        numbers: those of its placeholders that are numbers.
        places: those that are arguments, with their places among the flattened ones.
        leaves: the flattened arguments of the capture.

    Returns:
        The placeholders that are numbers now.

    Raises:
        NumberError: what is computed is no number that an input can stand for, today already, or goes into a number
            that only the graph knows.
    """
    made = _Arithmetic(graph, numbers, places)
    computed: dict[str, Number] = {}
    for node in made.results():
        number = made.number(node)
        if not number.fits(leaves):
            raise NumberError("it gives no number today that an input can stand for", labels=made.labels(node))
        source = made.source(node)
        with graph.inserting_before(source):
            placeholder = graph.placeholder("computed_number")
        placeholder.target = placeholder.name
        with source.meta["val"].fake_mode:
            placeholder.meta["val"] = torch.empty((), dtype=number.dtype)
        with graph.inserting_before(node):
            item = graph.call_function(_ITEM, (placeholder,))
        item.meta.update(node.meta)
        node.replace_all_uses_with(item, delete_user_cb=lambda user, item=item: user not in made.known)  # type: ignore[misc]
        computed[placeholder.name] = number
    if not computed:
        return dict(numbers)
    for node in reversed(made.known):
        if not node.users:
            graph.erase_node(node)
    used = dict(numbers)
    for placeholder in graph.find_nodes(op="placeholder"):
        if placeholder.name in numbers and not placeholder.users:
            graph.erase_node(placeholder)
            del used[placeholder.name]
    return used | computed


class _Arithmetic:
    """What is known of a graph before it runs; the arguments are those of `compute_in_python`.

    Attributes:
        known: the nodes that give numbers or are made of them, in their order, each with the former that are in it.
    """

    def __init__(self, graph: fx.Graph, numbers: Mapping[str, Number], places: Mapping[str, int]) -> None:
        self._numbers = numbers
        self._reads: dict[fx.Node, Read] = {}
        self.known: dict[fx.Node, tuple[fx.Node, ...]] = {}
        for node in graph.find_nodes(op="call_function", target=_ITEM):
            if node.args[0].name in numbers:
                self.known[node], self._reads[node] = (node,), numbers[node.args[0].name].read
        for node in graph.find_nodes(op="call_function", target=_SIZE):
            if node.args[0].name in places and type(node.args[1]) is int:
                self._reads[node] = partial(_size, places[node.args[0].name], node.args[1])
        for node in graph.nodes:
            if self._is_arithmetic(node) and any(one in self.known for one in node.all_input_nodes):
                if not all(one in self.known or one in self._reads for one in node.all_input_nodes) or node.kwargs:
                    (first, *_) = [one for one in node.all_input_nodes if one in self.known]
                    raise NumberError("it goes into a number that only the graph knows", labels=self.labels(first))
                made = [one for part in node.all_input_nodes for one in self.known.get(part, ())]
                self.known[node] = tuple(dict.fromkeys(made))

    @staticmethod
    def _is_arithmetic(node: fx.Node) -> bool:
        flat = not any(isinstance(one, (list, tuple)) for one in node.args)
        symbolic = isinstance(node.meta.get("val"), _SYMBOLS)
        return node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and symbolic and flat

    def results(self) -> list[fx.Node]:
        """What is computed and goes into tensors or out of the graph."""
        return [
            node
            for node in self.known
            if node not in self._reads and any(user not in self.known for user in node.users)
        ]

    def source(self, node: fx.Node) -> fx.Node:
        """The placeholder of the first number in it."""
        return self.known[node][0].all_input_nodes[0]

    def _of(self, node: fx.Node) -> list[Number]:
        return [self._numbers[item.all_input_nodes[0].name] for item in self.known[node]]

    def labels(self, node: fx.Node) -> frozenset[str]:
        """How the numbers in it are called."""
        return frozenset(number.label for number in self._of(node))

    def number(self, node: fx.Node) -> Number:
        """The number that it gives."""
        value = node.meta["val"]
        kind = float if isinstance(value, torch.SymFloat) else int if isinstance(value, torch.SymInt) else bool
        of_arguments = any(number.of_arguments for number in self._of(node))
        return Number(", ".join(sorted(self.labels(node))), self._read(node), kind, of_arguments)

    def _read(self, node: fx.Node) -> Read:
        """What computes it from the flattened arguments of a call."""
        needed, pending = set(), [node]
        while pending:
            one = pending.pop()
            if one not in needed:
                needed.add(one)
                pending += [] if one in self._reads else one.all_input_nodes
        begin = [one for one in self._reads if one in needed]
        rest = [one for one in self.known if one in needed and one not in self._reads]
        place = {one: number for number, one in enumerate((*begin, *rest))}
        steps = [
            (one.target, [(place[arg], None) if isinstance(arg, fx.Node) else (None, arg) for arg in one.args])
            for one in rest
        ]
        return partial(_compute, [self._reads[one] for one in begin], steps)


def _compute(begin: Sequence[Read], steps: Sequence[tuple[Any, Any]], leaves: Sequence[Any]) -> Any:
    values = [read(leaves) for read in begin]
    for function, arguments in steps:
        values.append(function(*[given if place is None else values[place] for place, given in arguments]))
    return values[-1]


def _size(place: int, dimension: int, leaves: Sequence[Any]) -> int:
    return int(leaves[place].shape[dimension])
