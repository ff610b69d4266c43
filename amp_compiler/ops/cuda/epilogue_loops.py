"""The loops that an operator of `ops.epilogues` replaces."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops.epilogues import ACTIVATION, GELU, WITH_SUM, bits_of, composed


def loops_of(operator: Any, left: Tensor, right: Tensor, *rest: Any) -> Callable[[], Any]:
    """What would run in the place of an operator: without a mask, as ReLU's gradient reads its result.

    Args:
        operator: one of `epilogues.OPERATORS`.
        left: its arguments.
        right: see there.
        rest: see there.
    """
    if operator is WITH_SUM or GELU in rest:
        return functools.partial(composed, operator, left, right, *rest)
    if operator is ACTIVATION:
        return lambda: torch.relu(torch.mm(left, right) if rest[0] is None else torch.addmm(rest[0], left, right))
    result = bits_of(rest[0], right.shape[1]).to(left.dtype)

    def gradient() -> Any:
        found = torch.ops.aten.threshold_backward.default(torch.mm(left, right), result, 0)
        return found, found.sum(0) if rest[2] else None

    return gradient
