"""Full garbage collections are put off while a graph is built.

Tracing and compiling make millions of objects that live on, and each full collection visits all of them: a seventh of
what the first step of a small GPT-2 takes.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_NEVER = 2**31 - 1  # the largest that Python takes
_LOCK = threading.Lock()
_BUILDERS: list[tuple[int, int, int]] = []  # the thresholds to go back to, once for every block that is entered


@contextlib.contextmanager
def without_full_collections() -> Iterator[None]:
    """Within it, also in other threads, Python collects its young objects alone. A decorator too."""
    with _LOCK:
        _BUILDERS.append(_BUILDERS[0] if _BUILDERS else gc.get_threshold())
        gc.set_threshold(*_BUILDERS[0][:2], _NEVER)
    try:
        yield
    finally:
        with _LOCK:
            before = _BUILDERS.pop()
            if not _BUILDERS:
                gc.set_threshold(*before)
