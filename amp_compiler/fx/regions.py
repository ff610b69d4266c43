"""`torch.autocast` regions in a model's own text, and the types that they name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from amp_compiler.errors import LoweringError
from amp_compiler.fx.graph import LOW_TYPES, user_source

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}


def check_region(
    kind: Any, dtype: torch.dtype | None, enabled: bool, device: str, low: torch.dtype | None, nodes: Iterable[fx.Node]
) -> None:
    """Refuse a region that is on in the 16-bit type which a plan does not have; one plan has one low type.

    A region that names no type is in torch's default for its device: BF16 on a CPU, FP16 on a GPU.

    Args:
        kind: device type of the region.
        dtype: its type; `None` where capture does not tell.
        enabled: whether it is on.
        device: device type of the model.
        low: the low type that is planned for; `None` where nothing is planned.
        nodes: nodes of the region, for the line of the model.

    Raises:
        LoweringError: names the line and both types.
    """
    if not enabled or str(kind) != device or low is None or dtype not in LOW_TYPES or dtype is low:
        return
    sources = (user_source(node.meta.get("stack_trace")) for node in nodes)
    raise LoweringError(
        f"the model opens torch.autocast('{kind}', dtype={dtype}) inside, and the low type that is planned for is"
        f" {_SHORT[low]}",
        where=next((source for source in sources if source), ""),
        mend=f"pass dtype='{_SHORT[dtype]}', or give that region dtype={low}",
    )
