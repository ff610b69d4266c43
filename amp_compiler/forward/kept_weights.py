"""`KeptWeights`: 16-bit copies of weights, and FP8 ones of these, that inference keeps between calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from amp_compiler.forward.tensor_versions import OPTIMIZER_STEPS, versions
from amp_compiler.fx.captured import Captured
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.runtime import ADDRESS_OF_TENSOR
from amp_compiler.ops.stale_copies import CopyWatch, compares_all
from amp_compiler.passes.step.place_operands import Operands

_Cast = tuple[int, str, torch.dtype]
_Seen = tuple[list[int], list[int], list[int | None]]  # ids, addresses, versions


class KeptWeights:
    """Low-precision copies of weights, made once, and all of them again when a parameter changes.

    A change is seen by the address and by the values, as `CopyWatch` compares them; by identity and version counter of
    weights of which it does not compare all; after a step of any optimizer of torch, whose fused updates move no
    counter, too. So what was written past version counters (`parameter.data.mul_()`) is seen as well.

    Args:
        casts: for each copy, place and name of the weight among the inputs and the type of the copy.
        operands: what is made of copies: place of the copy, and how it is made.

    Attributes:
        written: the first weight that was seen by its values alone; empty without one.
    """

    def __init__(self, casts: Sequence[_Cast], operands: Sequence[tuple[int, Operands]] = ()) -> None:
        self._operands = tuple(operands)
        self._casts, self.written, self._turn = tuple(casts), "", 0
        self._places = [place for place, *_ in self._casts]
        # Steps of optimizers, what is seen of the weights whose places stand before it and of all, what is made of
        # them, what compares: replaced as one, as any thread may call.
        self._known: tuple[int, list[int], _Seen, _Seen, list[Tensor], list[CopyWatch]] | None = None
        OPTIMIZER_STEPS.watch()

    def current(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The copies for today's inputs, and behind them what is made of copies."""
        inputs, known = tuple(inputs), self._known
        if known is None or known[0] != OPTIMIZER_STEPS.count or known[2] != _seen(inputs, known[1]):
            return self._made(inputs)
        *_, seen, kept, watches = known
        self._turn += 1
        if not watches:
            pairs = zip(self._weights(inputs), kept, strict=False)
            watches.append(
                CopyWatch([*pairs], arguments=self._places if ADDRESS_OF_TENSOR else (), address_of=ADDRESS_OF_TENSOR)
            )
        stale = watches[0].look(self._turn, inputs)
        if not stale:
            return kept
        # A write is seldom of one weight alone, and sampling may see it in one alone.
        if seen == _seen(inputs, self._places) and None not in seen[2]:
            self.written = self.written or self._casts[stale[0]][1]
        return self._made(inputs)

    def _weights(self, inputs: Sequence[Any]) -> list[Tensor]:
        return [*map(inputs.__getitem__, self._places)]

    def _made(self, inputs: Sequence[Any]) -> list[Tensor]:
        steps, every = OPTIMIZER_STEPS.count, _seen(inputs, self._places)  # before: a write meanwhile is seen then
        weights = self._weights(inputs)
        pairs = zip(weights, self._casts, strict=True)
        copies = [weight.detach().to(dtype) for weight, (_, _, dtype) in pairs]
        kept = [*copies, *(one for place, operands in self._operands for one in operands(copies[place]))]
        looked = [not (ADDRESS_OF_TENSOR and compares_all(*pair)) for pair in zip(weights, copies, strict=True)]
        places = [*compress(self._places, looked)]
        seen = [*compress(every[0], looked)], [*compress(every[1], looked)], [*compress(every[2], looked)]
        self._known = None if None in seen[2] else (steps, places, seen, every, kept, [])
        return kept

    def drop(self) -> None:
        """Forget the copies; the next call makes them again."""
        self._known = None


def _seen(inputs: Sequence[Any], places: Sequence[int]) -> _Seen:
    # By what CPython does fast: a model has hundreds of them.
    weights = [*map(inputs.__getitem__, places)]
    return [*map(id, weights)], [*map(Tensor.data_ptr, weights)], versions(weights)


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
