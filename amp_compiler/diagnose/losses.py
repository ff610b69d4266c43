"""A loss function, `loss_fn(model, *batch)`, taken apart: what it gives the model, and what it makes of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn

from amp_compiler.errors import AmpError

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
    args = () if isinstance(batch, Mapping) else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    made: Arguments = pytree.tree_map(
        lambda one: torch.from_numpy(one) if isinstance(one, np.ndarray) else one, (args, named)
    )
    return made


@dataclass(frozen=True)
class LossCall:
    """One call of a loss function that calls the model once.

    Args:
        model: the module.
        loss_fn: `loss_fn(model, *batch)`, as for `amp.training_step`.
        batch: its arguments behind the model, positional and by name.

    Attributes:
        given: what it gives the model, positional and by name.

    Raises:
        AmpError: it does not call the model, or more than once.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> call = LossCall(model, lambda model, x, y: (model(x) - y).abs().sum(), arguments((torch.ones(3, 2), 1.0)))
        >>> call.given[0][0].shape, float(call.of(torch.zeros(3, 1)))
        (torch.Size([3, 2]), 3.0)
    """

    model: nn.Module
    loss_fn: LossFunction
    batch: Arguments
    given: Arguments = field(init=False)

    def __post_init__(self) -> None:
        try:
            self._run(_give_up)
        except _Called as called:
            object.__setattr__(self, "given", (called.args, called.named))
            return
        raise AmpError(
            "loss_fn does not call the model that it is given",
            mend="write loss_fn(model, *batch), as for amp.training_step, with model(...) in it",
        )

    def of(self, output: Any) -> Any:
        """What it returns where the model gives this.

        Raises:
            AmpError: it calls the model more than once.
        """
        outputs = [output]

        def give(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if not outputs:
                raise AmpError("loss_fn calls the model more than once", mend="pass a training step with this loss")
            return outputs.pop()

        return self._run(give)

    def _run(self, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        args, named = self.batch
        devices = {one.device for one in self.model.parameters() if one.is_cuda}
        with torch.random.fork_rng(devices=devices):
            return self.loss_fn(_StandIn(self.model, call), *args, **named)


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
