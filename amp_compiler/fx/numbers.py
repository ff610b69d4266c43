"""Python numbers that change between calls (a weight that is annealed, a temperature) as inputs of a captured graph.

A capture takes what it reads from attributes, globals, closures and arguments for granted. A number that is seen to
change becomes an input of the next capture: while the forward is traced, a number read from a tensor stands in its
place. What is more than arithmetic with it (a branch, `math.exp`, a dropout probability) cannot be traced so.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import CodeType, FunctionType, MemberDescriptorType, NoneType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from amp_compiler.errors import AmpError, NumberError, first_line
from amp_compiler.fx.capture_errors import user_frame
from amp_compiler.fx.code_names import Origin, origin_of
from amp_compiler.fx.python_state import Holder, Kind, PythonState, put
from amp_compiler.fx.torch_private import is_taken_for_granted, symbols_as_texts, symbols_asked

_INT64 = 2**63
_CALLED = 1  # in the argument of LOAD_GLOBAL, where what it loads is called
_MOST = 256  # numbers of one capture, each of which is an input of its own
ARGUMENTS = "the arguments"
A_TENSOR = "a tensor"  # that stands in no place, and is read as a number
_NAME = "number_{}_that_changes"
_WRITABLE = frozenset({Kind.TABLE, Kind.CELL})
_PYTHON = {torch.SymFloat: float, torch.SymInt: int, torch.SymBool: bool}


@dataclass(frozen=True)
class Changing:
    """Which numbers were seen to change.

    Args:
        labels: of what stands in attributes, variables, lists and dicts, as `Holder.name_of` calls it.
        arguments: whether numbers among the arguments do.
    """

    labels: frozenset[str] = frozenset()
    arguments: bool = False

    def __bool__(self) -> bool:
        return bool(self.labels) or self.arguments


@dataclass(frozen=True)
class Number:
    """One that is an input.

    Args:
        label: how a user calls it.
        read: gives today's, from the flattened arguments of a call.
        kind: `float` or `int`.
        of_arguments: whether it is one of these, or is computed from one.
    """

    label: str
    read: Callable[[Sequence[Any]], float]
    kind: type
    of_arguments: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Of its tensor."""
        return torch.float64 if self.kind is float else torch.int64

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Whether it is one of its kind today: `1 / k` may be none, and `2**k` too large."""
        try:
            value = self.read(leaves)
        except (ArithmeticError, ValueError):
            return False
        return type(value) is self.kind and is_number(value)

    def tensor(self, leaves: Sequence[Any]) -> Tensor:
        """FP64 or INT64 [] on the CPU, from which a graph reads it without waiting for a device."""
        return _tensor(self.read(leaves))


@dataclass
class NumberInputs:
    """Puts stand-ins in the places of numbers for one capture.

    Args:
        model: the module that is captured.
        state: what its code reaches.
        changing: which numbers.
    """

    model: nn.Module
    state: PythonState
    changing: Changing
    numbers: dict[str, Number] = field(default_factory=dict)
    _places: list[tuple[str, Holder, Any]] = field(default_factory=list)
    _leaves: list[tuple[str, int]] = field(default_factory=list)

    @contextlib.contextmanager
    def active(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Within it the module can be traced once: its forward finds the stand-ins.

        Args:
            args: positional arguments of the capture.
            kwargs: keyword arguments.

        Raises:
            NumberError: one stands where it cannot be exchanged, such as in a tuple, or they are too many.
        """
        buffers, own = self.model._buffers, self.model.__dict__
        values: list[Tensor] = []
        found = [(holder, key, value, holder.name_of(key)) for holder, key, value in self.state.loaded()]
        found = [one for one in found if one[-1] in self.changing.labels]
        read = {label for _, _, value, label in found if isinstance(value, Tensor)}
        if read := read | (self.changing.labels & {A_TENSOR}):
            raise NumberError("a tensor is read as a number", labels=frozenset(read))
        found = [one for one in found if is_number(one[2])]
        if found and any(map(_asks_classes, self.state.functions)):
            raise NumberError("the code asks for the class of something", labels=frozenset(one[-1] for one in found))
        fixed = sorted({label for holder, key, _, label in found if not _is_writable(holder, key)})
        if fixed or len(found) > _MOST:
            raise NumberError(
                f"nothing can be put in the place of '{fixed[0]}'" if fixed else f"{len(found)} numbers change",
                labels=frozenset(fixed),
            )
        for holder, key, value, label in found:
            self._places.append((_NAME.format(len(values)), holder, key))
            self.numbers[_NAME.format(len(values))] = Number(label, _from_place(holder.getter(key)), type(value))
            self.state.numbers.add((id(holder.value), key))
            values.append(_tensor(value))
        leaves = pytree.tree_flatten((args, kwargs))[0] if self.changing.arguments else []
        for index, value in enumerate(leaves):
            if type(value) is float:
                self._leaves.append((_NAME.format(len(values)), index))
                self.numbers[_NAME.format(len(values))] = Number(ARGUMENTS, itemgetter(index), float, of_arguments=True)
                values.append(_tensor(value))
        if not self.numbers:
            yield
            return
        given = own.get("forward")
        own["forward"] = self._with_stand_ins(self.model.forward)
        buffers.update(zip(self.numbers, values, strict=True))
        try:
            yield
        finally:
            for name in self.numbers:
                del buffers[name]
            own.pop("forward", None) if given is None else own.update(forward=given)

    def _with_stand_ins(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def with_stand_ins(*args: Any, **kwargs: Any) -> Any:
            buffers = self.model._buffers
            # The model's own code may count its buffers: there are none but its own while it runs.
            added = {name: buffers.pop(name) for name in self.numbers}
            read: dict[str, Any] = {name: tensor.item() for name, tensor in added.items()}  # type: ignore[union-attr]
            leaves, spec = pytree.tree_flatten((args, kwargs))
            for name, index in self._leaves:
                leaves[index] = read[name]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            before = [(holder, key, _now(holder, key)) for _, holder, key in self._places]
            symbols = {str(value.node.expr): name for name, value in read.items()}
            try:
                for name, holder, key in self._places:
                    put(holder, key, read[name])
                with _told_as_numbers(self.state), symbols_as_texts() as shown, symbols_asked() as asked:
                    result = forward(*args, **kwargs)
                if caught := [self.numbers[symbols[one]].label for one in sorted(asked & symbols.keys())]:
                    raise NumberError(f"the value of '{caught[0]}' is asked for", labels=frozenset(caught))
                if told := [self.numbers[symbols[one]].label for one in sorted(shown & symbols.keys())]:
                    raise NumberError(f"'{told[0]}' becomes a text", labels=frozenset(told))
                places = [(holder.name_of(key), _now(holder, key), read[name]) for name, holder, key in self._places]
                if written := [label for label, now, given in places if now is not given]:
                    raise NumberError(f"forward assigns to '{written[0]}'", labels=frozenset(written))
                if bound := [self.numbers[name].label for name, one in read.items() if is_taken_for_granted(one)]:
                    raise NumberError(f"'{bound[0]}' must lie in a range", labels=frozenset(bound))
                return result
            except AmpError:
                raise
            except Exception as error:  # the model's own code may raise anything
                named = {symbols[one] for one in set(re.findall(r"\w+", str(error))) & symbols.keys()}
                if not named:
                    raise
                raise NumberError(
                    f"more than arithmetic is done with it: {first_line(error)}",
                    labels=frozenset(self.numbers[name].label for name in named),
                    where=user_frame(error),
                ) from error
            finally:
                for holder, key, value in before:
                    put(holder, key, value)
                buffers.update(added)

        return with_stand_ins


class _OfStandIns(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs:
            return _PYTHON.get(type(args[0]), type(args[0]))
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is type

    def __hash__(cls) -> int:
        return hash(type)


class _Type(type, metaclass=_OfStandIns):
    """`type`, by which a stand-in is a number."""


def _isinstance(value: Any, kinds: Any) -> bool:
    """`isinstance`, by which a stand-in is a number."""
    kind = _PYTHON.get(type(value))
    return isinstance(value, kinds) or (kind is not None and issubclass(kind, kinds))


_SHADOWS = {"isinstance": _isinstance, "type": _Type}


@contextlib.contextmanager
def _told_as_numbers(state: PythonState) -> Iterator[None]:
    """Within it `isinstance(k, float)` and `type(k)` in the code behind a model know what a stand-in stands for."""
    classes = {base for module in state.modules for base in type(module).__mro__}
    spaces = [vars(sys.modules[one.__module__]) for one in classes if one.__module__ in sys.modules]
    spaces += [function.__globals__ for function in state.functions]
    shadowed = []
    try:
        for space in {id(one): one for one in spaces}.values():
            if origin_of(str(space.get("__name__", ""))) is not Origin.FOREIGN:
                given = {name: value for name, value in _SHADOWS.items() if name not in space}
                shadowed.append((space, given))
                space.update(given)
        yield
    finally:
        for space, given in shadowed:
            for name, shadow in given.items():
                if space.get(name) is shadow:
                    del space[name]


@functools.lru_cache(maxsize=4096)
def _matches_classes(code: CodeType) -> bool:
    """Whether code asks for classes in a way that cannot be answered for a stand-in.

    That is by `match`, by `x.__class__`, and by `type` as a value, of which `type(x) is type` is an example.
    """
    if "__class__" in code.co_names or any(map(_asks_a_class, dis.get_instructions(code))):
        return True
    return any(_matches_classes(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def _asks_a_class(instruction: dis.Instruction) -> bool:
    if instruction.opname == "LOAD_GLOBAL" and instruction.argval == "type":
        return not (instruction.arg or 0) & _CALLED
    return instruction.opname == "MATCH_CLASS"


def _asks_classes(function: FunctionType) -> bool:
    return _matches_classes(function.__code__)


def _is_writable(holder: Holder, key: Any) -> bool:
    """Whether what is put at a key stands there as it is, and can be taken back: no code of the user's decides."""
    writer: Any = type(holder.value).__setattr__
    if holder.kind is Kind.OBJECT:
        return isinstance(getattr(type(holder.value), key, None), MemberDescriptorType) and writer is object.__setattr__
    if holder.kind is Kind.CLASS:
        return writer is type.__setattr__
    if holder.kind in (Kind.DICT, Kind.LIST):
        return not isinstance(getattr(type(holder.value), "__setitem__", None), FunctionType | NoneType)
    return holder.kind in _WRITABLE


def is_number(value: Any) -> bool:
    """Whether a value is one that an input can stand for."""
    return type(value) is float or (type(value) is int and abs(value) < _INT64)


def _tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64 if type(value) is float else torch.int64)


def _now(holder: Holder, key: Any) -> Any:
    return holder.getter(key)()


def _from_place(get: Callable[[], float]) -> Callable[[Sequence[Any]], float]:
    return lambda leaves: get()
