"""A 16-bit type goes by every name that it has, wherever `dtype=` is taken."""

from typing import Any, get_args

import onnx
import pytest
import torch
from torch import nn
from toys import sgd_step

import amp_compiler as amp
from amp_compiler.ir.dtypes import LowName

X = torch.ones(2, 4)


def linear() -> nn.Module:
    return nn.Linear(4, 2).eval()


def file() -> onnx.ModelProto:
    graph = onnx.parser.parse_graph("g (float[2,4] x, float[4,2] w) => (float[2,2] y) { y = MatMul(x, w) }")
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 22)], ir_version=10)


def compiled(dtype: Any) -> str:
    model = amp.compile(linear(), dtype=dtype, backend="eager")
    model(X)
    return model.plan.dtype


def stepped(dtype: Any) -> str:
    step = sgd_step(linear(), lambda m, x: m(x).square().mean(), dtype=dtype)
    step(X)
    return step.plan.dtype


def through_torch(dtype: Any) -> str:
    """The type of the product within `torch.compile`, which its result is rounded to."""
    model = nn.Linear(1, 1, bias=False).eval()
    nn.init.constant_(model.weight, 1 + 2**-9)
    options = {"dtype": dtype, "backend": "eager"}
    with torch.no_grad():
        return (
            "bf16" if torch.compile(model, backend="amp_compiler", options=options)(torch.ones(1, 1)) == 1 else "fp16"
        )


TAKE_A_TYPE = {
    "compile": compiled,
    "training_step": stepped,
    "torch.compile": through_torch,
    "explain": lambda dtype: amp.explain(linear(), (X,), dtype=dtype).dtype,
    "explain_onnx": lambda dtype: amp.explain(file(), dtype=dtype).dtype,
    "profile": lambda dtype: amp.profile(linear(), [X], dtype=dtype).dtype,
    "find_nonfinite": lambda dtype: "fp16" if amp.find_nonfinite(linear(), 1e5 * X, dtype=dtype) else "bf16",
    "tune": lambda dtype: amp.tune(linear(), [X], dtype=dtype).dtype,
    "convert_onnx": lambda dtype: amp.convert_onnx(file(), dtype=dtype).plan.dtype,
    "export_onnx": lambda dtype: amp.export_onnx(linear(), (X,), dtype=dtype).plan.dtype,
}


@pytest.mark.parametrize("name", TAKE_A_TYPE)
def test_a_type_of_torch_and_its_names_are_taken(name):
    assert TAKE_A_TYPE[name](torch.bfloat16) == "bf16"
    assert TAKE_A_TYPE[name]("half") == "fp16"


@pytest.mark.parametrize("name", TAKE_A_TYPE)
def test_any_other_is_refused_with_the_nearest(name):
    with pytest.raises(Exception, match="dtype='bflaot16' is no 16-bit type; did you mean 'bfloat16'") as caught:
        TAKE_A_TYPE[name]("bflaot16")
    # Dynamo wraps what a backend raises.
    assert isinstance(caught.value, amp.AmpError) or name == "torch.compile"


@pytest.mark.parametrize("name", get_args(LowName))
def test_rules_take_every_name(name):
    low = amp.explain(linear(), (X,), dtype=name)
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"dtype": name}, "precision": "fp32"}]}
    assert low.nodes[0].precision == "low"
    assert amp.explain(linear(), (X,), rules=rules, dtype=name).nodes[0].precision == "fp32"
    rules["rules"] = [
        {"match": {"inputs": name}, "precision": "keep"},
        {"match": {"inputs": "float32"}, "math": "float32"},
    ]
    assert amp.explain(linear(), (X,), rules=rules, dtype=name).nodes[0].math == "fp32"


def test_what_is_made_fp32_goes_by_its_names():
    graph = onnx.parser.parse_graph("g (float16[2,4] x, float16[4,2] w) => (float16[2,2] y) { y = MatMul(x, w) }")
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 22)], ir_version=10)
    texts = {
        str(amp.convert_onnx(model, dtype="bf16", as_fp32=name).model.graph) for name in ("fp16", "float16", "half")
    }
    assert len(texts) == 1
    with pytest.raises(amp.OnnxError, match="'pf16' is no type that can be made FP32; did you mean 'fp16'"):
        amp.convert_onnx(model, dtype="bf16", as_fp32="pf16")


def test_a_profile_is_asked_by_every_name():
    profile = amp.profile(nn.Linear(4, 2, bias=False), [1e-8 * X], dtype="bf16")
    assert profile.worst("half") == profile.worst(torch.float16) == profile.worst("fp16") != profile.worst("bf16")
    assert profile.loss_scale(torch.float16) == profile.loss_scale("fp16")
