"""Garbage collections are put off while a graph is built.

Tracing and compiling make millions of objects that live on, and each full collection visits all of them: a seventh of
what the first step of a small GPT-2 takes. Most of the others die at once: the longer the young ones are left alone,
the fewer are there to visit.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

_NEVER = 2**31 - 1  # the largest that Python takes
_YOUNG = 20_000  # new objects until the young ones are collected, which hold some megabytes
_LOCK = threading.Lock()
_BUILDERS: list[tuple[int, int, int]] = []  # the thresholds to go back to, once for every block that is entered


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """Within it, also in other threads, Python collects its young objects alone, and less often. A decorator too.

    Where a user has switched collections off, they stay off.
    """
    with _LOCK:
        _BUILDERS.append(_BUILDERS[0] if _BUILDERS else gc.get_threshold())
        young, middle, _ = _BUILDERS[0]
        gc.set_threshold(max(young, _YOUNG) if young else 0, middle, _NEVER)
    try:
        yield
    finally:
        with _LOCK:
            before = _BUILDERS.pop()
            if not _BUILDERS:
                gc.set_threshold(*before)
