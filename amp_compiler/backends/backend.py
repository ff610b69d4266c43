"""`Backend`: what the project has to know of something that executes a rewritten graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

Builder = Callable[[fx.GraphModule, Sequence[Any], bool], Callable[..., Any]]


@dataclass(frozen=True)
class Backend:
    """Something that makes a function of a rewritten graph. Nothing but these fields tells one backend from another.

    Args:
        name: what a user writes as `backend=`.
        build: takes the graph (which it leaves as it is), example inputs, and whether every down-cast in the graph must
            really round; gives a function of the graph's flat inputs. It raises `LoweringError` where it cannot.
        compiled: whether it is a compiler. A compiler is given the forms that it does fastest, and of a training step
            only the pieces between the update kernels; any other runs a step whole, as its graph says.
        no_cuda_graph: why a training step of it is not replayed as a CUDA graph; empty where it may be.
        asks_arena: whether its code asks `ops.cpu.arena` for the memory of intermediate values on a CPU.

    Example:
        >>> Backend("plain", lambda graph_module, inputs, round_exactly: graph_module.forward).compiled
        False
    """

    name: str
    build: Builder
    compiled: bool = False
    no_cuda_graph: str = ""
    asks_arena: bool = False
