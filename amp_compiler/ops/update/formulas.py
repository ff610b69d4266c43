"""The optimizer updates as functions of tensors without side effects: the reference that every kernel is held to.

They use ordinary torch calls only, so the same functions run eagerly and can be traced and compiled. Every number that
a scheduler may change is a 0-dim tensor, so that a change compiles nothing anew.

Order of operations. `fma(a, b, c)` is `a * b + c` rounded once, as ATen's CPU kernels compute `add(alpha=...)`, `lerp`
and `addcmul`. With a 0-dim second factor `torch.addcmul(c, a, b)` is that fma, so eager SGD is bit-equal to
`torch.optim.SGD(foreach=False)`. Inductor on a CPU compiles it to a multiplication and an addition, each rounded, so
compiled results may differ from eager ones in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Unary = Callable[[Tensor], Tensor]


class AdamScalars(NamedTuple):
    """The numbers of one tensor's Adam step, each fp32 and 0-dim, rounded once from fp64.

    Args:
        shrink: `1 - lr * weight_decay`, the factor of decoupled weight decay.
        l2: `weight_decay`, for decay that is added to the gradient.
        l1: `l1_decay`, the length of the step towards zero that is added to the gradient.
        weight1: `1 - beta1`.
        beta2: as it is.
        weight2: `1 - beta2`.
        eps: as it is.
        root: `sqrt(1 - beta2 ** step)`.
        neg_step: `-lr / (1 - beta1 ** step)`.
    """

    shrink: Tensor
    l2: Tensor
    l1: Tensor
    weight1: Tensor
    beta2: Tensor
    weight2: Tensor
    eps: Tensor
    root: Tensor
    neg_step: Tensor


class SgdScalars(NamedTuple):
    """The numbers of an SGD step, each fp32 and 0-dim, rounded once from fp64.

    Args:
        neg_lr: `-lr`.
        momentum: as it is.
        weight: `1 - dampening`.
        l2: `weight_decay`.
        l1: `l1_decay`.
    """

    neg_lr: Tensor
    momentum: Tensor
    weight: Tensor
    l2: Tensor
    l1: Tensor


class AdamState(NamedTuple):
    """What an Adam step makes: the new weight, first moment, second moment and its maximum (`None` without amsgrad)."""

    weight: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None


def adam_scalars(steps: Sequence[Tensor], hyper: Tensor) -> Tensor:
    """The numbers of the coming step of every tensor, computed in fp64.

    Args:
        steps: n tensors fp32 of shape [], the steps made so far.
        hyper: fp64 [6]: lr, beta1, beta2, eps, weight_decay, l1_decay.

    Returns:
        fp32 [n, 9]; the columns are the fields of `AdamScalars`.
    """
    step = torch.stack(list(steps)).double() + 1
    columns = _adam_columns(hyper.unbind(), step, torch.sqrt)
    return torch.stack([column.expand(step.shape) for column in columns], dim=1).float()


def adam_numbers(steps: float, hyper: Tensor) -> list[float]:
    """One row of `adam_scalars` before it is rounded: one operation of torch takes longer than all of it.

    Args:
        steps: the steps made so far.
        hyper: as there, on a CPU.
    """
    try:
        return list(_adam_columns(hyper.tolist(), steps + 1, math.sqrt))
    except (ArithmeticError, ValueError):  # a tensor becomes inf or NaN there
        return adam_scalars([torch.tensor(steps)], hyper)[0].tolist()


def _adam_columns(hyper: Sequence[Any], step: Any, sqrt: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The fields of `AdamScalars`, from fp64 tensors or numbers."""
    lr, beta1, beta2, eps, decay, l1 = hyper
    return (
        1 - lr * decay,
        decay,
        l1,
        1 - beta1,
        beta2,
        1 - beta2,
        eps,
        sqrt(1 - beta2**step),
        -lr / (1 - beta1**step),
    )


def sgd_scalars(hyper: Tensor) -> Tensor:
    """The numbers of an SGD step, computed in fp64.

    Args:
        hyper: fp64 [5]: lr, momentum, dampening, weight_decay, l1_decay.

    Returns:
        fp32 [5]; the entries are the fields of `SgdScalars`.
    """
    lr, momentum, dampening, decay, l1 = hyper.unbind()
    return torch.stack([-lr, momentum, 1 - dampening, decay, l1]).float()


def unscale(grad: Tensor, coef: Tensor, *, maximize: bool) -> Tensor:
    """The gradient in fp32, times `coef`, negated where the objective is to grow.

    Args:
        grad: any float type, any shape.
        coef: fp32 []: inverse loss scale times clipping factor.
        maximize: whether the sign is turned.
    """
    scaled = grad.float() * coef
    return -scaled if maximize else scaled


def exact_sqrt(x: Tensor) -> Tensor:
    """The correctly rounded fp32 square root of an fp32 tensor; ATen's on a CPU can be one unit in the last place off.

    A square root in fp64 rounded to fp32 is the correctly rounded one, because 53 bits are more than 2 * 24 + 2.
    """
    return x.double().sqrt().float()


def _add_l2(grad: Tensor, weight: Tensor, l2: Tensor) -> Tensor:
    # torch leaves the term out where the decay is zero; adding zero times an infinite weight would make a NaN.
    return torch.where(l2 != 0, torch.addcmul(grad, weight, l2), grad)


def _add_l1(grad: Tensor, weight: Tensor, l1: Tensor) -> Tensor:
    # Caffe's `diff += decay * sign(data)`; a weight of zero is left where it is. One rounding: the product is exact.
    return torch.where(l1 != 0, grad + torch.sign(weight) * l1, grad)


def adam_step(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    scalars: AdamScalars,
    *,
    decoupled: bool,
    sqrt: Unary = torch.sqrt,
) -> AdamState:
    """One step of Adam (Kingma & Ba 2015) or AdamW (Loshchilov & Hutter 2019, decoupled decay) on one tensor.

    The order is that of `torch.optim.Adam`/`AdamW` with `foreach=False, capturable=False`:

        g = g + l1 * sign(p)                            L1 decay, which torch's optimizers lack
        decoupled:  p = p * shrink                      else:  g = fma(p, l2, g)
        m = fma(weight1, g - m, m)                      for weight1 < 1/2, else fma(weight1 - 1, g - m, g)
        v = fma(g * weight2, g, v * beta2)
        w = max(w, v)                                   amsgrad (Reddi et al. 2018); else w is v
        p = p + (m * neg_step) / (sqrt(w) / root + eps)

    Args:
        weight: fp32, any shape.
        grad: fp32, unscaled, of the same shape.
        exp_avg: fp32, of the same shape.
        exp_avg_sq: fp32, of the same shape.
        max_exp_avg_sq: fp32 of the same shape; `None` without amsgrad.
        scalars: the numbers of this step.
        decoupled: weight decay of AdamW rather than L2 added to the gradient.
        sqrt: the square root to use: `torch.sqrt`, or `exact_sqrt` for the reference.
    """
    grad = _add_l1(grad, weight, scalars.l1)
    if decoupled:
        weight = weight * scalars.shrink
    else:
        grad = _add_l2(grad, weight, scalars.l2)
    exp_avg = torch.lerp(exp_avg, grad, scalars.weight1)
    exp_avg_sq = torch.addcmul(exp_avg_sq * scalars.beta2, grad * scalars.weight2, grad)
    if max_exp_avg_sq is not None:
        max_exp_avg_sq = torch.maximum(max_exp_avg_sq, exp_avg_sq)
    denominator = sqrt(exp_avg_sq if max_exp_avg_sq is None else max_exp_avg_sq) / scalars.root + scalars.eps
    weight = weight + (exp_avg * scalars.neg_step) / denominator
    return AdamState(weight, exp_avg, exp_avg_sq, max_exp_avg_sq)


def sgd_step(
    weight: Tensor,
    grad: Tensor,
    buffer: Tensor | None,
    started: Tensor,
    scalars: SgdScalars,
    *,
    nesterov: bool,
    stored: Unary = lambda x: x,
) -> tuple[Tensor, Tensor | None]:
    """One step of SGD on one tensor, in the order of `torch.optim.SGD` with `foreach=False`.

        g = g + l1 * sign(p)           L1 decay, which torch's SGD lacks
        g = fma(p, l2, g)
        b = g on the first step, then fma(g, 1 - dampening, b * momentum)
        g = fma(b, momentum, g) with Nesterov (Sutskever et al. 2013), else b
        p = fma(g, -lr, p)

    Without dampening this is NVCaffe's `G = m*G + dW; W = W - lr*G` too: the momentum excludes the learning rate.

    Args:
        weight: fp32, any shape.
        grad: fp32, unscaled, of the same shape.
        buffer: fp32 of the same shape; `None` without momentum.
        started: fp32 []: 0 before the first step, then 1.
        scalars: the numbers of this step.
        nesterov: whether to look ahead.
        stored: rounds the new buffer to the type that it is kept in, so that the weight moves by what is kept.

    Returns:
        The new weight and the new buffer.
    """
    grad = _add_l2(_add_l1(grad, weight, scalars.l1), weight, scalars.l2)
    if buffer is not None:
        decayed = torch.addcmul(buffer * scalars.momentum, grad, scalars.weight)
        buffer = stored(torch.where(started != 0, decayed, grad))
        grad = torch.addcmul(grad, buffer, scalars.momentum) if nesterov else buffer
    return torch.addcmul(weight, grad, scalars.neg_lr), buffer


def gradient_summary(grad: Tensor, inv_scale: Tensor) -> tuple[Tensor, Tensor]:
    """What the check needs to know of one gradient, from one read of it.

    Args:
        grad: any float type, any shape.
        inv_scale: fp32 [].

    Returns:
        fp32 []: the sum of the squares of the unscaled elements; bool []: whether an element is infinite or NaN.
    """
    wide = grad.float()
    unscaled = wide * inv_scale
    if grad.numel() == 0:
        return unscaled.sum(), torch.zeros((), dtype=torch.bool, device=grad.device)
    return (unscaled * unscaled).sum(), ~torch.isfinite(wide.abs().amax())
