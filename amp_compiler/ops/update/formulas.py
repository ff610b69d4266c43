"""What the optimizer updates have in common, as functions of tensors without side effects.

The functions here and in `adam` and `sgd` are the reference that every kernel is held to. They use ordinary torch calls
only, so the same functions run eagerly and can be traced and compiled. Every number that a scheduler may change is a
0-dim tensor, so that a change compiles nothing anew.

Order of operations. `fma(a, b, c)` is `a * b + c` rounded once, as ATen's CPU kernels compute `add(alpha=...)`, `lerp`
and `addcmul`. With a 0-dim second factor `torch.addcmul(c, a, b)` is that fma, so eager SGD is bit-equal to
`torch.optim.SGD(foreach=False)`. Inductor on a CPU compiles it to a multiplication and an addition, each rounded, so
compiled results may differ from eager ones in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Unary = Callable[[Tensor], Tensor]


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


def add_l2(grad: Tensor, weight: Tensor, l2: Tensor) -> Tensor:
    """`fma(weight, l2, grad)`, which torch leaves out where `l2` is zero: zero times an infinite weight is NaN."""
    return torch.where(l2 != 0, torch.addcmul(grad, weight, l2), grad)


def add_l1(grad: Tensor, weight: Tensor, l1: Tensor) -> Tensor:
    """Caffe's `diff += decay * sign(data)`; a weight of zero stays. One rounding, for the product is exact."""
    return torch.where(l1 != 0, grad + torch.sign(weight) * l1, grad)


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
