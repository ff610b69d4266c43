"""What a loss function holds beside the model: modules of its own, and parameters that stand in no module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from amp_compiler.fx.python_state import PythonState
from amp_compiler.fx.python_walk import python_state

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


@dataclass
class Alone:
    """The parameters that no module has.

    Args:
        names: the parameter with its name within `outside`, by its `id`.
    """

    names: dict[int, tuple[str, Tensor]] = field(default_factory=dict)


def adopt(loss: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, tuple[str, Tensor]]:
    """Take in, as a module `outside`, what the code of a loss reaches beside its model.

    A criterion or a teacher in a closure becomes a submodule, so that its parameters and buffers are inputs of the
    graph. So do parameters of the optimizers that no module has, such as learned weights of several losses.

    Args:
        loss: the loss as a module; a later call takes in what has come since. Where nothing has, it stays as it is.
        optimizers: whose parameters are trained.

    Returns:
        The parameters that no module has, with their names within `outside`, by `id`.
    """
    before, state = loss._modules.pop(OUTSIDE, None), python_state(loss)
    known = {id(module) for module in loss.modules()}
    found = [module for module in state.modules if id(module) not in known]
    inner = {id(child) for module in found for child in module.modules() if child is not module}
    held = {id(parameter) for module in (loss, *found) for parameter in module.parameters()}
    adopted: dict[str, Any] = {}
    for module in found:
        if id(module) not in inner and module is not before:
            adopted[_name(state, module, adopted)] = module
    alone: dict[int, tuple[str, Tensor]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in held and id(parameter) not in alone:
                    alone[id(parameter)] = _name(state, parameter, adopted), parameter
                    adopted[alone[id(parameter)][0]] = parameter
    if before is not None and _same({**before._modules, **before._parameters}, adopted):
        loss._modules[OUTSIDE] = before
    elif adopted:
        loss.add_module(OUTSIDE, _holder(adopted))
    return alone


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[name] is b[name] for name in a)


def _holder(adopted: Mapping[str, Any]) -> nn.Module:
    holder = nn.Module()
    for name, value in adopted.items():
        if isinstance(value, nn.Module):
            holder.add_module(name, value)
        else:
            holder._parameters[name] = value  # a tensor that is no nn.Parameter too
    return holder


def _name(state: PythonState, value: Any, taken: Mapping[str, Any]) -> str:
    """How the code calls a value, as a name that is not taken yet."""
    called = next((one.name_of(key) for one, key, held in state.loaded() if held is value), type(value).__name__)
    name = base = re.sub(r"\W+", "_", called).strip("_") or "value"
    number = 1
    while name in taken or hasattr(nn.Module, name):
        number, name = number + 1, f"{base}_{number}"
    return name
