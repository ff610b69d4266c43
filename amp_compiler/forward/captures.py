"""The captures of one model: for which sizes the next one is to hold, and what its user is told of it.

With `dynamic_shapes="auto"` the first sizes are taken as they are. Where a call differs from earlier ones in sizes
alone, the dimensions that differ are captured as dynamic, so that the program fits whatever size they have next. Sizes
of 0 and 1 stay as they are (torch treats them apart), and so does all of it where the model cannot be captured
otherwise. A number of Python (`float`) that differs from that of an earlier capture becomes an input in the same way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch
import torch.utils._pytree as pytree

from amp_compiler.errors import CaptureError, HookError, NumberError, RankError
from amp_compiler.forward.notices import logger, telling
from amp_compiler.forward.settings import AUTO, Settings
from amp_compiler.forward.shape_guards import InputForm
from amp_compiler.forward.signature import traits_key, without_numbers
from amp_compiler.fx.numbers import ARGUMENTS, Changing
from amp_compiler.passes.pipeline import Stages

_MARKS = ("_dynamo_", "_has_dynamo_", "_specialize_on")  # how the names begin of what torch writes on a tensor
_NUMBERS_TRIED = 8  # captures for the sake of numbers that cannot be inputs, before the model is run in pieces
_LEAST = 2  # the smallest size that a dynamic dimension can stand for


class Built(Protocol):
    """What a capture makes."""

    @property
    def form(self) -> InputForm:
        """Which inputs it can be used for."""


Made = TypeVar("Made", bound=Built)
Build = Callable[[Settings, Stages, Changing], Made]
Dimensions = dict[int, tuple[int, ...]]  # place among the leaves, dimensions


@dataclass
class _Family:
    """Calls that differ in sizes alone.

    Args:
        first: the sizes of the first, by leaf; `None` for what is no tensor.
        changed: the dimensions in which a later one differed.
        fixed: whether a capture with dynamic dimensions failed.
        numbers: the numbers among the inputs of the first.
    """

    first: list[tuple[int, ...] | None]
    numbers: list[str]
    changed: set[tuple[int, int]] = field(default_factory=set)
    fixed: bool = False


class Captures:
    """Makes the captures of a model or a step.

    Args:
        name: what is captured, for messages.
        settings: the options.
        first: what the first argument of the captured tree is called in messages: `batch`, `args`.
    """

    def __init__(self, name: str, settings: Settings, first: str) -> None:
        self._name, self._settings, self._first = name, settings, first
        self._families: dict[Hashable, _Family] = {}
        self._last: tuple[Hashable, list[str]] | None = None
        self._changing: set[str] = set()  # numbers that were seen to change
        self._refused: set[str] = set()  # those of them that cannot be inputs
        self._anew = 0  # captures for their sake

    def make(
        self, mode: Hashable, tree: Any, leaves: Sequence[Any], build: Build[Made], changed: Iterable[str] = ()
    ) -> Made:
        """Capture for a new signature.

        Args:
            mode: what a program depends on besides the inputs.
            tree: the inputs.
            leaves: the same, flattened.
            build: captures and compiles with these settings, noting stages, with these numbers as inputs.
            changed: the numbers for whose sake no earlier program fits, as `ProgramTable.changed` gives them.

        Raises:
            CaptureError: numbers change at every call, and cannot be inputs: pieces hold for more of them.
            AmpError: what `build` raises for these sizes and numbers alone.
        """
        family, changed = self._family(mode, leaves), {*changed}
        if family.numbers != _numbers(leaves):
            changed.add(ARGUMENTS)
        self._changing |= changed
        if refused := sorted(changed & self._refused):
            self._anew += 1
            if self._anew > _NUMBERS_TRIED:
                raise CaptureError(
                    f"a number that changes ({', '.join(refused)}) cannot be an input of one graph: more than"
                    " arithmetic is done with it",
                    hint="pass it as a tensor, or compute with it outside",
                )
        while taken := self._changing - self._refused:
            changing = Changing(frozenset(taken - {ARGUMENTS}), ARGUMENTS in taken)
            try:
                made = _with(build, changing)
                return self._make(mode, tree, leaves, family, made, changed)
            except (HookError, RankError):
                raise
            except Exception as cause:  # noqa: BLE001  # torch, a pass or the compiler wants the number itself
                logger.debug("%s: a number that changes is no input: %s", self._name, cause)
                named = cause.labels if isinstance(cause, NumberError) else frozenset[str]()
                self._refused |= named & taken or taken
        return self._make(mode, tree, leaves, family, _with(build, Changing()), changed)

    def _make(
        self,
        mode: Hashable,
        tree: Any,
        leaves: Sequence[Any],
        family: _Family,
        build: Callable[[Settings, Stages], Made],
        changed: set[str],
    ) -> Made:
        begin, program, why = time.perf_counter(), None, ""
        if dimensions := self._dynamic(family, leaves):
            try:
                shapes = _shapes(leaves, dimensions)
                program = self._run(build, leaves, replace(self._settings, dynamic_shapes=shapes))
            except (HookError, NumberError, RankError):
                raise
            except Exception as cause:  # noqa: BLE001  # torch, a pass or the compiler knows numbers only: these sizes alone it is
                family.fixed, why = True, str(cause).strip().splitlines()[0] if str(cause).strip() else repr(cause)
            if program is not None and not program.form.is_dynamic:
                family.fixed, why = True, "the model works for that size alone"
        if program is None:
            auto = self._settings.dynamic_shapes == AUTO
            settings = replace(self._settings, dynamic_shapes=None) if auto else self._settings
            program = self._run(build, leaves, settings)
        self._say(mode, tree, leaves, program.form, why, time.perf_counter() - begin, changed)
        return program

    def _run(self, build: Callable[[Settings, Stages], Made], leaves: Sequence[Any], settings: Settings) -> Made:
        stages = Stages()
        try:
            with _marks_kept(leaves), telling(self._name, stages):
                return build(settings, stages)
        finally:
            stages.texts.clear()  # it would keep every graph that was made on the way

    def _family(self, mode: Hashable, leaves: Sequence[Any]) -> _Family:
        sizes = [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        key = mode, traits_key(without_numbers(leaves))
        family = self._families.setdefault(key, _Family(sizes, _numbers(leaves)))
        for place, (now, before) in enumerate(zip(sizes, family.first, strict=True)):
            if now is not None and before is not None:
                family.changed |= {
                    (place, n) for n, pair in enumerate(zip(now, before, strict=True)) if len({*pair}) > 1
                }
        return family

    def _dynamic(self, family: _Family, leaves: Sequence[Any]) -> Dimensions:
        """The dimensions to capture as dynamic."""
        if self._settings.dynamic_shapes != AUTO or family.fixed:
            return {}
        found: Dimensions = {}
        for place, dimension in sorted(family.changed):
            if leaves[place].shape[dimension] >= _LEAST and leaves[place].layout is torch.strided:
                found[place] = (*found.get(place, ()), dimension)
        return found

    def _say(
        self,
        mode: Hashable,
        tree: Any,
        leaves: Sequence[Any],
        form: InputForm,
        why: str,
        seconds: float,
        changed: set[str],
    ) -> None:
        before, self._last = self._last, (mode, [_described(leaf) for leaf in leaves])
        if before is None:
            logger.info("captured %s in %.1f s", self._name, seconds)
            return
        level, hint = logging.INFO, "keep modes and parameters as they are between calls"
        new = "modes, hooks or parameters of the model, or the form of its inputs"
        if changed:
            new = f"numbers that it read have changed ({', '.join(sorted(changed))})"
            hint = (
                "pass them as tensors, or compute with them outside"
                if changed & self._refused
                else "from now on they are inputs"
            )
        elif before[0] == mode and len(before[1]) == len(self._last[1]):
            pairs = list(zip(self._last[1], before[1], strict=True))
            place = next((place for place, (now, then) in enumerate(pairs) if now != then), 0)
            new = f"{self._path(tree, place)} is {pairs[place][0]}, it was {pairs[place][1]}"
            hint = "pad the inputs to one size" if isinstance(leaves[place], torch.Tensor) else "pass it as a tensor"
            if form.is_dynamic:
                hint = (
                    "from now on such sizes are dynamic; give dynamic_shapes= for dynamic ones from the first call on"
                )
            elif self._settings.dynamic_shapes is None:
                hint += ", or give dynamic_shapes='auto'"
        if why:
            level, hint = logging.WARNING, f"no dynamic sizes: {why}; {hint}"
        logger.log(level, "captured %s again in %.1f s: %s; %s", self._name, seconds, new, hint)

    def _path(self, tree: Any, place: int) -> str:
        path = pytree.tree_flatten_with_path(tree)[0][place][0]
        head = self._first if getattr(path[0], "idx", 0) == 0 else "kwargs"
        return f"{head}{pytree.keystr(path[1:])}"


@contextmanager
def _marks_kept(leaves: Sequence[Any]) -> Iterator[None]:
    """Take back what torch.export writes on tensors that are dynamic to it, and leaves there where it fails."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    before = [{name: value for name, value in vars(one).items() if name.startswith(_MARKS)} for one in tensors]
    try:
        yield
    finally:
        for tensor, marks in zip(tensors, before, strict=True):
            for name in [name for name in vars(tensor) if name.startswith(_MARKS)]:
                delattr(tensor, name)
            vars(tensor).update(marks)


def _with(build: Build[Made], changing: Changing) -> Callable[[Settings, Stages], Made]:
    return lambda settings, stages: build(settings, stages, changing)


def _numbers(leaves: Sequence[Any]) -> list[str]:
    return [repr(leaf) for leaf in leaves if type(leaf) is float]


def _shapes(leaves: Sequence[Any], dimensions: Dimensions) -> torch.export.ShapesCollection:
    shapes = torch.export.ShapesCollection()
    for place, found in dimensions.items():
        shapes[leaves[place]] = dict.fromkeys(found, torch.export.Dim.AUTO)
    return shapes


def _described(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    text = repr(leaf)
    return text if len(text) <= 40 else f"{text[:40]}…"
