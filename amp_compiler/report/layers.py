"""Places for the vertices of a drawing in layers: few crossings, short lines, and the spine of the graph straight.

The steps are those of layered drawing (Sugiyama, Tagawa and Toda, "Methods for visual understanding of hierarchical
system structures", 1981): layers, an order in each, then places. networkx gives the layers (topological generations)
and the spine (dominators).
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import networkx as nx

T = TypeVar("T", bound=Hashable)
_SWEEPS = 8  # over the layers, to order them
_SOURCES = 16  # that are tried for the longest spine
_SETTLING = 12  # sweeps over the layers, to place their vertices
_STIFF = 1e9  # weight of the spine beside that of other lines


def layer_of(graph: nx.DiGraph, late: set[T]) -> dict[T, int]:
    """The layer of every vertex, from 0: below all that it reads.

    Args:
        graph: no circle.
        late: vertices that stand right above the first that reads them, and not as high as they can.
    """
    layers = {vertex: layer for layer, part in enumerate(nx.topological_generations(graph)) for vertex in part}
    for vertex in sorted(late, key=layers.__getitem__, reverse=True):
        below = [layers[reader] for reader in graph.successors(vertex)]
        if below:
            layers[vertex] = min(below) - 1
    return layers


def spine_of(graph: nx.DiGraph) -> list[T]:
    """The vertices that everything passes on its way from a source to the last vertex, from first to last.

    Of the sources with the most descendants the one with the longest spine counts: in a residual network that is the
    data, whose spine holds the additions, and not the mask, which every block reads.

    Args:
        graph: no circle.
    """
    reached = {source: nx.descendants(graph, source) for source, degree in graph.in_degree() if degree == 0}
    order = list(nx.topological_sort(graph))
    spines: list[list[T]] = [[]]
    for start in sorted(reached, key=lambda source: -len(reached[source]))[:_SOURCES]:
        above = nx.immediate_dominators(graph, start)
        spine = [next(vertex for vertex in reversed(order) if vertex == start or vertex in reached[start])]
        while spine[-1] != start:
            spine.append(above[spine[-1]])
        spines.append(spine[::-1])
    return max(spines, key=len)  # the first of them where several are equally long


@dataclass(frozen=True)
class Line:
    """A line from a vertex to one in the layer below it.

    Args:
        above: number of the upper vertex.
        below: number of the lower vertex.
        weight: the more, the straighter it is drawn.
    """

    above: int
    below: int
    weight: int = 1


def place(
    layers: Sequence[Sequence[int]], widths: Sequence[float], lines: Sequence[Line], spine: set[int], gap: float
) -> list[float]:
    """The middle of every vertex: 0 for those of the spine, less on the left of it, more on the right.

    Args:
        layers: the numbers of the vertices of each layer, in a first order.
        widths: by vertex.
        lines: between neighbouring layers.
        spine: vertices that are to stand straight above each other, at most one of a layer.
        gap: least distance of two vertices of a layer.
    """
    up: list[list[tuple[int, int]]] = [[] for _ in widths]
    down: list[list[tuple[int, int]]] = [[] for _ in widths]
    for line in lines:
        up[line.below].append((line.above, line.weight))
        down[line.above].append((line.below, line.weight))
    ordered = _order([list(layer) for layer in layers], up, down)
    middles = [0.0] * len(widths)
    for layer in ordered:
        edge = 0.0
        for vertex in layer:
            middles[vertex] = edge + widths[vertex] / 2
            edge += widths[vertex] + gap
    for sweep in range(_SETTLING):
        down_through = sweep % 2 == 0
        neighbours = up if down_through else down
        for layer in ordered if down_through else reversed(ordered):
            _settle(layer, neighbours, middles, widths, spine, gap)
    return middles


def _order(
    layers: list[list[int]], up: list[list[tuple[int, int]]], down: list[list[tuple[int, int]]]
) -> list[list[int]]:
    """Each layer by the mean place of its neighbours, swept down and up; the order of fewest crossings counts."""
    best, fewest = [list(layer) for layer in layers], _crossings(layers, up)
    for sweep in range(_SWEEPS):
        if fewest == 0:
            break
        neighbours = up if sweep % 2 == 0 else down
        places: dict[int, float] = {}
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            for index, vertex in enumerate(layer):
                known = [places[other] for other, _ in neighbours[vertex]]
                places[vertex] = sum(known) / len(known) if known else index / len(layer)
            layer.sort(key=places.__getitem__)
            places.update({vertex: (index + 0.5) / len(layer) for index, vertex in enumerate(layer)})
        crossings = _crossings(layers, up)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    return best


def _crossings(layers: Sequence[Sequence[int]], up: list[list[tuple[int, int]]]) -> int:
    count = 0
    places: dict[int, int] = {}
    for layer in layers:
        seen: list[int] = []
        for vertex in layer:
            ends = sorted(places[other] for other, _ in up[vertex])
            count += sum(len(seen) - bisect.bisect_right(seen, end) for end in ends)
            for end in ends:
                bisect.insort(seen, end)
        places = {vertex: index for index, vertex in enumerate(layer)}
    return count


def _settle(
    layer: Sequence[int],
    neighbours: list[list[tuple[int, int]]],
    middles: list[float],
    widths: Sequence[float],
    spine: set[int],
    gap: float,
) -> None:
    """Move the vertices of a layer to their neighbours as near as their order and widths allow, by least squares.

    With the widths before a vertex taken off its place, places must only not fall: neighbours that would are merged
    into a block at their mean.
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, vertices
    offsets: list[float] = []
    offset = 0.0
    for index, vertex in enumerate(layer):
        if index:
            offset += (widths[layer[index - 1]] + widths[vertex]) / 2 + gap
        offsets.append(offset)
        weight = float(sum(weight for _, weight in neighbours[vertex]))
        wanted = middles[vertex]
        if vertex in spine:
            wanted, weight = 0.0, _STIFF
        elif weight:
            wanted = sum(middles[other] * weight for other, weight in neighbours[vertex]) / weight
        mean, weight, count = wanted - offset, weight or 0.01, 1
        while blocks and blocks[-1][0] >= mean:
            other_mean, other_weight, other_count = blocks.pop()
            mean = (mean * weight + other_mean * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        blocks.append((mean, weight, count))
    index = 0
    for mean, _, count in blocks:
        for vertex in layer[index : index + count]:
            middles[vertex] = mean + offsets[index]
            index += 1
