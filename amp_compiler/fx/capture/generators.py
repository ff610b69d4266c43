"""Random numbers that tracing and compiling draw are put back: only running a model uses them up."""

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from amp_compiler.fx.torch_private.runtime import exchanged


@contextmanager
def generators_kept() -> Iterator[None]:
    """At its end, by an error too, every default generator of random numbers stands where it stood at the beginning.

    Those are torch's on the CPU and on the CUDA devices in use, Python's and numpy's. Dynamo draws from no generator
    of a user's own.

    Example:
        >>> before = torch.random.get_rng_state()
        >>> with generators_kept():
        ...     _ = torch.rand(3)
        >>> torch.equal(before, torch.random.get_rng_state())
        True
    """
    with contextlib.ExitStack() as stack:
        cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        torchs = [(one.get_state, one.set_state) for one in (torch.default_generator, *cuda)]
        others = [(np.random.get_state, np.random.set_state), (random.getstate, random.setstate)]
        for read, put_back in (*torchs, *others):
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


def seeds_refused() -> contextlib.AbstractContextManager[None]:
    """Within it `torch.manual_seed` and `torch.seed` raise `SeedIsSetError` in this thread.

    Example:
        >>> with seeds_refused():
        ...     torch.manual_seed(0)
        Traceback (most recent call last):
        ...
        amp_compiler.fx.capture.generators.SeedIsSetError: a graph cannot set the seed of random numbers
    """
    module: Any = torch.random
    return exchanged(module, "default_generator", _Unseeded(module.default_generator, threading.get_ident()))


class _Unseeded:
    """A generator that one thread must not seed."""

    def __init__(self, generator: torch.Generator, thread: int) -> None:
        self._generator, self._thread = generator, thread

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed") and threading.get_ident() == self._thread:
            raise SeedIsSetError("a graph cannot set the seed of random numbers")
        return getattr(self._generator, name)
