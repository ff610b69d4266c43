"""The graphs of a model run again, node by node, to find what made the first value that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.fx.finiteness import Finiteness, range_of
from amp_compiler.ir.nonfinite import SHOWN, NonfiniteNode, ValueRange
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.training.reporting.nonfinite import described


@dataclass(frozen=True)
class _Place:
    """A node in one run of a subgraph: a subgraph may run several times."""

    run: int
    subgraph: str
    node: fx.Node
    ranges: dict[fx.Node, ValueRange] = field(default_factory=dict, compare=False)


class SubgraphReplay:
    """Runs subgraphs node by node, with autograd through each node, and notes what is not finite.

    What stands between the subgraphs runs as it is written: a value that it makes is seen where a subgraph takes it.

    Attributes:
        several: whether there are several subgraphs, so that names of nodes carry that of theirs.
    """

    def __init__(self) -> None:
        self.several, self._runs = True, 0
        self._made: list[_Place] = []  # what made a bad value of finite ones, in order
        self._returned: set[tuple[int, fx.Node]] = set()  # those of them that a bad result of a subgraph goes back to
        self._spoilt = False  # whether a subgraph has given a bad value
        self._gradients: list[_Place] = []  # of which the gradient is bad, in the order of the backward
        self._reached: dict[tuple[int, fx.Node], ValueRange] = {}  # what got a gradient, and which

    def run(self, subgraph: str, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Run a subgraph.

        Args:
            subgraph: its name.
            graph_module: its rewritten graph.
            inputs: what it is given.
        """
        self._runs += 1
        watched = _Watched(self, self._runs, subgraph, graph_module)
        results = watched.run(*inputs)
        returned = watched.seen.origins(graph_module.graph.output_node().all_input_nodes)
        self._returned |= {(self._runs, node) for node in returned}
        self._spoilt |= bool(returned)
        return results

    def note(self, place: _Place, seen: Finiteness) -> None:
        """Look at a node that has run, which is bad; what comes of a bad value is not noted.

        Args:
            place: the node.
            seen: what the nodes before it made.
        """
        causes = [source for source in place.node.all_input_nodes if seen.is_bad(source)]
        if not causes and not (place.node.op == "placeholder" and self._spoilt):
            self._made.append(replace(place, ranges=seen.ranges))

    def note_gradient(self, place: _Place, gradient: Tensor) -> None:
        """Look at the gradient of a node's value."""
        self._reached[place.run, place.node] = range_of(gradient)
        if not bool(torch.isfinite(gradient).all()):
            self._gradients.append(place)

    def origins(self, plan: PrecisionPlan | None = None, swallowed: bool = False) -> tuple[NonfiniteNode, ...]:
        """The first nodes of the forward that made something bad; where there are none, those of the backward.

        Args:
            plan: of all subgraphs.
            swallowed: those of the forward too of which nothing came that a subgraph returns.
        """
        forward = [one for one in self._made if swallowed or (one.run, one.node) in self._returned]
        if forward or swallowed:
            return tuple(
                described(one.node, is_forward=True, subgraph=self._shown(one), ranges=one.ranges, plan=plan)
                for one in forward
            )
        bad = {(one.run, one.node) for one in self._gradients}
        origins: dict[tuple[str, fx.Node], NonfiniteNode] = {}
        for place, one in enumerate(self._gradients):
            users = [user for user in one.node.users if (one.run, user) in self._reached]
            returned = any(user.op == "output" for user in one.node.users)
            if any((one.run, user) in bad for user in users) or ((returned or not users) and place):
                continue  # it comes of another one
            gradient = self._reached[one.run, one.node]
            for node in users or [one.node]:
                described_node = described(node, is_forward=False, subgraph=self._shown(one), plan=plan)
                inputs = ((f"the gradient of {node.name}", self._reached[one.run, node]),) if users else ()
                origins.setdefault((one.subgraph, node), replace(described_node, inputs=inputs, output=gradient))
        return tuple(origins.values())[:SHOWN]

    def _shown(self, place: _Place) -> str:
        return place.subgraph if self.several else ""


class _Watched(fx.Interpreter):
    """One run of a subgraph."""

    def __init__(self, replay: SubgraphReplay, run: int, subgraph: str, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=True)
        self._replay, self._run, self._subgraph = replay, run, subgraph
        self.seen = Finiteness(lambda node: True)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        value = super().run_node(n)
        if n.op == "output":
            return value
        if n.op == "placeholder" and _has_gradient(value):
            value = value.view_as(value)  # whose gradient is what this subgraph alone gives
        place = _Place(self._run, self._subgraph, n)
        self.seen.note(n, value)
        if self.seen.is_bad(n):
            self._replay.note(place, self.seen)
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if _has_gradient(one):
                one.register_hook(lambda gradient: self._replay.note_gradient(place, gradient))
        return value


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
