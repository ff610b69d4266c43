"""What a step of several ranks sends and holds, counted in its graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from amp_compiler.fx.graph import node_tensor
from amp_compiler.fx.meta import Key

_SENT = {  # of a message: how often a rank sends its bytes, by the number of ranks
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce_scatter_tensor": lambda ranks: (ranks - 1) / ranks,
    "all_gather_into_tensor": lambda ranks: float(ranks - 1),
    "broadcast": lambda ranks: (ranks - 1) / ranks,
}
_NOT_HELD = (
    "amaxes",
    "scale",
    "samples",
    "hyper",
    "started",
    "rng",
    "step",
)  # columns of single numbers


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank.

    Args:
        ranks: how many there are.
        elements: of the parameters that are updated.
        messages: number of messages of a step.
        sent: bytes that a rank sends in a step, as rings of ranks send them.
        weights: bytes of weights, as forward and backward read them.
        state: bytes of masters and of the optimizer's state.
    """

    ranks: int
    elements: int
    messages: int
    sent: float
    weights: int
    state: int

    def notes(self, whole: Sequence[str], gradients: int) -> tuple[str, ...]:
        """In words, for a plan.

        Args:
            whole: names of the parameters that are not split, where some are.
            gradients: bytes of the last gradients, which are kept to be read.
        """
        per = max(self.elements, 1)
        reduced = 4 * (self.ranks - 1) / self.ranks
        notes: tuple[str, ...] = (
            f"{self.ranks} ranks: each sends {self.sent / per:.2f} bytes a parameter and step in {self.messages}"
            f" message{'s' * (self.messages != 1)}, {self.sent:.0f} in all; a 16-bit all-reduce sends {reduced:.2f}",
            f"{self.ranks} ranks: each holds {self.weights / per:.2f} bytes a parameter of weights and"
            f" {self.state / per:.2f} of masters and moments, {self.weights + self.state} in all",
        )
        if gradients:
            notes = *notes, f"{self.ranks} ranks: each keeps {gradients} bytes of gradients until the next call"
        kept = f"whole on every rank: {', '.join(whole)}"
        return (*notes, kept) if whole else notes


def traffic_of(graph: fx.Graph, ranks: int, updated: Sequence[str]) -> Traffic:
    """Count the messages and the placeholders of a step.

    Args:
        graph: of the whole step.
        ranks: how many send each other messages.
        updated: placeholders of the parameters that it updates.
    """
    messages = list(_messages(graph, ranks))
    sent = sum(_SENT[name](among) * size for name, size, among in messages)
    placeholders = graph.find_nodes(op="placeholder")
    kept = [node for node in placeholders if Key.STATE in node.meta and node.meta[Key.STATE][0] not in _NOT_HELD]
    masters = [node for node in placeholders if Key.MASTER in node.meta]
    parameters = [node for node in placeholders if node.name in updated and node not in masters]
    low_weights = [node for node in placeholders if Key.LOW in node.meta and node.meta[Key.LOW][0] in updated]
    under = [node for node in placeholders if node.name in {node.meta[Key.MASTER] for node in masters}]
    return Traffic(
        ranks,
        sum(_numel(node) for node in (*parameters, *under)),
        len(messages),
        sent,
        sum(bytes_of(node.meta["val"]) for node in (*parameters, *under, *low_weights)),
        sum(bytes_of(node.meta["val"]) for node in (*masters, *kept)),
    )


def _messages(graph: fx.Graph, ranks: int) -> Iterator[tuple[str, int, int]]:
    """Each message, with the bytes that it has and the number of ranks that it goes among."""
    gathers = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default)
    among = {node.args[2]: node.args[1] for node in gathers}  # a group of norms has one, and may be smaller
    for node in graph.nodes:
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        short = name.removeprefix("_c10d_functional::").removeprefix("amp_compiler::")
        if name != short and short in _SENT:
            size = bytes_of(node.args[0].meta["val"])
            yield short, size, among.get(node.args[-1], ranks)


def bytes_of(value: Tensor) -> int:
    """Of all elements."""
    return int(value.numel()) * value.dtype.itemsize


def _numel(node: fx.Node) -> int:
    value = node_tensor(node)
    return 0 if value is None else math.prod(value.shape)
