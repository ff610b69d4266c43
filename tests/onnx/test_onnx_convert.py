"""`convert_onnx` on models of every shape: valid, idempotent, and right in its numbers."""

from __future__ import annotations

import gc

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import (
    DTYPES,
    LOW,
    RNG,
    X,
    casts,
    check,
    info,
    loop,
    mlp,
    model,
    node,
    same_numbers,
    weight,
)

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.convert import convert_onnx


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


def test_weights_are_rounded_to_nearest_even_and_keep_sign_and_zero():
    data = np.array([[1.0, -0.0, 0.0, 2049.0, 2051.0, -np.inf, 1e-7, -1e-7]], np.float32).T
    source = model(
        [node("MatMul", ["x", "w"], ["y"])], [info("x", 1, 8)], [info("y", 1, 1)], [nh.from_array(data, "w")]
    )
    made = nh.to_array(check(source, "fp16").model.graph.initializer[0])
    want = data.astype(np.float16)
    assert made.tobytes() == want.tobytes()
    assert made[3, 0] == 2048 and made[4, 0] == 2052 and np.signbit(made[1, 0])


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


def test_an_initializer_that_is_an_input_keeps_its_type():
    source = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [info("x", 4, 8), info("w", 8, 8)],
        [info("y", 4, 8)],
        [weight("w", 8, 8)],
        ir_version=3,
        opset=13,
    )
    made = check(source, "fp16").model
    assert made.graph.initializer[0].data_type == T.FLOAT
    assert sorted(entry.input[0] for entry in casts(made)) == ["w", "x", "y_fp16"]
    same_numbers(source, made, {"x": X})


def test_an_output_that_is_used_inside_keeps_its_name():
    source = model(
        [node("MatMul", ["x", "w"], ["a"], "one"), node("MatMul", ["a", "w"], ["y"], "two")],
        [info("x", 4, 8)],
        [info("a", 4, 8), info("y", 4, 8)],
        [weight("w", 8, 8)],
    )
    made = check(source, "fp16").model
    assert next(entry for entry in made.graph.node if entry.name == "two").input[0] == "a_fp16"
    same_numbers(source, made, {"x": X})


def test_a_value_that_the_model_itself_casts_and_returns():
    """The output may be the model's own upcast: it gets a name of its own, and both outputs keep theirs."""
    source = model(
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("Cast", ["a"], ["b"], to=T.FLOAT),
            node("MatMul", ["b", "w"], ["c"]),
        ],
        [info("x", 4, 8)],
        [info("a", 4, 8), info("b", 4, 8), info("c", 4, 8)],
        [weight("w", 8, 8)],
    )
    same_numbers(source, check(source, "fp16").model, {"x": X})


def test_unnamed_duplicate_and_odd_names():
    nodes = [
        node("MatMul", ["x", "w"], ["return"]),
        node("Relu", ["return"], ["a"], "return"),
        node("MatMul", ["a", "w"], ["x_fp16"], "twin"),
        node("MatMul", ["x_fp16", "w"], ["y"], "twin"),
    ]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)])
    done = check(source, "fp16")
    kept = [(entry.name, entry.op_type) for entry in done.model.graph.node if entry.op_type != "Cast"]
    assert kept == [("", "MatMul"), ("return", "Relu"), ("twin", "MatMul"), ("twin.1", "MatMul")]
    assert [entry.name for entry in done.plan.nodes][2:] == ["twin", "twin.1"]
    source.graph.node[3].name = "other"  # ONNX Runtime refuses equal names
    same_numbers(source, done.model, {"x": X})


@pytest.mark.parametrize("dtype", DTYPES)
def test_resize_with_shared_scales(dtype):
    source = model(
        [
            node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
            node("Resize", ["a", "", "s"], ["b"], mode="nearest"),
            node("Mul", ["b", "m"], ["c"]),
            node("Resize", ["c", "", "s"], ["y"], mode="nearest"),
        ],
        [info("x", 1, 2, 4, 4)],
        [h.make_tensor_value_info("y", T.FLOAT, [1, 2, 16, 16])],
        [weight("w", 2, 2, 3, 3), nh.from_array(np.array([1, 1, 2, 2], np.float32), "s"), weight("m", 1)],
    )
    made = check(source, dtype, "apex-o3").model
    data = {tensor.name: tensor.data_type for tensor in made.graph.initializer}
    assert data["s"] == T.FLOAT and data["w"] == LOW[dtype]


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


def test_local_functions_are_written_out():
    steps = [node("MatMul", ["a", "b"], ["t"]), node("Relu", ["t"], ["o"])]
    inner = h.make_function("f", "Double", ["a", "b"], ["o"], steps, [h.make_opsetid("", 18)])
    graph = h.make_graph([h.make_node("Double", ["x", "w"], ["y"], domain="f", name="call")], "g", [info("x", 4, 8)],
                         [info("y", 4, 8)], [weight("w", 8, 8)])  # fmt: skip
    source = h.make_model(
        graph, functions=[inner], opset_imports=[h.make_opsetid("", 18), h.make_opsetid("f", 1)], ir_version=9
    )
    done = check(source, "fp16")
    assert done.plan.low_nodes == 2 and not done.model.functions
    same_numbers(source, done.model, {"x": X})


def test_dynamic_dimensions_empty_tensors_and_unsorted_nodes():
    source = model(
        [
            node("MatMul", ["x", "w"], ["a"]),
            node("Concat", ["a", "nothing"], ["b"], axis=0),
            node("MatMul", ["b", "w"], ["y"]),
        ],
        [h.make_tensor_value_info("x", T.FLOAT, ["n", 8])],
        [h.make_tensor_value_info("y", T.FLOAT, ["m", 8])],
        [weight("w", 8, 8), nh.from_array(np.zeros((0, 8), np.float32), "nothing")],
    )
    done = check(source, "fp16")
    assert done.plan.low_nodes == 3
    same_numbers(source, done.model, {"x": X})
    nodes = list(source.graph.node)
    del source.graph.node[:]
    source.graph.node.extend(reversed(nodes))
    again = convert_onnx(source)
    onnx.checker.check_model(again.model, full_check=True)


def test_keep_io_types_false():
    source = mlp()
    made = check(source, "fp16", keep_io_types=False).model
    assert not casts(made)
    assert {entry.type.tensor_type.elem_type for entry in (*made.graph.input, *made.graph.output)} == {T.FLOAT16}
    assert [entry.name for entry in (*made.graph.input, *made.graph.output)] == ["x", "y"]


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
    made = convert_onnx(source, keep_io_types=kept, as_fp32="fp64").model
    onnx.checker.check_model(made, full_check=True)
    assert ends_of(made) == {name: T.DOUBLE if name in kept else T.FLOAT16 for name in "xzy"}


def ends_of(made):
    """The types of inputs and outputs by name."""
    return {entry.name: entry.type.tensor_type.elem_type for entry in (*made.graph.input, *made.graph.output)}


@pytest.mark.parametrize(("kept", "words"), [(["xx"], "'xx' is no input or output"), (["h"], "'h' is no"),
                                             (3, "3 is no list"), ([None], "None is no input")])  # fmt: skip
def test_names_that_keep_no_type_are_refused(kept, words):
    with pytest.raises(OnnxError, match=words):
        convert_onnx(mlp(), keep_io_types=kept)


def test_the_empty_plan_changes_nothing():
    source = loop()
    done = check(source, "fp16", {"version": 1, "rules": [{"match": {}, "precision": "keep"}]})
    assert not done.changed and done.plan.casts == ()
    assert done.model.graph.SerializeToString() == source.graph.SerializeToString()


def test_a_name_given_to_a_duplicate_is_nobodys():
    """The names that the first choice would be, taken in the model itself; equal names in two branches may stay."""
    names = ["twin", "twin", "twin.1", "twin"]
    values = ["x", "a", "b", "c", "y"]
    nodes = [node("MatMul", [one, "w"], [two], name) for one, two, name in zip(values, values[1:], names, strict=False)]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)])
    kept = [entry.name for entry in check(source, "fp16").model.graph.node if entry.op_type != "Cast"]
    assert kept[0] == "twin" and kept[2] == "twin.1" and len(set(kept)) == 4
    branches = {
        f"{side}_branch": h.make_graph([node("MatMul", ["x", "w"], ["o"], "inner")], side, [], [info("o", 4, 8)])
        for side in ("then", "else")
    }
    both = model([h.make_node("If", ["c"], ["y"], name="if", **branches)], [info("x", 4, 8), info("c", kind=T.BOOL)],
                 [info("y", 4, 8)], [weight("w", 8, 8)])  # fmt: skip
    made = check(both, "fp16").model
    for attribute in next(entry for entry in made.graph.node if entry.op_type == "If").attribute:
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


@pytest.mark.parametrize("shape", [[4, 9], [-1, 8], [4], [4, 8, 1]])
@pytest.mark.parametrize("place", ["output", "value_info"])
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


def test_another_contradiction_is_refused():
    source = mlp()
    source.graph.input[0].CopyFrom(info("x", 4, 7))
    with pytest.raises(OnnxError, match="Incompatible dimensions"):
        convert_onnx(source)
