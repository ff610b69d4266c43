"""The gradient check and the updates over a group of parameters, built from the functions of `formulas`.

Each function has the signature of the operator of the same name (see `operators`), can be traced, and writes its
results with `copy_` into the tensors that the operator changes.

Every update takes `coef`, fp32 [], which multiplies every gradient (inverse loss scale times clipping factor), and
`skip`, fp32 []: where it is not zero nothing changes, whatever the gradients hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_compiler.ops.update import formulas as math
from amp_compiler.ops.update.rounding import Storage, narrow, widen

Tensors = Sequence[Tensor]


def grad_check(grads: Tensors, inv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and finiteness of all gradients, from one read of them.

    The squares are summed in fp32 per tensor (on a CUDA device per block), then these sums in a fixed order.

    Args:
        grads: n tensors of any float types and shapes, not unscaled.
        inv_scale: fp32 []: what every element is multiplied with for the norm.

    Returns:
        norm: fp32 []: L2 norm of all unscaled gradients; it may overflow where all of them are finite.
        nonfinite: fp32 []: 1 where an element of a gradient as given is infinite or NaN, else 0.
        flags: uint8 [n]: the same per tensor.
    """
    if not grads:
        zero = inv_scale.new_zeros((), dtype=torch.float32)
        return zero, zero.clone(), inv_scale.new_zeros(0, dtype=torch.uint8)
    sums, bad = zip(*(math.gradient_summary(grad, inv_scale) for grad in grads), strict=True)
    flags = torch.stack(bad)
    return torch.stack(sums).sum().sqrt(), flags.any().float(), flags.to(torch.uint8)


def adam_update(
    masters: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    lows: Tensors,
    steps: Tensors,
    hyper: Tensor,
    coef: Tensor,
    skip: Tensor,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    *,
    sqrt: math.Unary = torch.sqrt,
) -> None:
    """One step of Adam or AdamW on fp32 master weights, in place; formula and order are those of `adam_step`.

    Args:
        masters: n tensors fp32.
        grads: n tensors of any float type, shaped as the masters.
        exp_avgs: n tensors fp32, first moments.
        exp_avg_sqs: n tensors fp32, second moments.
        max_exp_avg_sqs: n tensors fp32 with amsgrad, else empty.
        lows: n tensors fp16 or bf16 that are given the new master's value rounded to nearest, or empty. Where the step
            is skipped, the traced form writes the old master's value into them.
        steps: n tensors fp32 [], raised by one.
        hyper: fp64 [6]: lr, beta1, beta2, eps, weight_decay, l1_decay.
        coef: fp32 [].
        skip: fp32 [].
        amsgrad: whether the maximum of the second moments is used.
        maximize: whether the objective is to grow.
        decoupled: AdamW's weight decay rather than L2.
        sqrt: the square root to use.
    """
    adam_update_low(
        masters,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        compensations=[],
        steps=steps,
        rng=None,
        hyper=hyper,
        coef=coef,
        skip=skip,
        mode=Storage.NEAREST,
        amsgrad=amsgrad,
        maximize=maximize,
        decoupled=decoupled,
        sqrt=sqrt,
    )
    for low, master in zip(lows, masters, strict=bool(lows)):
        low.copy_(master)


def sgd_update(
    masters: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    lows: Tensors,
    started: Tensor,
    hyper: Tensor,
    coef: Tensor,
    skip: Tensor,
    nesterov: bool,
    maximize: bool,
) -> None:
    """One step of SGD on fp32 master weights, in place; formula and order are those of `sgd_step`.

    Args:
        masters: n tensors fp32.
        grads: n tensors of any float type, shaped as the masters.
        momentum_buffers: n tensors fp32, or empty where there is no momentum.
        lows: as in `adam_update`.
        started: fp32 []: 0 before the first step that is not skipped, 1 after.
        hyper: fp64 [5]: lr, momentum, dampening, weight_decay, l1_decay.
        coef: fp32 [].
        skip: fp32 [].
        nesterov: whether to look ahead.
        maximize: whether the objective is to grow.
    """
    options = (Storage.NEAREST, nesterov, maximize)
    sgd_update_low(masters, grads, momentum_buffers, [], started, None, hyper, coef, skip, *options)
    for low, master in zip(lows, masters, strict=bool(lows)):
        low.copy_(master)


def adam_update_low(
    weights: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    compensations: Tensors,
    steps: Tensors,
    rng: Tensor | None,
    hyper: Tensor,
    coef: Tensor,
    skip: Tensor,
    mode: int,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    *,
    sqrt: math.Unary = torch.sqrt,
) -> None:
    """One step of Adam or AdamW on weights that have no master, in place. Arithmetic is fp32.

    Args:
        weights: n tensors of any float type.
        grads: as in `adam_update`.
        exp_avgs: n tensors of any float type, rounded to nearest when stored; the step uses them before that.
        exp_avg_sqs: as `exp_avgs`.
        max_exp_avg_sqs: as `exp_avgs` with amsgrad, else empty.
        compensations: n tensors typed as the weights where `mode` is `Storage.KAHAN`, else empty.
        steps: n tensors fp32 [], raised by one.
        rng: int64 [2]: key, and number of updates, raised by one where `mode` is `Storage.STOCHASTIC`;
            no other mode needs it.
        hyper: fp64 [6]: lr, beta1, beta2, eps, weight_decay, l1_decay.
        coef: fp32 [].
        skip: fp32 [].
        mode: a `Storage`.
        amsgrad: as in `adam_update`, like the two that follow.
        maximize: as there.
        decoupled: as there.
        sqrt: the square root to use.
    """
    if not weights:
        return
    scalars = math.adam_scalars(steps, hyper)
    for i, weight in enumerate(weights):
        compensation = compensations[i] if mode == Storage.KAHAN else None
        largest = max_exp_avg_sqs[i] if amsgrad else None
        new = math.adam_step(
            widen(weight, compensation),
            math.unscale(grads[i], coef, maximize=maximize),
            *(exp_avgs[i].float(), exp_avg_sqs[i].float()),
            None if largest is None else largest.float(),
            math.AdamScalars(*scalars[i].unbind()),
            decoupled=decoupled,
            sqrt=sqrt,
        )
        stored, error = narrow(new.weight, weight, mode, rng, i)
        old = (weight, compensation, exp_avgs[i], exp_avg_sqs[i], largest, steps[i])
        _write(skip, old, (stored, error, new.exp_avg, new.exp_avg_sq, new.max_exp_avg_sq, steps[i] + 1))
    _advance(rng, skip, mode)


def sgd_update_low(
    weights: Tensors,
    grads: Tensors,
    momentum_buffers: Tensors,
    compensations: Tensors,
    started: Tensor,
    rng: Tensor | None,
    hyper: Tensor,
    coef: Tensor,
    skip: Tensor,
    mode: int,
    nesterov: bool,
    maximize: bool,
) -> None:
    """One step of SGD on weights that have no master, in place. Arithmetic is fp32.

    With `Storage.NEAREST`, no dampening and no Nesterov this is NVCaffe's FP16 storage: `G = m*G + dW`, kept in the
    type of the buffer, then `W = half(float(W) - lr*float(G))`.

    Args:
        weights: n tensors of any float type.
        grads: as in `sgd_update`.
        momentum_buffers: n tensors of any float type, or empty where there is no momentum.
        compensations: as in `adam_update_low`.
        started: as in `sgd_update`.
        rng: as in `adam_update_low`.
        hyper: fp64 [5]: lr, momentum, dampening, weight_decay, l1_decay.
        coef: fp32 [].
        skip: fp32 [].
        mode: a `Storage`.
        nesterov: as in `sgd_update`.
        maximize: as in `sgd_update`.
    """
    scalars = math.SgdScalars(*math.sgd_scalars(hyper).unbind())
    for i, weight in enumerate(weights):
        compensation = compensations[i] if mode == Storage.KAHAN else None
        buffer = momentum_buffers[i] if momentum_buffers else None
        kept = weight.dtype if buffer is None else buffer.dtype
        new, new_buffer = math.sgd_step(
            widen(weight, compensation),
            math.unscale(grads[i], coef, maximize=maximize),
            None if buffer is None else buffer.float(),
            started,
            scalars,
            nesterov=nesterov,
            stored=lambda value, kept=kept: value.to(kept).float(),  # type: ignore[misc]
        )
        stored, error = narrow(new, weight, mode, rng, i)
        _write(skip, (weight, compensation, buffer), (stored, error, new_buffer))
    started.copy_(torch.where(skip != 0, started, 1.0))
    _advance(rng, skip, mode)


def _write(skip: Tensor, old: Sequence[Tensor | None], new: Sequence[Tensor | None]) -> None:
    for target, value in zip(old, new, strict=True):
        if target is not None and value is not None:
            target.copy_(torch.where(skip != 0, target, value.to(target.dtype)))


def _advance(rng: Tensor | None, skip: Tensor, mode: int) -> None:
    if rng is not None and mode == Storage.STOCHASTIC:
        rng.copy_(torch.stack([rng[0], rng[1] + (skip == 0)]))
