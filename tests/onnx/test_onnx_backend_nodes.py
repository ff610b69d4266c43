"""ONNX's own backend node tests, those with a float input: each model converted to FP16 and to bfloat16."""

import functools
import re
from typing import Any

import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnx_models import node_tests, session

from amp_compiler.errors import AmpError, OnnxError
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx

BOUNDS = {"fp16": 5e-3, "bf16": 4e-2}
LOW = {"version": 1, "rules": [{"match": {}, "precision": "low"}]}
# Outputs that say nothing about rounding.
INCOMPARABLE = {
    "bernoulli": "draws random numbers",
    "random": "draws random numbers",
    "training_dropout": "draws random numbers",
    "attention_4d_diff_heads_mask4d_padded_kv": "onnxruntime's kernel refuses the FP32 model",
    "qk_matmul_bias_.*causal": "one output holds the mask, FP32's lowest number, which no 16-bit type holds",
}


@functools.cache
def cases() -> dict[str, Any]:
    """The node tests with an FP32 input, by name."""
    return {
        case.name: case
        for case in node_tests()
        if any(value.type.tensor_type.elem_type == TensorProto.FLOAT for value in case.model.graph.input)
        and sound(case.model)
    }


def sound(model: onnx.ModelProto) -> bool:
    """False for a model that ONNX's own checker refuses: `test_mvn`, in onnx 1.23."""
    try:
        onnx.checker.check_model(model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
        return False
    return True


def batch_of(case: Any) -> dict[str, Any]:
    arrays = [
        numpy_helper.to_array(value) if isinstance(value, TensorProto) else value for value in case.data_sets[0][0]
    ]
    names = [value.name for value in case.model.graph.input]
    return {name: array for name, array in zip(names, arrays, strict=False) if array is not None}


def loads(model: onnx.ModelProto) -> str:
    """Why ONNX Runtime does not load a model at its default optimization level; empty where it does."""
    try:
        session(model)
    except Exception as error:  # noqa: BLE001  its errors share no base class but Exception
        return str(error)
    return ""


# Every 50th model by default, all of them in the slow tests.
STEPS = pytest.mark.parametrize("step", [50, pytest.param(1, marks=pytest.mark.slow)])


def wrong_of(case: Any, dtype: str, rules: Any) -> tuple[str, bool]:
    """What is wrong with the conversion of a node test, and whether anything of it is low.

    ONNX Runtime, which hardly has bfloat16 kernels on a CPU, must load the FP16 model where it loads the original.
    """
    try:
        done = convert_onnx(case.model, dtype=dtype, rules=rules)
        onnx.checker.check_model(done.model, full_check=True)
        onnx.shape_inference.infer_shapes(done.model, check_type=True, strict_mode=True)
        if not done.plan.low_nodes:
            return "", False
        refused = loads(done.model) if dtype == "fp16" else ""
        if refused and not loads(case.model):
            return refused, True
        if rules == "default" and not any(re.search(pattern, case.name) for pattern in INCOMPARABLE):
            report = verify(case.model, done.model, [batch_of(case)], trace=False)
            return "" if report.ok(BOUNDS[dtype]) else f"{report.largest_error:.3g}", True
    except OnnxError as error:
        # A model that onnx's own version converter cannot raise is refused with a clear error.
        return "" if "version converter" in str(error) else str(error), False
    except (AmpError, onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        return f"{type(error).__name__}: {error}", False
    return "", True


@pytest.mark.parametrize("rules", ["default", LOW], ids=["default", "low"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@STEPS
def test_a_node_is_valid_and_within_tolerance_by_true_rounding(step, dtype, rules):
    """Under the default rules, and where every node is asked to be low: no op gets a type that it does not take."""
    chosen = list(cases().values())[::step]
    result = {case.name: wrong_of(case, dtype, rules) for case in chosen}
    wrong = [f"{name}: {message}"[:300] for name, (message, _) in result.items() if message]
    assert not wrong, f"{len(wrong)} of {len(chosen)}:\n" + "\n".join(wrong)
    assert len(cases()) > 1000 and sum(low for _, low in result.values()) > (150 if rules == "default" else 600) // step
