"""The gradient check and the updates over a group of parameters, in torch calls that can be traced.

This is what every kernel must give, and what a compiler gets where there is no kernel. Results are written with `copy_`
into the tensors that the operator changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from amp_compiler.ops.update.formulas import Unary, gradient_summary, unscale
from amp_compiler.ops.update.fused import FusedOptimizer, How, Tensors, Update
from amp_compiler.ops.update.rounding import Storage, differs, narrow, outgrows, saturated, widen


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
    sums, bad = zip(*(gradient_summary(grad, inv_scale) for grad in grads), strict=True)
    flags = torch.stack(bad)
    return torch.stack(sums).sum().sqrt(), flags.any().float(), flags.to(torch.uint8)


def step_numbers(optimizer: FusedOptimizer, steps: Tensors, hyper: Tensor) -> Tensor:
    """The numbers of the coming step, computed in fp64 and rounded once.

    Args:
        optimizer: whose.
        steps: n tensors fp32 [], the steps made so far; none for an optimizer that does not count.
        hyper: fp64 [h], as `FusedOptimizer.hyper` says.

    Returns:
        fp32 [n, k], or [k] for an optimizer that does not count; the last dimension are the fields of its numbers.
    """
    if not optimizer.counts:
        return torch.stack(list(optimizer.numbers.of(hyper.unbind(), None, torch.sqrt))).float()
    step = torch.stack(list(steps)).double() + 1
    columns = optimizer.numbers.of(hyper.unbind(), step, torch.sqrt)
    return torch.stack([column.expand(step.shape) for column in columns], dim=1).float()


def update(optimizer: FusedOptimizer, args: Update, sqrt: Unary = torch.sqrt) -> None:
    """One step of an optimizer on a group of parameters, in place. Arithmetic is fp32.

    Args:
        optimizer: which.
        args: the arguments of its operator.
        sqrt: the square root to use: `torch.sqrt`, or `exact_sqrt` for what kernels are held to.
    """
    if args.weights:
        if args.stale is not None:
            takes = [args.takes] * len(args.weights)
            weights, (stale,) = follow(args.weights, args.low_weights, takes, [args.stale])
            torch._foreach_copy_([*args.weights, args.stale], [*weights, stale])
        _update_all(optimizer, args, sqrt)
    advance(args)
    for low, master in zip(args.low_weights, args.weights, strict=bool(args.low_weights)):
        low.copy_(master)


def follow(
    masters: Tensors, copies: Sequence[Tensor | None], takes: Sequence[bool], stale: Tensors
) -> tuple[list[Tensor], list[Tensor]]:
    """Look whether copies are still their masters rounded, before a step.

    Args:
        masters: n tensors fp32.
        copies: of each, fp16 or bf16, where it has one.
        takes: of each, whether it takes what the copy has otherwise.
        stale: uint8 [n], as in `Update`; none where nobody looks.

    Returns:
        What the step is to begin with, and the new `stale`.
    """
    if not stale:
        return list(masters), []
    weights, flags = [], []
    for master, copy, take in zip(masters, copies, takes, strict=True):
        differing = torch.zeros((), dtype=torch.bool, device=master.device) if copy is None else differs(master, copy)
        weights.append(torch.where(differing, copy.float(), master) if take and copy is not None else master)
        flags.append(differing.any())
    return weights, [torch.maximum(stale[0], torch.stack(flags).to(torch.uint8))]


def advance(args: Update) -> None:
    """After all tensors: note that a first step was made, and count the update for the random bits of the next."""
    if args.started is not None:
        args.started.copy_(torch.where(args.skip != 0, args.started, 1.0))
    if args.rng is not None and args.mode == Storage.STOCHASTIC:
        args.rng.copy_(torch.stack([args.rng[0], args.rng[1] + (args.skip == 0)]))


def overflow(optimizer: FusedOptimizer, args: Update) -> Tensor:
    """fp32 []: 1 where the coming step makes a weight or state that its 16-bit type cannot hold, else 0.

    Such a value is clipped by `update` and by every kernel. This is for those who would rather not make the step.

    Args:
        optimizer: which.
        args: the arguments of its operator; nothing is written.
    """
    flags = [torch.zeros_like(args.skip, dtype=torch.bool)]
    for one in _steps(optimizer, args, torch.sqrt):
        values = ((one.weight, one.new), *zip(one.states, one.reached, strict=True))
        flags += [outgrows(value, of.dtype) for of, value in values if of is not None and value is not None]
    return torch.stack(flags).any().float()


class _Step(NamedTuple):
    """The step of one tensor, with nothing stored yet.

    Args:
        weight: the tensor.
        compensation: its rounding error, where it is kept.
        states: what is kept of the optimizer's state.
        new: fp32: the new weight.
        new_states: fp32: the new states, those that the weight is moved by as they will be stored.
        reached: the new states before that.
    """

    weight: Tensor
    compensation: Tensor | None
    states: Sequence[Tensor | None]
    new: Tensor
    new_states: Sequence[Tensor | None]
    reached: Sequence[Tensor | None]


def _steps(optimizer: FusedOptimizer, args: Update, sqrt: Unary) -> Iterator[_Step]:
    table = step_numbers(optimizer, args.steps, args.hyper)
    shared = None if optimizer.counts else table.unbind()
    for i, weight in enumerate(args.weights):
        compensation = args.compensations[i] if args.mode == Storage.KAHAN else None
        states = [column[i] if column else None for column in args.states]
        before: dict[int, Tensor] = {}
        how = How(args.flags, args.started, sqrt, _storing(weight, states, before))
        new, new_states = optimizer.step(
            widen(weight, compensation),
            unscale(args.grads[i], args.coef, maximize=args.flags["maximize"]),
            [None if state is None else state.float() for state in states],
            optimizer.numbers(*(table[i].unbind() if shared is None else shared)),
            how,
        )
        reached = [before.get(place, value) for place, value in enumerate(new_states)]
        yield _Step(weight, compensation, states, new, new_states, reached)


def _storing(
    weight: Tensor, states: Sequence[Tensor | None], before: dict[int, Tensor]
) -> Callable[[Tensor, int], Tensor]:
    """`How.stored`; notes what a state was before."""
    types = [weight.dtype if state is None else state.dtype for state in states]

    def stored(value: Tensor, place: int) -> Tensor:
        before[place] = value
        return saturated(value, types[place]).to(types[place]).float()

    return stored


def _update_all(optimizer: FusedOptimizer, args: Update, sqrt: Unary) -> None:
    for i, one in enumerate(_steps(optimizer, args, sqrt)):
        stored, error = narrow(one.new, one.weight, args.mode, args.rng, i)
        counted = ((args.steps[i], args.steps[i] + 1),) if optimizer.counts else ()
        states = zip(one.states, one.new_states, strict=True)
        for target, value in ((one.weight, stored), (one.compensation, error), *states, *counted):
            if target is not None and value is not None:
                kept = saturated(value, target.dtype).to(target.dtype)
                target.copy_(torch.where(args.skip != 0, target, kept))
