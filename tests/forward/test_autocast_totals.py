"""What `torch.autocast` would cast, counted on fake tensors: as many casts and bytes as it makes on real ones."""

import json

import onnx
import onnx.parser
import pytest
import torch
from torch import nn

import amp_compiler as amp
from amp_compiler.forward.autocast import CastCounter
from amp_compiler.ir.plan import PrecisionPlan

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2).mean((2, 3)))


class OwnRegion(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.second(x.float())
        return torch.softmax(self.first(x), -1)


class FrozenTwice(nn.Module):
    """Autocast keeps the casts of weights that are trained, and no others."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.trained(self.frozen(self.trained(x))))


def test_an_onnx_file_has_the_totals_of_its_model(tmp_path):
    torch.manual_seed(0)
    model, x = Pictures().eval(), torch.randn(2, 3, 16, 16)
    path = str(tmp_path / "m.onnx")
    batch = torch.export.Dim("batch")
    torch.onnx.export(model, (x,), path, dynamic_shapes=({0: batch},), verbose=False)
    result = amp.explain(path, (x.numpy(),), dtype="bf16").autocast
    expected = amp.explain(model, (x,), dtype="bf16").autocast
    assert (result.casts, result.cast_bytes) == (expected.casts, expected.cast_bytes)
    assert result.low_nodes == expected.low_nodes - 1  # the exporter folds the normalisation
    assert amp.explain(path, dtype="bf16").autocast is None


def test_an_onnx_file_that_is_not_imported_is_planned_all_the_same(caplog):
    result = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 20, "mine": 1]> g (float[n, 8] x) => (float[n, 8] y)'
        "<float[8, 8] w = {" + ", ".join(["1"] * 64) + "}> { a = MatMul(x, w) y = mine.Unknown(a) }"
    )
    plan = amp.explain(result, (torch.ones(4, 8),), dtype="bf16")
    assert plan.autocast is None and plan.nodes[0].precision == "low"
    assert "what torch.autocast casts is not counted" in caplog.text and "Unknown" in caplog.text


CASES = {
    "pictures": (Pictures, (2, 3, 16, 16)),
    "own region": (OwnRegion, (3, 8)),
    "frozen": (FrozenTwice, (3, 8)),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bf16") for name in CASES), ("pictures", "fp16")])
def test_as_many_as_autocast_makes(name, dtype):
    make, shape = CASES[name]
    model, x = make(), torch.randn(shape)
    result = amp.explain(model, (x,), dtype=dtype).autocast
    with torch.autocast("cpu", dtype=LOW[dtype]), CastCounter() as counted:
        model(x)
    assert (result.casts, result.cast_bytes) == (counted.casts, counted.cast_bytes)
    assert 0 < result.low_nodes <= len(amp.explain(model, (x,), dtype=dtype).nodes)


def test_nobody_counts_for_a_device_that_the_tensors_are_not_on():
    model = nn.Linear(8, 8)
    assert amp.explain(model, (torch.ones(2, 8),), dtype="fp16", device="cuda").autocast is None
    assert amp.explain(model, (torch.ones(2, 8),), dtype="fp16", device="cpu").autocast is not None


def test_a_plan_keeps_it_and_is_equal_without_it():
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    plan = amp.explain(model, (x,), dtype="bf16")
    back = PrecisionPlan.from_dict(json.loads(plan.to_json()))
    assert back.autocast == plan.autocast
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    compiled(x)
    assert compiled.plan.autocast is None
    assert "autocast" not in compiled.plan.to_dict()
    assert compiled.plan == plan


def test_a_symbolic_size_counts_as_large_as_it_was_seen():
    model, x = nn.Linear(8, 8), torch.ones(5, 8)
    result = amp.explain(model, (x,), dtype="bf16", dynamic_shapes=({0: torch.export.Dim("b")},)).autocast
    with torch.autocast("cpu", dtype=torch.bfloat16), CastCounter() as counted:
        model(x)
    assert result.cast_bytes == counted.cast_bytes
    assert type(result.cast_bytes) is int


def test_a_size_that_only_data_tell_is_a_number_all_the_same():
    class Nonzero(nn.Linear):
        def forward(self, x):
            return super().forward(x[torch.nonzero(x[:, 0] > 0)[:, 0]])

    result = amp.explain(Nonzero(8, 8), (torch.randn(4, 8),), dtype="bf16")
    assert result.autocast is None or type(result.autocast.cast_bytes) is int
    result.to_json()
