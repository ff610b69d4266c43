"""`place_casts`: from labels to casts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from amp_compiler.ir.dtypes import DType, dtype_from_short
from amp_compiler.ir.graph import Node
from amp_compiler.ir.plan import RETURN, PlannedCast
from amp_compiler.passes.base import FunctionalPass, PassResult
from amp_compiler.planner.draft import Draft
from amp_compiler.planner.fixed_labels import resolve
from amp_compiler.planner.free_nodes import FollowProblem, cast_origin, upcast_source
from amp_compiler.planner.typing import FP32, LABELS, LOW

Key = tuple[
    str, DType, str, int
]  # value, destination, region, and a number of its own for each user of volatile memory


@dataclass(frozen=True)
class PlaceCasts(FunctionalPass[Draft]):
    """List every cast that the labels make necessary, each value once for each type and region.

    A cast stands right before its first reader, in the order of execution. Memory that is changed in place is cast anew
    for each reader. What the graph returns is cast back to its captured type. Where the low type is needed of a value
    that the model itself upcast from a low value, readers read that low value; where the model itself has cast a value
    to the type in which it is returned, that cast is returned. Both are entries with `src == dst` and 0 bytes, which
    mean "these users read `value` itself" and insert nothing. What low readers read that the model has cast to FP32
    from a third type (a mask, whole numbers) is cast for them from that type. The model's own casts that still change a
    type are listed with `explicit=True` and no users.

    Before: x (fp32) with linear: low reading it twice, then layer_norm: fp32.

        a = aten.linear(input=x, weight=w) -> fp32[2, 8]
        b = aten.linear(input=x, weight=w) -> fp32[2, 8]
        n = aten.layer_norm(input=a) -> fp32[2, 8]
        return n, b

    After:

        cast x: fp32 -> fp16 for a[0], b[0]
        cast w: fp32 -> fp16 for a[1], b[1]
        cast a: fp16 -> fp32 for n[0]
        cast b: fp16 -> fp32 for return[1]

    No casts: a graph whose labels are all `fp32` or `keep`; operands in slots whose type does not matter.
    """

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def requires(self, subject: Draft) -> str | None:
        """Every node has a label."""
        for name in subject.graph.nodes:
            if subject.labels.get(name) not in LABELS:
                return f"node '{name}' has no label"
        return None

    def ensures(self, subject: Draft, remembered: Any) -> str | None:
        """Every operand is read in a type that its node takes, and no exact op's result is rounded and widened."""
        return _wrong_types(subject) or _lossy_pair(subject)

    def run(self, subject: Draft) -> PassResult[Draft]:
        """Fill `casts`."""
        casts = _Placer(subject).place()
        if casts == subject.casts:
            return PassResult(subject, False)
        return PassResult(replace(subject, casts=casts), True)


@dataclass
class _Placer:
    """Collects the readers of each cast, first-come first-placed."""

    draft: Draft
    users: dict[Key, list[tuple[str, int]]] = field(default_factory=dict)
    position: dict[Key, tuple[int, int]] = field(default_factory=dict)
    anchored: bool = False  # whether readers were added in another order than that of execution
    placed: dict[tuple[str, DType], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.graph, self.labels = self.draft.graph, self.draft.labels
        self.typing = self.draft.typing
        self.types = self.draft.types

    @functools.cached_property
    def orders(self) -> dict[str, int]:
        """By node, its place in the order of execution."""
        return {name: order for order, name in enumerate((*self.graph.nodes, RETURN))}

    def place(self) -> tuple[PlannedCast, ...]:
        """All casts in execution order."""
        mixing: list[tuple[int, Node]] = []
        explicit: list[tuple[tuple[int, int], PlannedCast]] = []
        types, labels, typings, low = self.types, self.labels, self.typing.nodes, self.typing.low
        for order, (node, typing) in enumerate(zip(self.graph.nodes.values(), typings.values(), strict=True)):
            label = labels[node.name]
            if label == FP32 and typing.mixes(label) and typing.data:
                mixing.append((order, node))
            if typing.is_cast:
                explicit += [((order, -1), cast) for cast in self._model_cast(node)]
            one = low if label == LOW and typing.uniform else typing.reads_one(label, low)
            if one is not None:
                for index, operand in enumerate(node.inputs):
                    if types[operand.value] is not one:
                        self._require(order, node.name, index, operand.value, one, node.region)
                continue  # it is no cast
            for index, operand in enumerate(node.inputs):
                self._require(order, node.name, index, operand.value, self.typing.need(node, index, label), node.region)
            if typing.is_cast and typing.info.casts:
                self._note_model_cast(node)
        for index, value in enumerate(self.graph.outputs):
            if self.typing.is_flexible(value):
                self._require(len(self.graph.nodes), RETURN, index, value, self.graph.values[value].dtype, "")
        self.anchored = bool(mixing)
        for order, node in mixing:
            self._anchor(order, node)
        placed = [(self.position[key], self._cast(key)) for key in self.users]
        return tuple(cast for _, cast in sorted(placed + explicit, key=lambda pair: pair[0]))

    def _require(self, order: int, user: str, index: int, value: str, needed: DType | None, region: str) -> None:
        if needed is None or needed is self.types[value]:
            return
        if needed is self.typing.low and self.typing.cast_results:
            source = upcast_source(self.typing, value)
            if source is not None and self.types[source] is needed:
                value = source
            origin = cast_origin(self.typing, value)
            if origin is not None:
                value = origin.name
        if user == RETURN:
            value = self.placed.get((value, needed), value)
        alone = len(self.users) + 1 if self.graph.values[value].volatile else 0
        key = (value, needed, region, alone)
        users = self.users.get(key)
        if users is None:
            self.users[key], self.position[key] = [(user, index)], (order, index)
            return
        users.append((user, index))
        if (order, index) < self.position[key]:
            self.position[key] = (order, index)

    def _note_model_cast(self, node: Node) -> None:
        """Let what the graph returns be the result of the model's own cast, where that has the type already."""
        source, result = self.graph.values[node.inputs[0].value], self.graph.values[node.outputs[0]]
        if (
            not node.region
            and not source.volatile
            and not result.volatile
            and self.types[source.name] is not self.types[result.name]
        ):
            self.placed.setdefault((source.name, self.types[result.name]), result.name)

    def _anchor(self, order: int, node: Node) -> None:
        """Cast one operand of a node that takes mixed types and would get only low ones."""
        index = self.typing.anchor(
            node, self.types.__getitem__, lambda value: (value, DType.FLOAT32, node.region, 0) in self.users
        )
        if index is not None:
            self._require(order, node.name, index, node.inputs[index].value, DType.FLOAT32, node.region)

    def _cast(self, key: Key) -> PlannedCast:
        value, dst, _, _ = key
        src = self.types[value]
        free = src is dst or self.graph.is_folded(value)
        moved = 0 if free else self.graph.values[value].numel * (src.itemsize + dst.itemsize)
        users = self.users[key]
        if self.anchored:
            users = sorted(users, key=lambda user: (self.orders[user[0]], user[1]))
        return PlannedCast(value, src.short, dst.short, moved, tuple(users))

    def _model_cast(self, node: Node) -> Iterator[PlannedCast]:
        """The entry of an explicit cast, where it still turns one floating-point type into another."""
        value = self.graph.values[node.inputs[0].value] if node.inputs else None
        if value is None or not value.dtype.is_float:
            return
        src = self.types[value.name]
        for name in node.outputs:
            dst = self.types[name]
            if dst.is_float and src is not dst:
                yield PlannedCast(
                    value.name, src.short, dst.short, value.numel * (src.itemsize + dst.itemsize), explicit=True
                )


def _wrong_types(draft: Draft) -> str | None:
    types = draft.types
    reads = {(name, index): dtype_from_short(cast.dst) for cast in draft.casts or () for name, index in cast.users}
    for name, node in draft.graph.nodes.items():
        read = [reads.get((name, index), types[operand.value]) for index, operand in enumerate(node.inputs)]
        wrong = draft.typing.complaint(node, draft.labels[name], read)
        if wrong is not None:
            return wrong
    for index, value in enumerate(draft.graph.outputs):
        captured = draft.graph.values[value].dtype
        returned = reads.get((RETURN, index), types[value])
        if returned is not captured:
            return f"output {index} is returned in {returned.short}, not in {captured.short}"
    return None


def _lossy_pair(draft: Draft) -> str | None:
    """An exact op that `follow` moved to the low type though a reader of it wants every bit."""
    if not draft.decisions:
        return None  # labels written by hand
    typing = draft.typing
    exact = (name for name in draft.labels if typing[name].info.exact) if typing.has_exact else ()
    if all(draft.labels[name] != LOW for name in exact):
        return None
    semantics = resolve(draft, typing)
    problem = FollowProblem(typing, semantics)
    problem.labels = dict(draft.labels)
    rounded = [name for name in semantics.free if draft.labels[name] == LOW and problem.keeps_bits(name)]
    problem.free = {}  # every label is settled by now
    for name in rounded:
        for value in typing[name].decided_outputs(draft.graph.nodes[name]):
            if problem.needs_bits(value):
                return f"'{value}' is rounded to {typing.low.short} and read in a wider type"
    return None
