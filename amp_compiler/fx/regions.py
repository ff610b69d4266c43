"""`torch.autocast` regions in a model's own text, and the types that they name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from amp_compiler.errors import LoweringError
from amp_compiler.fx.graph import LOW_TYPES, user_source

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}


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


def check_region(
    kind: Any, dtype: torch.dtype | None, enabled: bool, device: str, low: torch.dtype | None, nodes: Iterable[fx.Node]
) -> None:
    """Refuse a region that `names_other_type`, in a model that runs in pieces.

    Args:
        kind, dtype, enabled, device, low: see `names_other_type`.
        nodes: nodes of the region, for the line of the model.

    Raises:
        LoweringError: names the line and both types.
    """
    if low is None or dtype is None or not names_other_type(kind, dtype, enabled, device, low):
        return
    sources = (user_source(node.meta.get("stack_trace")) for node in nodes)
    raise LoweringError(
        f"the model opens torch.autocast('{kind}', dtype={dtype}) inside, and the low type that is planned for is"
        f" {_SHORT[low]}",
        where=next((source for source in sources if source), ""),
        mend=f"pass dtype='{_SHORT[dtype]}', or give that region dtype={low}",
    )
