"""Kernels that Inductor writes for a GPU from graphs of ours, compiled for one that need not be there."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._triton import has_triton
from written_for_gpu import an_h200, kernels, machine_code

from amp_compiler.backends.inductor import _options
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ops.fp8 import Delayed, multiply, scaled
from amp_compiler.passes.device import remake_masks

pytest.importorskip("triton", reason="kernels are compiled by Triton, which this platform lacks")

aten = torch.ops.aten
IMAGES, FILTERS, CHANNELS = (64, 64, 56, 56), (64, 64, 3, 3), (64,)


def block(image, kernel, weight, shift, gradient):
    """A convolution, a batch norm and a ReLU, with the norm's gradients, as a step's graph has them."""
    data = aten.convolution.default(image, kernel, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    normal, mean, scale = aten.native_batch_norm.default(data, weight, shift, None, None, True, 0.1, 1e-5)
    relu = aten.relu.default(normal)
    masked = aten.threshold_backward.default(gradient, relu, 0)
    kept = (None, None, mean, scale, True, 1e-5, [True, True, True])
    return relu, *aten.native_batch_norm_backward.default(masked, data, weight, *kept)


def written_of_block(dtype):
    with an_h200() as written:
        images, filters = (torch.empty(one, dtype=dtype, device="cuda") for one in (IMAGES, FILTERS))
        given = [images, filters, *(torch.empty(CHANNELS, device="cuda") for _ in range(2)), torch.empty_like(images)]
        options = _options(make_fx(block)(*given), False)
        with config.patch({name: value for name, value in options.items() if hasattr(config, name)}):
            compile_fx_inner(make_fx(block, select_decomp_table())(*given), given)
    return kernels(written[0])


def sums_of_gradients(found):
    """Kernels that sum masked gradients over channels, and how many images each reads."""
    return {
        name: len(re.findall(r"'in_ptr\d+': '\*(?:bf16|fp16)'", source))
        for name, source in found.items()
        if "reduction(" in source and " <= " in source
    }


@pytest.mark.compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_what_a_mask_is_remade_of_compiles_for_a_gpu_and_reads_one_image_less(dtype, monkeypatch):
    before = has_triton()  # remembered by torch, whatever has run before
    remade = written_of_block(dtype)
    assert has_triton() == before
    sums = sums_of_gradients(remade)
    assert sums and set(sums.values()) == {2}, "the gradient and the norm's data"
    for name in remade:
        if " <= " in remade[name]:
            assert all(".target sm_90" in one for one in machine_code(name, remade[name]))
    monkeypatch.setattr(remake_masks.RemakeMasks, "awaited", lambda self, graph: False)
    assert set(sums_of_gradients(written_of_block(dtype)).values()) == {3}, "and the ReLU's result"


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
    ("made", "way"),
    [
        (products, Fp8()),
        (products, Fp8("e4m3", "rowwise", True)),
        (with_delayed_scales, Fp8(scaling="delayed", history=16)),
    ],
    ids=["tensorwise", "rowwise", "delayed"],
)
def test_fp8_products_are_three_calls_of_the_library_and_casts_that_compile_for_a_gpu(made, way):
    with an_h200() as written:
        given = [torch.empty(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((96, 64), (128, 64), (96, 128))]
        traced = make_fx(lambda *inputs: made(*inputs, way))(*given)
        compile_fx_inner(make_fx(traced, select_decomp_table())(*given), given)
    assert len(re.findall(r"extern_kernels\._scaled_mm\(", written[0])) == 3
    found = kernels(written[0])
    assert any("fp8" in source for source in found.values())
    name = next(name for name, source in found.items() if "fp8" in source)
    assert all(".target sm_90" in one for one in machine_code(name, found[name]))
