"""Autocast around a block: off, or with another type where a region names none."""

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from amp_compiler.errors import AmpError


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


def refuse_other_autocast(low: torch.dtype) -> None:
    """Refuse what runs within `torch.autocast` of another type than is planned for.

    Args:
        low: the low type that is planned for.

    Raises:
        AmpError: names both types.
    """
    for kind in ("cpu", "cuda"):
        around = torch.get_autocast_dtype(kind)
        if torch.is_autocast_enabled(kind) and around is not low:
            raise AmpError(
                f"a graph that is planned in {low} was called inside torch.autocast('{kind}', dtype={around})",
                hint=f"leave the autocast context out, since the rules decide, or give it dtype={low}",
            )
