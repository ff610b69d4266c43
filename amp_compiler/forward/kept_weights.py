"""`KeptWeights`: 16-bit copies of weights, and FP8 ones of these, that inference keeps between calls."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS
from amp_compiler.fx.captured import Captured
from amp_compiler.fx.meta import Key
from amp_compiler.ops.stale_copies import CopyWatch
from amp_compiler.passes.step.place_operands import Operands

_VERSION = attrgetter("_version")
_Cast = tuple[int, str, torch.dtype]
_Seen = tuple[list[int], list[int], list[int | None], int]  # ids, addresses, versions, steps of optimizers


class KeptWeights:
    """Low-precision copies of weights, made once, and all of them again when a parameter changes.

    A change is seen by identity, address and version counter; after a step of any optimizer of torch, whose fused
    updates move no counter, too. What was written past version counters (`parameter.data.mul_()`)
    is seen by the values, as `CopyWatch` compares them.

    Args:
        casts: for each copy, place and name of the weight among the inputs and the type of the copy.
        operands: what is made of copies: place of the copy, and how it is made.

    Attributes:
        written: the first weight that was seen by its values; empty without one.
    """

    def __init__(self, casts: Sequence[_Cast], operands: Sequence[tuple[int, Operands]] = ()) -> None:
        self._operands = tuple(operands)
        self._casts, self.written, self._turn = tuple(casts), "", 0
        self._places = [place for place, *_ in self._casts]
        # What is known of the weights, what is made of them, what compares: replaced as one, as any thread may call.
        self._known: tuple[_Seen, list[torch.Tensor], list[CopyWatch]] | None = None
        OPTIMIZER_STEPS.watch()

    def current(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The copies for today's inputs, and behind them what is made of copies."""
        # By what CPython does fast: a model has hundreds of them.
        weights = [*map(inputs.__getitem__, self._places)]
        seen = [*map(id, weights)], [*map(torch.Tensor.data_ptr, weights)], _versions(weights), OPTIMIZER_STEPS.count
        known = self._known
        if known is None or known[0] != seen or None in seen[2]:
            return self._keep(seen, self._made(weights))
        _, kept, watches = known
        copies = kept[: len(weights)]
        self._turn += 1
        if not watches:
            watches.append(CopyWatch([*zip(weights, copies, strict=True)]))
        stale = watches[0].look(self._turn)
        if not stale:
            return kept
        # A write is seldom of one weight alone, and sampling may see it in one alone.
        self.written = self.written or self._casts[stale[0]][1]
        return self._keep(seen, self._made(weights))

    def _made(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pairs = zip(weights, self._casts, strict=True)
        return [weight.detach().to(dtype) for weight, (_, _, dtype) in pairs]

    def _keep(self, seen: _Seen, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        kept = [*copies, *(one for place, operands in self._operands for one in operands(copies[place]))]
        self._known = seen, kept, []
        return kept

    def drop(self) -> None:
        """Forget the copies; the next call makes them again."""
        self._known = None


def _versions(weights: Sequence[torch.Tensor]) -> list[int | None]:
    """Version counters; an inference tensor has none, and no copy is kept where there is one."""
    try:
        return [*map(_VERSION, weights)]
    except RuntimeError:
        return [None if one.is_inference() else one._version for one in weights]


def kept_weights(captured: Captured) -> KeptWeights:
    """What gives the placeholders that `HoistWeightCasts` and `PlaceOperands` added their tensors."""
    placeholders = captured.graph_module.graph.find_nodes(op="placeholder")
    index = {node.name: place for place, node in enumerate(placeholders)}
    added = placeholders[len(captured.inputs) :]
    copies = [node for node in added if Key.LOW in node.meta]
    names = {entry.name: entry.target for entry in captured.inputs}
    casts = [(index[name], names[name], dtype) for name, dtype in (node.meta[Key.LOW] for node in copies)]
    states = [node.meta[Key.STATE] for node in added[len(copies) :]]
    operands = [(index[recipe.weight] - index[copies[0].name], recipe) for _, recipe, number in states if not number]
    return KeptWeights(casts, operands)
