"""Which tensors a forward reads as numbers while it is captured: what these hold then stands in the graph as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amp_compiler.fx.torch_private import is_stand_in, reads_noted

# What hands out memory itself, of which no tracer hears; all else that gives numbers is an operator.
_READERS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__})


class _Readers(TorchFunctionMode):
    def __init__(self, found: list[torch.Tensor]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READERS and not is_stand_in(args[0]):
            self._found.append(args[0])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def values_read() -> Iterator[list[torch.Tensor]]:
    """Within it a module is captured; the list takes the tensors that its code makes numbers of.

    Parameters, buffers and inputs are none: to a trace these have no values, so that it fails there. A tensor that only
    stands in an attribute, a global or a list has its own, and `self.scale.item()` gives a number.
    """
    found: list[torch.Tensor] = []
    with reads_noted(found.append), _Readers(found):
        yield found
