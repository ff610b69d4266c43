"""The loss scales: none, static, dynamic and adaptive, all with the interface of `LossScale`.

A loss scale is frozen settings without tensors, and a state of 0-dim device tensors beside them. The state goes into a
training step and comes out of it; the settings are Python numbers that the trace bakes in.

`next` is made of tensor functions only, so it is traced into the step's graph and never waits for the device:

    scaling = make_loss_scale("dynamic")
    state = scaling.init("cuda")
    state = scaling.next(state, nonfinite, norm)    # once per step
"""

from amp_compiler.ops.loss_scale.adaptive import NormAdaptiveLossScale, NvcaffeLossScale
from amp_compiler.ops.loss_scale.base import HELD, LossScale, LossScaleState
from amp_compiler.ops.loss_scale.constant import NoLossScale, StaticLossScale
from amp_compiler.ops.loss_scale.dynamic import DynamicLossScale
from amp_compiler.ops.loss_scale.make import LossScaleArgument, make_loss_scale

__all__ = [
    "HELD",
    "DynamicLossScale",
    "LossScale",
    "LossScaleArgument",
    "LossScaleState",
    "NoLossScale",
    "NormAdaptiveLossScale",
    "NvcaffeLossScale",
    "StaticLossScale",
    "make_loss_scale",
]
