"""The Inductor backend: the rewritten graph compiled, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from amp_compiler.backends.torch_shim import inductor_compile


def build(graph_module: fx.GraphModule, inputs: Sequence[Any], round_exactly: bool = False) -> Callable[..., Any]:
    """Compile the graph for inputs like these; the graph itself stays as it is, for reading.

    Raises:
        LoweringError: where Inductor cannot compile it.
    """
    return inductor_compile(copy.deepcopy(graph_module), inputs, round_exactly)
