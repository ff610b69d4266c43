"""What takes longer than some seconds is told: where it begins to, and where it is done."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

logger = logging.getLogger("amp_compiler")
PATIENCE = 2.0  # seconds that nothing is said of


@contextmanager
def sign_of_life(name: str) -> Iterator[None]:
    """Around a call of `name`. A decorator too."""
    began = time.perf_counter()
    # Of this thread's context, which may be silent.
    timer = threading.Timer(PATIENCE, copy_context().run, (logger.warning, f"{name} has taken {PATIENCE:g} s so far"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    if (seconds := time.perf_counter() - began) >= PATIENCE:
        logger.warning("%s is done, in %.1f s", name, seconds)
