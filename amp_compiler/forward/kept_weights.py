"""`KeptWeights`: low-precision copies of weights that inference keeps between calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from amp_compiler.forward.tensor_versions import write_mark
from amp_compiler.fx.capture import Captured
from amp_compiler.fx.meta import Key
from amp_compiler.ops.stale_copies import CopyWatch


class KeptWeights:
    """Low-precision copies of weights, made once and made again when a parameter changes.

    A change is seen as `write_mark` says: after a step of any optimizer of torch all copies are made again. What was
    written past version counters (`parameter.data.mul_()`) is seen by the values, as `CopyWatch` compares them.

    Args:
        casts: for each copy, place and name of the weight among the inputs and the type of the copy.

    Attributes:
        written: the first weight that was seen by its values; empty without one.
    """

    def __init__(self, casts: Sequence[tuple[int, str, torch.dtype]] = ()) -> None:
        self._casts, self.written, self._turn = tuple(casts), "", 0
        self._seen: list[tuple[int, ...] | None] = [None] * len(self._casts)
        self._copies: list[torch.Tensor | None] = [None] * len(self._casts)
        self._watched: CopyWatch | None = None

    def current(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copies for today's inputs."""
        copies: list[torch.Tensor] = []
        fresh = 0
        for slot, (index, _, dtype) in enumerate(self._casts):
            tensor = inputs[index]
            counted = not tensor.is_inference()  # an inference tensor has no version counter: its copy is never kept
            mark = (id(tensor), *write_mark(tensor)) if counted else None
            copy = self._copies[slot]
            if copy is None or mark is None or self._seen[slot] != mark:
                copy = self._copies[slot] = tensor.detach().to(dtype)
                self._seen[slot], fresh = mark, fresh + 1
            copies.append(copy)
        if fresh:
            self._watched = None  # it holds the copies and weights that were
        return copies if fresh == len(copies) else self._compared(inputs, copies)

    def _compared(self, inputs: Sequence[torch.Tensor], copies: list[torch.Tensor]) -> list[torch.Tensor]:
        """Make those again that their weights no longer agree with, though nothing has told of a write."""
        watched = self._watched
        if watched is None:
            pairs = [(inputs[index], copy) for (index, *_), copy in zip(self._casts, copies, strict=True)]
            self._watched = watched = CopyWatch(pairs)
        self._turn += 1
        stale = watched.look(self._turn)
        if not stale:
            return copies
        self.written, self._watched = self.written or self._casts[stale[0]][1], None
        # A write is seldom of one weight alone, and sampling may see it in one alone.
        self._copies[:] = [inputs[index].detach().to(dtype) for index, _, dtype in self._casts]
        return [copy for copy in self._copies if copy is not None]

    def drop(self) -> None:
        """Forget the copies; the next call makes them again."""
        self._seen, self._copies, self._watched = [None] * len(self._casts), [None] * len(self._casts), None


def kept_weights(captured: Captured) -> KeptWeights:
    """What gives the placeholders that `HoistWeightCasts` added their tensors."""
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    index = {node.name: place for place, node in enumerate(placeholders)}
    added = [node.meta[Key.LOW] for node in placeholders[len(captured.inputs) :]]
    names = {entry.name: entry.target for entry in captured.inputs}
    return KeptWeights([(index[name], names[name], dtype) for name, dtype in added])
