"""`amp.tune` on ONNX models: the planted nodes are found, and the file fixes the conversion."""

import math

import numpy as np
import onnx
import pytest
import torch
from onnx_models import info, model, node, scalar
from planted import batch, file

import amp_compiler as amp
from amp_compiler.diagnose.tuning import onnx_model
from amp_compiler.errors import AmpError, OnnxError, RuleError

TOLERANCE = 5e-3
X = np.linspace(0.5, 1.0, 8, dtype=np.float32).reshape(2, 4)


def scaled() -> onnx.ModelProto:
    """A product beyond FP16, scaled down again, and a layer that 16 bits do no harm to."""
    stored = [scalar("w", np.full((4, 4), 4e4)), scalar("small", 2.0**-17), scalar("eye", np.eye(4))]
    nodes = [
        node("MatMul", ["x", "w"], ["h"], "big"),
        node("Mul", ["h", "small"], ["s"], "down"),
        node("MatMul", ["s", "eye"], ["y"], "last"),
    ]
    return model(nodes, [info("x", 2, 4)], [info("y", 2, 4)], stored)


def test_the_planted_nodes_are_found_and_the_file_fixes_the_conversion(tmp_path):
    (source, planted), path, x = file(), tmp_path / "tuned.yaml", {"x": batch().numpy()}
    result = amp.tune(source, [x], tolerance=TOLERANCE, output=path)
    assert {one.name for one in result.nodes} == planted and result.searched > 100 and not result.stopped
    assert result.runs <= 4 * math.log2(result.searched) + len(result.nodes)
    assert result.error <= TOLERANCE < result.before

    done = amp.convert_onnx(source, rules=str(path), dtype="fp16", verify=[x])
    assert done.report.largest_error == pytest.approx(result.error) and not done.plan.unused_rules
    untuned = amp.convert_onnx(source, dtype="fp16", verify=[x])
    assert untuned.report.largest_error > TOLERANCE
    assert sum(one.precision == "fp32" for one in done.plan.nodes) == result.fp32


def test_a_file_is_tuned_on_files_of_batches(tmp_path):
    onnx.save(scaled(), tmp_path / "m.onnx")
    np.savez(tmp_path / "batch.npz", x=X)
    before = (tmp_path / "m.onnx").read_bytes()
    result = amp.tune(str(tmp_path / "m.onnx"), str(tmp_path / "batch.npz"), output=tmp_path / "tuned.yaml")
    assert [one.name for one in result.nodes] == ["big", "down"] and result.dtype == "fp16"
    assert (tmp_path / "m.onnx").read_bytes() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["batch.npz", "m.onnx", "tuned.yaml"]
    wide = amp.tune(scaled(), [{"x": X}], dtype="bf16")
    assert not wide.nodes and wide.tolerance == 8e-2


def test_what_torch_cannot_run_is_ordered_by_its_ranges(monkeypatch):
    def refused(*inputs, **named):
        raise OnnxError("there is no conversion")

    monkeypatch.setattr(onnx_model, "onnx_to_fx", refused)
    result = amp.tune(scaled(), [{"x": X}])
    assert [one.name for one in result.nodes] == ["big", "down"] and result.error <= result.tolerance


def test_refusals():
    with pytest.raises(OnnxError, match=r"in FP32 the output y is not finite; .*amp.find_nonfinite names the node"):
        amp.tune(scaled(), [{"x": X * 3e38}])
    low = amp.convert_onnx(scaled(), dtype="fp16").model
    with pytest.raises(OnnxError, match=r"it has 16-bit parts already.*tune the FP32 model"):
        amp.tune(low, [{"x": X}])
    with pytest.raises(AmpError, match="an ONNX model has no backward"):
        amp.tune(scaled(), [{"x": X}], loss_fn=torch.sum)
    with pytest.raises(OnnxError, match="the input 'x' is missing"):
        amp.tune(scaled(), [{}])
    with pytest.raises(RuleError):
        amp.tune(scaled(), [{"x": X}], rules="nowhere.yaml")
