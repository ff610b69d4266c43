"""Kernels that Inductor writes for a GPU from graphs of ours, compiled for one that need not be there."""

from __future__ import annotations

import re

import pytest
import torch
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from written_for_gpu import an_h200, kernels, machine_code

from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ops.fp8 import Delayed, multiply, scaled

pytest.importorskip("triton", reason="kernels are compiled by Triton, which this platform lacks")


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
        pytest.param(products, Fp8(), marks=pytest.mark.slow),
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
