"""Random numbers that tracing and compiling draw are put back: only running a model uses them up."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import nn

_Access = tuple[Callable[[], Any], Callable[[Any], object]]  # reads the state of a generator, and sets it


@contextmanager
def generators_kept(*values: Any) -> Iterator[None]:
    """At its end, by an error too, every generator of random numbers stands where it stood at the beginning.

    Those are the default ones of torch on the CPU and on the CUDA devices in use, Python's, numpy's, and those that
    are found in `values`.

    Args:
        values: modules, functions, and containers of arguments: generators in attributes and closures are found too.

    Example:
        >>> before = torch.random.get_rng_state()
        >>> with generators_kept():
        ...     _ = torch.rand(3)
        >>> torch.equal(before, torch.random.get_rng_state())
        True
    """
    with contextlib.ExitStack() as stack:
        for read, put_back in [*_defaults(), *_found(values)]:
            stack.callback(put_back, read())
        yield


def random_state(device: torch.device) -> list[torch.Tensor]:
    """The state of torch's own generators, of the CPU and of one device."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_random_state(device: torch.device, states: Sequence[torch.Tensor]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)


class SeedIsSetError(Exception):
    """A seed is set while a graph is captured, which would hold the numbers drawn and not the seed."""


@contextmanager
def seeds_refused() -> Iterator[None]:
    """Within it `torch.manual_seed` and `torch.seed` raise `SeedIsSetError` in this thread.

    Example:
        >>> with seeds_refused():
        ...     torch.manual_seed(0)
        Traceback (most recent call last):
        ...
        amp_compiler.fx.capture.generators.SeedIsSetError: a graph cannot set the seed of random numbers
    """
    module: Any = torch.random
    kept = module.default_generator
    module.default_generator = _Unseeded(kept, threading.get_ident())
    try:
        yield
    finally:
        module.default_generator = kept


class _Unseeded:
    """A generator that one thread must not seed."""

    def __init__(self, generator: torch.Generator, thread: int) -> None:
        self._generator, self._thread = generator, thread

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed") and threading.get_ident() == self._thread:
            raise SeedIsSetError("a graph cannot set the seed of random numbers")
        return getattr(self._generator, name)


def _defaults() -> list[_Access]:
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    torchs = [(one.get_state, one.set_state) for one in (torch.default_generator, *cuda)]
    return [*torchs, (np.random.get_state, np.random.set_state), (random.getstate, random.setstate)]


def _found(value: Any) -> Iterator[_Access]:
    """What reads and sets the state of each generator in `value`."""
    pending, seen = [value], set()
    while pending:
        for leaf in pytree.tree_leaves(pending.pop(), is_leaf=lambda one: isinstance(one, (nn.Module, FunctionType))):
            if id(leaf) in seen or isinstance(leaf, (torch.Tensor, int, float, str)):
                continue
            seen.add(id(leaf))
            if isinstance(leaf, (torch.Generator, np.random.RandomState)):
                yield leaf.get_state, leaf.set_state
            elif isinstance(leaf, random.Random):
                yield leaf.getstate, leaf.setstate
            elif isinstance(leaf, np.random.Generator):
                bits = leaf.bit_generator
                yield partial(getattr, bits, "state"), partial(setattr, bits, "state")
            elif isinstance(leaf, nn.Module):
                pending.append(vars(leaf))  # its submodules among them
            elif isinstance(leaf, MethodType):
                pending += [leaf.__func__, leaf.__self__]
            elif isinstance(leaf, FunctionType):
                pending += [cell.cell_contents for cell in leaf.__closure__ or () if _is_filled(cell)]
                pending += [leaf.__globals__.get(name) for name in leaf.__code__.co_names]
                pending += [leaf.__defaults__, leaf.__kwdefaults__]


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False
