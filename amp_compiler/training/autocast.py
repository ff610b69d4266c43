"""What `torch.autocast` would cast in the forward of a training step."""

from __future__ import annotations

from typing import Any

import torch.utils._pytree as pytree

from amp_compiler.forward.autocast import autocast_totals
from amp_compiler.forward.program import normalize
from amp_compiler.forward.settings import Settings, device_of
from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.graph import torch_dtype
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.ir.plan import AutocastTotals
from amp_compiler.training.capture import capture_once
from amp_compiler.training.loss_module import ROOT, LossModule


def autocast_of(model: LossModule, batch: tuple[Any, ...], settings: Settings) -> AutocastTotals | None:
    """Capture the loss once more, and count as `forward.autocast` does; nothing is changed.

    Args:
        model: the loss as a module.
        batch: what a call of the step gives it.
        settings: those of the step.

    Raises:
        CaptureError: the loss is no one graph.
    """
    device = device_of([*pytree.tree_leaves(batch), *model.parameters()])
    low = settings.low(device)
    with autocast_off(), building(), generators_kept():
        captured = capture_once(model, batch, torch_dtype(low)).captured
        normalize(captured.graph_module, settings, None, ROOT, low)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return autocast_totals(captured, low, device.type, frozen)
