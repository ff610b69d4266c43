"""Norms and GELUs that are written out are found, and planned as a whole: no cast stands within."""

from __future__ import annotations

import numpy as np
import pytest
from compound_models import ERF_FORMS, RNG, TANH_FORMS, gelu, norm
from onnx_models import DTYPES, casts, check

from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.lowering.compounds import find_compounds
from amp_compiler.onnx.model.model import open_model, read_model

BOTH = pytest.mark.parametrize("dtype", DTYPES)
WRITTEN = {
    "rms": lambda: norm(),
    "rms, products": lambda: norm(square="mul", root="reciprocal", scale="before"),
    "rms, no weights": lambda: norm(scale=""),
    "layer norm": lambda: norm(centred=True, bias=True),
    "layer norm, products": lambda: norm(centred=True, bias=True, square="mul", root="one_over"),
    "layer norm, opset 13": lambda: norm(centred=True, bias=True, opset=13),
    "layer norm over channels": lambda: norm(centred=True, axes=(1,), scale_shape=(5, 1)),
}


def inner(plan):
    """Precisions of all but the two products."""
    return {entry.name: entry.precision for entry in plan.nodes if entry.op != "onnx.MatMul"}


def kinds(source):
    return [ways[0].kind for ways in find_compounds(read_model(open_model(source)).ir.graph)]


@pytest.mark.parametrize("name", WRITTEN)
def test_norms_are_found(name):
    source = WRITTEN[name]()
    (ways,) = find_compounds(read_model(open_model(source)).ir.graph)
    assert ways[0].kind == ("layer_norm" if "layer" in name else "rms_norm")
    assert len(ways[0].nodes) == len(source.graph.node) - 2  # all but the products
    assert set(ways[0].values) >= {"x", "epsilon"}


@pytest.mark.parametrize("form", [*TANH_FORMS, *ERF_FORMS])
def test_gelus_are_found(form):
    source = gelu(form)
    (ways,) = find_compounds(read_model(open_model(source)).ir.graph)
    assert ways[0].kind == "gelu" and len(ways[0].nodes) == len(source.graph.node) - 2


@pytest.mark.parametrize("source", [norm(exponent=3.0), gelu("pow", power=2.0), gelu("half_x", half=0.4)])
def test_what_is_something_else(source):
    assert kinds(source) == []


@BOTH
@pytest.mark.parametrize("name", WRITTEN)
def test_a_norm_is_fp32_from_its_input_to_its_result(name, dtype):
    done = check(WRITTEN[name](), dtype, fuse=False)
    assert set(inner(done.plan).values()) == {"fp32"}
    assert len(casts(done.model)) == 4  # of the input and of the output of the graph, and of those of the norm
    reasons = [entry.reason for entry in done.plan.nodes if entry.precision == "fp32"]
    assert all("norm" in reason or "the range of fp16" in reason for reason in reasons)


@pytest.mark.parametrize("rules", ["fast", "apex-o3", "safe", "tensorflow"])
@pytest.mark.parametrize("name", WRITTEN)
def test_so_it_is_under_other_rules(name, rules):
    """ONNX Runtime fuses it to one op of one type: `check` loads the model."""
    assert set(inner(check(WRITTEN[name](), "fp16", rules, fuse=False).plan).values()) == {"fp32"}


@BOTH
@pytest.mark.parametrize("name", ["rms", "layer norm"])
def test_inner_values_that_are_read_elsewhere_change_nothing(name, dtype):
    source = norm(twice=True, centred=name != "rms")
    plan = check(source, dtype).plan
    assert {entry.precision for entry in plan.nodes if entry.name.startswith(("n_mean", "n_root", "n_div"))} == {"fp32"}


@BOTH
@pytest.mark.parametrize("form", [*TANH_FORMS, *ERF_FORMS])
def test_a_gelu_is_low_from_its_input_to_its_result(form, dtype):
    done = check(gelu(form), dtype)
    assert set(inner(done.plan).values()) == {"low"}
    assert len(casts(done.model)) == 2  # of the input and of the output of the graph


@pytest.mark.parametrize("form", [*TANH_FORMS, *ERF_FORMS])
def test_a_cube_that_overflows_changes_nothing(form):
    """Beyond 40 the cube is infinite in FP16; the tanh of that is 1, as that of the cube is."""
    source = gelu(form, products=False, shape=(1, 2001))
    feeds = {"x": np.linspace(-600, 600, 2001, dtype=np.float32)[None]}
    done = convert_onnx(source, dtype="fp16")
    report = verify(source, done.model, [feeds])
    assert report.ok(5e-4)


@pytest.mark.parametrize("form", TANH_FORMS)
def test_a_gelu_of_which_a_part_is_fp32_is_fp32(form):
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"op": "onnx.Tanh"}, "precision": "fp32"}]}
    done = check(gelu(form), "fp16", rules)
    assert set(inner(done.plan).values()) == {"fp32"}
    assert len(casts(done.model)) == 4
    assert any("part of one GELU with" in entry.reason for entry in done.plan.nodes)


@pytest.mark.parametrize("form", ["pow", "half_x"])
def test_calibration_keeps_a_gelu_whole(form):
    source = gelu(form, products=False)
    batch = {"x": (RNG.standard_normal((2, 5, 8)) * 30000).astype(np.float32)}
    plan = convert_onnx(source, dtype="fp16", calibration=[batch]).plan
    assert {entry.precision for entry in plan.nodes} == {"fp32"}


@pytest.mark.parametrize("make", [norm, lambda: gelu("pow")])
def test_safe_keeps_it_in_fp32(make):
    assert set(inner(convert_onnx(make(), rules="safe").plan).values()) == {"fp32"}


def test_outliers_whose_squares_overflow():
    source = norm(products=False)
    feeds = {"x": (RNG.standard_normal((2, 5, 8)) * 3000).astype(np.float32)}
    assert verify(source, convert_onnx(source, dtype="fp16").model, [feeds]).outputs[0].relative < 1e-3


def test_rules_name_the_part():
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"part": "gelu"}, "precision": "fp32"}]}
    assert set(inner(convert_onnx(gelu("pow"), rules=rules).plan).values()) == {"fp32"}
