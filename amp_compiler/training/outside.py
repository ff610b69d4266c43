"""What a loss function holds beside the model: modules of its own, and parameters that stand in no module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from amp_compiler.fx.python_state import PythonState, python_state

OUTSIDE = "outside"  # the name under which a `LossModule` has them


class Substitutes(TorchFunctionMode):
    """Within it, every torch function is given other tensors in place of some.

    Args:
        tensors: the tensor to give, by the `id` of the one that the code holds.
    """

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def swap(self, value: Any) -> Any:
        """A tree of values, with what stands for some of its tensors."""
        return pytree.tree_map(lambda leaf: self._tensors.get(id(leaf), leaf), value)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with them."""
        return func(*self.swap(args), **self.swap(kwargs or {}))


def adopt(loss: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, tuple[str, Tensor]]:
    """Take in, as a module `outside`, what the code of a loss reaches beside its model.

    A criterion or a teacher in a closure becomes a submodule, so that its parameters and buffers are inputs of the
    graph. So do parameters of the optimizers that no module has, such as learned weights of several losses.

    Args:
        loss: the loss as a module; a later call takes in what has come since.
        optimizers: whose parameters are trained.

    Returns:
        The parameters that no module has, with their names within `outside`, by `id`.
    """
    loss._modules.pop(OUTSIDE, None)
    state, holder = python_state(loss), nn.Module()
    known = {id(module) for module in loss.modules()}
    found = [module for module in state.modules if id(module) not in known]
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    for module in found:
        if id(module) not in inner:
            holder.add_module(_name(state, module, holder), module)
    held = {id(parameter) for module in (loss, holder) for parameter in module.parameters()}
    alone: dict[int, tuple[str, Tensor]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in held and id(parameter) not in alone:
                    name = _name(state, parameter, holder)
                    holder._parameters[name] = parameter  # a tensor that is no nn.Parameter too
                    alone[id(parameter)] = name, parameter
    if holder._modules or holder._parameters:
        loss.add_module(OUTSIDE, holder)
    return alone


def _name(state: PythonState, value: Any, holder: nn.Module) -> str:
    """How the code calls a value, as a name that the holder does not have yet."""
    called = next((one.name_of(key) for one, key, held in state.loaded() if held is value), type(value).__name__)
    name = base = re.sub(r"\W+", "_", called).strip("_") or "value"
    number = 1
    while hasattr(holder, name):
        number, name = number + 1, f"{base}_{number}"
    return name
