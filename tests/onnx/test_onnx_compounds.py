"""Norms and GELUs in parts: found and planned as a whole, one op where that is asked for, right for all of FP16."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from compound_models import ERF_FORMS, RNG, TANH_FORMS, gelu, norm
from onnx import numpy_helper as nh
from onnx_models import BOTH, DTYPES, casts, check, info, model, node, run, scalar

import amp_compiler as amp
from amp_compiler.onnx.check.emulate import emulate
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.plan import explain_onnx
from amp_compiler.passes.pipeline import ONNX_PLAN, PLAN, Stages

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


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [
        ("default", "fp16"),
        ("default", "bf16"),
        *((rules, "fp16") for rules in ("fast", "apex-o3", "safe", "tensorflow")),
    ],
)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_norm_is_fp32_from_its_input_to_its_result(name, rules, dtype):
    """ONNX Runtime fuses it to one op of one type: `check` loads the model."""
    done = check(WRITTEN[name](), dtype, rules, fuse=False)
    assert set(inner(done.plan).values()) == {"fp32"}
    if rules == "default":
        assert len(casts(done.model)) == 4  # of the input and of the output of the graph, and of those of the norm
        reasons = [entry.reason for entry in done.plan.nodes if entry.precision == "fp32"]
        assert all("norm" in reason or "the range of fp16" in reason for reason in reasons)


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


@pytest.mark.parametrize(("source", "part"), [(gelu("pow"), "gelu"), (norm(opset=23), "rms_norm")])
def test_rules_name_the_part_and_the_op_that_it_becomes(source, part):
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"part": part}, "precision": "fp32"}]}
    for fuse in (False, True):
        assert set(inner(convert_onnx(source, rules=rules, fuse=fuse).plan).values()) == {"fp32"}
    assert set(inner(convert_onnx(source, rules="safe").plan).values()) == {"fp32"}


DRAWN = np.random.default_rng(7)
WIDTH = 64
KINDS = {
    "rms": (norm(opset=23), "RMSNormalization"),
    "layer norm": (norm(opset=18, centred=True, bias=True), "LayerNormalization"),
    "layer norm, axes as attribute": (norm(opset=17, centred=True, bias=True), "LayerNormalization"),
    "gelu": (gelu("pow", opset=20), "Gelu"),
}


def ops(built):
    return [entry.op_type for entry in built.graph.node if entry.op_type != "Cast"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_cast_stands_around_it(kind, dtype):
    source, written = KINDS[kind]
    done = check(source, dtype, fuse=True)
    assert ops(done.model) == ["MatMul", written, "MatMul"]
    assert [(cast.value, cast.dst) for cast in done.plan.casts if cast.bytes] == [("input", dtype), ("y", "fp32")]
    (planned,) = [one for one in done.plan.nodes if one.op == f"onnx.{written}"]
    assert planned.precision == "low" and "written out in" in planned.reason and done.changed
    assert done.plan == amp.explain(source, dtype=dtype, fuse=True)


def test_onnx_runtime_makes_one_kernel_of_the_parts(tmp_path):
    """The parts in FP32 between 16-bit products are one RMSNorm to it."""
    result = check(norm(opset=18), "fp16").model
    settings = ort.SessionOptions()
    settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    settings.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    ort.InferenceSession(result.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    assert ops(onnx.load(tmp_path / "optimized.onnx")) == ["MatMul", "SimplifiedLayerNormalization", "MatMul"]


def rows():
    """Rows of all sizes that FP16 holds, one of zeros, of equal numbers, of a single large number."""
    drawn = [DRAWN.standard_normal(WIDTH) * spread for spread in (1.0, 3000.0, 20000.0, 1e-4, 1e-6, 0.0)]
    single = np.zeros(WIDTH)
    single[3] = 65504.0
    data = np.stack([*drawn, np.full(WIDTH, 0.7), np.full(WIDTH, -60000.0), single])
    return np.clip(data, -65504, 65504).astype(np.float16).astype(np.float32)


def between_identities(data, scale, epsilon, opset):
    """An RMSNorm between products with the identity, which round nothing that FP16 holds."""
    axes = {"axes": [-1]} if opset < 18 else {}
    nodes = [
        node("MatMul", ["input", "eye"], ["x"]),
        node("Pow", ["x", "two"], ["s"]),
        node("ReduceMean", ["s", *([] if axes else ["axis"])], ["m"], **axes),
        node("Add", ["m", "eps"], ["v"]),
        node("Sqrt", ["v"], ["r"]),
        node("Reciprocal", ["r"], ["i"]),
        node("Mul", ["x", "i"], ["n"]),
        node("Mul", ["n", "scale"], ["q"]),
        node("MatMul", ["q", "eye"], ["y"]),
    ]
    stored = [
        nh.from_array(np.eye(WIDTH, dtype=np.float32), "eye"),
        nh.from_array(scale, "scale"),
        scalar("two", 2.0),
        scalar("eps", epsilon),
        *([] if axes else [nh.from_array(np.array([-1]), "axis")]),
    ]
    return model(nodes, [info("input", *data.shape)], [info("y", *data.shape)], stored, opset=opset,
                 ir_version=11 if opset > 22 else 9)  # fmt: skip


@pytest.mark.parametrize("opset", [17, 20, 23])
@pytest.mark.parametrize("epsilon", [1e-5, 1e-6, 1e-12])
def test_an_rms_norm_is_right_for_all_numbers_of_fp16(epsilon, opset):
    """But for the rounding of its result, to the last digits of FP32: in FP16 its squares would be 0 or infinite."""
    data = rows()
    scale = DRAWN.uniform(0.5, 2, WIDTH).astype(np.float16).astype(np.float32)
    source = between_identities(data, scale, epsilon, opset)
    result = check(source, "fp16", fuse=True).model
    assert ("RMSNormalization" in ops(result)) == (opset == 23)
    wide = data.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * scale
    for got in (run(result, {"input": data})[0], run(emulate(result).proto, {"input": data})[0]):
        assert (np.abs(got - want) <= np.abs(want) * 2.0**-10.9 + 2.0**-24.9).all()


@pytest.mark.parametrize("opset", [20, 23])
def test_numbers_beyond_fp16_are_read_in_fp32(opset):
    """Rows of a stored table, and what calibration has seen: no cast to FP16 stands before the norm."""
    table = (DRAWN.standard_normal((16, WIDTH)) * 1e6).astype(np.float32)
    scale = np.ones(WIDTH, np.float32)
    source = between_identities(np.zeros((4, WIDTH)), scale, 1e-6, opset)
    del source.graph.node[0], source.graph.input[:]
    source.graph.node.insert(0, node("Gather", ["table", "ids"], ["x"]))
    source.graph.input.append(info("ids", 4, kind=7))
    source.graph.initializer.append(nh.from_array(table, "table"))
    feeds = {"ids": np.arange(4)}
    assert verify(source, check(source, "fp16", fuse=True).model, [feeds]).largest_error < 1e-3
    calibrated = between_identities(np.zeros((4, WIDTH)), scale, 1e-6, opset)
    feeds = {"input": table[:4] / 10}
    for rows_, limit in ((feeds, 1e-3), ({"input": feeds["input"] / 1e5}, 1e-3)):
        done = convert_onnx(calibrated, calibration=[rows_], verify=[rows_], fuse=True)
        assert done.report.largest_error < limit


def test_norms_that_share_a_scale_go_on_sharing_it():
    source = between_identities(np.zeros((4, WIDTH)), np.ones(WIDTH, np.float32), 1e-6, 23)
    again = [onnx.NodeProto.FromString(entry.SerializeToString()) for entry in source.graph.node]
    result = {name for entry in again for name in entry.output}
    for entry in source.graph.node:
        entry.output[0] = f"{entry.output[0]}_1"
        entry.input[:] = [f"{name}_1" if name in result else name for name in entry.input]
        entry.name = entry.output[0]
    again[0].input[0] = "y_1"
    source.graph.node.extend(again)
    converted = check(source, "fp16", fuse=True).model
    assert ops(converted) == ["MatMul", "RMSNormalization", "MatMul"] * 2
    assert len([one for one in converted.graph.initializer if one.name.startswith("scale")]) == 1


def test_the_stages_of_a_plan_are_told_once():
    stages = Stages()
    explain_onnx(norm(opset=23), stages=stages)
    assert [stage.name for stage in stages] == ["capture", *ONNX_PLAN.names, *PLAN.names]
    assert "onnx.ReduceMean" in stages["capture"].text
