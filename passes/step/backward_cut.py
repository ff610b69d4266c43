"""Where a backward is cut so that early updates can run beside its end, for `BranchUpdate`."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from amp_compiler.fx.alias import AliasGroups, readers, written_roots
from amp_compiler.fx.graph import LOW_TYPES, is_single_number, node_tensor, results_of, schema_argument
from amp_compiler.fx.meta import Key
from amp_compiler.ops.update.operators import CHECK, COMMIT, OPERATORS
from amp_compiler.passes.device.recompute_cheap import is_elementwise, is_loop, memory_of, product_in_bytes, size_of
from amp_compiler.passes.step.cut_step import BEFORE, BEHIND

aten = torch.ops.aten
_TRIED = 25  # bits: of so many elements is the update that is tried out
_LOOKED_AT = 32  # places for the cut, the best ones by what can run beside
_TRIED_WITH = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution_backward.default)


@dataclass(frozen=True)
class Cut:
    """Where the backward is cut.

    Args:
        behind: what stands behind the cut, in order.
        again: what stands before it and is made again there, in order.
        early: by update, the numbers of its weights that the branch updates.
    """

    behind: tuple[fx.Node, ...]
    again: tuple[fx.Node, ...]
    early: dict[fx.Node, list[int]]


def branchable(subject: fx.GraphModule) -> CutStepParts | None:
    """A step whose updates need nothing but their gradients, each its own; `None` of any other.

    Args:
        subject: a step as `CutStep` makes it.
    """
    graph = subject.graph
    checks = graph.find_nodes(op="call_function", target=CHECK)
    calls = graph.find_nodes(op="call_module", target=BEFORE)
    updates = [node for node in graph.nodes if node.target in OPERATORS.values()]
    known = {CHECK, COMMIT, operator.getitem, *OPERATORS.values()}
    plain = all(node.op != "call_function" or node.target in known for node in graph.nodes)
    if not plain or len(checks) != 1 or len(calls) != 1 or checks[0].args[0] or not updates:
        return None
    behind: fx.Graph = getattr(subject, BEHIND).graph
    if any(node.op == "placeholder" for node in written_roots(behind, AliasGroups(behind))):
        return None  # an optimizer's code, traced: it would change weights before the end of the backward reads them
    values = [node_tensor(node) for node in graph.find_nodes(op="placeholder")]
    if any(value is None or not all(type(size) is int for size in value.shape) for value in values):
        return None  # sizes that change: no graph is replayed then, and none of several ranks
    step = CutStepParts(subject, calls[0], updates)
    return None if any(getattr(node.target, "namespace", "") == "_c10d_functional" for node in step.nodes) else step


class CutStepParts:
    """What a cut step is made of, and where it can be cut once more."""

    def __init__(self, step: fx.GraphModule, call: fx.Node, updates: Sequence[fx.Node]) -> None:
        self.step, self.call, self.updates = step, call, updates
        self.piece: fx.GraphModule = getattr(step, BEFORE)
        self.placeholders = self.piece.graph.find_nodes(op="placeholder")
        self.nodes = [node for node in self.piece.graph.nodes if node.op not in ("placeholder", "output")]
        self.order = {node: place for place, node in enumerate(self.nodes)}
        self.results: list[fx.Node] = results_of(self.piece.graph)
        self.given: dict[Any, fx.Node] = dict(zip(call.args, self.placeholders, strict=True))
        self.items = [(node, self.results[node.args[1]]) for node in call.users]  # type: ignore[index]
        self.made: dict[Any, fx.Node] = dict(self.items)
        self._groups = AliasGroups(self.piece.graph)
        self._written = written_roots(self.piece.graph, self._groups)
        self._first = self._needed_first()

    def _needed_first(self) -> set[fx.Node]:
        """What the piece makes for all updates together or for what stands before them, and all that it is made of."""
        graph = self.step.graph
        last = {*self.updates, graph.output_node(), *graph.find_nodes(op="call_function", target=COMMIT)}
        shared = {one for update in self.updates for one in update.args if isinstance(one, fx.Node)}
        waiting = [result for item, result in self.items if item in shared or not last.issuperset(item.users)]
        found: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node in self.order and node not in found:
                found.add(node)
                waiting += node.all_input_nodes
        return found

    def best_cut(self, least: float) -> Cut | None:
        """The cut by which most can run beside the end of the backward, if that is enough.

        Args:
            least: bytes that the early updates move at least.
        """
        ready = sorted((place, moved) for place, moved, _, _ in self._ready())
        places, room = self._products()
        both, early, done = [], 0, 0
        for place in sorted(places):
            while done < len(ready) and ready[done][0] <= place:
                early, done = early + ready[done][1], done + 1
            both.append((min(early, room[place]), place))
        found: tuple[float, Cut] | None = None
        for beside, place in sorted(both, reverse=True)[:_LOOKED_AT]:
            if beside < least or (found is not None and beside <= found[0]):
                break
            cut = self._cut_at(place)
            gained = 0.0 if cut is None else beside - self._handed_over(cut)
            if cut is not None and (found is None or gained > found[0]):
                found = gained, cut
        return None if found is None or found[0] < least else found[1]

    def _ready(self) -> Iterator[tuple[int, int, fx.Node, int]]:
        """For each weight that the branch may take: from which place on, bytes moved, the update, its number in it."""
        last_read: dict[fx.Node, int] = {}
        for place, node in enumerate(self.nodes):
            for source in node.all_input_nodes:
                last_read[self._groups.root(source)] = place
        for update in self.updates:
            columns = _columns(update)
            for number in range(len(columns[0][0]) if columns else 0):
                gradient = self.made.get(columns[1][0][number])
                if gradient not in self.order:
                    continue
                place = max([self.order[gradient], *(last_read.get(one, 0) for one in self._changed(columns, number))])
                moved = sum(size_of(column[number]) * (1 + changed) for column, changed in columns)
                yield place + 1, moved, update, number

    def _changed(self, columns: Sequence[tuple[Sequence[fx.Node], bool]], number: int) -> set[fx.Node]:
        """What the update of a weight changes, as the piece reads it."""
        written = [column[number] for column, changed in columns if changed]
        return {self._groups.root(self.given[node]) for node in written if node in self.given}

    def _products(self) -> tuple[list[int], dict[int, float]]:
        """Places behind the backward's products, and how many bytes the products from each of them on leave unused."""
        places, room, left = [], {}, 0.0
        for place in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[place]
            arithmetic, moved = product_in_bytes(node)
            if arithmetic and node.meta.get(Key.PHASE) == "backward":
                places.append(place + 1)
                room[place + 1] = left
                left += max(0.0, arithmetic - moved)
        return places, room

    def _cut_at(self, place: int) -> Cut | None:
        behind: dict[fx.Node, None] = {}
        for node in self.nodes[place:]:
            if node in self._first:
                value = node_tensor(node)
                if value is None or not is_single_number(value):
                    return None  # what all updates read depends on the end of the backward
            elif node.target is not operator.getitem or node.args[0] in behind:  # a result goes with what makes it
                behind[node] = None
        cut = Cut(tuple(behind), tuple(self._made_again(behind)), {})
        if any(map(_is_rounded_statistic, self.handed(cut))) or not any(one.target in _TRIED_WITH for one in behind):
            return None
        read = {self._groups.root(source) for node in cut.again for source in node.all_input_nodes}
        for first, _, update, number in self._ready():
            if first <= place and read.isdisjoint(self._changed(_columns(update), number)):
                cut.early.setdefault(update, []).append(number)
        return cut if cut.early else None

    def _made_again(self, behind: Collection[fx.Node]) -> list[fx.Node]:
        """What stands before the cut and is made of as little that has to be handed over as it is itself."""
        later = set(behind)
        handed = {source for node in behind for source in node.all_input_nodes} - later
        for node in reversed(self.nodes):
            if node in handed and self._can_be_again(node):
                sources = {one for one in node.all_input_nodes if one in self.order} - handed
                if memory_of(node) or sum(map(size_of, sources)) <= size_of(node):
                    later.add(node)
                    handed |= set(node.all_input_nodes)
        return [node for node in self.nodes if node in later and node not in behind]

    def _can_be_again(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            return True
        if not self._written.isdisjoint(self._groups.root(one) for one in (node, *node.all_input_nodes)):
            return False
        if node_tensor(node) is None or node.target is operator.getitem:
            return False
        return bool(memory_of(node)) or (is_elementwise(node) and all(map(is_loop, readers(node))))

    def handed(self, cut: Cut) -> set[fx.Node]:
        """What stands before a cut and is read behind it."""
        later = {*cut.behind, *cut.again}
        return {source for node in later for source in node.all_input_nodes if source in self.order} - later

    def _handed_over(self, cut: Cut) -> int:
        """Bytes that are moved more than without the cut: of what one graph need not write, or not read, or as wide."""
        later, handed, moved = {*cut.behind, *cut.again}, self.handed(cut), 0
        for node in handed:
            value = node_tensor(node)
            if value is not None and value.dtype is torch.int64:  # of maxima in a pooling: 8 bits wide there
                moved += 2 * (size_of(node) - size_of(node) // 8)
            elif _is_made_by_loop(node) and self._goes_on(node, later):
                moved += 2 * size_of(node)
            elif any(is_loop(user) for user in readers(node) if user in later) and self._follows(node, handed):
                moved += size_of(node)
        return moved

    def _follows(self, node: fx.Node, handed: set[fx.Node]) -> bool:
        """Whether loops and norms make it of what is handed over as well, as ReLU's result behind a norm of images."""
        waiting, seen = list(node.all_input_nodes) if is_elementwise(node) else [], set[fx.Node]()
        while waiting:
            one = waiting.pop()
            if one in seen or one in handed or one not in self.order:
                continue
            seen.add(one)
            source: Any = one.args[0] if one.target is operator.getitem else one
            if not (is_elementwise(source) or memory_of(source) or _is_norm(source)):
                return False
            waiting += source.all_input_nodes
        return is_elementwise(node)

    def _goes_on(self, node: fx.Node, later: set[fx.Node]) -> bool:
        """Whether a compiler could make one loop of a node and a reader of it behind the cut.

        Not where it is written anyway: what is no loop reads it, or the reader also reads what such a reader makes.
        """
        if not all(map(is_loop, readers(node))):
            return False
        waiting, apart = {user for user in node.users if user in later}, set[fx.Node]()
        made = {node}
        for one in self.nodes[self.order[node] + 1 :]:
            sources = [source for source in one.all_input_nodes if source in made]
            if not sources:
                continue
            made.add(one)
            if not is_loop(one) or any(source in apart for source in sources):
                apart.add(one)
            elif one in waiting:
                return True
            waiting.discard(one)
            if not waiting:
                break
        return False

    def to_try(self, cut: Cut) -> tuple[Any, tuple[Any, ...], Any, tuple[Any, ...]]:
        """What is tried out: the largest early update, of its first weights, and the dearest product beside it."""
        update, numbers = max(cut.early.items(), key=lambda one: len(one[1]))
        sizes, few = [size_of(_columns(update)[0][0][number]) for number in numbers], 1
        while few < len(sizes) and sum(sizes[: few + 1]) <= 4 << _TRIED:
            few += 1
        products = (node for node in cut.behind if node.target in _TRIED_WITH)
        product = max(products, key=lambda one: product_in_bytes(one)[0])
        return (
            update.target,
            fx.node.map_arg(arguments_for(update, numbers[:few]), lambda one: one.meta["val"]),
            product.target,
            fx.node.map_arg(product.args, lambda one: one.meta["val"]),
        )


def _is_rounded_statistic(node: fx.Node) -> bool:
    """Whether it is a mean or a deviation that torch rounds to the type of the data, and a compiler keeps in FP32."""
    source, value = node.args[0] if node.target is operator.getitem else None, node_tensor(node)
    if not isinstance(source, fx.Node) or value is None or value.dtype not in LOW_TYPES or node.args[1] == 0:
        return False
    return _is_norm(source)


def _is_norm(node: fx.Node) -> bool:
    return "norm" in getattr(node.target, "__name__", "")


def _is_made_by_loop(node: fx.Node) -> bool:
    source: Any = node.args[0] if node.target is operator.getitem else node
    return is_loop(source) and not memory_of(node)


def _columns(update: fx.Node) -> list[tuple[Sequence[fx.Node], bool]]:
    """The lists of an update with one tensor for each weight, and whether it changes them.

    Empty where it changes what belongs to all weights together.
    """
    columns: list[tuple[Sequence[fx.Node], bool]] = []
    for declared in update.target._schema.arguments:  # type: ignore[union-attr]
        given, changed = schema_argument(update, declared.name), getattr(declared.alias_info, "is_write", False)
        if isinstance(given, (list, tuple)):
            columns += [(given, changed)] if given else []
        elif changed and given is not None:
            return []
    return columns


def arguments_for(update: fx.Node, numbers: Sequence[int]) -> tuple[Any, ...]:
    """The arguments of an update for some of its weights.

    Args:
        update: its node.
        numbers: of the weights, as they stand in its lists.
    """
    return tuple([one[n] for n in numbers] if isinstance(one, (list, tuple)) and one else one for one in update.args)
