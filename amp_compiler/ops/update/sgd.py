"""SGD with momentum, and with Nesterov's (Sutskever et al. 2013)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amp_compiler.ops.update.formulas import add_l1, add_l2
from amp_compiler.ops.update.fused import FusedOptimizer, How, State, group_flag, group_value, l1_of


class SgdNumbers(NamedTuple):
    """The numbers of a step.

    Args:
        neg_lr: `-lr`.
        momentum: as it is.
        weight: `1 - dampening`.
        l2: `weight_decay`.
        l1: `l1_decay`.
    """

    neg_lr: Any
    momentum: Any
    weight: Any
    l2: Any
    l1: Any

    @classmethod
    def of(cls, hyper: Sequence[Any], step: Any, sqrt: Callable[[Any], Any]) -> SgdNumbers:
        """From the hyperparameters, see `FusedOptimizer.numbers`."""
        lr, momentum, dampening, decay, l1 = hyper
        return cls(-lr, momentum, 1 - dampening, decay, l1)


def sgd_step(
    weight: Tensor, grad: Tensor, states: Sequence[Any], numbers: SgdNumbers, how: How
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """One step on one tensor, in the order of `torch.optim.SGD` with `foreach=False`; see `FusedOptimizer.step`.

        g = g + l1 * sign(p)           L1 decay, which torch's SGD lacks
        g = fma(p, l2, g)
        b = g on the first step, then fma(g, 1 - dampening, b * momentum)
        g = fma(b, momentum, g) with Nesterov, else b
        p = fma(g, -lr, p)

    Without dampening this is `G = m*G + dW; W = W - lr*G`: the momentum excludes the learning rate, which the code of
    NVCaffe has inside (`H = m*H + lr*dW; W = W - H`; the same while the rate is). On weights without masters, to
    nearest and without Nesterov, `G` is kept in the type of the weight, then `W = half(float(W) - lr*float(G))`; so the
    weight moves by what is kept of the buffer.
    """
    (buffer,) = states
    grad = add_l2(add_l1(grad, weight, numbers.l1), weight, numbers.l2)
    if buffer is not None:
        decayed = torch.addcmul(buffer * numbers.momentum, grad, numbers.weight)
        buffer = how.stored(torch.where(how.started != 0, decayed, grad), 0)
        grad = torch.addcmul(grad, buffer, numbers.momentum) if how.flags["nesterov"] else buffer
    return torch.addcmul(weight, grad, numbers.neg_lr), (buffer,)


SGD = FusedOptimizer(
    name="sgd",
    classes=(torch.optim.SGD,),
    states=(State("momentum_buffer", lambda group: bool(group["momentum"])),),
    hyper={
        "lr": group_value("lr"),
        "momentum": group_value("momentum"),
        "dampening": group_value("dampening"),
        "weight_decay": group_value("weight_decay"),
        "l1_decay": l1_of,
    },
    flags={"nesterov": group_flag("nesterov"), "maximize": group_flag("maximize")},
    numbers=SgdNumbers,
    step=sgd_step,
    started=lambda group: bool(group["momentum"] and group["dampening"]),
    state_as_weight=True,  # as NVCaffe; Adam's second moment would stagnate in 16 bits, where 0.999 * v rounds to v
)
