"""`export_onnx` is as near the FP32 model as converting what torch exports, by true rounding.

The FP32 model is written by torch's exporter with its own optimizer, as users write it, which merges a batch norm into
the convolution before it. `export_onnx` leaves it out, so that stored data keep their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import onnx
import pytest
import torch
from onnx import TensorProto
from twin_models import MODELS, make

from amp_compiler.ir.dtypes import low_type
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.export import DEFAULT_OPSET, export_onnx
from amp_compiler.onnx.exporting.exporter import quiet_exporter

LARGE = ("encoder", "gpt2", "bert", "vit")  # seconds each


def over(quick: Callable[[str, str], bool]) -> pytest.MarkDecorator:
    """Every model in both types; the others of the large ones are slow."""
    return pytest.mark.parametrize(
        ("name", "dtype"),
        [
            pytest.param(
                name,
                dtype,
                marks=[pytest.mark.long] * (name in LARGE)
                + [pytest.mark.slow] * (name in LARGE and not quick(name, dtype)),
            )
            for name in MODELS
            for dtype in ("fp16", "bf16")
        ],
    )


EVERY = over(lambda name, dtype: dtype == "fp16" and name in ("encoder", "gpt2"))


@functools.cache
def original(name: str, opset: int) -> onnx.ModelProto:
    model, inputs = make(name)
    with quiet_exporter():
        program = torch.onnx.export(model, inputs, dynamo=True, verbose=False, opset_version=opset)
    return program.model_proto


@functools.cache
def exported(name: str, dtype: str) -> onnx.ModelProto:
    model, inputs = make(name)
    first = original(name, DEFAULT_OPSET[low_type(dtype)])
    return export_onnx(model, inputs, dtype=dtype, output_names=[value.name for value in first.graph.output]).model


@EVERY
def test_both_are_equally_near_the_fp32_model(name, dtype):
    first = original(name, DEFAULT_OPSET[low_type(dtype)])
    batch = dict(zip([value.name for value in first.graph.input], map(torch.Tensor.numpy, make(name)[1]), strict=True))
    errors = []
    for model in (exported(name, dtype), convert_onnx(first, dtype=dtype).model):
        report = verify(first, model, [batch])
        assert report.first_bad is None
        errors.append(report.largest_error)
    assert 0 < max(errors) < (2e-3 if dtype == "fp16" else 1.6e-2)
    assert errors[0] < 2 * errors[1] and errors[1] < 3 * errors[0]


@EVERY
def test_the_export_is_valid_and_small(name, dtype):
    model = exported(name, dtype)
    onnx.checker.check_model(model, full_check=True)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    assert len(stored) == len(model.graph.initializer)
    low = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[dtype]
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Gemm", "Conv"):
            assert all(stored[read].data_type == low for read in node.input if read in stored), node.name
    casts = {node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    assert not casts & set(stored), "a cast of stored data is left to the run"
