"""`ModuleHooks`: which hooks stand on a model, which Dynamo would ask for longer than for all else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from amp_compiler.fx.capture.hooks import MODULE_HOOKS, hooks_made
from amp_compiler.fx.stand_in import StandIn
from amp_compiler.fx.torch_private.runtime import global_module_hooks


class ModuleHooks:
    """Tells one state of hooks from another.

    Torch numbers the hooks of a process: the modules are gone through only where there are more than before.

    Args:
        model: the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._made = model, -1
        self._tables: list[Mapping[int, Any]] = []  # those that hold hooks

    def key(self) -> tuple[Any, ...]:
        """The numbers of all hooks, those of all modules first."""
        count = hooks_made()
        if count != self._made:
            self._made = count
            tables = (vars(one)[name] for module in self._model.modules() for one in _with_original(module)
                      for name in MODULE_HOOKS)  # fmt: skip
            self._tables = [table for table in tables if table]
        own = (tuple(table) for table in self._tables if table)
        return global_module_hooks(), global_module_hooks(backward=True), *own


def _with_original(module: nn.Module) -> Iterator[nn.Module]:
    """A module, and behind one that is compiled already the one that it was made of, which has hooks of its own."""
    yield module
    while isinstance(module, StandIn):
        module = module._amp_original
        yield module
