"""`HiddenWrites`: what was written to weights past their version counters, as `weight.data.clamp_()` writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from amp_compiler.forward.tensor_versions import note_writes, tell_of_hidden_write, writable
from amp_compiler.fx.compiled_look import address_test
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ops.stale_copies import CopyWatch
from amp_compiler.training.kept import KeptTensors
from amp_compiler.training.loss_module import LossModule
from amp_compiler.training.weights import MASTER


class HiddenWrites:
    """Finds weights whose 16-bit copy, or whose FP32 master, no longer goes with them.

    Such a weight was written. Its version counter is moved, so that whoever keeps something beside it sees that as any
    other write. On a GPU, where looking would wait for the device, what is kept is made again there.

    Args:
        model: the loss as a module.
        optimizers: checked optimizers.
        kept: the tensors that the step keeps beside theirs.
    """

    def __init__(self, model: LossModule, optimizers: Sequence[torch.optim.Optimizer], kept: KeptTensors) -> None:
        self._model, self._optimizers, self._kept = model, optimizers, kept
        self._key: tuple[int, int] | None = None
        self._watch, self._weights, self._said = CopyWatch([]), list[Tensor](), False
        self._masters_lie: Callable[[], bool] | None = None
        self._turn = 0

    def look(self, generation: int) -> bool:
        """At the beginning of a call: whether there are any.

        Args:
            generation: another number where weights, masters or copies may lie elsewhere, see `ChangeDetector`.
        """
        key = generation, self._kept.low_weights.made
        if key != self._key or (self._masters_lie is not None and not self._masters_lie()):
            found = [(weight, pair) for weight in self._trained() for pair in self._pairs(weight)]
            self._weights = [weight for weight, _ in found]
            takes = {place for place, (weight, _) in enumerate(found) if weight.dtype in LOW_TYPES}
            masters = [one for place in sorted(takes) if (one := self._master(self._weights[place])) is not None]
            self._masters_lie = address_test(masters) if masters else None
            self._watch, self._key = CopyWatch([pair for _, pair in found], takes), key
        self._turn += 1
        places = self._watch.look(self._turn)
        if places:
            # A write is seldom of one weight alone, and sampling may see it in one alone: all copies are cast anew. Of
            # a 16-bit weight its master would lose digits by that.
            written = [w for place, w in enumerate(self._weights) if place in places or w.dtype not in LOW_TYPES]
            note_writes(list({id(weight): weight for weight in written}.values()))
            self._say(self._weights[places[0]])
        return bool(places)

    def tell(self) -> None:
        """Name what a GPU has found, where the caller waits for it anyway."""
        if not self._said and (places := self._watch.seen_elsewhere()):
            self._say(self._weights[places[0]])

    def _trained(self) -> list[Tensor]:
        groups = (group for one in self._optimizers for group in one.param_groups)
        return writable(weight for group in groups for weight in group["params"])

    def _pairs(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A weight with its copies, or its master with it; of a weight that is split over ranks this rank's part."""
        for copy in self._kept.low_weights.copies(weight):
            yield weight.detach(), copy
        master, parts = self._master(weight), self._kept.weights.parts
        if master is None or weight.dtype not in LOW_TYPES or not self._kept.weights.masters.has(weight):
            return
        if weight not in parts and master.shape == weight.shape:
            yield master, weight.detach()
        elif weight in parts and weight.is_contiguous() and master.shape == (parts.size(weight),):
            size = parts.size(weight)
            part = weight.detach().view(-1)[parts.rank * size : (parts.rank + 1) * size]
            yield master[: len(part)], part

    def _master(self, weight: Tensor) -> Tensor | None:
        return next(
            (one.state[weight][MASTER] for one in self._optimizers if MASTER in one.state.get(weight, {})), None
        )

    def _say(self, weight: Tensor) -> None:
        if not self._said:
            self._said = True
            names = (name for name, one in self._model.named_parameters() if one is weight)
            tell_of_hidden_write(next(names, "").partition(".")[2])
