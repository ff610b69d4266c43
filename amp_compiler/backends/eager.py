"""The eager backend: the rewritten graph run node by node. It is the oracle, and it allows double backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from amp_compiler.backends.backend import Backend
from amp_compiler.fx.checkpoints import with_checkpoints
from amp_compiler.fx.torch_private.tracing import forward_of


def build(graph_module: fx.GraphModule, inputs: Sequence[Any], round_exactly: bool = True) -> Callable[..., Any]:
    """The graph as a function of its flat inputs; every cast in it rounds, and `inputs` are not needed."""
    if torch.is_grad_enabled():
        graph_module = with_checkpoints(graph_module)
    return forward_of(graph_module)


BACKEND = Backend("eager", build, no_cuda_graph="backend='eager' runs the step node by node")
