"""`convert_onnx` on old and new opsets, and the raising of an opset that has no 16-bit type for an op."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import DTYPES, RNG, check, convolution, info, model, node, precisions, run, same_numbers, weight
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.model.model import open_model
from amp_compiler.onnx.model.opset import raise_opset


@pytest.mark.parametrize("opset", [9, 13, 14, 15, 21])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opsets(opset, dtype):
    """Batch norm in every version: its statistics are tied to the data before opset 15, and bf16 wants opset 22."""
    data = [weight("w", 3, 2, 3, 3), weight("b", 3), weight("s", 3), weight("mean", 3)]
    data.append(nh.from_array(np.array([0.5, 1.0, 2.0], np.float32), "var"))
    source = model(
        [
            node("Conv", ["x", "w", "b"], ["a"], "conv"),
            node("BatchNormalization", ["a", "s", "b", "mean", "var"], ["c"], "norm"),
            node("Relu", ["c"], ["d"], "act"),
            node("GlobalAveragePool", ["d"], ["y"], "pool"),
        ],
        [info("x", 1, 2, 5, 5)],
        [info("y", 1, 3, 1, 1)],
        data,
        opset=opset,
        ir_version=4,
    )
    done = check(source, dtype)
    assert precisions(done) == dict.fromkeys(("conv", "norm", "act", "pool"), "low")
    if dtype == "fp16":
        assert done.model.opset_import[0].version == opset
        same_numbers(source, done.model, {"x": RNG.standard_normal((1, 2, 5, 5)).astype(np.float32)})


def test_an_opset_that_cannot_be_raised_is_an_error_that_says_so(monkeypatch):
    source = convolution()

    def fail(proto, version):
        raise RuntimeError("no adapter")

    monkeypatch.setattr(onnx.version_converter, "convert_version", fail)
    message = "Conv takes bf16 from opset 22 on .*cannot raise the model from 17: no adapter"
    with pytest.raises(OnnxError, match=message):
        convert_onnx(source, dtype="bf16")
    kept = convert_onnx(source, dtype="bf16", raise_opset=False)
    assert kept.model == convert_onnx(source, dtype="fp16", rules={"version": 1}).model
    assert kept.plan.nodes[0].reason == "Conv takes no bf16 before opset 22; the opset is 17"


def test_raising_keeps_names_doc_strings_and_metadata():
    source = model([h.make_node("Conv", ["x", "w"], ["y"], name="conv", doc_string="a note")], [info("x", 1, 2, 5, 5)],
                   [info("y", 1, 3, 3, 3)], [weight("w", 3, 2, 3, 3)], opset=17)  # fmt: skip
    source.graph.node[0].metadata_props.add(key="k", value="v")
    source.metadata_props.add(key="author", value="me")
    result = check(source, "bf16").model
    conv = next(entry for entry in result.graph.node if entry.op_type == "Conv")
    assert (conv.name, conv.doc_string, conv.metadata_props[0].value) == ("conv", "a note", "v")
    assert result.metadata_props[0].value == "me"
    assert nh.to_array(source.graph.initializer[0]).shape == tuple(result.graph.initializer[0].dims)


CHANGED = {
    "Resize": (11, node("Resize", ["x", "scales"], ["y"], "changed"), (2, 3, 4)),
    "Upsample": (11, node("Upsample", ["x", "scales"], ["y"], "changed"), (2, 3, 4)),
    "Hardmax": (13, node("Hardmax", ["x"], ["y"], "changed"), (2, 3, 4)),
}


@pytest.mark.parametrize("op", CHANGED)
def test_an_op_of_another_meaning_is_not_raised(op):
    """It is FP32 then, as all is that BF16 has a type for only later, and the note says so."""
    since, changed, shape = CHANGED[op]
    data = [nh.from_array(np.ones(3, np.float32), "scales")] if len(changed.input) > 1 else []
    opset = {"Resize": 10, "Upsample": 9, "Hardmax": 12}[op]
    source = model([changed], [info("x", *shape)], [info("y", *shape)], data, opset=opset)
    with pytest.raises(OnnxError, match=f"{op} means something else from opset {since} on"):
        raise_opset(open_model(source), 22, "a test wants it")
    done = convert_onnx(source, dtype="bf16")
    assert done.model.opset_import[0].version == opset and not done.changed


def test_group_norms_of_another_meaning_are_not_raised():
    """ONNX's converter leaves a scale for each group, and ONNX Runtime refuses the model."""
    norm = node("GroupNormalization", ["x", "s", "b"], ["y"], "norm", num_groups=2)
    ends = [info("x", 2, 4, 3, 3)], [info("y", 2, 4, 3, 3)]
    graph = h.make_graph([norm], "g", *ends, initializer=[weight("s", 2), weight("b", 2)])
    source = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=9)  # which onnx's checker refuses
    with pytest.raises(OnnxError, match="GroupNormalization means something else from opset 21 on") as caught:
        convert_onnx(source, opset=21)
    assert caught.value.where == "node 'norm' (GroupNormalization)"
    assert convert_onnx(source, opset=20, check=False).model is not None


@pytest.mark.parametrize("opset", [13, 15, 18, 19, 20])
def test_a_filled_tensor_is_stored_in_a_type_that_the_opset_has_for_it(opset):
    """`ConstantOfShape` makes BF16 from opset 20 on: before, what it makes is cast."""
    source = model(
        [node("MatMul", ["x", "w"], ["a"], "first"), node("Shape", ["a"], ["s"], "shape"),
         node("ConstantOfShape", ["s"], ["c"], "fill", value=nh.from_array(np.array([0.5], np.float32))),
         node("Add", ["a", "c"], ["y"], "add")],
        [info("x", 2, 4)], [info("y", 2, 4)], [weight("w", 4, 4)], opset=opset,
    )  # fmt: skip
    done = check(source, "bf16")
    assert precisions(done)["add"] == "low"
    kind = next(one for one in done.model.graph.node if one.name == "fill").attribute[0].t.data_type
    assert kind == (onnx.TensorProto.FLOAT if opset < 20 else onnx.TensorProto.BFLOAT16)
    assert done.model.opset_import[0].version == opset


@pytest.mark.parametrize("opset", [11, 13, 15, 16])
def test_an_op_that_is_run_by_its_definition_gets_the_opset_of_that(opset):
    """ONNX Runtime writes a BF16 `Clip` out with `Where`, which takes BF16 from opset 16 on."""
    source = model([node("MatMul", ["x", "w"], ["a"], "first"), node("Clip", ["a", "lo", "hi"], ["y"], "clip")],
                   [info("x", 2, 4)], [info("y", 2, 4)],
                   [weight("w", 4, 4), nh.from_array(np.float32(0), "lo"), nh.from_array(np.float32(1), "hi")],
                   opset=opset)  # fmt: skip
    done = check(source, "bf16")
    assert done.model.opset_import[0].version == 16
    assert [entry.precision for entry in done.plan.nodes] == ["low", "low"]
    assert done.refusal is None or done.refusal.kernel
    kept = convert_onnx(source, dtype="bf16", raise_opset=False)
    wanted = {16: "low"}.get(opset, "keep")
    assert kept.plan.nodes[1].precision == wanted


REQUIRED = {  # attributes that have no default
    "to": T.FLOAT, "axis": 1, "kernel_shape": [2, 2], "perm": [0, 1, 3, 2], "equation": "abcd,efgd->abcg",
    "blocksize": 2, "num_groups": 1, "size": 3, "mode": "linear", "shape": [-1], "pads": [0] * 8,
    "pooled_shape": [1, 1], "axes": [1],
}  # fmt: skip


RUNTIME_ERRORS = [one for one in vars(ort_errors).values() if isinstance(one, type) and issubclass(one, Exception)]
NOT_COMPARED = {  # draws, steps that rounding crosses, and a product that is subnormal in FP32
    "Bernoulli", "RandomNormalLike", "RandomUniformLike", "Hardmax", "Shrink", "Unique", "ReduceProd",
}  # fmt: skip
LAYOUTS = [((2, 4, 4, 4),) * 2, ((4, 4),) * 2, ((4,),) * 2, ((2, 4, 4, 4), (4,)), ((2, 4, 4, 4), (4, 4, 2, 2))]


def each_op(opset):
    """A model of each op of an opset that takes and gives FP32, as far as ONNX Runtime runs one of some layouts."""
    for name in sorted({schema.name for schema in onnx.defs.get_all_schemas() if not schema.domain}):
        if not onnx.defs.has(name, opset, ""):
            continue
        schema = onnx.defs.get_schema(name, opset, "")
        inputs = schema.inputs[: max(schema.min_input, 1)]
        required = {key for key, attribute in schema.attributes.items() if attribute.required}
        if schema.deprecated or not inputs or not required <= REQUIRED.keys():
            continue
        if not all("tensor(float)" in value.types for value in (*inputs, schema.outputs[0])):
            continue
        swept = node(name, [f"x{index}" for index, _ in enumerate(inputs)], ["o"], "swept")
        swept.attribute.extend(h.make_attribute(key, REQUIRED[key]) for key in sorted(required))
        nodes = [node("Relu", ["x"], ["x0"]), swept, node("Identity", ["o"], ["y"])]
        for first, other in LAYOUTS:
            values = [info("x", *first), *(info(value, *other) for value in swept.input[1:])]
            graph = h.make_graph(nodes, "g", values, [h.make_empty_tensor_value_info("y")])
            source = h.make_model(graph, opset_imports=[h.make_opsetid("", opset)], ir_version=8)
            shapes = [first, *(other for _ in swept.input[1:])]
            feeds = {
                value.name: RNG.uniform(0.1, 0.9, shape).astype(np.float32)
                for value, shape in zip(values, shapes, strict=True)
            }
            try:
                source = onnx.shape_inference.infer_shapes(source, strict_mode=True)
                run(source, feeds)
            except (onnx.shape_inference.InferenceError, *RUNTIME_ERRORS):  # another layout may fit the op
                continue
            yield name, source, feeds
            break


ALL_LOW = {"version": 1, "rules": [{"match": {}, "precision": "low"}]}


@pytest.mark.parametrize(
    ("rules", "dtype"),
    [
        ("default", "fp16"),
        (ALL_LOW, "bf16"),
        pytest.param("default", "bf16", marks=pytest.mark.slow),
        pytest.param(ALL_LOW, "fp16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("opset", [7, *(pytest.param(later, marks=pytest.mark.slow) for later in range(8, 26))])
def test_each_op_in_each_opset(opset, rules, dtype):
    """Converted or refused in words, and within rounding of what it was."""
    wrong, compared = [], 0
    for name, source, feeds in each_op(opset):
        try:
            done = convert_onnx(source, dtype=dtype, rules=rules)
            report = verify(source, done.model, [feeds], trace=False)
        except OnnxError as error:
            if "report this as a bug" in str(error):
                wrong.append(f"{name}: {error}"[:300])
            continue
        compared += 1
        if name not in NOT_COMPARED and not report.ok({"fp16": 5e-3, "bf16": 4e-2}[dtype]):
            wrong.append(f"{name}: {report.largest_error:.3g}")
    assert not wrong, "\n".join(wrong)
    assert compared > 60
