"""`convert_onnx` on models of every shape: valid, idempotent, and right in its numbers."""

import gc

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graph_reading import parse_graph
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_corpus import built
from onnx_models import DTYPES, LOW, RNG, X, casts, check, info, low_nodes, mlp, model, node, same_numbers, weight

from amp_compiler.errors import OnnxError
from amp_compiler.ir.dtypes import low_type
from amp_compiler.ir.graph_text import format_graph
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.lowering.lower import lower
from amp_compiler.onnx.model.data import convert, examine
from amp_compiler.onnx.model.model import open_model, read_model


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_benign_model_has_one_cast_at_each_end_and_16_bit_weights(dtype):
    source = mlp()
    done = check(source, dtype)
    assert [entry.precision for entry in done.plan.nodes] == ["low"] * 3
    assert len(casts(done.model)) == 2
    assert {tensor.data_type for tensor in done.model.graph.initializer} == {LOW[dtype]}
    assert [tensor.name for tensor in done.model.graph.initializer] == ["w1", "w2"]
    if dtype == "fp16":
        same_numbers(source, done.model, {"x": X})


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shared_initializer_is_stored_once_or_twice(dtype):
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("MatMul", ["a", "w"], ["b"]),
        node("Exp", ["w"], ["e"]),
        node("MatMul", ["b", "e"], ["y"]),
    ]
    both = check(model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)]), dtype).model
    assert sorted(tensor.data_type for tensor in both.graph.initializer) == sorted([T.FLOAT, LOW[dtype]])
    only = check(model([*nodes[:1], node("MatMul", ["a", "w"], ["y"])], [info("x", 4, 8)], [info("y", 4, 8)],
                       [weight("w", 8, 8)]), dtype).model  # fmt: skip
    assert [tensor.data_type for tensor in only.graph.initializer] == [LOW[dtype]]


@pytest.mark.parametrize(("rules", "low"), [("apex-o2", False), ("apex-o3", True)])
def test_parameters_of_a_batch_norm_are_low_where_its_kind_is_not_kept(rules, low):
    statistics = [nh.from_array(np.ones(2, np.float32), name) for name in ("scale", "bias", "mean", "var")]
    source = model(
        [
            node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["a", "scale", "bias", "mean", "var"], ["y"]),
        ],
        [info("x", 1, 2, 4, 4)],
        [info("y", 1, 2, 4, 4)],
        [weight("w", 2, 2, 3, 3), *statistics],
    )
    kinds = {tensor.name: tensor.data_type for tensor in check(source, "fp16", rules).model.graph.initializer}
    assert kinds.pop("w") == T.FLOAT16 and set(kinds.values()) == {T.FLOAT16 if low else T.FLOAT}


def test_what_a_loop_reads_from_outside_is_cast_outside():
    source = built("loop")[0]
    rules = {
        "version": 1,
        "rules": [{"match": {}, "precision": "fp32"}, {"match": {"op": "onnx.Add"}, "precision": "low"}],
    }
    result = check(source, "fp16", rules).model
    (holder,) = [entry for entry in result.graph.node if entry.op_type == "Loop"]
    read = holder.input[2]
    assert len([entry for entry in casts(result) if entry.input[0] == read]) == 1
    assert all(entry.input[0] != read for entry in holder.attribute[0].g.node if entry.op_type == "Cast")


def test_keep_io_types_false():
    source = mlp()
    result = check(source, "fp16", keep_io_types=False).model
    assert not casts(result)
    assert {entry.type.tensor_type.elem_type for entry in (*result.graph.input, *result.graph.output)} == {T.FLOAT16}
    assert [entry.name for entry in (*result.graph.input, *result.graph.output)] == ["x", "y"]


@pytest.mark.parametrize("kept", ["x", ["x"], ["z", "y"], []])
def test_inputs_and_outputs_keep_their_types_by_name(kept):
    nodes = [node("MatMul", ["x", "w"], ["a"], "first"), node("MatMul", ["z", "w"], ["b"], "second"),
             node("Add", ["a", "b"], ["y"], "add")]  # fmt: skip
    source = model(nodes, [info("x", 4, 8), info("z", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)])
    assert ends_of(check(source, "fp16", keep_io_types=kept).model) == {
        name: T.FLOAT if name in kept else T.FLOAT16 for name in "xzy"
    }
    for one in (*source.graph.input, *source.graph.output):
        one.type.tensor_type.elem_type = T.DOUBLE
    source.graph.initializer[0].CopyFrom(nh.from_array(RNG.standard_normal((8, 8)), "w"))
    result = convert_onnx(source, keep_io_types=kept, as_fp32="fp64").model
    onnx.checker.check_model(result, full_check=True)
    assert ends_of(result) == {name: T.DOUBLE if name in kept else T.FLOAT16 for name in "xzy"}


def ends_of(result):
    """The types of inputs and outputs by name."""
    return {entry.name: entry.type.tensor_type.elem_type for entry in (*result.graph.input, *result.graph.output)}


@pytest.mark.parametrize(("kept", "words"), [(["xx"], "'xx' is no input or output"), (["h"], "'h' is no"),
                                             (3, "3 is no list"), ([None], "None is no input")])  # fmt: skip
def test_names_that_keep_no_type_are_refused(kept, words):
    with pytest.raises(OnnxError, match=words):
        convert_onnx(mlp(), keep_io_types=kept)


def test_the_empty_plan_changes_nothing():
    source = built("nested")[0]
    done = check(source, "fp16", {"version": 1, "rules": [{"match": {}, "precision": "keep"}]})
    assert not done.changed and done.plan.casts == ()
    assert done.model.graph.SerializeToString() == source.graph.SerializeToString()


def test_names_of_nodes_stay_and_a_duplicate_gets_one_that_nobody_has():
    """The names that the first choice would be, taken in the model itself; equal names in two branches may stay."""
    nodes = [
        node("MatMul", ["x", "w"], ["return"]),
        node("Relu", ["return"], ["a"], "return"),
        node("MatMul", ["a", "w"], ["x_fp16"], "twin"),
        node("MatMul", ["x_fp16", "w"], ["b"], "twin"),
        node("MatMul", ["b", "w"], ["c"], "twin.1"),
        node("MatMul", ["c", "w"], ["y"], "twin"),
    ]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)])
    done = check(source, "fp16", full=False)  # ONNX Runtime refuses equal names
    kept = [entry.name for entry in done.model.graph.node if entry.op_type != "Cast"]
    assert kept[:3] == ["", "return", "twin"] and kept[4] == "twin.1" and len(set(kept)) == 6
    branches = {
        f"{side}_branch": h.make_graph([node("MatMul", ["x", "w"], ["o"], "inner")], side, [], [info("o", 4, 8)])
        for side in ("then", "else")
    }
    both = model([h.make_node("If", ["c"], ["y"], name="if", **branches)], [info("x", 4, 8), info("c", kind=T.BOOL)],
                 [info("y", 4, 8)], [weight("w", 8, 8)])  # fmt: skip
    result = check(both, "fp16").model
    for attribute in next(entry for entry in result.graph.node if entry.op_type == "If").attribute:
        assert "inner" in [entry.name for entry in attribute.g.node]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled):
    """It pauses while a model is converted."""
    was, wrong = gc.isenabled(), mlp()
    wrong.graph.node[0].op_type = "Nothing"
    try:
        (gc.enable if enabled else gc.disable)()
        convert_onnx(mlp(), check=False)
        with pytest.raises(OnnxError):
            convert_onnx(wrong)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize(("shape", "place"), [([4, 9], "output"), ([-1, 8], "value_info"), ([4], "value_info")])
def test_declared_shapes_that_inference_contradicts_are_replaced(shape, place):
    """ONNX Runtime runs such models, with a warning."""
    nodes = [node("MatMul", ["x", "w"], ["h"], "product"), node("Relu", ["h"], ["y"], "act")]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)])
    source.graph.value_info.append(info("h", 4, 8))
    wrong = getattr(source.graph, place)[0]
    wrong.CopyFrom(info(wrong.name, *shape))
    done = convert_onnx(source)
    assert done.notes == (f"inferred shapes replace declared ones that they contradict: '{wrong.name}'",)
    assert [entry.precision for entry in done.plan.nodes] == ["low", "low"]
    onnx.checker.check_model(done.model, full_check=True)
    same_numbers(source, done.model, {"x": X[:4]})
    raised = convert_onnx(source, dtype="bf16", rules="fast")
    assert wrong.name in raised.notes[-1]


@pytest.mark.parametrize("lacks", ["shape of an output", "shape of an input", "name of the graph", "axes"])
def test_what_onnx_runtime_runs_and_the_checker_refuses(lacks):
    source = model([node("MatMul", ["x", "w"], ["h"], "product"), node("Relu", ["h"], ["r"]),
                    node("MeanVarianceNormalization", ["r"], ["y"], axes=[0, 2, 3])],
                   [info("x", 1, 2, 4, 8)], [info("y", 1, 2, 4, 8)], [weight("w", 8, 8)])  # fmt: skip
    if lacks == "name of the graph":
        source.graph.name = ""
    elif lacks == "axes":
        del source.graph.node[2].attribute[:]
    else:
        place = source.graph.input if lacks.endswith("input") else source.graph.output
        place[0].type.tensor_type.ClearField("shape")
    done = convert_onnx(source)
    assert "product" in low_nodes(done)
    same_numbers(source, done.model, {"x": RNG.standard_normal((1, 2, 4, 8)).astype(np.float32)})


def test_another_contradiction_is_refused():
    source = mlp()
    source.graph.input[0].CopyFrom(info("x", 4, 7))
    with pytest.raises(OnnxError, match="Incompatible dimensions"):
        convert_onnx(source)


@pytest.mark.parametrize("dtype", DTYPES)
def test_data_are_examined_and_rounded(dtype):
    low = low_type(dtype)
    rng = np.random.default_rng(1)
    data = (rng.standard_normal(300_000) * 10.0 ** rng.integers(-9, 5, 300_000)).astype(np.float32)
    data[:4] = [0.0, -0.0, np.inf, low.format.smallest_subnormal / 2]
    held = examine(ir.tensor(data), low)
    finite = data[np.isfinite(data)]
    want = data.astype(h.tensor_dtype_to_np_dtype(LOW[dtype]))
    assert held.largest == np.abs(finite).max() and held.infinite
    assert held.lost == int(((want.astype(np.float32) == 0) & (data != 0)).sum())
    assert convert(ir.tensor(data), low, name="w").tobytes() == want.tobytes()


@pytest.mark.parametrize("opset", [9, 15])
def test_a_lowered_graph_can_be_written_and_read(opset):
    data = [nh.from_array(np.ones(3, np.float32), name) for name in ("scale", "bias", "mean", "var")]
    source = model([node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["y"], "norm")],
                   [info("x", 2, 3, 4)], [info("y", 2, 3, 4)], data, opset=opset)  # fmt: skip
    graph = lower(read_model(open_model(source)), low_type("fp16")).graph
    text = format_graph(graph)
    assert text.startswith("graph onnx stored_casts_free cast_overhead=4096 widest_is_open ")
    again = parse_graph(text)
    assert format_graph(again) == text and again.execution == graph.execution and again.nodes == graph.nodes
