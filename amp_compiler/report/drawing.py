"""A plan as a drawing of boxes and lines from top to bottom; the page's template writes it down as SVG."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import networkx as nx

from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.report.flow import Carried, Flow, Vertex, flow_of, stored_title
from amp_compiler.report.layers import Line, layer_of, place, spine_of

_BOX, _ROW = 26, 46  # height of a box; from layer to layer
_LETTER, _PADDING, _GAP, _RAIL = 6.7, 20, 14, 8  # widths; a rail is a line that passes a layer
_MARGIN = 16  # around the drawing
_LONGEST_MODULE = 30  # letters of its name that are shown
_SHELF = 1400  # width in which parts that are not joined are put side by side
_STRAIGHT = 3  # weight of a rail
_TALL = 5  # layers from which on there is a spine
_REACH = 60  # layers: what is read from farther above is named beside its reader, in place of a line


@dataclass(frozen=True, slots=True)
class Box:
    """One box.

    Args:
        x: left edge.
        y: upper edge.
        width: of the box; all are equally high.
        kind: `node`, `cast`, `input`, `output`, or `far` for the name of a value that comes from far above.
        precision: `low`, `fp32` or `keep`; of a node that which it runs in, of others that of the value.
        label: words in it.
        title: what is shown when the mouse rests on it.
        name: of the node; empty for others.
        stored: what to say of the casts of weights that the node reads, empty where it reads none.
        stored_count: how many those are.
    """

    x: int
    y: int
    width: int
    kind: str
    precision: str
    label: str
    title: str
    name: str = ""
    stored: str = ""
    stored_count: int = 0


@dataclass(frozen=True, slots=True)
class Wire:
    """The lines of one value, from its maker to its readers.

    Args:
        path: as SVG path data.
        precision: `low`, `fp32` or `keep`, by its type.
        title: the value and its type.
    """

    path: str
    precision: str
    title: str


@dataclass(frozen=True, slots=True)
class Bracket:
    """The layers of one module.

    Args:
        y: of its upper end.
        height: of all its layers.
        name: of the module.
        label: the end of its name, which tells more than the beginning where it is long.
    """

    y: int
    height: int
    name: str
    label: str


@dataclass
class Drawing:
    """Boxes, wires and brackets in a frame.

    Args:
        words: what must be said of it; of a drawing without boxes, why there is none.
    """

    words: str = ""
    width: int = 0
    height: int = 0
    boxes: list[Box] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    brackets: list[Bracket] = field(default_factory=list)


def draw_plan(plan: PrecisionPlan) -> Drawing:
    """The drawing of a plan: the same for equal plans on every run.

    Parts of the graph that are not joined stand side by side, the largest first. A value that is read more than
    `_REACH` layers below its maker is named above its reader.

    Args:
        plan: any plan. Of one with more than `flow.LARGEST` nodes the largest casts are drawn.
    """
    flow, words = flow_of(plan)
    drawing = Drawing(words)
    order = {vertex: index for index, vertex in enumerate(flow.graph)}
    parts = [sorted(part, key=order.__getitem__) for part in nx.weakly_connected_components(flow.graph)]
    parts.sort(key=lambda part: (-len(part), order[part[0]]))
    placed = [_Part(flow, part, plan.dtype) for part in parts]
    if placed and 2 * len(parts[0]) > len(order):  # else it would not be clear whose modules these are
        drawing.brackets = placed[0].brackets(_MARGIN)
    left = _MARGIN + max((round(_wide(bracket.label)) + 40 for bracket in drawing.brackets), default=0)
    x, y, lowest = left, _MARGIN, _MARGIN
    for part in placed:
        if x > left and x + part.width > max(_SHELF, drawing.width):
            x, y = left, lowest + _ROW
        part.draw(drawing, x, y)
        x += part.width + 2 * _MARGIN
        drawing.width = max(drawing.width, x - _MARGIN)
        lowest = max(lowest, y + part.height)
    drawing.height = lowest + _MARGIN
    return drawing


class _Part:
    """Vertices that are joined, with the place of each."""

    def __init__(self, flow: Flow, vertices: Sequence[Vertex], low: str) -> None:
        self.flow, self.low = flow, low
        graph = flow.graph.subgraph(vertices)
        late = {vertex for vertex in vertices if vertex[0] == "cast" or graph.in_degree(vertex) == 0}
        self.layers = layer_of(graph, late)
        spine: list[Vertex] = spine_of(graph) if max(self.layers.values()) >= _TALL else []
        self.spine_lines = set(itertools.pairwise(spine))
        self.rows: list[list[int]] = [[] for _ in range(1 + max(self.layers.values()))]
        self.widths: list[float] = []
        self.lines: list[Line] = []
        self.numbers = {vertex: self._new(self.layers[vertex], self._width(vertex)) for vertex in vertices}
        self.spine = {self.numbers[vertex] for vertex in spine}
        self.far: dict[tuple[Carried, int], int] = {}
        self.routes: dict[Carried, list[tuple[int, int]]] = {}
        for carried, readers in self._readers(vertices).items():
            self._route(carried, readers)
        middles = place(self.rows, self.widths, self.lines, self.spine, _GAP)
        left = min(middle - width / 2 for middle, width in zip(middles, self.widths, strict=True))
        self.middles = [round(middle - left) for middle in middles]
        self.width = round(max(m + width / 2 for m, width in zip(self.middles, self.widths, strict=True)))
        self.height = len(self.rows) * _ROW - (_ROW - _BOX)
        self.row_of = {number: row for row, numbers in enumerate(self.rows) for number in numbers}

    def _new(self, row: int, width: float) -> int:
        self.rows[row].append(len(self.widths))
        self.widths.append(width)
        return len(self.widths) - 1

    def _width(self, vertex: Vertex) -> float:
        words = _wide(self.flow.labels[vertex]) + _PADDING
        return max(48.0, words + (28 if vertex in self.flow.stored else 0))

    def _readers(self, vertices: Sequence[Vertex]) -> dict[Carried, list[Vertex]]:
        readers: dict[Carried, list[Vertex]] = {}
        for maker in vertices:
            for _, reader, values in self.flow.graph.out_edges(maker, data="carried"):
                for carried in values:
                    readers.setdefault(carried, []).append(reader)
        return readers

    def _route(self, carried: Carried, readers: list[Vertex]) -> None:
        """Lead a value down along one rail, from which each reader takes it in the layer above its own."""
        maker = carried[0]
        top = self.layers[maker]
        at = {top: self.numbers[maker]}
        steps = self.routes.setdefault(carried, [])
        for reader in sorted(readers, key=self.layers.__getitem__):
            row = self.layers[reader]
            if row - top > _REACH:
                tip = self.far.get((carried, row - 1))
                if tip is None:
                    tip = self.far[carried, row - 1] = self._new(row - 1, _wide(_far_label(carried)) + _PADDING)
                self._join(steps, tip, self.numbers[reader], 1)
                continue
            for passed in range(top + 1, row):
                if passed not in at:
                    at[passed] = self._new(passed, _RAIL)
                    self._join(steps, at[passed - 1], at[passed], _STRAIGHT)
            self._join(steps, at[row - 1], self.numbers[reader], 1)
            if (maker, reader) in self.spine_lines:
                self.spine.update(number for passed, number in at.items() if top < passed < row)

    def _join(self, steps: list[tuple[int, int]], above: int, below: int, weight: int) -> None:
        steps.append((above, below))
        self.lines.append(Line(above, below, weight))

    def _precision(self, dtype: str) -> str:
        return "low" if dtype == self.low else dtype if dtype == "fp32" else "keep"

    def draw(self, drawing: Drawing, x: int, y: int) -> None:
        """Add the boxes and wires, with the upper left corner at (`x`, `y`)."""
        for carried, steps in self.routes.items():
            path = "".join(self._step(above, below, x, y) for above, below in steps)
            drawing.wires.append(Wire(path, self._precision(carried[2]), f"{carried[1]}: {carried[2]}"))
        for vertex, number in self.numbers.items():
            node = self.flow.nodes.get(vertex)
            casts = self.flow.stored.get(vertex)
            drawing.boxes.append(
                Box(
                    *self._corner(number, x, y),
                    kind=vertex[0],
                    precision=node.precision if node else self._precision(self._carried_type(vertex)),
                    label=self.flow.labels[vertex],
                    title=self.flow.titles[vertex],
                    name=node.name if node else "",
                    stored=stored_title(casts) if casts else "",
                    stored_count=len(casts or ()),
                )
            )
        for (carried, _), number in self.far.items():
            title = f"{carried[1]}: {carried[2]}, made far above"
            corner = self._corner(number, x, y)
            drawing.boxes.append(Box(*corner, "far", self._precision(carried[2]), _far_label(carried), title))

    def _carried_type(self, vertex: Vertex) -> str:
        """The type that a cast or an input gives, or that a result has."""
        edges = [*self.flow.graph.out_edges(vertex, data="carried"), *self.flow.graph.in_edges(vertex, data="carried")]
        return str(edges[0][2][0][2]) if edges else ""

    def _corner(self, number: int, x: int, y: int) -> tuple[int, int, int]:
        width = round(self.widths[number])
        return x + self.middles[number] - width // 2, y + self.row_of[number] * _ROW, width

    def _step(self, above: int, below: int, x: int, y: int) -> str:
        """A line from the lower edge of a box, or from the top of a rail, to the upper edge of the one below."""
        start, end = x + self.middles[above], x + self.middles[below]
        row = y + self.row_of[above] * _ROW
        first = f"M{start} {row}v{_BOX}" if self.widths[above] == _RAIL else f"M{start} {row + _BOX}"
        drop = _ROW - _BOX
        bend = f"v{drop}" if start == end else f"c0 {drop // 2} {end - start} {drop // 2} {end - start} {drop}"
        return first + bend

    def brackets(self, y: int) -> list[Bracket]:
        """By run of layers, the module that all nodes of them belong to."""
        modules: list[list[str]] = [[] for _ in self.rows]
        for vertex, node in self.flow.nodes.items():
            if vertex in self.layers:
                modules[self.layers[vertex]].append(node.module)
        names: list[str] = []
        for row in modules:
            names.append(_common(row) if row else names[-1] if names else "")
        found, top = [], 0
        for name, run in itertools.groupby(names):
            count = len(list(run))
            if name:
                label = name if len(name) <= _LONGEST_MODULE else "…" + name[1 - _LONGEST_MODULE :]
                found.append(Bracket(y + top * _ROW, count * _ROW - (_ROW - _BOX), name, label))
            top += count
        return found


def _wide(label: str) -> float:
    """How wide it is drawn at most; Chinese, Japanese and Korean letters take the room of two."""
    return _LETTER * (len(label) + sum(unicodedata.east_asian_width(letter) in "WF" for letter in label))


def _far_label(carried: Carried) -> str:
    return carried[1] if len(carried[1]) <= 20 else carried[1][:19] + "…"


def _common(modules: Iterable[str]) -> str:
    """The module that holds all of these."""
    parts = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(names[0] for names in itertools.takewhile(lambda names: len(set(names)) == 1, parts))
