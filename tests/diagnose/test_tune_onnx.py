"""`amp.tune` on ONNX models: the planted nodes are found, and the file fixes the conversion."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from planted import ONNX_PLANTED, ONNX_RULES, batch, file

import amp_compiler as amp
from amp_compiler.diagnose.tuning import onnx_model
from amp_compiler.diagnose.tuning.subject import searched
from amp_compiler.diagnose.tuning.writing import with_chosen
from amp_compiler.errors import AmpError, OnnxError, RuleError
from amp_compiler.policy.rules import Precision

TOLERANCE = 5e-3
X = np.linspace(0.5, 1.0, 8, dtype=np.float32).reshape(2, 4)


def scaled() -> onnx.ModelProto:
    """A product beyond FP16, scaled down again, and a layer that 16 bits do no harm to."""
    weights = [
        numpy_helper.from_array(np.full((4, 4), 4e4, np.float32), "w"),
        numpy_helper.from_array(np.array(2.0**-17, np.float32), "small"),
        numpy_helper.from_array(np.eye(4, dtype=np.float32), "eye"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "big"),
        helper.make_node("Mul", ["h", "small"], ["s"], "down"),
        helper.make_node("MatMul", ["s", "eye"], ["y"], "last"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "scaled", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_the_planted_nodes_are_found_and_the_file_fixes_the_conversion(tmp_path):
    model, path, x = file(), tmp_path / "tuned.yaml", {"x": batch().numpy()}
    found = amp.tune(model, [x], rules=ONNX_RULES, tolerance=TOLERANCE, output=path)
    assert {node.name for node in found.nodes} == ONNX_PLANTED and found.searched > 200 and not found.stopped
    assert found.runs <= 4 * math.log2(found.searched) + len(found.nodes)
    assert found.error <= TOLERANCE < found.before

    done = amp.convert_onnx(model, rules=str(path), dtype="fp16", verify=[x])
    assert done.report.largest_error == pytest.approx(found.error) and not done.plan.unused_rules
    untuned = amp.convert_onnx(model, rules=ONNX_RULES, dtype="fp16", verify=[x])
    assert untuned.report.largest_error > TOLERANCE
    assert sum(node.precision == "fp32" for node in done.plan.nodes) == found.fp32


def test_a_file_is_tuned_on_files_of_batches(tmp_path):
    onnx.save(scaled(), tmp_path / "m.onnx")
    np.savez(tmp_path / "batch.npz", x=X)
    before = (tmp_path / "m.onnx").read_bytes()
    found = amp.tune(str(tmp_path / "m.onnx"), str(tmp_path / "batch.npz"), output=tmp_path / "tuned.yaml")
    assert [node.name for node in found.nodes] == ["big", "down"] and found.dtype == "fp16"
    assert (tmp_path / "m.onnx").read_bytes() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["batch.npz", "m.onnx", "tuned.yaml"]
    wide = amp.tune(scaled(), [{"x": X}], dtype="bf16")
    assert not wide.nodes and wide.tolerance == 8e-2


def test_what_torch_cannot_run_is_ordered_by_its_ranges(monkeypatch):
    def refused(*given, **named):
        raise OnnxError("there is no conversion")

    monkeypatch.setattr(onnx_model, "onnx_to_fx", refused)
    found = amp.tune(scaled(), [{"x": X}])
    assert [node.name for node in found.nodes] == ["big", "down"] and found.error <= found.tolerance


def test_the_profiled_run_measures_the_nodes_of_the_plan():
    subject = onnx_model.OnnxSubject(file(), [{"x": batch().numpy()}], onnx_model.DType.FLOAT16)
    rules = amp.load_rules(ONNX_RULES)
    plan = subject.plan(rules)
    names = frozenset(node.name for node in searched(plan, rules.ops))
    estimates = subject.profile(plan, names)
    assert set(estimates) == names and subject.runs == 2
    assert math.isinf(estimates["attention/scores"].error) and estimates["attention/scores"].infinite > 0.5
    softmax = estimates["log/softmax"]
    assert softmax.zero > 0.1 * softmax.numbers and 0 < estimates["block3/up"].error < 1e-3
    one = estimates["block3/up"]
    assert 0 < one.least < one.greatest < 100


def test_estimates_are_what_a_run_with_one_node_low_shows():
    """To first order; the projections are random, so by a factor of 3 at most.

    Of products, which the rules name: what follows its neighbours runs in FP32 where they do.
    """
    subject = onnx_model.OnnxSubject(file(), [{"x": batch().numpy()}], onnx_model.DType.FLOAT16)
    rules = amp.load_rules(ONNX_RULES)
    plan = subject.plan(rules)
    names = [node.name for node in searched(plan, rules.ops)]
    estimates = subject.profile(plan, frozenset(names))
    for name in ("block0/up", "block20/up", "block39/down", "variance/inner"):
        alone = subject.measure(with_chosen(rules, frozenset(names) - {name}, Precision.FP32)).error
        assert estimates[name].error / 3 < alone < estimates[name].error * 3


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


def test_a_difference_that_cancels_is_told_with_the_step_of_fp16_at_its_size():
    shift = numpy_helper.from_array(np.array(1000, np.float32), "shift")
    nodes = [
        helper.make_node("Add", ["x", "shift"], ["h"], "away"),
        helper.make_node("Sub", ["h", "shift"], ["y"], "back"),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "shifted", ends[:1], ends[1:], [shift])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    found = amp.tune(model, [{"x": X}], dtype="fp16", rules={"version": 1, "allow": ["elementwise"]})
    details = {node.name: node.detail for node in found.nodes}
    assert "of numbers up to 1e+03 that cancel, where 16 bits have steps of 0.5" in details["back"]
    assert "cancel" not in details["away"]
