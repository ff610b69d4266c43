"""Kernels that Inductor writes for a GPU from graphs of ours, compiled for one that need not be there."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import codecache, config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime import hints, triton_helpers
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _triton

from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ops.fp8 import Delayed, multiply, scaled

pytest.importorskip("triton", reason="kernels are compiled by Triton, which this platform lacks")


H200 = SimpleNamespace(
    name="NVIDIA H200", gcnArchName="", major=9, minor=0, multi_processor_count=132, total_memory=141 << 30,
    warp_size=32, max_threads_per_block=1024, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20,
)  # fmt: skip
_ON_TORCH = {
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_properties": lambda device=None: H200,
    "get_device_capability": lambda device=None: (H200.major, H200.minor),
    "is_bf16_supported": lambda *inputs, **named: True,
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
        return SimpleNamespace(call=lambda inputs: (), __file__=path)

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

    result: list[Any] = []
    compile_one = triton.compile

    def noted(*inputs: Any, **named: Any) -> Any:
        result.append(compile_one(*inputs, **named))
        return result[-1]

    no_driver = mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None)
    with no_driver, mock.patch.object(triton, "compile", noted):
        tuner = getattr(codecache.PyCodeCache.load(source), name)
        for form in tuner.configs:
            tuner._precompile_config(form)
    assert len(result) == len(tuner.configs) > 0 and all(one.asm["cubin"] for one in result)
    return [one.asm["ptx"] for one in result]


def products(x, weight, gradient, way):
    """The three products of an FP8 linear layer, as a graph of a step has them."""
    low, narrow, wide = x.dtype, torch.float8_e4m3fn, torch.float8_e5m2
    result = multiply(scaled(x, narrow, way, 1), scaled(weight.t(), narrow, way, 0), low, way)
    to_input = multiply(scaled(gradient, wide, way, 1), scaled(weight, narrow, way, 0), low, way)
    return result, to_input, multiply(scaled(gradient.t(), wide, way, 1), scaled(x, narrow, way, 0), low, way)


def with_delayed_scales(x, weight, gradient, way):
    """The same of a layer whose scales are of the steps before, with what it remembers behind the step."""
    low, narrow, wide = x.dtype, torch.float8_e4m3fn, torch.float8_e5m2
    delayed = Delayed(x.new_empty(3, 1 + way.history, dtype=torch.float32), (way, way))
    left, right = delayed.scaled(0, x, narrow, way, 1), delayed.scaled(1, weight.t(), narrow, way, 0)
    incoming = delayed.scaled(2, gradient, wide, way, 1)
    products = multiply(left, right, low, way), multiply(incoming, right.t(), low, way)
    return *products, multiply(incoming.t(), left, low, way), delayed.following()


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("built", "way"),
    [
        pytest.param(products, Fp8(), marks=pytest.mark.slow),
        (products, Fp8("e4m3", "rowwise", True)),
        (with_delayed_scales, Fp8(scaling="delayed", history=16)),
    ],
    ids=["tensorwise", "rowwise", "delayed"],
)
def test_fp8_products_are_three_calls_of_the_library_and_casts_that_compile_for_a_gpu(built, way):
    with an_h200() as written:
        args = [torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((96, 64), (128, 64), (96, 128))]
        traced = make_fx(lambda *inputs: built(*inputs, way))(*args)
        compile_fx_inner(make_fx(traced, select_decomp_table())(*args), args)
    assert len(re.findall(r"extern_kernels\._scaled_mm\(", written[0])) == 3
    result = kernels(written[0])
    assert any("fp8" in source for source in result.values())
    name = next(name for name, source in result.items() if "fp8" in source)
    assert all(".target sm_90" in one for one in machine_code(name, result[name]))
