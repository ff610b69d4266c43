"""What is private of torch's portable cache (`torch.compiler.save_cache_artifacts`), and of the code that it lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from torch.compiler import _cache

KIND = "amp_compiler"
"""Stands in the portable cache for what this package has added."""


@functools.cache
def _registered(put: Callable[[str, bytes], None]) -> None:
    class Artifact(_cache.CacheArtifact):
        def populate_cache(self) -> None:
            put(self.key, self.content)

        @staticmethod
        def type() -> str:
            return KIND

    _cache.CacheArtifactFactory.register(Artifact)


def register_artifacts(put: Callable[[str, bytes], None]) -> None:
    """Let torch's portable cache hold files of ours; nothing is done where it does so already.

    Args:
        put: is given the name and the content of each when the cache is loaded.
    """
    if KIND not in _cache.CacheArtifactFactory._artifact_types:
        _registered(put)


def record_artifact(name: str, content: bytes) -> None:
    """Put a file into the portable cache; they must have been registered.

    Args:
        name: as `put` will be given it.
        content: of the file.
    """
    _cache.CacheArtifactManager.record_artifact(KIND, name, content)


def kernel_folder() -> Path:
    """Where Inductor keeps its code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def kernel_libraries() -> list[Path]:
    """The libraries for a CPU that this process has compiled or loaded, which torch's portable cache leaves out."""
    from torch._inductor import codecache

    keys = {*codecache.CppCodeCache.cache, *codecache.CppPythonBindingsCodeCache.cache}
    return [file for key in sorted(keys) for file in sorted((kernel_folder() / key[1:3]).glob(f"{key}.*so"))]
