"""`UpdateGroup`: what one update node of a step graph works on."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class UpdateGroup:
    """Parameters that one update node writes.

    Args:
        kind: a key of `ops.update.operators.OPERATORS`.
        masters: placeholder names of the FP32 weights.
        low_weights: placeholder names of their 16-bit copies, or empty where the group has none.
        columns: names of the state lists, in the operator's order, with `None` for one that stays empty.
        scalars: sizes of the operator's FP64 vector of hyperparameters.
        flags: the operator's boolean arguments, in order.
        started: whether the operator takes a `started` flag.
        storage: how weights without a master are stored, a `rounding.Storage`; `None` where there are masters.
        moment: type of the moments; `None` for that of the masters.
        ranks: over how many ranks masters and moments are split, see `ShardUpdate`; `masters` are then the placeholders
            of the 16-bit weights that these are of.
    """

    kind: str
    masters: tuple[str, ...]
    low_weights: tuple[str, ...]
    columns: tuple[tuple[str, bool], ...]
    scalars: int
    flags: tuple[bool, ...]
    started: bool = False
    storage: int | None = None
    moment: torch.dtype | None = None
    ranks: int = 1

    @property
    def takes(self) -> tuple[bool, ...]:
        """The operator's last argument: `low_weights` are the parameters themselves, which users write."""
        return (True,) if self.storage is None and self.moment is not None else ()
