"""Where the code stands that torch's portable cache (`torch.compiler.save_cache_artifacts`) leaves out."""

from __future__ import annotations

from pathlib import Path


def kernel_folder() -> Path:
    """Where Inductor keeps its code."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


def kernel_libraries() -> list[Path]:
    """The libraries for a CPU that this process has compiled or loaded, which torch's portable cache leaves out."""
    from torch._inductor import codecache

    keys = {*codecache.CppCodeCache.cache, *codecache.CppPythonBindingsCodeCache.cache}
    return [file for key in sorted(keys) for file in sorted((kernel_folder() / key[1:3]).glob(f"{key}.*so"))]
