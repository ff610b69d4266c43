"""`export_onnx` gives what exporting FP32 by torch and converting the file gives.

Compared are the ops that compute, in their order, with the types that each reads; and the numbers, by true rounding.
The FP32 model is written by torch's exporter with its own optimizer, as users write it, which merges a batch norm into
the convolution before it. `export_onnx` leaves it out, so that stored data keep their names.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

import onnx
import pytest
import torch
from onnx import TensorProto
from twin_models import MODELS, make

from amp_compiler.ir.dtypes import low_type
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import Conversion, convert_onnx
from amp_compiler.onnx.export import DEFAULT_OPSET, export_onnx
from amp_compiler.onnx.exporting.exporter import quiet_exporter

FLOATS = {TensorProto.FLOAT: "fp32", TensorProto.FLOAT16: "low", TensorProto.BFLOAT16: "low"}
MOVES = {  # ops that compute nothing, and those on masks
    "Cast", "Constant", "Shape", "Identity", "Concat", "Reshape", "Transpose", "Unsqueeze", "Squeeze", "Expand",
    "Slice", "Gather", "Split", "Where",
}  # fmt: skip
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


EVERY = over(lambda name, dtype: dtype == "fp16" and name == "gpt2")


@functools.cache
def original(name: str, opset: int) -> onnx.ModelProto:
    model, inputs = make(name)
    with quiet_exporter():
        program = torch.onnx.export(model, inputs, dynamo=True, verbose=False, opset_version=opset)
    return program.model_proto


@functools.cache
def exported(name: str, dtype: str, rules: str) -> Conversion:
    model, inputs = make(name)
    first = original(name, DEFAULT_OPSET[low_type(dtype)])
    return export_onnx(
        model, inputs, rules=rules, dtype=dtype, output_names=[value.name for value in first.graph.output]
    )


@functools.cache
def converted(name: str, dtype: str, rules: str) -> onnx.ModelProto:
    return convert_onnx(original(name, DEFAULT_OPSET[low_type(dtype)]), rules=rules, dtype=dtype).model


def computed(model: onnx.ModelProto) -> list[str]:
    """The ops that compute floating-point values, with the types that they read."""
    known = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*known.input, *known.value_info, *known.output)}
    types.update({tensor.name: tensor.data_type for tensor in known.initializer})
    found = []
    for node in known.node:
        if node.op_type not in MOVES and any(types.get(name) in FLOATS for name in node.output):
            read = [FLOATS[types[name]] for name in node.input if types.get(name) in FLOATS]
            found.append(f"{node.op_type} {' '.join(read)}")
    return found


def difference(name: str, dtype: str, rules: str) -> tuple[Counter[str], Counter[str]]:
    """What only the export has, and what only the conversion has."""
    first, second = computed(exported(name, dtype, rules).model), computed(converted(name, dtype, rules))
    one, two = Counter(first), Counter(second)
    only = one - two, two - one
    kept = [item for item in first if item not in only[0] and item not in only[1]]
    assert kept == [item for item in second if item not in only[0] and item not in only[1]]
    return only


def expected(name: str) -> tuple[dict[str, int], dict[str, int]]:
    return {"BatchNormalization low fp32 fp32 fp32 fp32": 2} if name == "cnn" else {}, {}


@EVERY
def test_default_rules_give_one_plan(name, dtype):
    assert difference(name, dtype, "default") == expected(name)


@EVERY
def test_fast_rules_give_one_plan(name, dtype):
    assert difference(name, dtype, "fast") == expected(name)


@EVERY
def test_both_are_equally_near_the_fp32_model(name, dtype):
    first = original(name, DEFAULT_OPSET[low_type(dtype)])
    batch = dict(zip([value.name for value in first.graph.input], map(torch.Tensor.numpy, make(name)[1]), strict=True))
    errors = []
    for model in (exported(name, dtype, "default").model, converted(name, dtype, "default")):
        report = verify(first, model, [batch])
        assert report.first_bad is None
        errors.append(report.largest_error)
    assert 0 < max(errors) < (2e-3 if dtype == "fp16" else 1.6e-2)
    assert errors[0] < 2 * errors[1] and errors[1] < 3 * errors[0]


@EVERY
def test_the_export_is_valid_and_small(name, dtype):
    model = exported(name, dtype, "default").model
    onnx.checker.check_model(model, full_check=True)
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    assert len(stored) == len(model.graph.initializer)
    low = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[dtype]
    for node in model.graph.node:
        if node.op_type in ("MatMul", "Gemm", "Conv"):
            assert all(stored[read].data_type == low for read in node.input if read in stored), node.name
    casts = {node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    assert not casts & set(stored), "a cast of stored data is left to the run"
