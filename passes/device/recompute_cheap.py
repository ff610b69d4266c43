"""`RecomputeCheap`: what is made of kept values by elementwise operators is made again in the backward, not kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from amp_compiler.errors import PassError
from amp_compiler.fx.alias import AliasGroups, written_roots
from amp_compiler.fx.graph import hint, node_tensor, results_of
from amp_compiler.fx.lower import made_tensors
from amp_compiler.fx.meta import Key
from amp_compiler.fx.recompute import computed_again, memory_of
from amp_compiler.fx.torch_private.tracing import is_pointwise
from amp_compiler.passes.base import RewritePass
from amp_compiler.planner.mincut import TwoLabelProblem

_MIB = 2**20
_aten = torch.ops.aten
_CASTS = {_aten._to_copy.default, _aten.to.dtype}
# What a byte counts that is kept until the backward, and one that is moved once more to spare it.
_KEPT, _MOVED = 2, 1
PER_BYTE = 206  # operations on 16-bit matrices that an H200 does while it moves a byte: 989e12 over 4.8e12 a second


@dataclass(frozen=True)
class RecomputeCheap(RewritePass):
    """Compute elementwise values again where the backward reads them, if that keeps fewer bytes for it.

    What is kept is a minimum cut: of all sets of values from which elementwise operators, casts and views make what the
    backward reads, the one with the fewest bytes. A value that a product reads has to be written again, and one that
    the backward did not read before has to be read: such bytes count half. They take time as well, of which no more is
    spent than a small part of what the step's products take by a model: the longer of their operations and their bytes
    at an H200's speed. What is kept longest goes first.

    Before::

        gelu: bf16[8, 8] = aten.gelu.default(addmm)  # phase=forward
        …
        mm: bf16[8, 8] = aten.mm.default(grad, gelu)  # phase=backward
        gelu_backward: bf16[8, 8] = aten.gelu_backward.default(grad_1, addmm)  # phase=backward

    After::

        gelu: bf16[8, 8] = aten.gelu.default(addmm)  # phase=forward
        …
        gelu_1: bf16[8, 8] = aten.gelu.default(addmm)  # phase=backward
        mm: bf16[8, 8] = aten.mm.default(grad, gelu_1)  # phase=backward
        gelu_backward: bf16[8, 8] = aten.gelu_backward.default(grad_1, addmm)  # phase=backward

    As everywhere, a compiler may keep what is 16 bits wide in FP32 between two operators that it makes one loop of.

    Left alone: products, convolutions, attention, reductions and with them norms, random numbers, whatever is small or
    changed in place, what the step returns; and a CPU, where memory is plenty and arithmetic takes time.

    Args:
        devices: on which it is done.
        least: of a value, in MiB.
        most: how much longer the step may take by the model, as a share of what its products take.
    """

    devices: tuple[str, ...] = ("cuda",)
    least: float = 1
    most: float = 0.02
    exact: ClassVar[bool] = True
    skippable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.devices, str):
            raise PassError(f"recompute_cheap: devices={self.devices!r}", hint=f"write devices=({self.devices!r},)")
        for name in ("least", "most"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not value >= 0:
                raise PassError(f"recompute_cheap: {name}={value!r}", hint="give a number from 0 on")

    def rewrite(self, graph: fx.Graph) -> bool:
        """Add copies to the backward, in place."""
        tensors = (node_tensor(node) for node in graph.nodes)
        if not any(value.device.type in self.devices for value in tensors if value is not None):
            return False
        values = _Values(graph, self.devices, self.least * _MIB)
        recomputed = values.cheapest()
        spent, kept = 0.0, set()
        most = self.most * products_in_bytes(graph) if recomputed else 0
        for node in recomputed:  # in the order of the forward: what is kept longest first
            spent += values.moved(node)
            if spent > most:
                kept.add(node)
                spent -= values.moved(node)
        if kept:
            recomputed = values.cheapest(kept)
        return computed_again(graph, values.forward, set(recomputed))


class _Values:
    """What the forward makes, which of it the backward reads, and what it costs to keep or to make again."""

    def __init__(self, graph: fx.Graph, devices: Collection[str], least: float) -> None:
        groups = AliasGroups(graph)
        written = written_roots(graph, groups)
        results = {groups.root(node) for node in results_of(graph) if isinstance(node, fx.Node)}
        self.forward = [n for n in graph.nodes if n.op == "call_function" and n.meta.get(Key.PHASE) == "forward"]
        self._all = set(self.forward)
        self._alive = {node for node in self.forward if groups.root(node) in results}
        self._cheap = {
            node
            for node in self.forward
            if node not in self._alive
            and _is_elementwise(node)
            and (value := node_tensor(node)) is not None
            and value.device.type in devices
            and _bytes_of(value) >= least
            and written.isdisjoint(groups.root(one) for one in (node, *node.all_input_nodes))
        }
        self._cheap -= self._read_far_apart()
        self._written = {node: self._is_written_again(node) for node in self._cheap}
        self._read: set[fx.Node] = set()
        for node in reversed(self.forward):
            if node in self._read or any(user not in self._all for user in node.users):
                self._read.update((node, *memory_of(node)))

    def _read_far_apart(self) -> set[fx.Node]:
        """Values that the forward reads on both sides of a product which depends on them, as residuals.

        One is made of the other. Made again, all would be at once, where the backward reads the last of them.
        """
        order = {node: place for place, node in enumerate(self.forward)}
        first: dict[fx.Node, int] = {}  # place of the first node behind it that is no loop
        far = set()
        for node in reversed(self.forward):
            users = [user for user in node.users if user in order]
            places = [first[user] if _is_loop(user) else order[user] for user in users]
            first[node] = min(places, default=len(order))
            if any(_is_loop(user) and order[user] > first[node] for user in _readers(node) if user in order):
                far.add(node)
        return far

    def _is_written_again(self, node: fx.Node) -> bool:
        """Whether something in the backward reads it from memory: what is no loop over elements."""
        for user in node.users:
            if user in self._all:
                if memory_of(user) and self._is_written_again(user):
                    return True
            elif memory_of(user):
                if any(not _is_elementwise(reader) for reader in _readers(user)):
                    return True
            elif not _is_elementwise(user):
                return True
        return False

    def moved(self, node: fx.Node) -> int:
        """Bytes that are moved once more where it is made again, but those of values of the forward."""
        inputs = [one for one in node.all_input_nodes if one.op == "placeholder"]
        read = [one for one in inputs if all(user in self._all for user in one.users)]
        return sum(map(_size_of, [*read, node] if self._written[node] else read))

    def cheapest(self, kept: Collection[fx.Node] = ()) -> list[fx.Node]:
        """What is to be made again, in the order of the forward, by a minimum cut.

        Args:
            kept: what must not be.
        """
        problem = TwoLabelProblem()
        needed = {node: problem.variable() for node in self.forward}
        again: dict[fx.Node, int] = {}
        forced = 1 + 4 * sum(_size_of(node) for node in self.forward)
        for node in self.forward:
            if node in self._read:
                problem.single(needed[node], if_zero=forced)
            sources = memory_of(node)
            cost = 0 if node in self._alive else _KEPT * _size_of(node)
            cost += 0 if node in self._read else _MOVED * _size_of(node)
            if node in self._cheap and node not in kept:
                again[node] = problem.variable()
                problem.pair(needed[node], again[node], cost)
                problem.single(again[node], if_one=_MOVED * self.moved(node))
                sources = node.all_input_nodes
            elif not sources:
                problem.single(needed[node], if_one=cost)
            for source in sources:
                if source in needed:
                    problem.pair(again.get(node, needed[node]), needed[source], None)
        labels = problem.solve()
        return [node for node, variable in again.items() if labels[variable]]


def products_in_bytes(graph: fx.Graph) -> float:
    """How many bytes a GPU moves while it does a graph's matrix products, convolutions and attention, by a model."""
    return sum(map(_product_in_bytes, graph.nodes))


def _product_in_bytes(node: fx.Node) -> float:
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if node.op != "call_function" or count is None:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])
    flops = hint(count(*args, **kwargs, out_val=node.meta["val"]))
    return max(flops / PER_BYTE, sum(map(_size_of, node.all_input_nodes)) + _size_of(node))


def _bytes_of(value: torch.Tensor) -> int:
    """Of its elements, with the sizes seen at the capture for dynamic ones."""
    return math.prod(map(hint, value.shape)) * value.dtype.itemsize


def _size_of(node: fx.Node) -> int:
    """Bytes of what a node makes, of all its results together."""
    return sum(map(_bytes_of, made_tensors(node)))


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element is made of one of each operand, and nothing is written or drawn."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    loops = is_pointwise(node.target) or node.target in _CASTS
    drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    return loops and not drawn and not node.target._schema.is_mutable


def _is_loop(node: fx.Node) -> bool:
    """Whether it fuses with what it reads: it is elementwise, a view, or gives less than it reads and is no product."""
    if _is_elementwise(node) or memory_of(node):
        return True
    is_product = getattr(node.target, "overloadpacket", None) in flop_registry
    return not is_product and _size_of(node) < max(map(_size_of, node.all_input_nodes), default=0)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a value or a view of it."""
    for user in node.users:
        if memory_of(user):
            yield from _readers(user)
        else:
            yield user
