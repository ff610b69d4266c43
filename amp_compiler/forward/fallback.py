"""What a model runs under where no plan can be kept of it: torch's own mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from amp_compiler.forward.settings import Settings
from amp_compiler.fx.graph import torch_dtype


def run_under_autocast(
    model: nn.Module, settings: Settings, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a model as it is written under `torch.autocast`, which knows no rules; whoever asks for it says so.

    Args:
        model: the module.
        settings: which 16-bit type.
        device: the device that it runs on.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Example:
        >>> from amp_compiler.forward.settings import make_settings
        >>> settings, x = make_settings(dtype="bf16"), torch.ones(1, 2)
        >>> run_under_autocast(nn.Linear(2, 2), settings, x.device, (x,), {}).dtype
        torch.bfloat16
    """
    with torch.autocast(device.type, dtype=torch_dtype(settings.low(device))):
        return model(*args, **kwargs)
