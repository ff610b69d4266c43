"""`KeptTensors`: what a training step keeps from call to call beside parameters, buffers and optimizer states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from amp_compiler.ops.loss_scale import LossScaleState
from amp_compiler.training.samples import Samples
from amp_compiler.training.state import Amaxes, GradientSums, LowWeights
from amp_compiler.training.weights import WeightState


@dataclass(frozen=True)
class KeptTensors:
    """The tensors that all programs of a training step share.

    Args:
        scale: gives the loss scale's present state.
        low_weights: the 16-bit weights.
        sums: sums of gradients over several batches.
        weights: FP32 masters of 16-bit parameters, or what storage without masters needs.
        samples: how much each batch counts; `None` where all count alike.
        amaxes: what delayed scaling of FP8 operands knows of the steps before.
    """

    scale: Callable[[], LossScaleState]
    low_weights: LowWeights
    sums: GradientSums
    weights: WeightState
    samples: Samples | None = None
    amaxes: Amaxes = field(default_factory=Amaxes)

    def follow(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Make again what is kept beside a parameter that was written outside of a step.

        Args:
            parameter: where and as it was.
            state: the optimizer's state of it; empty where it has none.
        """
        self.low_weights.follow(parameter)
        self.weights.masters.follow(parameter, state)
