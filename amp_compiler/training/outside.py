"""What a loss function holds beside the model: modules of its own, and parameters that stand in no module."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

OUTSIDE = "outside"  # the name under which a `LossModule` has them


def adopt(loss: nn.Module, function: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Take in, as a module `outside`, what the code of a loss reaches beside its model.

    A criterion or a teacher in a closure becomes a submodule. So do parameters of the optimizers that no module has,
    such as learned weights of several losses.

    Args:
        loss: the loss as a module; a later call takes in what has come since. Where nothing has, it stays as it is.
        function: the loss function.
        optimizers: whose parameters are trained.
    """
    before = loss._modules.pop(OUTSIDE, None)
    known = {id(module) for module in loss.modules()}
    reached = list(held_by(function))
    modules = {id(one): one for _, one in reached if isinstance(one, nn.Module) and id(one) not in known}
    inner = {id(child) for module in modules.values() for child in module.modules() if child is not module}
    held = {id(parameter) for module in (loss, *modules.values()) for parameter in module.parameters()}
    adopted: dict[str, Any] = {}
    for number, module in modules.items():
        if number not in inner and module is not before:
            adopted[_name(reached, module, adopted)] = module
    for optimizer in optimizers:
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if id(parameter) not in held:
                held.add(id(parameter))
                adopted[_name(reached, parameter, adopted)] = parameter
    own = {} if before is None else {**before._modules, **before._parameters}
    if before is not None and all(own.get(name) is one for name, one in adopted.items()):
        loss._modules[OUTSIDE] = before
    elif adopted:
        holder: Any = nn.Module()
        for name, value in adopted.items():  # a tensor that is no nn.Parameter too
            (holder._modules if isinstance(value, nn.Module) else holder._parameters)[name] = value
        loss.add_module(OUTSIDE, holder)


def held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """What the code of a function reaches by a name: its closure, globals that it names, defaults, bound objects.

    Args:
        function: a function, a method, a `functools.partial`, or an object that is called.

    Example:
        >>> def loss(model, x, weight=torch.ones(1)): return model(x) * weight
        >>> [name for name, value in held_by(loss) if isinstance(value, Tensor)]
        ['weight']
    """
    pending, seen = [("", function)], set[int]()
    while pending:
        name, value = pending.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if name:
            yield name, value
        if isinstance(value, functools.partial):
            pending += [
                ("", value.func),
                *value.keywords.items(),
                *((f"{name}_{i}", x) for i, x in enumerate(value.args)),
            ]
        elif isinstance(value, MethodType):
            pending += [("", value.__func__), ("self", value.__self__)]
        elif isinstance(value, FunctionType):
            pending += _of_function(value)
        elif isinstance(value, (dict, list, tuple)):
            leaves = pytree.tree_flatten_with_path(value)[0]
            pending += [(f"{name}{pytree.keystr(path)}", one) for path, one in leaves if path]
        elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, Tensor)):
            called = [("", type(value).__call__)] if callable(value) else []
            pending += [*vars(value).items(), *called] if called or name == "self" else []


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, cells = function.__code__, function.__closure__ or ()
    for name, cell in zip(code.co_freevars, cells, strict=True):
        with contextlib.suppress(ValueError):  # of a variable that has no value yet
            yield name, cell.cell_contents
    yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
    yield from (function.__kwdefaults__ or {}).items()
    defaults = function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True)


def _name(reached: Iterable[tuple[str, Any]], value: Any, taken: Mapping[str, Any]) -> str:
    """How the code calls a value, as a name that is not taken yet."""
    called = next((name for name, one in reached if one is value), type(value).__name__)
    return free_name(called, taken)


def free_name(called: str, taken: Mapping[str, Any]) -> str:
    """A name like this one for an attribute of a module, which is not taken yet."""
    name = base = re.sub(r"\W+", "_", called).strip("_") or "value"
    number = 1
    while name in taken or hasattr(nn.Module, name):
        number, name = number + 1, f"{base}_{number + 1}"
    return name
