"""The gradient check and the optimizer updates as operators of the namespace `amp_compiler`.

A graph holds one node per group of parameters. On a CUDA device a node runs as Triton kernels over all tensors of the
group, without reading a value back to the host. On a CPU it runs as the function of the same name in `reference`,
which documents the arguments and which `decomposition` gives, so that the node can be traced into a graph and compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.update import reference as group_update
from amp_compiler.ops.update.formulas import exact_sqrt

_LIBRARY = torch.library.Library("amp_compiler", "FRAGMENT")
_SCHEMAS = (
    "grad_check(Tensor[] grads, Tensor inv_scale) -> (Tensor norm, Tensor nonfinite, Tensor flags)",
    "adam_update(Tensor(a!)[] masters, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] lows, Tensor(f!)[] steps, Tensor hyper, Tensor coef, Tensor skip,"
    " bool amsgrad, bool maximize, bool decoupled) -> ()",
    "sgd_update(Tensor(a!)[] masters, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] lows,"
    " Tensor(d!) started, Tensor hyper, Tensor coef, Tensor skip, bool nesterov, bool maximize) -> ()",
    "adam_update_low(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
    " Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] compensations, Tensor(f!)[] steps, Tensor(g!) rng, Tensor hyper,"
    " Tensor coef, Tensor skip, int mode, bool amsgrad, bool maximize, bool decoupled) -> ()",
    "sgd_update_low(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor(c!)[] compensations,"
    " Tensor(d!) started, Tensor(e!) rng, Tensor hyper, Tensor coef, Tensor skip, int mode, bool nesterov,"
    " bool maximize) -> ()",
)
_OTHERS = (
    "add_rows(Tensor dense, Tensor rows, Tensor places, int skipped) -> Tensor",
    "commit(Tensor skip, Tensor(a!)[] targets, Tensor[] values) -> ()",
)
for _schema in (*_SCHEMAS, *_OTHERS):
    _LIBRARY.define(_schema)
_HYPERPARAMETERS = {"adam": 6, "sgd": 5}


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


_TRACEABLE: dict[str, Callable[..., Any]] = {
    "grad_check": group_update.grad_check,
    "adam_update": group_update.adam_update,
    "sgd_update": group_update.sgd_update,
    "adam_update_low": group_update.adam_update_low,
    "sgd_update_low": group_update.sgd_update_low,
}
_OPENED: dict[str, Callable[..., Any]] = {**_TRACEABLE, "add_rows": add_rows, "commit": commit}


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
            f"'{operator}' is not an update of this library", mend=f"use one of {', '.join(sorted(_OPENED))}"
        )
    return _OPENED[name]


def _check(name: str, arguments: Sequence[Any]) -> None:
    """Lists that belong together must have one length, and the numbers must be as many as the formula takes."""
    lists = [item for item in arguments if isinstance(item, (list, tuple))]
    counts = {len(item) for item in lists if len(item)}
    if len(counts) > 1:
        raise LoweringError(f"{name} was given lists of {sorted(counts)} tensors", mend="give one entry per parameter")
    wanted, hyper = _HYPERPARAMETERS[name.partition("_")[0]], arguments[_argument_names(name).index("hyper")]
    if hyper.numel() != wanted:
        raise LoweringError(
            f"{name} was given {hyper.numel()} hyperparameters, not {wanted}", mend="see `reference` for their order"
        )
    for weight, grad in zip(lists[0], lists[1], strict=False):
        if weight.shape != grad.shape:
            raise LoweringError(
                f"{name} was given a gradient of shape {list(grad.shape)} for a weight of shape {list(weight.shape)}",
                mend="give the gradients in the order of the weights",
            )


def _grad_check_fake(grads: Sequence[Tensor], inv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    norm = inv_scale.new_empty((), dtype=torch.float32)
    return norm, torch.empty_like(norm), inv_scale.new_empty(len(grads), dtype=torch.uint8)


def _fake_update(name: str) -> Callable[..., None]:
    def fake(*arguments: Any) -> None:
        _check(name, arguments)

    return fake


def _cpu_update(name: str) -> Callable[..., None]:
    """The reference with a correctly rounded square root; a skipped step touches nothing."""
    skip_position = _argument_names(name).index("skip")
    options = {"sqrt": exact_sqrt} if name.startswith("adam") else {}

    def update(*arguments: Any) -> None:
        _check(name, arguments)
        if not bool(arguments[skip_position]):
            _TRACEABLE[name](*arguments, **options)

    return update


def _cuda(name: str) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        from amp_compiler.ops.cuda import (
            update as kernels,  # needs Triton, which machines without a CUDA device may lack
        )

        if name != "grad_check":
            _check(name, arguments)
        return getattr(kernels, name)(*arguments)

    return run


@cache
def _argument_names(name: str) -> list[str]:
    overload = getattr(torch.ops.amp_compiler, name).default
    return [argument.name for argument in overload._schema.arguments]


def _register() -> None:
    for name in _TRACEABLE:
        _LIBRARY.impl(name, _cuda(name), "CUDA")
        if name == "grad_check":
            continue
        _LIBRARY.impl(name, _cpu_update(name), "CPU")
        torch.library.register_fake(f"amp_compiler::{name}", _fake_update(name), lib=_LIBRARY)
    _LIBRARY.impl("grad_check", group_update.grad_check, "CPU")
    torch.library.register_fake("amp_compiler::grad_check", _grad_check_fake, lib=_LIBRARY)
    _LIBRARY.impl("add_rows", add_rows, "CompositeExplicitAutograd")
    torch.library.register_fake("amp_compiler::add_rows", lambda dense, *_: torch.empty_like(dense), lib=_LIBRARY)
    _LIBRARY.impl("commit", commit_on_cpu, "CPU")
    _LIBRARY.impl("commit", commit, "CUDA")
    torch.library.register_fake("amp_compiler::commit", lambda *_: None, lib=_LIBRARY)


_register()

# The update operators, by the kind of a group of parameters.
OPERATORS = {
    "adam": torch.ops.amp_compiler.adam_update.default,
    "sgd": torch.ops.amp_compiler.sgd_update.default,
    "adam_low": torch.ops.amp_compiler.adam_update_low.default,
    "sgd_low": torch.ops.amp_compiler.sgd_update_low.default,
}
CHECK = torch.ops.amp_compiler.grad_check.default
ADD_ROWS = torch.ops.amp_compiler.add_rows.default
COMMIT = torch.ops.amp_compiler.commit.default
