"""A loss function, `loss_fn(model, *batch)`, taken apart: what it gives the model, and what it makes of the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from amp_compiler.errors import AmpError, first_line
from amp_compiler.forward.compiled_module import CompiledModule
from amp_compiler.forward.settings import AUTO, device_of
from amp_compiler.fx.capture.errors import user_frame
from amp_compiler.ir.dtypes import DType, low_type
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
    if isinstance(subject, (TrainingStep, CompiledModule)):
        low = subject._low if isinstance(subject, TrainingStep) else _low_of(subject)
        refused |= {"rules": rules, "dtype": dtype != AUTO and low_type(dtype) != low}
    if not isinstance(subject, TrainingStep) and number != 1 and loss_fn is None and not backward:
        raise AmpError(f"loss_scale={loss_scale!r} without a loss", hint="pass loss_fn= as well")
    kind = "training step" if isinstance(subject, TrainingStep) else "compiled module"
    for name in (name for name, is_given in refused.items() if is_given):
        raise AmpError(f"{name}= is given with a {kind}, which has its own", hint="leave it out")


def _low_of(compiled: CompiledModule) -> DType:
    low: DType = compiled.settings.low(device_of(compiled.original.parameters()))
    return low


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function that calls the model once.

    Args:
        model: the module.
        loss_fn: `loss_fn(model, *batch)`, as for `amp.training_step`.
        batch: its arguments behind the model, positional and by name.

    Attributes:
        model_args: what it gives the model, positional and by name.

    Raises:
        AmpError: it is no function, does not call the model, or raises something.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> call = LossCall(model, lambda model, x, y: (model(x) - y).abs().sum(), arguments((torch.ones(3, 2), 1.0)))
        >>> call.model_args[0][0].shape, float(call.of(torch.zeros(3, 1)))
        (torch.Size([3, 2]), 3.0)
    """

    model: nn.Module
    loss_fn: LossFunction
    batch: Arguments
    model_args: Arguments = field(init=False)

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise AmpError(
                f"loss_fn is a {type(self.loss_fn).__name__}", hint="pass a function: loss_fn(model, *batch)"
            )
        try:
            self._run(_give_up)
        except _Called as called:
            object.__setattr__(self, "model_args", (called.args, called.named))
            return
        raise AmpError(
            "loss_fn does not call the model that it is given",
            hint="write loss_fn(model, *batch), as for amp.training_step, with model(...) in it",
        )

    def of(self, output: Any) -> Any:
        """The loss that it returns where the model gives this; of `(loss, aux)` the first.

        Raises:
            AmpError: it calls the model more than once, or raises something.
        """
        outputs = [output]

        def give(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if not outputs:
                raise AmpError("loss_fn calls the model more than once", hint="pass a training step with this loss")
            return outputs.pop()

        loss = self._run(give)
        return loss[0] if isinstance(loss, tuple) and len(loss) == 2 else loss

    def _run(self, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        args, named = self.batch
        devices = {one.device for one in self.model.parameters() if one.is_cuda}
        with torch.random.fork_rng(devices=devices):
            try:
                return self.loss_fn(_StandIn(self.model, call), *args, **named)
            except AmpError:
                raise
            except Exception as error:  # the user's code may raise anything
                raise AmpError(
                    f"loss_fn raises {type(error).__name__}: {first_line(error)}",
                    where=user_frame(error),
                    hint="call it as loss_fn(model, *batch) yourself: if it raises the same, it or the batch is wrong",
                ) from error


class _Called(BaseException):  # no `except Exception` of a loss function's may catch it
    def __init__(self, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self.args, self.named = args, named


def _give_up(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    raise _Called(args, named)


class _StandIn:
    """Stands for a model where it is called; everything else of it is the model's own."""

    def __init__(self, model: nn.Module, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self.__dict__["_model"], self.__dict__["_call"] = model, call

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.__dict__["_call"](args, named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)
