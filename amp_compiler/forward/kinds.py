"""What other tools ask of a compiled module: the classes that it derives from, and the arguments of its forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

# The Trainer of transformers saves with its own `save_pretrained` what is one of these, and else the plain state dict,
# which safetensors refuses where weights are tied.
_ASKED_FOR = frozenset({("transformers.modeling_utils", "PreTrainedModel")})


def kinds_of(model: type[nn.Module]) -> tuple[type[nn.Module], ...]:
    """The classes among the bases of a model's class that tools ask for.

    Args:
        model: the class.

    Example:
        >>> kinds_of(nn.Linear)
        ()
    """
    return tuple(one for one in model.__mro__ if (one.__module__, one.__qualname__) in _ASKED_FOR)


def forwarding_members(kind: type[nn.Module], own: type) -> dict[str, Any]:
    """Members for a class that derives from `kind` in name only: what that defines is the original's.

    Args:
        kind: one of `kinds_of`.
        own: the class whose members go before these.

    Returns:
        By name, what reads the attribute of the original; for what `nn.Module` has too, that of `nn.Module`.
    """
    taken = {name for one in own.__mro__ if one not in nn.Module.__mro__ for name in vars(one)}
    members: dict[str, Any] = {}
    for one in kind.__mro__:
        if one in nn.Module.__mro__:
            continue
        for name in vars(one):
            if name in taken or (name.startswith("__") and name.endswith("__")):
                continue
            members[name] = vars(nn.Module)[name] if name in vars(nn.Module) else _OfTheOriginal(kind, name)
    return members


class _OfTheOriginal:
    """An attribute that is read from the original; on the class itself, from the class that defines it."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind, self._name = kind, name

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        return getattr(self._kind if module is None else module.__dict__["original"], self._name)


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
