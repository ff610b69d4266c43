"""What `signature.module_key` walks over, noted so that a later call sees in one quick pass that nothing has changed."""

from __future__ import annotations

from operator import attrgetter

import torch
from torch import Tensor, nn

from amp_compiler.forward.same_objects import SameObjects
from amp_compiler.fx.capture import StandIn
from amp_compiler.fx.hooks import HOOKS, MODULE_HOOKS
from amp_compiler.fx.torch_private import address_test, form_test, global_module_hooks

TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = tuple(map(attrgetter, HOOKS))


class Key:
    """A long key whose hash is computed once; equal to every other of the same value."""

    __slots__ = ("_hash", "value")

    def __init__(self, value: tuple[object, ...]) -> None:
        self.value, self._hash = value, hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and (
            self is other or (self._hash == other._hash and bool(self.value == other.value))
        )


def note_modules(model: nn.Module, same: SameObjects) -> tuple[list[Tensor], list[Tensor]] | None:
    """Note the tables, modes and hooks of a module and of all below it.

    Args:
        model: the module.
        same: takes the tables, and what stands in them.

    Returns:
        The parameters and the buffers in them; `None` where there is a module whose tables are not Python's.
    """
    seen: set[int] = set()
    parameters: list[Tensor] = []
    buffers: list[Tensor] = []
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, torch.jit.ScriptModule):
            return None
        own = vars(module)
        plain = ["training"] if "training" in own else []
        same.tables_of(module, (*TABLES, *MODULE_HOOKS), plain)
        if not plain:
            same.attribute(module, "training")
        parameters += [tensor for tensor in own["_parameters"].values() if tensor is not None]
        buffers += [tensor for tensor in own["_buffers"].values() if tensor is not None]
        pending += [child for child in own["_modules"].values() if child is not None]
        if isinstance(module, StandIn):
            same.attribute(module, "original")
            pending.append(module.original)
    return parameters, buffers


class TensorWatch:
    """Whether tensors have the form, the place in memory and the hooks that they had.

    Args:
        tensors: what to look at, each once. Gradients are enabled, here and at every look.
        hooked: those of them that may not have hooks on their gradients.
    """

    def __init__(self, tensors: list[Tensor], hooked: list[Tensor]) -> None:
        self._forms, self._addresses, self._hooked = form_test(tensors), address_test(tensors), hooked

    @staticmethod
    def takes(tensors: list[Tensor]) -> bool:
        """Whether all of them can be watched: plain tensors in memory."""
        return all(type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided for t in tensors)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        return self._forms() and self._addresses() and not self.hooks()

    def hooks(self) -> bool:
        """Whether something is to be called with the gradient of one of them."""
        return any(any(map(hooks, self._hooked)) for hooks in _HOOKS)


def hooks_of_all_modules() -> tuple[int, ...]:
    """The numbers of the hooks that are registered for all modules."""
    return (*global_module_hooks(), -1, *global_module_hooks(backward=True))
