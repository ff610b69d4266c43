"""Classes that other tools ask for with `isinstance`, and which a compiled module therefore derives from."""

from __future__ import annotations

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
