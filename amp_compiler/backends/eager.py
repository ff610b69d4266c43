"""The eager backend: the rewritten graph run node by node. It is the oracle, and it allows double backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from amp_compiler.backends.backend import Backend


def build(graph_module: fx.GraphModule, inputs: Sequence[Any], round_exactly: bool = True) -> Callable[..., Any]:
    """The graph as a function of its flat inputs; every cast in it rounds, and `inputs` are not needed."""
    return graph_module.forward  # type: ignore[no-any-return]


BACKEND = Backend("eager", build, no_cuda_graph="backend='eager' runs the step node by node")
