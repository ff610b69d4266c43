"""Key-value caches of `transformers` as outputs of a captured model."""

from __future__ import annotations

import contextlib
import functools
import sys


@functools.cache
def _register_caches_once() -> None:
    try:
        from transformers.integrations.executorch import register_dynamic_cache_export_support
    except ImportError:
        return  # an older or newer transformers: its caches stay unknown to pytree, and capture says so
    with contextlib.suppress(ValueError):  # registered by somebody else
        register_dynamic_cache_export_support()


def register_caches() -> None:
    """Let `transformers`' key-value caches be taken apart as outputs, where the module that defines them is loaded.

    Whoever returns one has loaded it. Loading it here takes a second, for a model that has nothing to do with it.
    """
    if "transformers.cache_utils" in sys.modules:
        _register_caches_once()
