"""Losses."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from amp_compiler.onnx.importing.ops.registry import op

_NONE = -(2**31)  # an index that no class has


def _loss(logs: Tensor, target: Tensor, weight: Any, ignore_index: int | None, reduction: str) -> Tensor:
    index = _NONE if ignore_index is None else ignore_index
    return F.nll_loss(logs, target.to(torch.int64), weight, ignore_index=index, reduction=reduction)


@op("NegativeLogLikelihoodLoss")
def _nll(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, ignore_index: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:  # fmt: skip
    return _loss(x, target, weight, ignore_index, reduction)


@op("SoftmaxCrossEntropyLoss", many=True)
def _cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, *, outputs: int, ignore_index: int | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> tuple[Tensor, ...]:  # fmt: skip
    logs = torch.log_softmax(x, 1)
    return (_loss(logs, target, weight, ignore_index, reduction), logs)[:outputs]
