"""`amp.export_onnx` with batches: what leaves the range of FP16 stays FP32."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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


def run(proto, *inputs: torch.Tensor) -> np.ndarray:
    import onnxruntime as ort

    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(None, dict(zip(names, (one.numpy() for one in inputs), strict=True)))[0]


def precisions(plan) -> dict[str, str]:
    return {node.module or node.op: node.precision for node in plan.nodes}


def test_what_leaves_the_range_stays_fp32():
    model = Growing().eval()
    plain = amp.export_onnx(model, batch(1e5)).plan
    assert precisions(plain)["middle"] == "low"
    done = amp.export_onnx(model, batch(1.0), calibration=[batch(1.0), batch(1e5)])
    found = precisions(done.plan)
    assert found["middle"] == "fp32" and found["first"] == found["last"] == "low"
    reason = next(node.reason for node in done.plan.nodes if node.module == "middle")
    assert "in calibration; fp16 ends at 65504" in reason
    want = model(*batch(1e5)).detach().numpy()
    assert np.abs(run(done.model, *batch(1e5)) - want).max() < 1e-2 * np.abs(want).max()
    assert precisions(amp.export_onnx(model, batch(1.0), calibration=[batch(1.0)]).plan)["middle"] == "low"
    assert (
        precisions(amp.export_onnx(model, batch(1.0), calibration=[batch(1e5)], dtype="bf16").plan)["middle"] == "low"
    )


def test_the_same_as_converting_the_export(tmp_path):
    model = Growing().eval()
    torch.onnx.export(model, batch(1.0), tmp_path / "fp32.onnx", dynamo=True, verbose=False, optimize=False)
    batches = [{"x": batch(1e5)[0].numpy(), "scale": batch(1e5)[1].numpy()}]
    converted = amp.convert_onnx(tmp_path / "fp32.onnx", calibration=batches).plan
    exported = amp.export_onnx(model, batch(1.0), calibration=[batch(1e5)]).plan
    wide = [[node.precision for node in plan.nodes if node.family == "matmul"] for plan in (converted, exported)]
    assert wide[0] == wide[1] == ["low", "fp32", "low"]


def test_keywords_dynamic_shapes_and_generators():
    model = Growing().eval()
    shapes = {"x": {0: torch.export.Dim("rows", min=2)}, "scale": None}
    given = ({"x": batch(1e5, rows)[0], "scale": batch(1e5)[1]} for rows in (3, 7))
    example = {"x": batch(1.0)[0], "scale": batch(1.0)[1]}
    done = amp.export_onnx(model, example, dynamic_shapes=shapes, calibration=given)
    assert precisions(done.plan)["middle"] == "fp32"


@pytest.mark.parametrize(
    ("calibration", "told"),
    [
        ([], "there is no batch in it"),
        (3, "calibration: it is a int"),
        (torch.ones(2), "calibration: it is a Tensor"),
        ([(torch.randn(2, 8),)], "batch 0: its arguments are not those of the example"),
        ([(torch.randn(2, 9), torch.tensor(1.0))], "batch 0: the input 'x' has the shape"),
    ],
)
def test_batches_that_do_not_fit_are_refused(calibration, told):
    with pytest.raises(amp.OnnxError, match=told):
        amp.export_onnx(Growing().eval(), batch(1.0), calibration=calibration)
