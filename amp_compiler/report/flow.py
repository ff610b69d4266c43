"""What a drawing of a plan shows, as a graph: nodes, casts, inputs and results, and who reads what in which type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import networkx as nx

from amp_compiler.ir.plan import RETURN, PlannedCast, PlannedNode, PrecisionPlan
from amp_compiler.report.table import human_bytes, short_place

LARGEST = 2000  # nodes of a graph that is drawn whole
_AROUND_CASTS = 300  # nodes of a drawing that shows only the largest casts of a larger graph
_LONGEST = 26  # letters of a label
_MOST_USERS = 6  # of a cast that are named

Vertex = tuple[str, str]  # kind and name, such as ("node", "linear") and ("cast", "12")
Carried = tuple[Vertex, str, str]  # who makes it, the value, its type


@dataclass
class Flow:
    """What is drawn.

    Args:
        graph: an edge goes from what makes a value to what reads it; its `carried` are the (maker, value, type) read.
        labels: by vertex, the words in its box.
        titles: by vertex, what is shown when the mouse rests on it.
        nodes: by vertex, the planned node, where it is one.
        stored: by vertex, the casts of weights and other stored data that it reads, which are not drawn as boxes.
    """

    graph: nx.DiGraph = field(default_factory=nx.DiGraph)
    labels: dict[Vertex, str] = field(default_factory=dict)
    titles: dict[Vertex, str] = field(default_factory=dict)
    nodes: dict[Vertex, PlannedNode] = field(default_factory=dict)
    stored: dict[Vertex, list[PlannedCast]] = field(default_factory=dict)

    def add(self, vertex: Vertex, label: str, title: str) -> Vertex:
        """Add a vertex with its words; it is returned."""
        self.graph.add_node(vertex)
        self.labels[vertex] = label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…"
        self.titles[vertex] = title
        return vertex

    def read(self, reader: Vertex, carried: Carried) -> None:
        """Note that `reader` reads a value."""
        maker = carried[0]
        known = self.graph.get_edge_data(maker, reader, {"carried": ()})["carried"]
        if carried not in known:
            self.graph.add_edge(maker, reader, carried=(*known, carried))


def flow_of(plan: PrecisionPlan) -> tuple[Flow, str]:
    """What to draw of a plan, and what must be said about what is not drawn.

    Args:
        plan: any plan.

    Returns:
        The whole graph up to `LARGEST` nodes, and above that the largest casts with the nodes at their ends. The words
        are empty where all is drawn. The flow is empty where nothing can be.
    """
    if not any(node.inputs for node in plan.nodes):
        return Flow(), "The plan does not say which node reads which, so there is nothing to draw."
    nodes, words = plan.nodes, ""
    if len(plan.nodes) > LARGEST:
        names, count = _around_casts(plan)
        nodes = tuple(node for node in plan.nodes if node.name in names)
        words = f"The graph has {len(plan.nodes):,} nodes, too many to draw all. " + (
            f"Drawn are the nodes at the ends of the {count} largest casts between nodes."
            if count
            else "No cast stands between two of them."
        )
    flow = _Builder(plan, nodes).flow
    if not nx.is_directed_acyclic_graph(flow.graph):
        return Flow(), "The nodes of the plan read each other in a circle, so there is nothing to draw."
    return flow, words


def _around_casts(plan: PrecisionPlan) -> tuple[set[str], int]:
    """The names of the nodes at the ends of the largest casts of values that nodes make, and how many casts those are.

    At least one cast is taken, then as many as fit.
    """
    makers = {value: node.name for node in plan.nodes for value, _ in node.outputs}
    names: set[str] = set()
    between = [cast for cast in plan.casts if cast.value in makers and _is_drawn(cast)]
    for count, cast in enumerate(sorted(between, key=lambda cast: -cast.bytes)):
        ends = {makers[cast.value], *(user for user, _ in cast.users)} - {RETURN}
        if count and len(names | ends) > _AROUND_CASTS:
            return names, count
        names |= ends
    return names, len(between)


def _is_drawn(cast: PlannedCast) -> bool:
    """False for the model's own casts, which are nodes, and for reads past an upcast, which cast nothing."""
    return not cast.explicit and cast.src != cast.dst


class _Builder:
    """Joins nodes, casts, inputs and results."""

    def __init__(self, plan: PrecisionPlan, nodes: tuple[PlannedNode, ...]) -> None:
        self.flow = Flow()
        self.makers: dict[str, Carried] = {}
        self.reads: dict[tuple[str, int], Carried | None] = {}
        whole = len(nodes) == len(plan.nodes)
        self.readers = {node.name for node in nodes} | ({RETURN} if whole else set())
        if whole:
            read = {value for node in nodes for value in node.inputs} | set(plan.outputs)
            for value, dtype in plan.inputs:
                if value in read:
                    self._make(self.flow.add(("input", value), value, f"input {value}: {dtype}"), value, dtype)
        for node in nodes:
            vertex = self.flow.add(("node", node.name), node.op.partition(".")[2] or node.op, _title(node))
            self.flow.nodes[vertex] = node
            for value, dtype in node.outputs:
                self._make(vertex, value, dtype)
        for index, cast in enumerate(plan.casts):
            self._cast(index, cast)
        for node in nodes:
            for index, value in enumerate(node.inputs):
                carried = self.reads.get((node.name, index), self.makers.get(value))
                if carried is not None:
                    self.flow.read(("node", node.name), carried)
        for index, value in enumerate(plan.outputs if whole else ()):
            returned = self.reads.get((RETURN, index), self.makers.get(value))
            if returned is not None:
                title = f"result {index} of the graph: {value}, {returned[2]}"
                self.flow.read(self.flow.add(("output", str(index)), "returned", title), returned)

    def _make(self, vertex: Vertex, value: str, dtype: str) -> None:
        self.makers[value] = (vertex, value, dtype)

    def _cast(self, index: int, cast: PlannedCast) -> None:
        users = [user for user in cast.users if user[0] in self.readers]
        source = self.makers.get(cast.value)
        if not users or cast.explicit:
            return
        if source is not None and _is_drawn(cast):
            label = f"{cast.src} → {cast.dst}, {human_bytes(cast.bytes)}"
            vertex = self.flow.add(("cast", str(index)), label, _cast_title(cast))
            self.flow.read(vertex, source)
            source = (vertex, cast.value, cast.dst)
        elif _is_drawn(cast):
            for name in dict.fromkeys(name for name, _ in users):
                self.flow.stored.setdefault(("node", name), []).append(cast)
        # A read past an upcast comes from the value itself; stored data comes from nowhere.
        self.reads.update(dict.fromkeys(users, source))


def _title(node: PlannedNode) -> str:
    return "\n".join(_title_lines(node))


def _title_lines(node: PlannedNode) -> Iterator[str]:
    yield f"{node.name} = {node.op}"
    if node.module:
        yield f"module {node.module}"
    asked = f" ({node.asked})" if node.asked not in ("", node.precision) else ""
    made = ", ".join(dtype for _, dtype in node.outputs)
    yield f"{node.precision}{asked}" + (f", gives {made}" if made else "")
    yield (f"{short_place(node.rule)}: " if node.rule else "") + node.reason
    if node.source:
        yield short_place(node.source)


def _cast_title(cast: PlannedCast) -> str:
    users = ", ".join(f"{name}[{index}]" for name, index in cast.users[:_MOST_USERS])
    if len(cast.users) > _MOST_USERS:
        users += f" and {len(cast.users) - _MOST_USERS} more"
    return f"cast {cast.value}: {cast.src} → {cast.dst}, {human_bytes(cast.bytes)}\nfor {users}"


def stored_title(casts: list[PlannedCast]) -> str:
    """What is said of the casts of stored data that a node reads."""
    return "\n".join(["reads stored data through casts:", *map(_cast_title, casts)])
