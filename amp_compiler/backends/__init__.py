"""What executes a rewritten graph: `BACKENDS` is the table of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from amp_compiler.backends import eager, inductor

Builder = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

BACKENDS: dict[str, Builder] = {"inductor": inductor.build, "eager": eager.build}
