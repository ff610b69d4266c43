"""`typed_op`: an operator whose gradients are made in another type than its result.

Autograd gives a gradient the type of its tensor, so an operator that runs in 16 bits has 16-bit gradients. NVCaffe's
layers have a forward type and a backward type; here that is one `torch.autograd.Function` around any ATen operator. Its
backward runs the operator once more, in the backward type, on the operands as the forward read them, and takes autograd
through it. In a traced graph the second run is dead code wherever the gradient does not need its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

aten = torch.ops.aten
_TRAINS = ("training", "train", "use_input_stats")
_STATISTICS = ("running_mean", "running_var")
_LOW = (torch.float16, torch.bfloat16)


def typed_op(
    op: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    reads: Sequence[torch.dtype],
    rereads: Sequence[torch.dtype],
    gradient: torch.dtype,
    emulate: bool = False,
) -> Any:
    """Run an operator forward in one type and backward in another.

    Args:
        op: an ATen operator that draws no random numbers (`aten.dropout` may) and changes nothing in place but running
            statistics.
        args: its positional arguments.
        kwargs: its keyword arguments, in the order of the schema.
        reads: for each tensor among the arguments, in their order, the type in which the forward reads it.
        rereads: the types in which the backward reads them; FP32 for a 16-bit one with 16-bit gradients computes those
            in FP32 and rounds them as they leave.
        gradient: type of the gradients, as they come in and go out. FP32 gradients are handed on as they are: a 16-bit
            result comes out widened to FP32, which is exact. 16-bit ones are widened where the tensor is FP32.
        emulate: compute in FP32 on rounded operands wherever the operator would run in 16 bits.

    Returns:
        What the operator returns; a list as a tuple.

    Example:
        >>> x = torch.ones(2, 3, requires_grad=True)
        >>> y = typed_op(torch.ops.aten.mul.Tensor, (x, 3.0), {}, [torch.bfloat16], [torch.float32], torch.float32)
        >>> y.dtype, y.sum().backward(), x.grad[0, 0].item()
        (torch.float32, None, 3.0)
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = tuple(place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    tensors = [leaves[place] for place in places]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    call = _Call(op, rest, spec, places, tuple(reads), tuple(rereads), gradient, emulate)
    if op is aten.dropout.default and call.argument(tensors, "train"):
        return _TypedDropout.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return _TypedOp.apply(call, *tensors)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Call:
    """A call of an operator with its tensors left out; the fields are the arguments of `typed_op`."""

    op: Any
    rest: list[Any]
    spec: pytree.TreeSpec
    places: tuple[int, ...]
    reads: tuple[torch.dtype, ...]
    rereads: tuple[torch.dtype, ...]
    gradient: torch.dtype
    emulate: bool

    def arguments(self, tensors: Sequence[Tensor | None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.spec)  # type: ignore[no-any-return]

    def argument(self, tensors: Sequence[Tensor | None], name: str) -> Any:
        """The argument of that schema name as it was given, else `None`."""
        args, kwargs = self.arguments(tensors)
        names = [declared.name for declared in self.op._schema.arguments]
        if name in kwargs or name not in names:
            return kwargs.get(name)
        return args[names.index(name)] if names.index(name) < len(args) else None

    def changed(self, tensors: Sequence[Tensor]) -> set[int]:
        """Ids of the running statistics that the operator changes; the second run goes without them."""
        if not any(self.argument(tensors, name) is True for name in _TRAINS):
            return set()
        return {id(self.argument(tensors, name)) for name in _STATISTICS} - {id(None)}

    def run(self, tensors: Sequence[Tensor | None], *, rounds: bool) -> tuple[Any, ...]:
        """Results of one run; where 16-bit arithmetic is emulated and it `rounds`, they are rounded at the end."""
        low = next((t.dtype for t in tensors if t is not None and t.dtype in _LOW), None) if self.emulate else None
        if low is not None:
            tensors = [t.float() if t is not None and t.dtype is low else t for t in tensors]
        args, kwargs = self.arguments(tensors)
        result = self.op(*args, **kwargs)
        results = tuple(result) if isinstance(result, (list, tuple)) else (result,)
        if low is None or not rounds:
            return results
        return tuple(r.to(low) if isinstance(r, Tensor) and r.dtype is torch.float32 else r for r in results)

    def shown(self, result: Any) -> Any:
        """A forward result as autograd is to see it: wide enough for its gradient."""
        widen = isinstance(result, Tensor) and result.dtype in _LOW and self.gradient is torch.float32
        return result.float() if widen else result


class _TypedOp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        read = [tensor.to(dtype) for tensor, dtype in zip(tensors, call.reads, strict=True)]
        results = tuple(call.shown(result) for result in call.run(read, rounds=True))
        changed = call.changed(read)
        kept = [None if id(tensor) in changed else tensor for tensor in read]
        # A backward of the backward has to reach the tensors themselves; any other reads the rounded copies.
        ctx.save_for_backward(*[None if k is None else t for t, k in zip(tensors, kept, strict=True)], *kept)
        ctx.call, ctx.types = call, [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[r for r in results if isinstance(r, Tensor) and not r.is_floating_point()])
        return results if len(results) > 1 or call.op._schema.returns[0].type.kind() == "ListType" else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        call, count = ctx.call, len(ctx.types)
        again = torch.is_grad_enabled()
        saved = ctx.saved_tensors[:count] if again else ctx.saved_tensors[count:]
        arrived = [(place, g) for place, g in enumerate(gradients) if g is not None]
        wanted = [place for place in range(count) if ctx.needs_input_grad[place + 1]]
        if not arrived or not wanted:
            return (None,) * (count + 1)
        with torch.enable_grad(), _no_autocast(arrived[0][1]):
            inputs = [_reread(call, place, t, place in wanted, again) for place, t in enumerate(saved)]
            results = call.run(inputs, rounds=False)
            reached = [(results[place], g) for place, g in arrived if results[place].requires_grad]
            if not reached:
                return (None,) * (count + 1)
            slopes: list[Tensor | None] = list(
                torch.autograd.grad(
                    [result for result, _ in reached],
                    [inputs[place] for place in wanted],  # type: ignore[arg-type]
                    [g.to(call.gradient).to(result.dtype) for result, g in reached],
                    allow_unused=True,
                    create_graph=again,
                )
            )
            by_place = dict(zip(wanted, slopes, strict=True))
            return None, *[_handed_on(call, place, by_place.get(place), ctx.types[place]) for place in range(count)]


def _reread(call: _Call, place: int, tensor: Tensor | None, wanted: bool, again: bool) -> Tensor | None:
    """An operand for the second run: its own tensor, so that each use of a tensor gets its own gradient."""
    if tensor is None:
        return None
    read = (tensor if again else tensor.detach()).to(call.reads[place]).to(call.rereads[place])
    if not wanted:
        return read
    if again:
        return read.view_as(read) if read is tensor else read
    return (read.detach() if read is tensor else read).requires_grad_()


def _handed_on(call: _Call, place: int, gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if gradient is None:
        return None
    widened = call.emulate or (call.reads[place] in _LOW and call.rereads[place] is torch.float32)
    narrow = widened and gradient.dtype is torch.float32 and call.gradient in _LOW
    return (gradient.to(call.gradient) if narrow else gradient).to(dtype)


class _TypedDropout(torch.autograd.Function):
    """Dropout draws its mask once: the backward multiplies by the mask of the forward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, tensor: Tensor) -> Tensor:
        probability = float(call.argument([tensor], "p"))
        result, mask = aten.native_dropout.default(tensor.to(call.reads[0]), probability, True)
        ctx.save_for_backward(mask)
        ctx.call, ctx.dtype = call, tensor.dtype
        ctx.factor = 0.0 if probability == 1 else 1 / (1 - probability)
        return call.shown(result)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (mask,) = ctx.saved_tensors
        slope = aten.native_dropout_backward.default(gradient.to(ctx.call.gradient), mask, ctx.factor)
        return None, slope.to(ctx.dtype)


def _no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    # `loss.backward()` may be called inside of autocast; the types of the second run are settled.
    kind = tensor.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if on else nullcontext()
