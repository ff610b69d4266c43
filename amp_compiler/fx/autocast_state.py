"""Autocast around a block: off, or with another type where a region names none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch


def autocast_off() -> AbstractContextManager[None]:
    """No ambient autocast: the plan decides, not the caller's context."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return _autocast_off(kinds) if kinds else _AS_IT_IS


_AS_IT_IS = contextlib.nullcontext()


@contextmanager
def _autocast_off(kinds: Sequence[str]) -> Iterator[None]:
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)


@contextmanager
def regions_in(low: torch.dtype | None) -> Iterator[None]:
    """Regions of autocast that name no type have this one, as within `torch.autocast(dtype=low)`."""
    before = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")}
    for kind, dtype in before.items():
        torch.set_autocast_dtype(kind, low or dtype)
    try:
        yield
    finally:
        for kind, dtype in before.items():
            torch.set_autocast_dtype(kind, dtype)
