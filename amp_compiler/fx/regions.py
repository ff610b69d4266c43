"""`torch.autocast` regions in a model's own text, and the types that they name."""

from __future__ import annotations

from typing import Any

import torch

from amp_compiler.fx.graph import LOW_TYPES


def names_other_type(kind: Any, dtype: torch.dtype | None, enabled: bool, device: str, low: torch.dtype | None) -> bool:
    """Whether a region is on in the 16-bit type which a plan does not have.

    A region that names no type is in torch's default for its device: BF16 on a CPU, FP16 on a GPU.

    Args:
        kind: device type of the region.
        dtype: its type; `None` where capture does not tell.
        enabled: whether it is on.
        device: device type of the model.
        low: the low type that is planned for; `None` where nothing is planned.
    """
    return enabled and str(kind) == device and low is not None and dtype in LOW_TYPES and dtype is not low
