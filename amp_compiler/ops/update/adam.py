"""Adam (Kingma & Ba 2015), AMSGrad (Reddi et al. 2018) and AdamW (Loshchilov & Hutter 2019, decoupled decay)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_compiler.ops.update.formulas import add_l1, add_l2
from amp_compiler.ops.update.fused import FusedOptimizer, Group, How, State, group_flag, group_value, l1_of


class AdamNumbers(NamedTuple):
    """The numbers of one tensor's step.

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

    shrink: Any
    l2: Any
    l1: Any
    weight1: Any
    beta2: Any
    weight2: Any
    eps: Any
    root: Any
    neg_step: Any

    @classmethod
    def of(cls, hyper: Sequence[Any], step: Any, sqrt: Callable[[Any], Any]) -> AdamNumbers:
        """From the hyperparameters, see `FusedOptimizer.numbers`."""
        lr, beta1, beta2, eps, decay, l1 = hyper
        return cls(
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


def adam_step(
    weight: Tensor, grad: Tensor, states: Sequence[Any], numbers: AdamNumbers, how: How
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """One step on one tensor; arguments are those of `FusedOptimizer.step`.

    The order is that of `torch.optim.Adam`/`AdamW` with `foreach=False, capturable=False`:

        g = g + l1 * sign(p)                            L1 decay, which torch's optimizers lack
        decoupled:  p = p * shrink                      else:  g = fma(p, l2, g)
        m = fma(weight1, g - m, m)                      for weight1 < 1/2, else fma(weight1 - 1, g - m, g)
        v = fma(g * weight2, g, v * beta2)
        w = max(w, v)                                   AMSGrad; else w is v
        p = p + (m * neg_step) / (sqrt(w) / root + eps)
    """
    exp_avg, exp_avg_sq, largest = states
    grad = add_l1(grad, weight, numbers.l1)
    if how.flags["decoupled"]:
        weight = weight * numbers.shrink
    else:
        grad = add_l2(grad, weight, numbers.l2)
    exp_avg = torch.lerp(exp_avg, grad, numbers.weight1)
    exp_avg_sq = torch.addcmul(exp_avg_sq * numbers.beta2, grad * numbers.weight2, grad)
    if largest is not None:
        largest = torch.maximum(largest, exp_avg_sq)
    denominator = how.sqrt(exp_avg_sq if largest is None else largest) / numbers.root + numbers.eps
    weight = weight + (exp_avg * numbers.neg_step) / denominator
    return weight, (exp_avg, exp_avg_sq, largest)


def _decoupled(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    return bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW)))


ADAM = FusedOptimizer(
    name="adam",
    classes=(torch.optim.AdamW, torch.optim.Adam),
    states=(State("exp_avg"), State("exp_avg_sq"), State("max_exp_avg_sq", lambda group: bool(group["amsgrad"]))),
    hyper={
        "lr": group_value("lr"),
        "beta1": group_value("betas", 0),
        "beta2": group_value("betas", 1),
        "eps": group_value("eps"),
        "weight_decay": group_value("weight_decay"),
        "l1_decay": l1_of,
    },
    flags={"amsgrad": group_flag("amsgrad"), "maximize": group_flag("maximize"), "decoupled": _decoupled},
    numbers=AdamNumbers,
    step=adam_step,
    counts=True,
)
