"""`KeptWeights`: low-precision copies of weights that inference keeps between calls."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS
from amp_compiler.fx.capture import Captured
from amp_compiler.fx.meta import Key
from amp_compiler.ops.stale_copies import CopyWatch

_VERSION = attrgetter("_version")


class KeptWeights:
    """Low-precision copies of weights, made once and made again when a parameter changes.

    A change is seen by identity, address and version counter; after a step of any optimizer of torch, whose fused
    updates move no counter, all copies are made again. What was written past version counters (`parameter.data.mul_()`)
    is seen by the values, as `CopyWatch` compares them.

    Args:
        casts: for each copy, place and name of the weight among the inputs and the type of the copy.

    Attributes:
        written: the first weight that was seen by its values; empty without one.
    """

    def __init__(self, casts: Sequence[tuple[int, str, torch.dtype]] = ()) -> None:
        self._casts, self.written, self._turn = tuple(casts), "", 0
        self._places = [place for place, *_ in self._casts]
        self._seen: tuple[list[int], list[int], list[int | None], int] | None = None
        self._copies: list[torch.Tensor] = []
        self._watched: CopyWatch | None = None
        OPTIMIZER_STEPS.watch()

    def current(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copies for today's inputs."""
        # By what CPython does fast: a model has hundreds of them.
        weights = [*map(inputs.__getitem__, self._places)]
        seen = [*map(id, weights)], [*map(torch.Tensor.data_ptr, weights)], _versions(weights), OPTIMIZER_STEPS.count
        if seen == self._seen and None not in seen[2]:
            return self._compared(weights) if weights else []
        before, self._seen, self._watched = self._seen, seen, None
        if before is None or before[3] != seen[3]:
            self._copies = self._made(weights)
            return self._copies
        self._copies = [
            copy if now == then and now[2] is not None else weight.detach().to(copy.dtype)
            for weight, copy, now, then in zip(
                weights, self._copies, zip(*seen[:3], strict=True), zip(*before[:3], strict=True), strict=True
            )
        ]
        return self._copies

    def _made(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(weights, self._casts, strict=True)
        return [weight.detach().to(dtype) for weight, (_, _, dtype) in pairs]

    def _compared(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copies, all made again where one no longer agrees with its weight, though nothing has told of a write."""
        if self._watched is None:
            self._watched = CopyWatch([*zip(weights, self._copies, strict=True)])
        self._turn += 1
        stale = self._watched.look(self._turn)
        if stale:  # a write is seldom of one weight alone, and sampling may see it in one alone
            self.written, self._watched = self.written or self._casts[stale[0]][1], None
            self._copies = self._made(weights)
        return self._copies

    def drop(self) -> None:
        """Forget the copies; the next call makes them again."""
        self._seen, self._copies, self._watched = None, [], None


def _versions(weights: Sequence[torch.Tensor]) -> list[int | None]:
    """Version counters; an inference tensor has none, and its copy is never kept."""
    try:
        return [*map(_VERSION, weights)]
    except RuntimeError:
        return [None if one.is_inference() else one._version for one in weights]


def kept_weights(captured: Captured) -> KeptWeights:
    """What gives the placeholders that `HoistWeightCasts` added their tensors."""
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    index = {node.name: place for place, node in enumerate(placeholders)}
    added = [node.meta[Key.LOW] for node in placeholders[len(captured.inputs) :]]
    names = {entry.name: entry.target for entry in captured.inputs}
    return KeptWeights([(index[name], names[name], dtype) for name, dtype in added])
