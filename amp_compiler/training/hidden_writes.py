"""`HiddenWrites`: what was written to weights past their version counters, as `weight.data.clamp_()` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.forward.tensor_versions import tell_of_hidden_write, writable
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.ops.stale_copies import CopyWatch
from amp_compiler.training.loss_module import LossModule
from amp_compiler.training.optimizers.fused import KINDS, BoundGroup
from amp_compiler.training.optimizers.traced import TracedGroup
from amp_compiler.training.reporting.scale_watch import LateFlag
from amp_compiler.training.state import StepState
from amp_compiler.training.weights import MASTER


class HiddenWrites:
    """Finds weights whose 16-bit copy, or whose FP32 master, no longer goes with them.

    Such a weight was written. Its version counter is moved, so that whoever keeps something beside it sees that as any
    other write. On a GPU, where looking would wait for the device, what is kept is made again there. What a look at
    some elements misses the update finds, as it reads all of them; what a GPU has found is read some steps late.

    Args:
        model: the loss as a module.
        optimizers: checked optimizers.
        state: what the step keeps beside theirs.
    """

    def __init__(self, model: LossModule, optimizers: Sequence[torch.optim.Optimizer], state: StepState) -> None:
        self._model, self._optimizers, self._state = model, optimizers, state
        self._at: tuple[int, int] | None = None
        self._key: list[tuple[Any, ...]] = []
        self._watch, self._weights, self._said = CopyWatch([]), list[Tensor](), False
        self._turn = 0
        self._groups: Sequence[BoundGroup | TracedGroup] = ()  # of the last update
        self._flags: list[tuple[BoundGroup | TracedGroup, Any]] = []  # on a CPU, with what their updates have found
        self._tables: list[tuple[BoundGroup | TracedGroup, Tensor, Tensor]] = []  # on a GPU, with flags and sums
        self._casts, self._late = 0, LateFlag()

    def look(self, generation: int) -> bool:
        """At the beginning of a call: whether there are any.

        Args:
            generation: another number where weights, masters or copies may lie elsewhere, see `ChangeDetector`.
        """
        at = generation, self._state.low_weights.generation
        if at != self._at:
            self._at = at
            self._make_watch()
        if self._casts != self._state.low_weights.casts:
            self._forget()
        self._turn += 1
        places = self._watch.look(self._turn)
        if places:
            # A write is seldom of one weight alone, and sampling may see it in one alone: all copies are cast anew. Of
            # a 16-bit weight its master would lose digits by that.
            written = [w for place, w in enumerate(self._weights) if place in places or w.dtype not in LOW_TYPES]
            torch.autograd.graph.increment_version(list({id(weight): weight for weight in written}.values()))
            self._say(self._weights[places[0]])
        return bool(places)

    def note(self, groups: Sequence[BoundGroup | TracedGroup]) -> None:
        """Behind an update: name what it has found.

        Args:
            groups: of the program that made it.
        """
        if groups is not self._groups:
            self._forget()  # of another program, which does not know of this update
            self._groups = groups
            self._flags, self._tables = [], []
            for one in groups:
                size = 2 * len(one.parameters)
                if one.stale.dtype is torch.int64:
                    self._tables.append((one, one.stale[:size:2], one.stale[size:]))
                elif one.stale.is_cpu:
                    self._flags.append((one, one.stale.numpy()))
        for group, flags in self._flags if not self._said else ():
            if flags.any():
                self._say(group.parameters[int(flags.argmax())])
        if self._tables and not self._said:
            if self._late.arrived():
                self.tell()
            self._late.note(lambda: torch.cat([flags for _, flags, _ in self._tables]).any())

    def tell(self) -> None:
        """Name what a GPU has found, where the caller waits for it anyway."""
        for group, flags, _ in self._tables if not self._said else ():
            for place in flags.nonzero()[:1].flatten().tolist():
                self._say(group.parameters[place])

    def _forget(self) -> None:
        """What updates of a GPU left is not known any more."""
        self._casts = self._state.low_weights.casts
        for _, _, sums in self._tables:
            sums.zero_()

    def _make_watch(self) -> None:
        """Make another watch where what is watched is another, or may lie elsewhere."""
        pairs = [(weight, pair) for weight in writable(self._trained()) for pair in self._pairs(weight)]
        key = [(id(weight), *((one.data_ptr(), one.stride()) for one in pair)) for weight, pair in pairs]
        if key == self._key:  # the weights and the watch are held, so that no other tensor has these
            return
        self._key = key
        self._weights = [weight for weight, _ in pairs]
        takes = {place for place, weight in enumerate(self._weights) if weight.dtype in LOW_TYPES}
        # The update, which reads all of a master that is whole, does not compare one that is a part.
        parts = {place for place, weight in enumerate(self._weights) if weight in self._state.parts}
        self._watch = CopyWatch([pair for _, pair in pairs], takes, parts)

    def _trained(self) -> list[Tensor]:
        return [weight for one in self._optimizers for group in one.param_groups for weight in group["params"]]

    def _pairs(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """A weight with its copies, or its master with it; of a weight that is split over ranks this rank's part."""
        for copy in self._state.low_weights.copies(weight):
            yield weight.detach(), copy
        master, parts = self._master(weight), self._state.parts
        if master is None or weight.dtype not in LOW_TYPES or not self._state.masters.has(weight):
            return
        if weight not in parts and master.shape == weight.shape:
            yield master, weight.detach()
        elif weight in parts and weight.is_contiguous() and master.shape == (parts.size(weight),):
            size = parts.size(weight)
            part = weight.detach().view(-1)[parts.rank * size : (parts.rank + 1) * size]
            yield master[: len(part)], part

    def _master(self, weight: Tensor) -> Tensor | None:
        for one in self._optimizers:
            own = None if weight.is_cuda and type(one) in KINDS else one.state.get(weight)  # whose update compares all
            if own is not None and MASTER in own:
                return own[MASTER]  # type: ignore[no-any-return]
        return None

    def _say(self, weight: Tensor) -> None:
        if not self._said:
            self._said = True
            names = (name for name, one in self._model.named_parameters() if one is weight)
            tell_of_hidden_write(next(names, "").partition(".")[2])
