"""The gradient check and the optimizer updates as operators of the namespace `amp_compiler`.

A graph holds one node per group of parameters. On a CUDA device a node runs as Triton kernels over all tensors of the
group, without reading a value back to the host. On a CPU it runs as `reference` says, which `decomposition` gives too,
so that the node can be traced into a graph and compiled. `fused.Update` documents the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cuda import update as kernels
from amp_compiler.ops.update import reference
from amp_compiler.ops.update.adam import ADAM
from amp_compiler.ops.update.formulas import exact_sqrt
from amp_compiler.ops.update.fused import FusedOptimizer, Update
from amp_compiler.ops.update.sgd import SGD

FUSED: tuple[FusedOptimizer, ...] = (ADAM, SGD)
*_FIRST, _LAST = (cls.__name__ for one in FUSED for cls in one.classes)
FUSED_NAMES = f"{', '.join(_FIRST)} or {_LAST}"  # of the torch classes, for messages

_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
_SCHEMAS = (
    "grad_check(Tensor[] grads, Tensor inv_scale) -> (Tensor norm, Tensor nonfinite, Tensor flags)",
    "add_rows(Tensor dense, Tensor rows, Tensor places, int skipped) -> Tensor",
    "commit(Tensor skip, Tensor(a!)[] targets, Tensor[] values) -> ()",
    *(one.schema(low) for one in FUSED for low in (False, True)),
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)


def add_rows(dense: Tensor, rows: Tensor, places: Tensor, skipped: int) -> Tensor:
    """A gradient with the rows of a lookup added to it: what a table that is looked up in and multiplied with gets.

    Args:
        dense: fp32 [height, width], the other part of the gradient.
        rows: fp32 [..., width], one row for every place.
        places: int64 or int32 [...], to which row of the gradient each belongs.
        skipped: a row that gets none (the padding index); negative where every row may.

    Returns:
        fp32 [height, width]; `dense` stays as it is.
    """
    flat = places.reshape(-1)
    added = rows.reshape(flat.numel(), -1)
    if skipped >= 0:
        added = torch.where((flat == skipped)[:, None], 0.0, added)
    return torch.index_put(dense, (flat,), added, accumulate=True)


def commit(skip: Tensor, targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write new values unless the step is skipped, in calls that can be traced.

    Args:
        skip: one number, not 0 where the step does not count.
        targets: what to write.
        values: the new values, which share no memory with a target; of the targets' shapes.
    """
    for target, value in zip(targets, values, strict=True):
        target.copy_(torch.where(skip != 0, target, value))


def commit_on_cpu(skip: Tensor, targets: list[Tensor], values: list[Tensor]) -> None:
    """As `commit`, for a CPU."""
    if skip.item() == 0:  # looking at a tensor on a CPU waits for nothing
        torch._foreach_copy_(targets, values)


def overflow(kind: str, arguments: Sequence[Any]) -> Tensor:
    """fp32 []: 1 where an update of weights without masters would make a number that its type cannot hold, else 0.

    Args:
        kind: of the group of parameters, a key of `OPERATORS`.
        arguments: of that operator; nothing is written.
    """
    ((optimizer, low),) = ((one, low) for one in FUSED for low in (False, True) if _kind(one, low) == kind)
    return reference.overflow(optimizer, optimizer.bound(low, arguments))


def _kind(optimizer: FusedOptimizer, low: bool) -> str:
    return optimizer.operator(low).replace("_update", "")


def _traceable(optimizer: FusedOptimizer, low: bool) -> Callable[..., None]:
    def update(*arguments: Any) -> None:
        reference.update(optimizer, optimizer.bound(low, arguments))

    update.__name__ = optimizer.operator(low)
    return update


_OPENED: dict[str, Callable[..., Any]] = {
    "grad_check": reference.grad_check,
    "add_rows": add_rows,
    "commit": commit,
    **{one.operator(low): _traceable(one, low) for one in FUSED for low in (False, True)},
}


def decomposition(operator: torch._ops.OpOverload) -> Callable[..., Any]:
    """The function that does what an operator of this module does in traceable torch calls.

    Args:
        operator: such as `torch.ops.amp_compiler.adam_update.default`.

    Returns:
        A function of the operator's signature; it ends in `copy_` into the tensors that the operator changes.

    Raises:
        LoweringError: for any other operator.

    Example:
        >>> decomposition(torch.ops.amp_compiler.sgd_update.default).__name__
        'sgd_update'
    """
    namespace, _, name = operator._schema.name.partition("::")
    if namespace != "amp_compiler" or name not in _OPENED:
        raise LoweringError(
            f"'{operator}' is not an update of this library", hint=f"use one of {', '.join(sorted(_OPENED))}"
        )
    return _OPENED[name]


def _check(optimizer: FusedOptimizer, name: str, args: Update) -> None:
    """Lists that belong together must have one length, and the numbers must be as many as the formula takes."""
    lists = (args.weights, args.grads, *args.states, args.low_weights, args.compensations, args.steps)
    counts = {len(item) for item in lists if len(item)}
    if len(counts) > 1:
        raise LoweringError(f"{name} was given lists of {sorted(counts)} tensors", hint="give one entry per parameter")
    if args.hyper.numel() != len(optimizer.hyper):
        raise LoweringError(
            f"{name} was given {args.hyper.numel()} hyperparameters, not {len(optimizer.hyper)}",
            hint=f"give {', '.join(optimizer.hyper)}, in this order",
        )
    for weight, grad in zip(args.weights, args.grads, strict=False):
        if weight.shape != grad.shape:
            raise LoweringError(
                f"{name} was given a gradient of shape {list(grad.shape)} for a weight of shape {list(weight.shape)}",
                hint="give the gradients in the order of the weights",
            )


def _grad_check_fake(grads: Sequence[Tensor], inv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    norm = inv_scale.new_empty((), dtype=torch.float32)
    return norm, torch.empty_like(norm), inv_scale.new_empty(len(grads), dtype=torch.uint8)


def _register_update(optimizer: FusedOptimizer, low: bool) -> None:
    name = optimizer.operator(low)

    def checked(*arguments: Any) -> Update:
        args = optimizer.bound(low, arguments)
        _check(optimizer, name, args)
        return args

    def on_cpu(*arguments: Any) -> None:
        """The reference with a correctly rounded square root; a skipped step touches nothing."""
        args = checked(*arguments)
        if not bool(args.skip):
            reference.update(optimizer, args, exact_sqrt)

    def fake(*arguments: Any) -> None:
        checked(*arguments)

    _LIBRARY.impl(name, on_cpu, "CPU")
    _LIBRARY.impl(name, lambda *arguments: kernels.update(optimizer, checked(*arguments)), "CUDA")
    torch.library.register_fake(f"amp_compiler::{name}", fake, lib=_LIBRARY)


def _register() -> None:
    for optimizer in FUSED:
        for low in (False, True):
            _register_update(optimizer, low)
    _LIBRARY.impl("grad_check", reference.grad_check, "CPU")
    _LIBRARY.impl("grad_check", kernels.grad_check, "CUDA")
    torch.library.register_fake("amp_compiler::grad_check", _grad_check_fake, lib=_LIBRARY)
    _LIBRARY.impl("add_rows", add_rows, "CompositeExplicitAutograd")
    torch.library.register_fake("amp_compiler::add_rows", lambda dense, *_: torch.empty_like(dense), lib=_LIBRARY)
    _LIBRARY.impl("commit", commit_on_cpu, "CPU")
    _LIBRARY.impl("commit", commit, "CUDA")
    torch.library.register_fake("amp_compiler::commit", lambda *_: None, lib=_LIBRARY)


_register()

CHECK = torch.ops.amp_compiler.grad_check.default
ADD_ROWS = torch.ops.amp_compiler.add_rows.default
COMMIT = torch.ops.amp_compiler.commit.default
# The update operators, by the kind of a group of parameters.
OPERATORS = {
    _kind(one, low): getattr(torch.ops.amp_compiler, one.operator(low)).default
    for low in (False, True)
    for one in FUSED
}
