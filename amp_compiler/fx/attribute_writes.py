"""What a forward writes beside its result: found while it is captured, undone then, and done again after every call.

A tensor that is assigned to an attribute (the loss of a mixture of experts, the state of a recurrent model) becomes one
more result of the graph. A number that changes with every call, or an object that no graph can make, is an error, after
which the model is run in Dynamo's pieces: Dynamo runs such lines in Python.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from amp_compiler.errors import CaptureError, HookError
from amp_compiler.fx.generators import generators_kept
from amp_compiler.fx.python_state import (
    BY_NAME,
    Holder,
    Kind,
    PythonState,
    content_of,
    environment,
    fill,
    is_plain,
    put,
)

_ABSENT = object()
_COPIED = 1024  # elements; torch computes with constants of one element while it traces, and lets the others be


@dataclass(frozen=True)
class Write:
    """One assignment.

    Args:
        label: what is written, such as `encoder.aux_loss`.
        put: assigns a value.
        spec: tree of the value.
        leaves: its leaves; a `Result` stands for a result of the graph.
    """

    label: str
    put: Callable[[Any], None]
    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]


@dataclass(frozen=True)
class Result:
    """A result of the graph.

    Args:
        place: among all results, the forward's own first.
    """

    place: int


@dataclass(frozen=True)
class Writes:
    """What is written after every call of a captured program.

    Args:
        assignments: one by one, in the order in which the places were found.
    """

    assignments: tuple[Write, ...] = ()

    def put(self, results: Sequence[Any]) -> None:
        """Assign what a call gave.

        Args:
            results: all results of the graph, flat.
        """
        for write in self.assignments:
            leaves = [results[leaf.place] if isinstance(leaf, Result) else leaf for leaf in write.leaves]
            write.put(pytree.tree_unflatten(leaves, write.spec))


@dataclass
class WriteWatch:
    """Watches one capture.

    Args:
        model: the module that is captured.
        state: what its code reaches.

    Attributes:
        writes: what it was seen to write.
        out_spec: tree of the forward's own result where others were added to it, else `None`.
    """

    model: nn.Module
    state: PythonState
    writes: Writes = Writes()
    out_spec: pytree.TreeSpec | None = None
    _before: list[tuple[Holder, dict[Any, Any]]] = field(default_factory=list)
    _drawn: Any = None
    _arrays: list[bytes] = field(default_factory=list)
    _environment: Any = None
    _depth: int = 0
    _tables: list[tuple[nn.Module, dict[str, dict[str, Any]]]] = field(default_factory=list)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Within it the module is captured; its result is a pair with the added ones where there are any.

        All that was written is as before at the end, however it ends.
        """
        thread = threading.get_ident()

        def begins(*_: Any) -> None:
            if threading.get_ident() == thread:  # others may run the model meanwhile
                self._depth += 1
                if self._depth == 1:
                    self._begin()

        def ends(module: nn.Module, args: Any, output: Any) -> Any:
            if threading.get_ident() != thread:
                return None
            self._depth -= 1  # a model may call itself
            return self._end(output) if self._depth == 0 else None

        begins.of_capture = ends.of_capture = True  # type: ignore[attr-defined]  # no sign of another model
        begin = self.model.register_forward_pre_hook(begins, prepend=True)
        end = self.model.register_forward_hook(ends)
        try:
            with restored(self.state):
                yield
        finally:
            begin.remove()
            end.remove()

    def _begin(self) -> None:
        self._drawn = _generators(self.state)
        self._arrays = [content_of(one) for one in self.state.arrays]
        self._environment = dict(environment()) if self.state.environment else None
        self._before = [(holder, holder.items()) for holder in self.state.holders.values()]
        self._tables = [
            (module, {name: dict(module.__dict__[name]) for name in ("_parameters", "_buffers", "_modules")})
            for module in self.state.modules
        ]

    def _end(self, output: Any) -> Any:
        """The output with the tensors that were written, behind those that are in it anyway."""
        now = _generators(self.state)
        if now != self._drawn:
            drawn = zip(self.state.generators, now[2:], self._drawn[2:], strict=True)
            lost = any(isinstance(one, random.Random) and new != old for one, new, old in drawn)
            raise (HookError if lost else CaptureError)(  # a random.Random of its own Dynamo freezes too
                "forward draws from Python's or NumPy's random numbers, which one graph would freeze",
                hint="draw from torch, or draw before the call and pass a tensor",
            )
        if [content_of(one) for one in self.state.arrays] != self._arrays:
            raise CaptureError(
                "forward writes to an array that is no tensor, which one graph would freeze",
                hint="keep what it holds in a tensor",
            )
        if self.state.environment and environment() != self._environment:
            raise _refused("os.environ", "changes")
        own = pytree.tree_leaves(output)
        results = _Results(own)
        assignments = []
        self._check_tables()
        for holder, before in self._before:
            after = holder.items()
            if before.keys() != after.keys() or any(before[key] is not after[key] for key in after):
                assignments += _assignments(holder, before, after, self.state, results)
        self.writes = Writes(tuple(assignments))
        if not results.added:
            return None
        self.out_spec = pytree.tree_structure(output)
        return output, tuple(results.added)

    def _check_tables(self) -> None:
        """Copy what buffers were assigned into them; parameters and modules are not changed by any graph."""
        named = {id(module): name for name, module in self.model.named_modules()}
        for module, tables in self._tables:
            path = named.get(id(module), type(module).__name__)
            for table in ("_parameters", "_modules"):
                now = module.__dict__[table]
                if now.keys() != tables[table].keys() or any(now[key] is not tables[table][key] for key in now):
                    changed = next(
                        key for key in {**tables[table], **now} if now.get(key) is not tables[table].get(key)
                    )
                    raise _refused(
                        f"{path}.{changed}".removeprefix("."),
                        "assigns a parameter or a module to",
                        self.state.line_that_stores(changed),
                    )
            for name, buffer in module._buffers.items():
                old = tables["_buffers"].get(name, _ABSENT)
                if buffer is not old:
                    _copy_buffer(old, buffer, f"{path}.{name}".removeprefix("."))
                    if module is not self.model:  # export does it for the model's own
                        module._buffers[name] = old  # type: ignore[assignment]


def _copy_buffer(old: Any, new: Tensor | None, label: str) -> None:
    fits = isinstance(old, Tensor) and isinstance(new, Tensor)
    if not fits or old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:  # type: ignore[union-attr]
        raise _refused(label, "assigns a tensor of another form to the buffer")
    old.copy_(new.detach())  # type: ignore[union-attr]


class _Results:
    """The results of a graph in the making: those of the forward, and behind them what is added."""

    def __init__(self, own: Sequence[Any]) -> None:
        self.added: list[Tensor] = []
        self._own = len(own)
        self._places = {id(leaf): place for place, leaf in enumerate(own) if isinstance(leaf, Tensor)}

    def place(self, tensor: Tensor) -> Result:
        """The result that is this tensor; one that is written twice stays one."""
        if id(tensor) not in self._places:
            self._places[id(tensor)] = self._own + len(self.added)
            self.added.append(tensor)
        return Result(self._places[id(tensor)])


def _assignments(
    holder: Holder, before: dict[Any, Any], after: dict[Any, Any], state: PythonState, results: _Results
) -> list[Write]:
    """How to write what a holder holds now, where it held something else."""
    if holder.kind is Kind.SET:
        raise _refused(holder.label, "changes the set")
    if gone := [key for key in before if key not in after]:
        raise _refused(holder.name_of(gone[0]), "takes away", state.line_that_stores(gone[0]))
    changed = {key: value for key, value in after.items() if key not in before or value is not before[key]}
    if holder.kind is Kind.LIST and changed.keys() - before.keys():
        if before:
            raise _refused(holder.label, "appends, without emptying it first, to")
        return [_write(holder.label, partial(_extend, holder), list(after.values()), results)]
    found = []
    for key, value in changed.items():
        label, old = holder.name_of(key), before.get(key, _ABSENT)
        if type(old) is type(value) and is_plain(value) and old == value:
            continue
        counts = isinstance(value, (int, float, complex)) and not isinstance(value, bool)
        loaded = state.read(holder)
        read = loaded is None or key in loaded
        if counts and read and isinstance(old, (int, float, complex)) and not isinstance(old, bool):
            raise _refused(label, f"changes the number {old!r} to {value!r} in", state.line_that_stores(key))
        found.append(_write(label, partial(put, holder, key), value, results, state.line_that_stores(key)))
    return found


def _write(label: str, put: Callable[[Any], None], value: Any, results: _Results, line: str = "") -> Write:
    leaves, spec = pytree.tree_flatten(value)
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, FakeTensor) and not isinstance(leaf, nn.Parameter):
            found.append(results.place(leaf))
        elif is_plain(leaf) and not isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found.append(leaf)
        else:
            raise _refused(label, f"assigns a {type(leaf).__name__} to", line)
    return Write(label, put, spec, tuple(found))


def _extend(holder: Holder, values: list[Any]) -> None:
    holder.get().extend(values)


class Saved:
    """What `state` holds, as it is now.

    Args:
        state: what the code of a model reaches.
    """

    def __init__(self, state: PythonState) -> None:
        self._holders = [(holder, holder.items()) for holder in state.holders.values()]
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [
            (table, dict(table))
            for module in state.modules
            for table in (module._parameters, module._buffers, module._modules)
        ]
        self._transient = [(module, set(module._non_persistent_buffers_set)) for module in state.modules]
        self._misses = [(cache, cache.cache_info().misses) for cache in state.caches]
        # A tensor that is no buffer is a constant to the tracer, which computes with constants where it can.
        self._tensors = {id(value): value for _, items in self._holders for value in items.values() if _is_real(value)}
        self._copies = {key: tensor.detach().clone() for key, tensor in self._tensors.items()}
        self._arrays = [(one, content) for one in state.arrays if (content := content_of(one))]
        self._variables = dict(os.environ) if state.environment else None
        self._drawn = _default_generators()

    def put_back(self) -> None:
        """Undo what was written meanwhile; generators of the model's own are left as they are."""
        if _default_generators() != self._drawn:
            _set_generators(self._drawn)
        for holder, items in self._holders:
            _restore(holder, items)
        for array, before in self._arrays:
            if content_of(array) != before:
                fill(array, before)
        if self._variables is not None and self._variables != os.environ:
            os.environ.clear()
            os.environ.update(self._variables)
        for table, held in self._tables:
            if table.keys() != held.keys() or any(table[key] is not held[key] for key in held):
                table.clear()
                table.update(held)
        for module, names in self._transient:
            module._non_persistent_buffers_set = names
        for cache, misses in self._misses:
            if cache.cache_info().misses != misses:
                cache.cache_clear()  # what the trace put there is no real tensor
        for key, tensor in self._tensors.items():
            if not torch.equal(tensor, self._copies[key]):
                tensor.detach().copy_(self._copies[key])


@contextlib.contextmanager
def restored(state: PythonState) -> Iterator[None]:
    """Whatever is written within it to what `state` holds is as before behind it."""
    saved = Saved(state)
    try:
        with generators_kept(state.generators):
            yield
    finally:
        saved.put_back()


def _generators(state: PythonState) -> tuple[Any, ...]:
    """The states of Python's and NumPy's own generators, NumPy's where it is loaded, and of those of the model's."""
    return (*_default_generators(), *(pickle.dumps(one) for one in state.generators))


def _default_generators() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return random.getstate(), ()
    kind, words, *rest = numpy.random.get_state()
    return random.getstate(), (kind, tuple(words.tolist()), *rest)


def _set_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    if states[1]:
        sys.modules["numpy"].random.set_state(states[1])


def _is_real(value: Any) -> bool:
    """Whether a value is a small tensor whose elements can be read; FSDP has some whose memory was given back."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
        return False
    return value.numel() <= _COPIED and (not value.numel() or value.untyped_storage().nbytes() > 0)


def _restore(holder: Holder, items: dict[Any, Any]) -> None:
    now = holder.items()
    if now.keys() == items.keys() and all(now[key] is items[key] for key in now):
        return
    value = holder.value
    if holder.kind is Kind.LIST:
        value.clear()
        value.extend(items.values())
    elif holder.kind is Kind.SET:
        value.clear()
        value.update(items)
    elif holder.kind is Kind.CONTEXT:
        value.set(items[""])  # one that had none is back in the caller's context, see `capture_module`
    elif holder.kind is Kind.CELL:
        if items:
            value.cell_contents = items[""]
        else:
            del value.cell_contents
    else:
        for key in [key for key in now if key not in items]:
            delattr(value, key) if holder.kind in BY_NAME else value.pop(key)
        for key, old in items.items():
            if now.get(key, _ABSENT) is not old:
                setattr(value, key, old) if holder.kind in BY_NAME else value.__setitem__(key, old)


def _refused(label: str, what: str, line: str = "") -> CaptureError:
    return CaptureError(
        f"forward {what} '{label}', which one graph cannot do",
        where=line,
        hint="return the value, keep it as a tensor in a buffer, or write it after the call",
    )
