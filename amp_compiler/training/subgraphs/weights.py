"""Weights without a master in a step in subgraphs: which of them the subgraphs read in the low type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.passes.step.place_weights import is_read_low
from amp_compiler.policy.rules import OpTable
from amp_compiler.training.weights import store_alone

Run = Callable[..., Any]


class LowReads:
    """Notes which FP32 parameters the subgraphs of a model read in the low type, and converts them.

    A subgraph is made when it first runs, and layers of one kind may share one: what it reads is known as it runs.

    Args:
        low: the low type.
        ops: the op table.
    """

    def __init__(self, low: torch.dtype, ops: OpTable) -> None:
        self._low, self._ops = low, ops
        self._found: dict[int, Tensor] = {}
        self._otherwise: set[int] = set()  # what is read in FP32 too, by `id`

    def around(self, graph_module: fx.GraphModule, run: Run) -> Run:
        """A subgraph that notes what it is given.

        Args:
            graph_module: the rewritten graph of the subgraph.
            run: runs it.
        """
        low, otherwise = [], []
        for place, node in enumerate(graph_module.graph.find_nodes(op="placeholder")):
            if is_read_low(node, self._low, self._ops):
                low.append(place)
            if any(not (user.op == "call_function" and _is_low(user, self._low)) for user in node.users):
                otherwise.append(place)

        def noting(*inputs: Any) -> Any:
            for place in low:
                if isinstance(inputs[place], torch.nn.Parameter) and inputs[place].dtype is torch.float32:
                    self._found[id(inputs[place])] = inputs[place]
            self._otherwise.update(id(inputs[place]) for place in otherwise)
            return run(*inputs)

        return noting

    def convert(self, trained: Mapping[str, Tensor]) -> bool:
        """Store in the low type what is read in it; says whether something has read a value that is not what is stored.

        So does what read one of these in FP32 as well, and what read an infinity where the largest number is stored.

        Args:
            trained: the parameters that may be converted, by qualified name.
        """
        parameters = {
            name.partition(".")[2]: parameter
            for name, parameter in trained.items()
            if id(parameter) in self._found and parameter.dtype is torch.float32
        }
        stale = any(
            id(parameter) in self._otherwise and not torch.equal(parameter, parameter.to(self._low).float())
            for parameter in parameters.values()
        )
        stale |= store_alone(parameters, self._low)
        self._found.clear()
        return stale


def _is_low(node: fx.Node, low: torch.dtype) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is low
