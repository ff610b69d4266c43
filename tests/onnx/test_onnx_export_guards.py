"""What `convert_onnx` keeps in FP32 without being told, `export_onnx` of the same torch model keeps too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import amp_compiler as amp
from amp_compiler.onnx.check.emulate import emulate
from amp_compiler.onnx.check.run import Runner

pytestmark = pytest.mark.long  # an export each

EYE = torch.eye(16)
LARGE = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) * 100 + 3000
NEAR = (LARGE / 100).round()
IDS = torch.randint(66000, 90000, (4, 16), generator=torch.Generator().manual_seed(1))


class Of(nn.Module):
    """A function of a product."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x.float() @ EYE)


def magnitude(a):
    return (a[:, :8] * a[:, :8] + a[:, 8:] * a[:, 8:]).sqrt()


def distances(a):
    return (a * a).sum(-1, keepdim=True) - 2 * a @ a.T + (a * a).sum(-1)


MODELS = {
    "magnitude": (magnitude, LARGE),
    "norm": (lambda a: a / ((a * a).sum(-1, keepdim=True) + 1e-12).sqrt(), LARGE),
    "mean of squares": (lambda a: a * ((a * a).mean(-1, keepdim=True) + 1e-6).rsqrt(), LARGE),
    "epsilon": (lambda a: a.relu() / (a.relu() + 1e-9), LARGE - 3000),
    "variance": (lambda a: (a * a).mean(-1) - a.mean(-1) ** 2, NEAR),
    "distance": (distances, NEAR),
    "whole numbers": (lambda a: a * 1e-5, IDS),
}


@pytest.mark.sweep(7)  # every kind: the first four leave the range of FP16, the others need digits that BF16 lacks
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_guard_holds_for_an_export(kind, dtype):
    function, x = MODELS[kind]
    model = Of(function)
    made = amp.export_onnx(model, (x,), dtype=dtype).model
    twin = emulate(made)
    got = next(iter(Runner(twin.proto, None).run(twin.feeds({made.graph.input[0].name: x.numpy()})).values()))
    want = model(x).numpy()
    assert np.isfinite(got).all() == np.isfinite(want).all()
    near = np.linalg.norm(np.nan_to_num(got - want)) / np.linalg.norm(np.nan_to_num(want))
    assert near < {"fp16": 4e-3, "bf16": 3e-2}[dtype]


class Scaled(nn.Module):
    """Takes a whole number, and gives one result twice and its input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, times: int):
        y = self.layer(x) * times
        return y, y, x


def test_whole_numbers_are_calibrated_and_what_is_given_out_twice_keeps_its_names():
    shapes = {"x": {0: torch.export.Dim.DYNAMIC}, "times": torch.export.Dim.DYNAMIC}
    batch = (torch.ones(5, 4), 7)
    made = amp.export_onnx(Scaled(), (torch.ones(2, 4), 3), dynamic_shapes=shapes, calibration=[batch]).model
    assert [one.name for one in made.graph.input] == ["x", "times"]
    assert [one.name for one in made.graph.output] == ["output_0", "output_1", "output_2"]


def test_a_result_that_is_no_tensor_is_refused():
    with pytest.raises(amp.AmpError, match="returns 3, which is no tensor"):
        amp.export_onnx(Of(lambda a: (a, 3)), (LARGE,))
