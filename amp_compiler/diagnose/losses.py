"""Batches and loss functions as `amp.profile`, `amp.find_nonfinite` and `amp.tune` are given them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from amp_compiler.backends.backend import DEFAULT
from amp_compiler.errors import AmpError, CaptureError
from amp_compiler.forward.compiled_module import CompiledModule
from amp_compiler.forward.program import EAGER
from amp_compiler.forward.settings import AUTO, Settings, device_of
from amp_compiler.fx.capture.frontend import raise_at_once
from amp_compiler.ir.dtypes import low_type, short_name
from amp_compiler.training.api import ALONE, RUN, training_step
from amp_compiler.training.step import TrainingStep

LossFunction = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def arguments(batch: Any) -> Arguments:
    """The arguments of a batch, positional and by name; arrays as tensors.

    Args:
        batch: a tuple or list of arguments, a dict of them by name, or a single one.

    Example:
        >>> arguments({"b": 2, "a": 1}), arguments(3)
        (((), {'a': 1, 'b': 2}), ((3,), {}))
    """
    named = dict(sorted(batch.items())) if isinstance(batch, Mapping) else {}
    tensors: Arguments = pytree.tree_map(_tensor, (() if isinstance(batch, Mapping) else positional(batch), named))
    return tensors


def positional(batch: Any) -> tuple[Any, ...]:
    """A batch of a step: a tuple or list of arguments, or a single one, which may be a dict."""
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def batches_of(batches: Any) -> Iterable[Any]:
    """Several batches, as they were given.

    Raises:
        AmpError: it is one batch, or nothing that gives them.
    """
    if not isinstance(batches, Iterable) or isinstance(batches, (Tensor, np.ndarray, Mapping, str)):
        raise AmpError(
            f"there are no batches in a {type(batches).__name__}", hint="pass a list of batches, or what gives them"
        )
    return batches


def _tensor(one: Any) -> Any:
    if not isinstance(one, np.ndarray):
        return one
    try:
        return torch.from_numpy(one)
    except TypeError as cause:
        raise AmpError(f"an array of {one.dtype} is no tensor", hint="pass arrays of numbers") from cause


def leaves_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Exact form of the flattened inputs: shapes, strides, types, values of what is no tensor, and who is who.

    Raises:
        CaptureError: for an input that cannot be a key, such as an object that is not hashable.
    """
    first: dict[int, int] = {}
    key = tuple(
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, first.setdefault(id(leaf), place))
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        else _plain_key(leaf)
        for place, leaf in enumerate(leaves)
    )
    try:
        hash(key)
    except TypeError as cause:
        kinds = sorted({type(leaf).__name__ for leaf in leaves if type(leaf).__hash__ is None})
        raise CaptureError(
            f"an input of type {', '.join(kinds)} is not hashable, so calls cannot be told apart"
            + (" (of dict() of it they can)" if any(isinstance(leaf, Mapping) for leaf in leaves) else ""),
            hint="pass tensors, numbers, strings, or containers of them",
        ) from cause
    return key


def _plain_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.layout, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf  # 0.0 and -0.0 differ, nan is itself


def check_given(
    subject: Any, loss_fn: Any, loss_scale: Any, dtype: str, *, rules: bool, backward: bool = False
) -> None:
    """Refuse options that would be passed over without a word.

    Args:
        subject: what is looked at.
        loss_fn: the loss function that was given.
        loss_scale: what it is multiplied by.
        dtype: the type that was given; `auto` for none. What has a type already may be given the same.
        rules: whether rules were given that only a subject without rules of its own takes.
        backward: whether the model itself gives the loss.

    Raises:
        AmpError: a step is given a loss, or `subject` something that it has itself; `loss_scale` is no scale, or there
            is no loss that it could scale.
    """
    number = float(loss_scale) if isinstance(loss_scale, Real) and not isinstance(loss_scale, bool) else math.nan
    if not 0 < number < math.inf:
        raise AmpError(f"loss_scale={loss_scale!r} is no scale", hint="pass a number above 0: scaler.get_scale()")
    refused = {"loss_fn": loss_fn is not None, "loss_scale": number != 1} if isinstance(subject, TrainingStep) else {}
    low = subject._low if isinstance(subject, TrainingStep) else None
    if isinstance(subject, CompiledModule):
        low = subject._amp_settings.low(device_of(subject._amp_original.parameters()))
    if low is not None:
        refused |= {"rules": rules, "dtype": dtype != AUTO and low_type(dtype) != low}
    if not isinstance(subject, TrainingStep) and number != 1 and loss_fn is None and not backward:
        raise AmpError(f"loss_scale={loss_scale!r} without a loss", hint="pass loss_fn= as well")
    kind = "training step" if isinstance(subject, TrainingStep) else "compiled module"
    for name in (name for name, is_given in refused.items() if is_given):
        raise AmpError(f"{name}= is given with a {kind}, which has its own", hint="leave it out")


def loss_step(
    model: nn.Module, settings: Settings, loss_fn: LossFunction, loss_scale: Any, *, by_name: bool
) -> TrainingStep:
    """A training step of a model and a loss that is never called: what it would compute is looked at.

    Args:
        model: the module.
        settings: its options; what the rules say of stored weights does not count.
        loss_fn: as for `amp.training_step`.
        loss_scale: what the loss is multiplied by, as for `amp.training_step`.
        by_name: a batch is one dict of the arguments behind the model.

    Raises:
        AmpError: no parameter has a gradient, or `loss_fn` is no function.
    """
    trained = [one for one in model.parameters() if one.requires_grad]
    if not trained:
        raise AmpError("no parameter of the model has a gradient", hint="leave loss_fn= out")
    called: LossFunction = (lambda model, named: loss_fn(model, **named)) if by_name else loss_fn
    return training_step(
        model, called, torch.optim.SGD(trained, 0.0), rules=replace(settings.rules, weights={}),
        dtype=short_name(settings.low(device_of(model.parameters()))), loss_scale=loss_scale, clip_norm=None,
        accumulate=1, dynamic_shapes=None, backend=EAGER, enabled=True, process_group=ALONE, mode=DEFAULT,
        passes=[settings.pipelines[one.name] for one in RUN if one.name in settings.pipelines],
    )  # fmt: skip


def own_loss(model: nn.Module, *args: Any, **named: Any) -> Any:
    """What a model returns where that is the loss, or has it as `loss`."""
    output = model(*args, **named)
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise_at_once("there is no loss to begin the backward from", "pass loss_fn=, which returns one number")
    return loss
