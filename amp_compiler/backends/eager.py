"""The eager backend: the rewritten graph run node by node. It is the oracle, and it allows double backward.

What a model checkpoints is kept as all else: only a compiler, or a training step, computes it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from amp_compiler.backends.backend import Backend
from amp_compiler.fx.torch_private.tracing import forward_of


def build(graph_module: fx.GraphModule, inputs: Sequence[Any], round_exactly: bool = True) -> Callable[..., Any]:
    """The graph as a function of its flat inputs; every cast in it rounds, and `inputs` are not needed."""
    return forward_of(graph_module)


BACKEND = Backend("eager", build, no_cuda_graph="backend='eager' runs the step node by node")
