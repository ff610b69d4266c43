"""`Backend`: what the project has to know of something that executes a rewritten graph."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from amp_compiler.errors import AmpError

Mode = Literal["default", "max-autotune"]
DEFAULT: Literal["default"] = "default"
TUNED: Literal["max-autotune"] = "max-autotune"
_CUDA_GRAPHS = "reduce-overhead"  # one of torch.compile's modes
Builder = Callable[[fx.GraphModule, Sequence[Any], bool], Callable[..., Any]]


@dataclass(frozen=True)
class Backend:
    """Something that makes a function of a rewritten graph. Nothing but these fields tells one backend from another.

    Args:
        name: what a user writes as `backend=`.
        build: takes the graph (which it leaves as it is), example inputs, and whether every down-cast in the graph must
            really round; gives a function of the graph's flat inputs. It raises `LoweringError` where it cannot.
        compiled: whether it is a compiler. A compiler is given the forms that it does fastest, and of a training step
            only the subgraphs between the update kernels; any other runs a step whole, as its graph says.
        no_cuda_graph: why a training step of it is not replayed as a CUDA graph; empty where it may be.
        asks_arena: whether its code asks `ops.cpu.arena` for the memory of intermediate values on a CPU.
        modes: what a user may write as `mode=` beside `"default"`, each with what builds in the place of `build`.

    Example:
        >>> Backend("plain", lambda graph_module, inputs, round_exactly: graph_module.forward).compiled
        False
    """

    name: str
    build: Builder
    compiled: bool = False
    no_cuda_graph: str = ""
    asks_arena: bool = False
    modes: Mapping[str, Builder] = field(default_factory=dict)

    def builder(self, mode: str) -> Builder:
        """What builds in a mode.

        Args:
            mode: `"default"`, or a key of `modes`.

        Raises:
            AmpError: the backend has no such mode.
        """
        known = {DEFAULT: self.build, **self.modes}
        if isinstance(mode, str) and mode in known:
            return known[mode]
        near = difflib.get_close_matches(str(mode), known, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(map(repr, known))}"
        if mode == _CUDA_GRAPHS:
            hint = f"a training step is one CUDA graph in every mode, and amp.compile makes none; {hint}"
        elif mode == TUNED:
            hint = "leave it out, or use backend='inductor'"
        raise AmpError(f"mode={mode!r} is not known to backend '{self.name}'", hint=hint)
