"""`export_onnx` is as near the FP32 model as converting what torch exports, by true rounding.

The FP32 model is written by torch's exporter with its own optimizer, as users write it, which merges a batch norm into
the convolution before it. `export_onnx` leaves it out, so that stored data keep their names.
"""

from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto
from onnx_corpus import exported
from onnx_models import kept
from torch import nn

from amp_compiler.ir.dtypes import low_type
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.export import DEFAULT_OPSET, export_onnx

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


class LastState(nn.Module):
    """An LSTM and a linear layer on all of its states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0])


def mlp() -> Made:
    model = nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8), nn.Softmax(-1)
    )
    return model, (torch.randn(4, 32),)


def cnn() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, bias=False), nn.BatchNorm2d(16), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model, (torch.randn(2, 3, 12, 12),)


def encoder() -> Made:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0), (torch.randn(2, 10, 32),)


def lstm() -> Made:
    return LastState(), (torch.randn(3, 7, 16),)


MODELS: dict[str, Any] = {one.__name__: one for one in (mlp, cnn, encoder, lstm)}
NAMES = (*MODELS, "gpt2", "bert", "vit")


def make(name: str) -> Made:
    """The model, the same on every call."""
    torch.manual_seed(0)
    if name in MODELS:
        model, inputs = MODELS[name]()
    else:
        model, named = exported.module(name)
        inputs = tuple(named.values())
    for label, parameter in model.named_parameters():
        if label.endswith("bias") and not parameter.any():  # the exporter's optimizer leaves a bias of zeros out
            nn.init.normal_(parameter, std=0.1)
    return model.eval(), inputs


LARGE = ("encoder", "gpt2", "bert", "vit")  # seconds each


def marks(name: str, dtype: str) -> list[pytest.MarkDecorator]:
    """Two of the large ones run in FP16 every day."""
    slow = name in LARGE and (name, dtype) not in (("encoder", "fp16"), ("gpt2", "fp16"))
    return [pytest.mark.long] * (name in LARGE) + [pytest.mark.slow] * slow


EVERY = pytest.mark.parametrize(
    ("name", "dtype"),
    [pytest.param(name, dtype, marks=marks(name, dtype)) for name in NAMES for dtype in ("fp16", "bf16")],
)


@EVERY
def test_the_export_is_valid_and_small_and_both_are_equally_near_the_fp32_model(name, dtype):
    module, inputs = make(name)
    opset = DEFAULT_OPSET[low_type(dtype)]
    export = lambda: exported.export(module, inputs, opset_version=opset).model_proto  # noqa: E731
    first = kept(f"{name}_opset_{opset}", export, exported.__file__, __file__)
    batch = {value.name: tensor.numpy() for value, tensor in zip(first.graph.input, inputs, strict=True)}
    names = [value.name for value in first.graph.output]
    written = export_onnx(module, inputs, dtype=dtype, output_names=names).model
    errors = []
    for model in (written, convert_onnx(first, dtype=dtype).model):
        report = verify(first, model, [batch])
        assert report.first_bad is None
        errors.append(report.largest_error)
    assert 0 < max(errors) < (2e-3 if dtype == "fp16" else 1.6e-2)
    assert errors[0] < 2 * errors[1] and errors[1] < 3 * errors[0]
    onnx.checker.check_model(written, full_check=True)
    stored = {tensor.name: tensor for tensor in written.graph.initializer}
    assert len(stored) == len(written.graph.initializer)
    low = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}[dtype]
    for node in written.graph.node:
        if node.op_type in ("MatMul", "Gemm", "Conv"):
            assert all(stored[read].data_type == low for read in node.input if read in stored), node.name
    casts = {node.input[0] for node in written.graph.node if node.op_type == "Cast"}
    assert not casts & set(stored), "a cast of stored data is left to the run"
