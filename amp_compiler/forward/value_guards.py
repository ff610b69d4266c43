"""`ValueGuards`: the Python values that a capture read and took for granted, compared at every call."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from operator import is_
from types import FunctionType, MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from amp_compiler.forward.notices import logger
from amp_compiler.forward.same_objects import SameObjects
from amp_compiler.fx.code_names import Origin, functions_of, origin_of
from amp_compiler.fx.numbers import A_TENSOR, Number, is_number
from amp_compiler.fx.python_state import (
    BY_NAME,
    COMPARED,
    OPENED,
    Holder,
    Kind,
    PythonState,
    content_of,
    environment,
    is_plain,
)

Check = Callable[[Any], bool]
_CONTAINERS = (list, deque, tuple, dict, set, MappingProxyType)
_GONE = (KeyError, ValueError, AttributeError, IndexError, TypeError)  # what is raised where something is gone


class ValueGuards:
    """What must still be so for a captured program to be used again.

    A number, a text or a function that the code of a model names must be the same; a tensor must be of the same type
    and shape; a list or dict must hold the same. Nearly all of them are attributes, globals or variables of closures:
    these are compared by identity in one generated expression, some 20 ns each, and by value only where that fails.

    Args:
        state: what the code reaches, in the state in which it was captured.
        constants: tensors that the graph reads and that stand somewhere in there.
        numbers: what gives the inputs of the graph that are numbers their values.

    Example:
        >>> from amp_compiler.fx.python_walk import python_state
        >>> dropout = nn.Dropout(0.5)
        >>> guards = ValueGuards(python_state(dropout))
        >>> guards.hold()
        True
        >>> dropout.p = 0.25
        >>> guards.hold()
        False
    """

    def __init__(
        self, state: PythonState, constants: Iterable[torch.Tensor] = (), numbers: Iterable[Number] = ()
    ) -> None:
        self._inputs = list(numbers)
        self._kept: list[tuple[Holder, Any, Check]] = []
        self._deep: list[tuple[Callable[[], Any], Check]] = []
        self._numbers: list[tuple[Holder, Any, str]] = []
        taken = state.numbers
        places = {(id(holder.value), key): (holder, key, value) for holder, key, value in state.loaded()}
        constants = list(constants)
        for tensor in constants:
            if (place := state.place_of(tensor)) is not None:
                places.setdefault((id(place[0].value), place[1]), (*place, tensor))
        for (owner, _), (holder, key, value) in places.items():
            if is_number(value) and (owner, key) not in taken:
                self._numbers.append((holder, key, repr(value)))
            if holder.kind not in (Kind.TABLE, Kind.CELL, Kind.CONTEXT, *BY_NAME):
                continue  # compared as part of what holds it
            if (owner, key) in taken:
                self._deep.append((holder.getter(key), partial(_is_like, type(value))))
            elif holder.kind not in (Kind.OBJECT, Kind.CONTEXT) and _is_told_by_identity(value):
                self._kept.append((holder, key, _expected(value, (), taken)))
            else:
                self._deep.append((holder.getter(key), _expected(value, (), taken)))
        for function in state.functions:
            for name in ("__defaults__", "__kwdefaults__"):
                defaults = getattr(function, name)
                if defaults and not is_plain(defaults):  # a list that is a default may change
                    self._deep.append((partial(getattr, function, name), _expected(defaults, (), taken)))
        for module in state.beside:
            self._deep.append((partial(getattr, module, "training"), _expected(module.training, (), taken)))
        for value in state.arrays:
            if not any(_lies_in(tensor, value) for tensor in constants):  # the graph reads its memory
                self._deep.append((lambda value=value: value, _array(value)))  # type: ignore[misc]
        self._read: list[tuple[Callable[[], Any], Check, str]] = []
        for tensor in {id(one): one for one in state.tensors}.values():
            place = state.place_of(tensor)
            get = (lambda tensor=tensor: tensor) if place is None else place[0].getter(place[1])  # type: ignore[misc]
            label = A_TENSOR if place is None else place[0].name_of(place[1])
            self._read.append((get, _values(tensor), label))
        self._deep += [(get, check) for get, check, _ in self._read]
        self._deep.append((_defaults_of_torch, _defaults_of_torch().__eq__))
        for name in _SETTINGS & state.names:
            setting = getattr(torch, name)
            self._deep.append((setting, setting().__eq__))
        if state.environment:
            self._deep.append((environment, dict(environment()).__eq__))
        self._absent = [(holder.value, key) for holder, key in state.absent()]
        self._same = _identity_test(self._kept, self._absent)
        self._code = _code_test(state)

    def hold(self, leaves: Sequence[Any] = ()) -> bool:
        """Whether everything is as it was.

        Args:
            leaves: the flattened arguments, from which numbers may be computed.
        """
        try:
            same = self._code() and (self._same() or self._equal()) and all(check(get()) for get, check in self._deep)
            return same and all(number.fits(leaves) for number in self._inputs)
        except _GONE:
            return False

    def changed(self) -> set[str]:
        """What the user calls those numbers that are others now, and the tensors of which numbers were made."""
        found = set()
        for get, check, label in self._read:
            with contextlib.suppress(*_GONE):
                if not check(get()):
                    found.add(label)
        for holder, key, before in self._numbers:
            with contextlib.suppress(*_GONE):
                now = holder.getter(key)()
                if is_number(now) and repr(now) != before:
                    found.add(holder.name_of(key))
        return found

    def _equal(self) -> bool:
        """By value: another object may be the same number."""
        if any(key in table for table, key in self._absent):
            return False
        return all(check(holder.getter(key)()) for holder, key, check in self._kept)


# Functions that tell what torch is set to, and that nothing else in this file or in torch's own guards covers.
_SETTINGS = {
    *("get_num_threads", "get_num_interop_threads", "get_float32_matmul_precision", "initial_seed"),
    *("get_deterministic_debug_mode", "is_warn_always_enabled"),
}


def _defaults_of_torch() -> tuple[Any, ...]:
    """What code that names no type or algorithm is traced and compiled with."""
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()


def _identity_test(kept: list[tuple[Holder, Any, Check]], absent: list[tuple[Any, Any]]) -> Callable[[], bool]:
    """One function that compares every place with the object that stands there now."""
    same = SameObjects()
    for holder, key, _ in kept:
        if holder.kind is Kind.CELL:
            same.cell(holder.value)
        else:
            same.item(vars(holder.value) if holder.kind is Kind.CLASS else holder.value, key)
    for table, key in absent:
        same.absent(table, key)
    return same.test()


def _code_test(state: PythonState) -> Callable[[], bool]:
    """Whether the user's functions have the code and the defaults, and the user's classes the functions, they had."""
    same = SameObjects()
    for function in state.functions:
        if origin_of(str(function.__globals__.get("__name__", ""))) is Origin.USER:
            same.attribute(function, "__code__")
            if is_plain(function.__defaults__):
                same.attribute(function, "__defaults__")
    for cls in state.classes:
        for name in sorted(state.names & set(dir(cls))):
            base = next((base for base in cls.__mro__ if name in vars(base)), object)
            if isinstance(vars(base).get(name), FunctionType):
                same.attribute(cls, name)
                continue
            if functions_of(vars(base).get(name)):
                same.item(vars(base), name)
            for nearer in cls.__mro__[: cls.__mro__.index(base)]:
                same.absent(vars(nearer), name)
    return same.test()


def _is_told_by_identity(value: Any) -> bool:
    return is_plain(value) or not isinstance(value, (torch.Tensor, partial, *_CONTAINERS))


def _is_like(kind: type, now: Any) -> bool:
    return type(now) is kind and is_number(now)


def _expected(value: Any, around: tuple[int, ...], taken: Set[tuple[int, Any]]) -> Check:
    """A test for a value like this one.

    Args:
        value: what stood there.
        around: `id` of the containers that it is in; one that holds itself is told by identity.
        taken: `id` of the container and key of numbers that may be any.
    """
    if isinstance(value, nn.Parameter):
        return lambda now: isinstance(now, nn.Parameter)  # those of the model are compared elsewhere
    if isinstance(value, torch.Tensor):
        form = _form(value)
        return lambda now: isinstance(now, torch.Tensor) and _form(now) == form
    if isinstance(value, (float, complex)):
        text = repr(value)  # 0.0 is not -0.0, and nan is nan
        return lambda now: now is value or (type(now) is type(value) and repr(now) == text)
    if is_plain(value):
        return lambda now: now is value or (type(now) is type(value) and bool(now == value))
    if isinstance(value, partial):
        arguments = _expected((value.args, value.keywords), around, taken)
        return lambda now: now is value and arguments((now.args, now.keywords))
    if id(value) in around or not isinstance(value, _CONTAINERS):
        return lambda now: now is value
    return _container(value, (*around, id(value)), taken)


def _container(value: Any, around: tuple[int, ...], taken: Set[tuple[int, Any]]) -> Check:
    kind, length = type(value), len(value)
    if length > OPENED:
        before = copy.copy(value)
        return lambda now: now is value and _same_items(now, before)
    if isinstance(value, set):
        members = frozenset(value)
        return lambda now: type(now) is kind and members == now
    keyed = isinstance(value, (dict, MappingProxyType))
    keys = tuple(value) if keyed else None
    checks = [
        partial(_is_like, type(item)) if (id(value), key) in taken else _expected(item, around, taken)
        for key, item in (value.items() if keyed else enumerate(value))
    ]

    def holds(now: Any) -> bool:
        if type(now) is not kind or len(now) != length or (keys is not None and tuple(now) != keys):
            return False
        return all(check(item) for check, item in zip(checks, now if keys is None else now.values(), strict=True))

    return holds


def _same_items(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)
    except RuntimeError:  # of tensors
        return False


def _array(value: Any) -> Check:
    size = value.nbytes if isinstance(value, np.ndarray) else memoryview(value).nbytes
    if size > COMPARED:
        logger.warning(
            "forward may read an array of %.0f MB that is no tensor: what changes in it between calls is not noticed;"
            " pass it as an argument, or keep it as a tensor",
            size / 1e6,
        )
        return lambda now: True
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        kept = value.copy()
        return lambda now: now.shape == kept.shape and all(map(is_, now.flat, kept.flat))
    if isinstance(value, np.ndarray) and value.size > OPENED and value.flags.c_contiguous:
        words = value.reshape(-1).view(np.uint8).copy()
        return lambda now: np.array_equal(now.reshape(-1).view(np.uint8), words)
    content = content_of(value)
    return lambda now: content_of(now) == content


def _values(tensor: torch.Tensor) -> Check:
    """Whether a tensor holds, bit by bit, what this one does."""
    kind, words = (tensor.dtype, tensor.shape), _words(tensor).clone()
    return lambda now: (
        isinstance(now, torch.Tensor) and kind == (now.dtype, now.shape) and torch.equal(_words(now), words)
    )


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _lies_in(tensor: torch.Tensor, value: Any) -> bool:
    """Whether a tensor was made of an array's memory."""
    if not isinstance(value, np.ndarray) or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    return 0 <= tensor.data_ptr() - value.ctypes.data < value.nbytes


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else tensor.layout
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad
