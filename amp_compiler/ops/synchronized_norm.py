"""A batch norm whose statistics are those of the rows of several ranks: `torch.nn.SyncBatchNorm`, in a graph.

Torch's own is an `autograd.Function` with messages of its own, for GPUs alone. Here it is made of ATen's operators and
functional collectives, so that a trace holds all of it: one small message forward, and one backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_GATHER: Any = torch.ops._c10d_functional.all_gather_into_tensor.default
_REDUCE: Any = torch.ops._c10d_functional.all_reduce.default
_WAIT: Any = torch.ops._c10d_functional.wait_tensor.default
# What the messages bring where this rank alone has rows, by operator: for a graph that it runs by itself.
ALONE: dict[Any, Callable[..., Tensor]] = {
    _GATHER: lambda message, ranks, group: torch.cat([message, message.new_zeros(message.numel() * (ranks - 1))]),
    _REDUCE: lambda message, by, group: message,
}

_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
_LIBRARY.define(
    "synchronized_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!)? running_mean,"
    " Tensor(b!)? running_var, bool training, float momentum, float eps, bool cudnn_enabled, str group, int ranks)"
    " -> Tensor"
)


def synchronized_batch_norm(
    data: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
    group: str,
    ranks: int,
) -> Tensor:
    """`aten.batch_norm` in training over the rows of all ranks of a group; differentiable once.

    Arithmetic, messages and running statistics are FP32 (FP64 for FP64 data), the result has the type of the data.
    Ranks may have different numbers of rows.

    Args:
        data: [rows, channels, …].
        weight: [channels], or `None`.
        bias: [channels], or `None`.
        running_mean: [channels], changed in place; `None` where it is not kept.
        running_var: the same of the variance, which is that of a sample.
        training: always true.
        momentum: how much of the new statistics goes into the running ones.
        eps: added to the variance.
        cudnn_enabled: of `aten.batch_norm`; nothing here asks it.
        group: torch's name of the group of ranks.
        ranks: their number.
    """
    result, mean, variance, count = _Normalized.apply(data, weight, bias, eps, group, ranks)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for kept, now in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if kept is not None:
                kept.copy_(kept.to(now.dtype) * (1 - momentum) + now * momentum)
    return result  # type: ignore[no-any-return]


_LIBRARY.impl("synchronized_batch_norm", synchronized_batch_norm, "CompositeImplicitAutograd")


class _Normalized(torch.autograd.Function):
    """Gives the normalized data, and the mean, the variance and the count of all ranks' rows."""

    @staticmethod
    def forward(
        ctx: Any, data: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: str, ranks: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = data.to(torch.promote_types(data.dtype, torch.float32))
        mean, variance, count = _joined(wide, group, ranks)
        inverse = torch.rsqrt(variance + eps)
        scale = inverse if weight is None else inverse * weight
        normalized = (wide - _over(mean, data)) * _over(scale, data)
        normalized = normalized if bias is None else normalized + _over(bias, data)
        ctx.save_for_backward(data, weight, bias, mean, inverse, count)
        ctx.group = group
        ctx.mark_non_differentiable(mean, variance, count)
        ctx.set_materialize_grads(False)
        return normalized.to(data.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        data, weight, bias, mean, inverse, count = ctx.saved_tensors
        if gradients[0] is None:
            return (None,) * 6
        wide, centred = gradients[0].to(mean.dtype), data.to(mean.dtype) - _over(mean, data)
        dims = _all_but_channels(data)
        total, along = wide.sum(dims), (wide * centred).sum(dims)
        of_data = of_weight = of_bias = None
        if weight is not None and ctx.needs_input_grad[1]:
            of_weight = (along * inverse).to(weight.dtype)
        if bias is not None and ctx.needs_input_grad[2]:
            of_bias = total.to(bias.dtype)
        if ctx.needs_input_grad[0]:
            sums = _WAIT(_REDUCE(torch.cat([total, along]), "sum", ctx.group))
            total, along = (sums / count).chunk(2)
            scale = inverse if weight is None else inverse * weight
            rest = _over(total, data) + centred * _over(along * inverse * inverse, data)
            of_data = ((wide - rest) * _over(scale, data)).to(data.dtype)
        return of_data, of_weight, of_bias, None, None, None


def _joined(wide: Tensor, group: str, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance (the biased one) and count of the rows of all ranks, as each rank works them out of all parts.

    Each tells its own mean and variance: a sum of squares would cancel where a mean is far from zero.
    """
    channels = wide.shape[1]
    variance, mean = torch.var_mean(wide, _all_but_channels(wide), correction=0)
    message = torch.cat([mean, variance, mean.new_full((1,), wide.numel() // channels)])
    parts = _WAIT(_GATHER(message, ranks, group)).view(ranks, -1)
    means, variances, counts = parts.split([channels, channels, 1], dim=1)
    count = counts.sum()
    shares = counts / count
    mean = (means * shares).sum(0)
    variance = ((variances + (means - mean).square()) * shares).sum(0)
    return mean, variance, count


def _all_but_channels(data: Tensor) -> list[int]:
    return [dim for dim in range(data.dim()) if dim != 1]


def _over(values: Tensor, data: Tensor) -> Tensor:
    """Numbers of each channel, so that they go with the data."""
    shape: Sequence[int] = [1, -1, *[1] * (data.dim() - 2)]
    return values.view(shape)
