"""`Reduction`: how the gradients of several ranks are summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from amp_compiler.passes.step.reduce_gradients import SharedGradient


@dataclass(frozen=True)
class Reduction:
    """How the gradients of several ranks are summed.

    Args:
        group: torch's name of the group of ranks.
        ranks: their number.
        bucket_bytes: as for `ReduceGradients`.
        in_fp32: whether sums are made in FP32 of what is made in 16 bits.
        broadcast_buffers: whether all ranks take the first one's buffers.
        shards: whether masters, moments and the update are split over the ranks.
        agree: `agree(gradients, norms, buffers)` gives what all of them have a gradient of, by that of which this one
            has, the messages of its forward and backward, and the buffers that it writes.
        agree_on_parts: as for `StepInputs.split`.
    """

    group: str
    ranks: int
    bucket_bytes: int
    in_fp32: bool
    broadcast_buffers: bool
    shards: bool = False
    agree: Callable[..., tuple[SharedGradient, ...]] = lambda gradients, norms, buffers: gradients
    agree_on_parts: Callable[[dict[str, bool]], Mapping[str, bool]] = lambda reads: reads
