"""`export_onnx` keeps in FP32 what leaves FP16's range in batches, and what `convert_onnx` keeps without being told."""

import numpy as np
import pytest
import torch
from onnx_models import outputs, precisions, run_tensors
from torch import nn

import amp_compiler as amp

pytestmark = pytest.mark.long  # an export each


class Growing(nn.Module):
    """Numbers that grow beyond 65504 between two layers, and come back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        grown = self.middle(self.first(x) * scale)
        return self.last(torch.tanh(grown / scale))


def batch(scale: float, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)), torch.tensor(scale)


def test_what_leaves_the_range_stays_fp32():
    model = Growing().eval()
    plain = amp.export_onnx(model, batch(1e5))
    assert precisions(plain)["middle"] == "low"
    done = amp.export_onnx(model, batch(1.0), calibration=[batch(1.0), batch(1e5)])
    result = precisions(done)
    assert result["middle"] == "fp32" and result["first"] == result["last"] == "low"
    middle = next(node for node in done.plan.nodes if node.module == "middle")
    assert "in calibration; fp16 ends at 65504" in middle.reason and middle.source.endswith("calibrated.py:23")
    want = model(*batch(1e5)).detach().numpy()
    assert np.abs(run_tensors(done.model, *batch(1e5)) - want).max() < 1e-2 * np.abs(want).max()
    assert precisions(amp.export_onnx(model, batch(1.0), calibration=[batch(1.0)]))["middle"] == "low"
    assert precisions(amp.export_onnx(model, batch(1.0), calibration=[batch(1e5)], dtype="bf16"))["middle"] == "low"


def test_keywords_dynamic_shapes_and_generators():
    model = Growing().eval()
    shapes = {"x": {0: torch.export.Dim("rows", min=2)}, "scale": None}
    inputs = ({"x": batch(1e5, rows)[0], "scale": batch(1e5)[1]} for rows in (3, 7))
    example = {"x": batch(1.0)[0], "scale": batch(1.0)[1]}
    done = amp.export_onnx(model, example, dynamic_shapes=shapes, calibration=inputs)
    assert precisions(done)["middle"] == "fp32"


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([], "there is no batch in it"),
        (3, "calibration: it is a int"),
        (torch.ones(2), "calibration: it is a Tensor"),
        ([(torch.randn(2, 8),)], "batch 0: its arguments are not those of the example"),
        ([(torch.randn(2, 9), torch.tensor(1.0))], "batch 0: the input 'x' has the shape"),
    ],
)
def test_batches_that_do_not_fit_are_refused(calibration, message):
    with pytest.raises(amp.OnnxError, match=message):
        amp.export_onnx(Growing().eval(), batch(1.0), calibration=calibration)


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
    "logarithm": (lambda a: a.softmax(-1).log(), (LARGE - 3000) / 17),
    "epsilon": (lambda a: a.relu() / (a.relu() + 1e-9), LARGE - 3000),
    "variance": (lambda a: (a * a).mean(-1) - a.mean(-1) ** 2, NEAR),
    "distance": (distances, NEAR),
    "whole numbers": (lambda a: a * 1e-5, IDS),
}


@pytest.mark.sweep(8)  # every kind: the first five leave the range of FP16, the others need digits that BF16 lacks
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_guard_holds_for_an_export(kind, dtype):
    function, x = MODELS[kind]
    model = Of(function)
    result = amp.export_onnx(model, (x,), dtype=dtype).model
    got = outputs(result, {result.graph.input[0].name: x.numpy()})[0]
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
    result = amp.export_onnx(Scaled(), (torch.ones(2, 4), 3), dynamic_shapes=shapes, calibration=[batch]).model
    assert [one.name for one in result.graph.input] == ["x", "times"]
    assert [one.name for one in result.graph.output] == ["output_0", "output_1", "output_2"]


def test_a_result_that_is_no_tensor_is_refused():
    with pytest.raises(amp.AmpError, match="returns 3, which is no tensor"):
        amp.export_onnx(Of(lambda a: (a, 3)), (LARGE,))
