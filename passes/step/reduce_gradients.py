"""`ReduceGradients`: the gradients of all ranks are summed, in buckets, while the backward goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, fx

from amp_compiler.fx.alias import readers
from amp_compiler.fx.graph import call_before, results_of, trace_before
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import RewritePass

MEGABYTE = 2**20
_REDUCE: Any = torch.ops._c10d_functional.all_reduce.default
_WAIT: Any = torch.ops._c10d_functional.wait_tensor.default


class SharedGradient(NamedTuple):
    """A gradient that is the sum of those of all ranks.

    Args:
        name: placeholder of the weight that it belongs to.
        dtype: the type in which it is made.
        order: dimensions in the order in which it lies in memory, the outermost first.
        behind: number of messages of forward and backward (`SynchronizeNorms`) that go before it on some rank.
    """

    name: str
    dtype: torch.dtype
    order: tuple[int, ...]
    behind: int = 0


def shared_gradients(graph: fx.Graph, updated: Sequence[str]) -> tuple[SharedGradient, ...]:
    """The gradients at the end of a graph's outputs, in the order in which the backward makes them.

    Args:
        graph: with a gradient for each weight, none of which is sent yet.
        updated: the placeholders of the weights.
    """
    places = {node: place for place, node in enumerate(graph.nodes)}
    outputs = results_of(graph)
    pairs = zip(updated, outputs[len(outputs) - len(updated) :], strict=True)
    ordered = sorted(pairs, key=lambda pair: places[pair[1]])
    messages = Messages(graph)
    return tuple(
        SharedGradient(name, node.meta["val"].dtype, _order(node.meta["val"]), messages.ahead_of(node))
        for name, node in ordered
    )


def norm_messages(graph: fx.Graph) -> list[fx.Node]:
    """The messages that stand in forward and backward, in order: those of `SynchronizeNorms`."""
    return [node for node in graph.nodes if _is_message(node) and node.meta.get(Key.PHASE) != "update"]


def in_order(graph: fx.Graph, shared: Sequence[SharedGradient]) -> tuple[str, ...]:
    """The weights of shared gradients in the order of their placeholders, as one process has them."""
    names = {one.name for one in shared}
    return tuple(node.name for node in graph.find_nodes(op="placeholder") if node.name in names)


@dataclass(frozen=True)
class Bucket:
    """Gradients that are sent together.

    Args:
        dtype: in which they are summed.
        gradients: in the order in which they lie in it.
    """

    dtype: torch.dtype
    gradients: tuple[SharedGradient, ...]


def buckets_of(
    shared: Sequence[SharedGradient], sizes: Sequence[int], most_bytes: int, in_fp32: bool
) -> tuple[Bucket, ...]:
    """The buckets, in the order in which they become full; one holds gradients of one type.

    Args:
        shared: the gradients, in the order of the backward.
        sizes: number of elements of each.
        most_bytes: a bucket that has reached them is full.
        in_fp32: sum in FP32 also what is made in 16 bits.
    """
    full: list[Bucket] = []
    filling: dict[torch.dtype, list[SharedGradient]] = {}
    held: dict[torch.dtype, int] = {}
    for one, size in zip(shared, sizes, strict=True):
        dtype = torch.float32 if in_fp32 else one.dtype
        filling.setdefault(dtype, []).append(one)
        held[dtype] = held.get(dtype, 0) + size * dtype.itemsize
        if held[dtype] >= most_bytes:
            full.append(Bucket(dtype, tuple(filling.pop(dtype))))
            del held[dtype]
    return (*full, *(Bucket(dtype, tuple(rest)) for dtype, rest in filling.items()))


@dataclass(frozen=True)
class ReduceGradients(RewritePass):
    """Put in the place of every gradient its sum over the ranks, and of new buffers those of the first rank.

    Of the magnitudes that delayed scaling keeps, all ranks take the largest.

    A bucket is sent as soon as its last gradient is made, and awaited where the update begins, so that it travels while
    the rest of the backward runs. The sum is made in the type of the gradients. All ranks get the same bits: norm,
    verdict and loss scale, which are made of the sums alone, are then the same without another message. Where the sum
    itself overflows, every rank sees that. The mean's division is `FuseUpdate`'s, which divides by the loss scale
    anyway. Messages of `ShardUpdate` go first: all ranks must send all of them in one order. Those of
    `SynchronizeNorms` stand where they are, and a bucket goes between the same two of them on all ranks.

    Before (`ranks=2`)::

        mul: bf16[4] = aten.mul.Tensor(w, x)
        return loss, mul

    After::

        mul: bf16[4] = aten.mul.Tensor(w, x)
        view: bf16[4] = aten.view.default(mul, [-1])
        all_reduce: bf16[4] = _c10d_functional.all_reduce.default(view, "sum", "0")
        wait_tensor: bf16[4] = _c10d_functional.wait_tensor.default(all_reduce)
        view_1: bf16[4] = aten.view.default(wait_tensor, [4])
        return loss, view_1

    Left alone: a step of one process, and the batches that are only gathered (`gather="add"`); gradients that
    `ShardUpdate` has summed.

    Args:
        updated: the weight of each gradient at the end of the graph's outputs.
        results: number of outputs before the new buffers.
        buffers: placeholder names of the buffers whose new values follow the results, and of kept magnitudes.
        gather: as for `GatherGradients`.
        group: torch's name of the group of ranks; empty for one process.
        shared: what all ranks together have a gradient of, the same on each. What this one lacks counts as zero.
        bucket_bytes: a bucket that has reached them is sent.
        reduce_in_fp32: sum in FP32 also what is made in 16 bits.
        broadcast_buffers: whether all ranks take the first one's buffers.
        parts: how many of the gradients, the first ones, `ShardUpdate` has summed.
    """

    updated: tuple[str, ...]
    results: int
    buffers: tuple[str, ...]
    gather: str = ""
    group: str = ""
    shared: tuple[SharedGradient, ...] = field(default=())
    bucket_bytes: int = 25 * MEGABYTE
    reduce_in_fp32: bool = False
    broadcast_buffers: bool = True
    parts: int = 0
    exact: ClassVar[bool] = False

    def requires(self, subject: fx.GraphModule) -> str | None:
        """Results, new buffers and gradients stand in the outputs as announced, and their weights are placeholders."""
        expected, count = self.results + len(self.buffers) + len(self.updated), len(results_of(subject.graph))
        if count != expected:
            return f"the graph returns {count} values, not {expected}"
        known = {node.name for node in subject.graph.find_nodes(op="placeholder")}
        missing = [one.name for one in self.shared if one.name not in known]
        return f"'{missing[0]}' is no placeholder of the graph" if missing else super().requires(subject)

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place; the gradients stand in the order that `in_order` says then."""
        has_any = bool(self.shared) or (self.broadcast_buffers and bool(self.buffers))
        if not self.group or self.gather == "add" or not has_any:
            return False
        _Builder(self, graph).build()
        return True


class Messages:
    """Where messages may stand in a graph, which all ranks must send in one order.

    Args:
        graph: with a gradient for each weight; it may have messages already: gradients that are sent, behind which all
            others go, and those of forward and backward, between which they go at the same places on all ranks.

    Attributes:
        weights: the placeholders, by name.
        output: the output node, in front of which messages are awaited.
        place: in front of which the next message may stand.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.output, nodes = graph.output_node(), list(graph.nodes)
        self.places = {node: place for place, node in enumerate(nodes)}
        self.following = dict(pairwise(nodes))
        self.weights = {node.name: node for node in graph.find_nodes(op="placeholder")}
        self.norms = norm_messages(graph)
        sent = [node for node in nodes if _is_message(node) and node not in self.norms]
        self.place = self.following[(sent or list(self.weights.values()))[-1]]

    def behind(self, nodes: Sequence[fx.Node], before: fx.Node) -> fx.Node:
        """The first place where all of these are made, written ones too, and that stands behind another one."""
        computed = [node for node in nodes if node.op != "placeholder"]
        writers = [user for node in computed for user in readers(node) if user in self.places and _writes(user)]
        next_nodes = [self.following[node] for node in (*computed, *writers)]
        place: fx.Node = max([before, *next_nodes], key=self.places.__getitem__)
        return place

    def ahead_of(self, gradient: fx.Node) -> int:
        """How many messages of forward and backward stand in front of where a gradient can be sent."""
        place = self.places[self.behind([gradient], self.place)]
        return sum(self.places[norm] < place for norm in self.norms)

    def packed(
        self, gradients: Sequence[SharedGradient], own: dict[str, fx.Node], pack: Callable[[list[Tensor]], Tensor]
    ) -> tuple[fx.Node, fx.Node]:
        """Where a bucket of gradients is to be sent, and what.

        Args:
            gradients: in the order in which they lie in it. What this rank lacks counts as zero.
            own: this rank's, by weight.
            pack: makes one row of numbers of all of them.
        """
        nodes = [own.get(one.name, self.weights[one.name]) for one in gradients]
        behind = max((one.behind for one in gradients), default=0)
        if behind:
            self.place = self.behind([self.norms[behind - 1]], self.place)
        self.place = self.behind([node for node in nodes if node in own.values()], self.place)
        missing = [one.name not in own for one in gradients]

        def flat(*tensors: Tensor) -> Tensor:
            return pack([torch.zeros_like(one) if lacks else one for one, lacks in zip(tensors, missing, strict=True)])

        (whole,) = trace_before(self.place, flat, nodes, "update")
        return self.place, whole

    def awaited(self, message: fx.Node) -> fx.Node:
        """What a message brings, in front of the output."""
        return call_before(self.output, _WAIT, [message], "update")


class _Builder:
    def __init__(self, options: ReduceGradients, graph: fx.Graph) -> None:
        self.options, self.graph, self.messages = options, graph, Messages(graph)
        self.weights, self.output, self.first = self.messages.weights, self.messages.output, self.messages.place

    def build(self) -> None:
        options, outputs = self.options, results_of(self.graph)
        behind = options.results + len(options.buffers)
        own: dict[str, fx.Node] = dict(zip(options.updated, outputs[behind:], strict=True))
        sizes = [self.weights[one.name].meta["val"].numel() for one in options.shared]
        buckets = buckets_of(options.shared, sizes, options.bucket_bytes, options.reduce_in_fp32)
        named = list(zip(options.buffers, outputs[options.results : behind], strict=True))
        amaxes = [value for name, value in named if Key.STATE in self.weights[name].meta]
        buffers = [value for _, value in named if value not in amaxes] if options.broadcast_buffers else []
        sent = [(part, self._broadcast(part)) for part in _by_type(buffers)]
        reduced = list(self._reduced(buckets, own))
        sent += [(amaxes, self._largest(amaxes))] if amaxes else []
        values: dict[fx.Node, fx.Node] = {}
        for part, message in sent:
            values.update(self._taken(part, self.messages.awaited(message)))
        sums: dict[str, fx.Node] = {}
        for bucket, message in reduced:
            sums.update(self._summed(bucket, self.messages.awaited(message)))
        written = [values.get(value, value) for value in outputs[options.results : behind]]
        gradients = [sums[name] for name in in_order(self.graph, options.shared)]
        parts = outputs[behind : behind + options.parts]
        self.output.args = ((*outputs[: options.results], *written, *parts, *gradients),)

    def _reduced(self, buckets: Sequence[Bucket], own: dict[str, fx.Node]) -> Iterator[tuple[Bucket, fx.Node]]:
        """The messages that sum buckets. All ranks send them in the same order."""
        for bucket in buckets:

            def flat(tensors: list[Tensor], bucket: Bucket = bucket) -> Tensor:
                pairs = zip(tensors, bucket.gradients, strict=True)
                return _flat([_turned(tensor.to(bucket.dtype), one.order) for tensor, one in pairs])

            place, whole = self.messages.packed(bucket.gradients, own, flat)
            yield bucket, call_before(place, _REDUCE, [whole, "sum", self.options.group], "update")

    def _summed(self, bucket: Bucket, flat: fx.Node) -> dict[str, fx.Node]:
        """The sums of the gradients of a bucket, by weight, from what came."""
        shapes = [self.weights[one.name].meta["val"].shape for one in bucket.gradients]

        def parts(whole: Tensor) -> list[Tensor]:
            ordered = [[shape[d] for d in one.order] for one, shape in zip(bucket.gradients, shapes, strict=True)]
            cut = _cut(whole, ordered)
            return [
                _turned(part, sorted(range(len(one.order)), key=one.order.__getitem__))
                for part, one in zip(cut, bucket.gradients, strict=True)
            ]

        sums = trace_before(self.output, parts, [flat], "update")
        return dict(zip([one.name for one in bucket.gradients], sums, strict=True))

    def _broadcast(self, values: Sequence[fx.Node]) -> fx.Node:
        """The message that gives all ranks these values of the first one, which the forward may write to its end."""
        forward = [node for node in self.messages.places if node.meta.get(Key.PHASE) == "forward"]
        place = self.messages.behind([*values, *forward[-1:]], self.first)
        (whole,) = trace_before(place, lambda *parts: _flat(parts), values, "update")
        arguments = [whole, 0, self.options.group]
        return call_before(place, torch.ops._c10d_functional.broadcast.default, arguments, "update")

    def _largest(self, values: Sequence[fx.Node]) -> fx.Node:
        """The last message: the largest of these values of all ranks, of scales that are delayed."""
        (whole,) = trace_before(self.output, lambda *parts: _flat(parts), values, "update")
        return call_before(self.output, _REDUCE, [whole, "max", self.options.group], "update")

    def _taken(self, part: Sequence[fx.Node], flat: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
        """The values of a message, each with what it stands in the place of."""
        shapes = [list(node.meta["val"].shape) for node in part]
        parts = trace_before(self.output, lambda whole: _cut(whole, shapes), [flat], "update")
        return zip(part, parts, strict=True)


def _is_message(node: fx.Node) -> bool:
    is_one = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional"
    return is_one and node.target is not _WAIT


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _by_type(values: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Values by type, each once."""
    by_type: dict[torch.dtype, list[fx.Node]] = {}
    for value in dict.fromkeys(values):
        by_type.setdefault(value.meta["val"].dtype, []).append(value)
    return list(by_type.values())


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    parts = [one.reshape(-1) for one in tensors]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _cut(whole: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """One row of numbers as tensors of these shapes."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = whole.split(sizes) if len(sizes) > 1 else [whole]
    return [part.view(shape) for part, shape in zip(parts, map(list, shapes), strict=True)]


def _order(value: Tensor) -> tuple[int, ...]:
    """The dimensions of a tensor from the largest stride to the smallest; as they are where elements overlap."""
    strides: list[Any] = list(value.stride())
    return (
        tuple(sorted(range(value.dim()), key=lambda d: (-strides[d], d))) if all(strides) else tuple(range(value.dim()))
    )


def _turned(value: Tensor, order: Sequence[int]) -> Tensor:
    return value if list(order) == sorted(order) else value.permute(list(order))
