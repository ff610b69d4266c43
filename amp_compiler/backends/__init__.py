"""What executes a rewritten graph: `BACKENDS` is the table of them.

A builder takes the graph, example inputs, and whether every down-cast in the graph must really round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from amp_compiler.backends import eager, inductor

Builder = Callable[[fx.GraphModule, Sequence[Any], bool], Callable[..., Any]]

BACKENDS: dict[str, Builder] = {"inductor": inductor.build, "eager": eager.build}
