"""What Inductor writes for a GPU, on a machine without one, and its kernels compiled for sm_90."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import codecache, config
from torch._inductor.runtime import hints, triton_helpers
from torch._subclasses import FakeTensorMode
from torch.utils import _triton

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 << 30,
    warp_size=32,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20,
    gcnArchName="",
)
_ON_TORCH = {
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda device=None: H200,
    "get_device_capability": lambda device=None: (H200.major, H200.minor),
    "is_bf16_supported": lambda *given, **named: True,
}
_ON_INDUCTOR = {
    **{name: answer for name, answer in _ON_TORCH.items() if name != "get_device_capability"},
    "is_available": lambda: True,
    "get_compute_capability": lambda device=None: 10 * H200.major + H200.minor,
}
_IN_WORKERS = {name: _ON_TORCH[name] for name in ("current_device", "get_device_properties")}


def _forget() -> None:
    """What torch remembers of a process: whether there is a GPU that Triton can compile for, and its properties."""
    for remembers in (*vars(_triton).values(), hints.DeviceProperties.create):
        if hasattr(remembers, "cache_clear"):
            remembers.cache_clear()


@contextlib.contextmanager
def an_h200() -> Iterator[list[str]]:
    """Within it tensors are fake, may lie on `cuda`, and what Inductor writes is added to a list and not loaded.

    A torch without CUDA has no guard of a device's streams, which indexing with `x[...]` and copies in place ask for.
    """
    written: list[str] = []

    def not_loaded(cls: type, key: str, path: str, *rest: object, **named: object) -> SimpleNamespace:
        written.append(Path(path).read_text(encoding="utf-8"))
        return SimpleNamespace(call=lambda given: (), __file__=path)

    places = ((torch.cuda, _ON_TORCH), (CudaInterface, _ON_INDUCTOR), (CudaInterface.Worker, _IN_WORKERS))
    with contextlib.ExitStack() as stack:
        _forget()
        stack.callback(_forget)
        for place, answers in places:
            for name, answer in answers.items():
                answer = staticmethod(answer) if isinstance(place, type) else answer
                stack.enter_context(mock.patch.object(place, name, answer))
        stack.enter_context(mock.patch.object(_triton, "triton_hash_with_backend", lambda: "none"))
        stack.enter_context(mock.patch.object(codecache.PyCodeCache, "load_by_key_path", classmethod(not_loaded)))
        stack.enter_context(config.patch(force_disable_caches=True, compile_threads=1))
        stack.enter_context(FakeTensorMode())
        yield written


_KERNEL = re.compile(r"async_compile\.triton\('(\w+)', \'\'\'(.*?)\'\'\'", re.DOTALL)


def kernels(written: str) -> dict[str, str]:
    """The source of every Triton kernel in what Inductor wrote, by its name."""
    return dict(_KERNEL.findall(written))


def machine_code(name: str, source: str) -> list[str]:
    """The PTX of a kernel in each of the forms that Inductor would try; ptxas has made machine code for sm_90 of it."""
    import triton

    made: list[Any] = []
    compile_one = triton.compile

    def noted(*given: Any, **named: Any) -> Any:
        made.append(compile_one(*given, **named))
        return made[-1]

    no_driver = mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None)
    with no_driver, mock.patch.object(triton, "compile", noted):
        tuner = getattr(codecache.PyCodeCache.load(source), name)
        for form in tuner.configs:
            tuner._precompile_config(form)
    assert len(made) == len(tuner.configs) > 0 and all(one.asm["cubin"] for one in made)
    return [one.asm["ptx"] for one in made]
