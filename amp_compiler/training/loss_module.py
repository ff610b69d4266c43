"""`LossModule`: `loss_fn(model, *batch)` as a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from amp_compiler.errors import AmpError
from amp_compiler.fx.capture.errors import SPOKEN_OF
from amp_compiler.fx.capture.frontend import raise_at_once
from amp_compiler.fx.capture.spread import refuse_spread
from amp_compiler.fx.graph import LOW_TYPES
from amp_compiler.training.outside import OUTSIDE, adopt, free_name

ROOT = "model"  # name of the models in a `LossModule`
PARALLEL = (
    "pass model.module, or a model that nothing was put around, and process_group= to average the gradients of several"
    " ranks (`reduce: {shard: update}` in the rules splits masters and moments); or train"
    " DistributedDataParallel(amp.compile(model)) or fully_shard(amp.compile(model)) in a loop"
)
_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)  # of a capture too


class LossModule(nn.Module):
    """`loss_fn(model, *batch)` as a module, so that it can be captured with the parameters of all models in it.

    One model stands under `model`; of a nest, each under its path: `model.generator` for `{"generator": …}`. What the
    loss function holds beside them stands under `outside`.
    """

    def __init__(self, model: Any, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__[SPOKEN_OF] = "the loss function"
        self.__dict__["nest"], self.__dict__["loss_fn"] = model, loss_fn
        if isinstance(model, nn.Module):
            self.add_module(ROOT, model)
            return
        for path, leaf in pytree.tree_flatten_with_path(model, is_leaf=lambda x: isinstance(x, nn.Module))[0]:
            if not isinstance(leaf, nn.Module):
                raise AmpError(
                    f"model holds a {type(leaf).__name__} at {pytree.keystr(path)}"
                    if path
                    else f"model is a {type(leaf).__name__}",
                    hint="pass an nn.Module, or a dict, list or tuple of them",
                )
            self._place(path, leaf)

    def _place(self, path: tuple[Any, ...], leaf: nn.Module) -> None:
        holder: nn.Module = self
        *outer, last = [ROOT, *(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)]
        try:
            for name in outer:
                if name not in holder._modules:
                    holder.add_module(name, nn.Module())
                holder = holder._modules[name]  # type: ignore[assignment]
            if last in holder._modules:
                raise KeyError(f"'{last}' is there twice")
            holder.add_module(last, leaf)
        except KeyError as cause:
            raise AmpError(
                f"model holds a module at {pytree.keystr(path)} whose path is no name: {cause.args[0]}",
                hint="use keys without dots, each another text",
            ) from cause

    def adopt(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take in what the loss function holds beside the models, see `training.outside`; refuse what is spread."""
        adopt(self, self.__dict__["loss_fn"], optimizers)
        refuse_spread(self, PARALLEL, of_step=True)

    def adopt_tensor(self, name: str, tensor: Tensor, is_parameter: bool) -> str:
        """Take in a tensor that only a capture has shown.

        Args:
            name: how the code calls it.
            tensor: a parameter, or a tensor that the loss writes to.
            is_parameter: which of them.

        Returns:
            Its qualified name.
        """
        if OUTSIDE not in self._modules:
            self.add_module(OUTSIDE, nn.Module())
        holder: Any = self._modules[OUTSIDE]
        table: dict[str, Any] = vars(holder)["_parameters" if is_parameter else "_buffers"]
        free = free_name(name, {**holder._parameters, **holder._buffers, **holder._modules})
        table[free] = tensor
        return f"{OUTSIDE}.{free}"

    def forward(self, *batch: Any) -> tuple[Tensor, Any]:
        """The loss and aux (`None` where the loss function gives none)."""
        own = self.__dict__
        result = own["loss_fn"](own["nest"], *batch)
        loss, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            raise_at_once(f"loss_fn returned {_describe(loss)} as the loss", _hint(loss))
        # A 16-bit loss could not hold the loss scale that the backward starts from.
        loss = loss.float() if loss.dtype in LOW_TYPES else loss
        return loss, aux


def _describe(loss: Any) -> str:
    if isinstance(loss, Tensor):
        return f"a tensor of shape {tuple(loss.shape)} and type {loss.dtype}"
    if isinstance(loss, _NUMBERS):
        return "a Python number"
    return "None" if loss is None else f"a {type(loss).__name__}"


def _hint(loss: Any) -> str:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        return "return its mean() or sum(), one floating-point number, or (loss, aux)"
    if isinstance(loss, _NUMBERS):
        return "return a tensor, without item() or float(), or (loss, aux)"
    if isinstance(loss, Mapping) and "loss" in loss:
        return "return (result['loss'], result), the loss and what goes with it"
    return "return one floating-point number as a tensor, or (loss, aux)"
