"""What a captured program depends on besides tensor values: the state of the module and the form of the inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from amp_compiler.errors import UnknownFormError
from amp_compiler.fx.hooks import MODULE_HOOKS, has_hooks, hook_numbers
from amp_compiler.fx.stand_in import StandIn
from amp_compiler.fx.torch_private import global_module_hooks


def module_key(model: nn.Module, by_identity: bool = False) -> tuple[Any, ...]:
    """Which modules there are, their modes and hooks, and what parameters and buffers they hold.

    A plain walk over the modules' tables: it runs at every call.

    Args:
        model: the module.
        by_identity: tell a parameter from another one like it, and whether it has hooks, as a step must. Otherwise only
            which of them are tied counts.
    """
    key: list[Any] = [torch.is_grad_enabled(), global_module_hooks(), global_module_hooks(backward=True)]
    seen: set[int] = set()
    tied: dict[int, int] = {}
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):  # it has no tables in Python
            key += (id(module), module.training, *[(p.requires_grad, *_layout(p)) for p in module.parameters()])
            continue
        own = vars(module)
        key += (id(module), module.training)
        key += [numbers for name in MODULE_HOOKS if own[name] and (numbers := hook_numbers(own[name]))]
        for parameter in own["_parameters"].values():
            if parameter is not None:
                number = tied.setdefault(id(parameter), len(tied))
                key.append((id(parameter) if by_identity else number, parameter.requires_grad, *_layout(parameter)))
                if by_identity and has_hooks(parameter):  # outside of a step autograd runs them
                    key.append("hooks")
        key += [b.dtype for b in own["_buffers"].values() if b is not None]
        pending += [child for child in own["_modules"].values() if child is not None]
        if isinstance(module, StandIn):
            pending.append(module.original)  # whose hooks run as well
    return tuple(key)


def _layout(parameter: torch.Tensor) -> tuple[Any, ...]:
    lazy = type(parameter) is not nn.Parameter and is_lazy(parameter)
    if lazy or parameter.layout is not torch.strided:
        return parameter.dtype, parameter.layout
    return parameter.dtype, parameter.shape, parameter.stride()


def leaves_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Exact form of the flattened inputs: shapes, strides, types, values of what is no tensor, and who is who.

    Raises:
        UnknownFormError: for an input that cannot be a key, such as an object that is not hashable.
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
        raise UnknownFormError(
            f"an input of type {', '.join(kinds)} is not hashable, so calls cannot be told apart"
            + (" (of dict() of it they can)" if any(isinstance(leaf, Mapping) for leaf in leaves) else ""),
            hint="pass tensors, numbers, strings, or containers of them",
        ) from cause
    return key


_ANY_NUMBER = object()


def without_numbers(leaves: Sequence[Any]) -> list[Any]:
    """The flattened inputs with one and the same thing in the place of every `float`."""
    return [_ANY_NUMBER if type(leaf) is float else leaf for leaf in leaves]


def _plain_key(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.layout, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), repr(leaf) if isinstance(leaf, float) else leaf  # 0.0 and -0.0 differ, nan is itself


def traits_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """What must be equal for a program of dynamic shapes to be used again: all but the sizes."""
    first: dict[int, int] = {}
    return tuple(
        (leaf.dim(), _order(leaf), leaf.dtype, leaf.device, leaf.requires_grad, first.setdefault(id(leaf), place))
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        else _plain_key(leaf)
        for place, leaf in enumerate(leaves)
    )


def _order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the widest stride to the narrowest; contiguous tensors of any size have one order."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    strides = tensor.stride()
    return tuple(sorted(range(tensor.dim()), key=lambda place: -strides[place]))


def like_forward_of(model: nn.Module, run: Callable[..., Any], doc: str | None) -> Callable[..., Any]:
    """A method `forward` with the signature that the forward of a model has.

    Args:
        model: the module; where its forward says nothing of its arguments, any are shown.
        run: called with the object, the positional and the keyword arguments.
        doc: its docstring.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, args, kwargs)

    forward.__doc__ = doc
    try:
        shown = inspect.signature(model.forward)
    except (TypeError, ValueError):  # written in C
        return forward
    me = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    forward.__signature__ = shown.replace(parameters=[me, *shown.parameters.values()])  # type: ignore[attr-defined]
    return forward
