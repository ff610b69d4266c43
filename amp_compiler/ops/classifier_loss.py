"""The cross-entropy of a classifier as operators that never hold all logits: they go over the rows in chunks.

A language model's logits, rows times vocabulary, are the largest value of its step. Here a chunk of rows is multiplied
with the weight, turned into its part of the loss and, where gradients are asked for too, into its part of those, before
the next chunk is begun. Each value is rounded where it is in the graph that stores them all: logits and their gradient
to the low type, softmax and loss in FP32, the gradient of the weight once, at the end of an FP32 sum.

A compiler is not shown the chunks: torch's fuses the loops of all of them, and so keeps all of them alive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops.cpu import arena
from amp_compiler.ops.cuda import cross_entropy

aten = torch.ops.aten
MEAN, SUM = 1, 2  # as ATen numbers the ways to reduce a loss
_ALIGNED = 64  # a GPU's rows of logits begin at multiples of it, as fast loads and matrix products need them
_AT_ONCE = 1 << 20  # FP32 logits that a CPU works on at a time, so that they stay in its caches


@torch.library.custom_op("amp_compiler::classifier_loss", mutates_args=())
def classifier_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    low: torch.dtype,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    at_once: int,
) -> Tensor:
    """`cross_entropy(linear(x, weight, bias).to(low).float(), target)` without its logits.

    Args:
        x: [rows, features].
        weight: [classes, features], of the type of `x`.
        bias: [classes], or `None`.
        target: int64 [rows], a class each, or `ignore_index`.
        low: the type that logits, and their gradients, are rounded to.
        reduction: `MEAN` of the rows that are not ignored, or `SUM`.
        ignore_index: the target of rows that do not count.
        label_smoothing: as for `cross_entropy`.
        at_once: rows of a chunk.

    Returns:
        The loss, an FP32 number. A mean of no rows is NaN, as torch gives it.
    """
    chunks = _Chunks(x, weight, bias, target, low, ignore_index, label_smoothing, at_once)
    for first, end in chunks:
        chunks.logits(first, end, None)
    return chunks.reduced(reduction)


@classifier_loss.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("amp_compiler::classifier_loss_gradients", mutates_args=())
def classifier_loss_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    low: torch.dtype,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
    at_once: int,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and its gradients, in one go over the chunks.

    Args:
        grad: gradient of the loss, an FP32 number. It is multiplied in, and the mean's division done, in FP32 before
            anything is rounded to the low type.
        x: this and all up to `at_once` as for `classifier_loss`.
        weight: see there.
        bias: see there.
        target: see there.
        low: see there.
        reduction: see there.
        ignore_index: see there.
        label_smoothing: see there.
        at_once: see there.
        wanted: whether the gradients of `x`, `weight` and `bias` are asked for; others come back empty.

    Returns:
        The loss, and the gradients of `x`, `weight` and `bias`, in their types.
    """
    chunks = _Chunks(x, weight, bias, target, low, ignore_index, label_smoothing, at_once)
    factor = torch.where(chunks.counts, grad / chunks.number if reduction == MEAN else grad, 0.0)
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
    of_weight, of_bias = (
        _total(one) if one is not None and asked else None
        for one, asked in zip((weight, bias), wanted[1:], strict=True)
    )
    for first, end in chunks:
        logits = chunks.logits(first, end, factor[first:end])
        if of_x is not None:
            torch.mm(logits, weight, out=of_x[first:end])
        if of_weight is not None:
            _add_product(of_weight, logits.t(), x[first:end], first > 0)
        if of_bias is not None:
            part = logits.sum(0, dtype=torch.float32)
            of_bias.copy_(of_bias + part if first else part)
    found = []
    for made, one in ((of_x, x), (of_weight, weight), (of_bias, bias)):
        if made is not None and not x.shape[0]:
            made.zero_()
        found.append(x.new_empty(0) if made is None or one is None else made.to(one.dtype))
    return (chunks.reduced(reduction), *found)  # type: ignore[return-value]


@classifier_loss_gradients.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = (
        one.new_empty(one.shape) if one is not None and asked else x.new_empty(0)
        for one, asked in zip((x, weight, bias), rest[-1], strict=True)
    )
    return (x.new_empty((), dtype=torch.float32), *found)  # type: ignore[return-value]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, target, *ctx.options = inputs
    ctx.save_for_backward(x, weight, bias, target)


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, weight, bias, target = ctx.saved_tensors
    wanted = list(ctx.needs_input_grad[:3])
    made = torch.ops.amp_compiler.classifier_loss_gradients(grad, x, weight, bias, target, *ctx.options, wanted)
    return *(one if asked else None for one, asked in zip(made[1:], wanted, strict=True)), *(None,) * 6


classifier_loss.register_autograd(_backward, setup_context=_save)


@dataclass
class _Chunks:
    """The rows in chunks, and the room for the logits of one; the fields are the arguments of `classifier_loss`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    low: torch.dtype
    ignore_index: int
    label_smoothing: float
    at_once: int

    def __post_init__(self) -> None:
        x, classes = self.x, self.weight.shape[0]
        width = -(-classes // _ALIGNED) * _ALIGNED if x.device.type == "cuda" else classes
        self._room = _lent(x, (min(self.at_once, x.shape[0]), width), x.dtype)[:, :classes]
        self.counts = self.target != self.ignore_index
        self.number = self.counts.sum()
        self._safe = torch.where(self.counts, self.target, 0)
        # What comes of it is not read: a class that there is not is an error, as in ATen's loss.
        self.losses = x.new_zeros((), dtype=torch.float32).expand(classes).gather(0, self._safe)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The first row of each chunk, and the one behind its last."""
        rows = self.x.shape[0]
        return ((first, min(first + self.at_once, rows)) for first in range(0, rows, self.at_once))

    def logits(self, first: int, end: int, factor: Tensor | None) -> Tensor:
        """Work a chunk's losses out; with a gradient for each of its rows it returns the gradient of its logits."""
        logits, x = self._room[: end - first], self.x[first:end]
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=logits)
        safe, losses = self._safe[first:end], self.losses[first:end]
        if cross_entropy.takes(logits):
            cross_entropy.run(logits, safe, factor, losses, self.low, self.label_smoothing)
        else:
            self._by_torch(logits, safe, factor, losses)
        return logits

    def _by_torch(self, logits: Tensor, target: Tensor, factor: Tensor | None, losses: Tensor) -> None:
        classes, smooth = logits.shape[1], self.label_smoothing
        block = max(_AT_ONCE // max(classes, 1), 1)
        for first in range(0, logits.shape[0], block):
            part, marks = logits[first : first + block], target[first : first + block, None]
            logs = torch.log_softmax(part.to(self.low), 1, dtype=torch.float32)
            found = logs.gather(1, marks)[:, 0].neg_()
            if smooth:
                found.mul_(1 - smooth).sub_(logs.sum(1), alpha=smooth / classes)
            losses[first : first + block] = found
            if factor is None:
                continue
            each = factor[first : first + block, None]
            logs.exp_().mul_(each).scatter_add_(1, marks, -(1 - smooth) * each)
            if smooth:
                logs.sub_(each, alpha=smooth / classes)
            part.copy_(logs if part.dtype is self.low else logs.to(self.low))

    def reduced(self, reduction: int) -> Tensor:
        """The loss of all rows."""
        total = torch.where(self.counts, self.losses, 0.0).sum()
        return total / self.number if reduction == MEAN else total


def _total(like: Tensor) -> Tensor:
    """Room for a sum in FP32. What an operator gives must have a memory of its own, which the arena's has not."""
    if like.dtype is torch.float32:
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return _lent(like, like.shape, torch.float32)


def _lent(like: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return arena.empty(size, range(len(size)), dtype, like.device)


def _add_product(total: Tensor, left: Tensor, right: Tensor, more: bool) -> None:
    """Write a product into an FP32 total or, if there is more in it, add it."""
    if left.dtype is torch.float32:
        torch.addmm(total, left, right, beta=int(more), out=total)
    elif left.device.type == "cuda":  # which keeps a product of 16-bit numbers in FP32 where it adds it up
        out = aten.addmm.dtype_out if more else aten.mm.dtype_out
        out(*((total,) if more else ()), left, right, torch.float32, out=total)
    else:
        product = torch.mm(left, right, out=_lent(left, total.shape, left.dtype))
        total.copy_(product) if not more else total.add_(product)
