"""What `signature.module_key` walks over, noted, so that a later call sees in one quick pass that it is the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from amp_compiler.forward.same_objects import SameObjects
from amp_compiler.fx.compiled_look import address_test
from amp_compiler.fx.hooks import HOOKS, MODULE_HOOKS, hooks_made
from amp_compiler.fx.stand_in import StandIn
from amp_compiler.fx.torch_private import form_test, global_module_hooks

TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = tuple(map(attrgetter, HOOKS))
_VERSION = attrgetter("_version")
_PIECE = 256  # tensors


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


def note_modules(model: nn.Module, same: SameObjects, hooks: SameObjects) -> tuple[list[Tensor], list[Tensor]] | None:
    """Note the tables, modes and hooks of a module and of all below it.

    Args:
        model: the module.
        same: takes the tables, and what stands in them.
        hooks: takes the tables that are without hooks.

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
        same.tables_of(module, (*TABLES, *(name for name in MODULE_HOOKS if own[name])), plain)
        hooks.tables_of(module, [name for name in MODULE_HOOKS if not own[name]], ())
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
    """Whether tensors have the form and the place in memory that they had, and how often they were written.

    It goes through them in pieces that stay in the processor's nearest cache while they are looked at.

    Args:
        versioned: tensors whose versions count, each once. Gradients are enabled, here and at every look.
        formed: tensors beside them, each once.
        placed: tensors of which only the place counts: what moves one changes its form as well, or leaves it.
    """

    def __init__(self, versioned: Sequence[Tensor], formed: Sequence[Tensor], placed: Sequence[Tensor]) -> None:
        self._versioned = [(form_test(piece), address_test(piece), piece) for piece in _pieces(versioned)]
        self._others = [test for piece in _pieces(formed) for test in (form_test(piece), address_test(piece))]
        self._placed = list(map(address_test, _pieces(placed)))

    @staticmethod
    def takes(tensors: Sequence[Tensor]) -> bool:
        """Whether all of them can be watched: plain tensors in memory."""
        return all(type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided for t in tensors)

    def look(self, placed: bool) -> int | None:
        """The sum of the versions of now, which never fall; `None` where something else has changed.

        Args:
            placed: whether the places of the tensors count whose form does not.
        """
        versions = 0
        for form, place, piece in self._versioned:
            if not form() or not place():
                return None
            versions += sum(map(_VERSION, piece))
        for holds in (*self._others, *(self._placed if placed else ())):
            if not holds():
                return None
        return versions

    def versions(self) -> list[int]:
        """The version of each one now."""
        return [version for _, _, piece in self._versioned for version in map(_VERSION, piece)]


@dataclass(frozen=True, slots=True)
class _Move:
    """By how much a kind of replay, which is kept alive, moves versions; whether that is known for certain."""

    kind: Any
    steps: list[int]
    sum: int
    known: bool


class WriteCount:
    """The versions that some tensors are to have when a step begins, if nobody else has written to them.

    Behind a replay they are not read again. What it moves is always the same, and known once two replays of the same
    kind, one behind the other, have moved the same.

    Args:
        watch: of the tensors.
    """

    def __init__(self, watch: TensorWatch) -> None:
        self._watch = watch
        self._moves: dict[int, _Move] = {}  # by the id of a kind
        self.read()

    def read(self) -> None:
        """Take the versions of now."""
        self._versions, self._counts = self._watch.versions(), Counter[int]()
        self.sum = sum(self._versions)

    def replayed(self, kind: Any) -> None:
        """Add what a replay has just moved.

        Args:
            kind: an object that stands for what it writes.
        """
        move = self._moves.get(id(kind))
        if move is not None and move.known:
            self._counts[id(kind)] += 1
            self.sum += move.sum
            return
        before = self.expected()
        self.read()
        steps = [now - old for now, old in zip(self._versions, before, strict=True)]
        self._moves[id(kind)] = _Move(kind, steps, sum(steps), move is not None and steps == move.steps)

    def expected(self) -> list[int]:
        """The version of each tensor, if nobody else has written to it."""
        expected = self._versions
        for number, count in self._counts.items():
            expected = [one + count * step for one, step in zip(expected, self._moves[number].steps, strict=True)]
        return expected

    def written(self) -> list[bool]:
        """Which of them somebody else has written; from now on they are expected to be as they are."""
        before = self.expected()
        self.read()
        return [now != old for now, old in zip(self._versions, before, strict=True)]


def _pieces(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    return [list(tensors[start : start + _PIECE]) for start in range(0, len(tensors), _PIECE)]


class HookWatch:
    """Whether no hooks were hung up since there were none.

    Torch numbers the hooks of a process: only where there are more than before, it looks for them.

    Args:
        modules: tells whether the tables of the modules that had no hooks have none.
        tensors: that may have no hooks on their gradients.
    """

    def __init__(self, modules: Callable[[], bool], tensors: Sequence[Tensor]) -> None:
        self._modules, self._tensors = modules, tensors
        self._global, self._made = _hooks_of_all_modules(), -1

    def holds(self) -> bool:
        """Whether there are none."""
        made = hooks_made()
        if made == self._made and not any(self._global):
            return True
        if _hooks_of_all_modules() != self._global or not self._modules():
            return False
        if any(any(map(hooks, self._tensors)) for hooks in _HOOKS):
            return False
        self._made = made
        return True


def _hooks_of_all_modules() -> tuple[tuple[int, ...], tuple[int, ...]]:
    return global_module_hooks(), global_module_hooks(backward=True)
