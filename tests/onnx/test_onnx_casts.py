"""Casts that a conversion leaves behind: as few as TensorFlow's, none in a row, none that changes nothing."""

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto as T
from onnx import helper as h
from onnx_models import DTYPES, LOW, check, info, model, node, nodes_of, run, types, weight
from tensorflow_graphs import GRAPHS, TensorFlowGraph

import amp_compiler as amp
from amp_compiler.onnx.convert import convert_onnx

_SHAPE = [4, 4]
_UNARY = ("Relu", "Neg", "Abs", "Sqrt", "Tanh", "Exp", "Log", "Identity", "Transpose", "Softmax", "Erf", "Sigmoid")
_BINARY = ("MatMul", "Add", "Mul", "Max", "Concat")
_FLOATS = (T.FLOAT, T.FLOAT16, T.BFLOAT16, T.DOUBLE)
_WHOLE = (T.BOOL, T.INT64, T.INT32, T.UINT8)


def _info(name: str, kind: int) -> onnx.ValueInfoProto:
    return h.make_tensor_value_info(name, kind, _SHAPE)


@st.composite
def models(draw: st.DrawFn, most: int = 12) -> onnx.ModelProto:
    """A valid model of up to `most` nodes: FP32 throughout but for its own casts, and inputs of whole numbers."""
    kinds: dict[str, int] = {"x0": T.FLOAT, "x1": T.FLOAT, "b": draw(st.sampled_from(_WHOLE)), "w": T.FLOAT}
    nodes = []
    for index in range(draw(st.integers(1, most))):
        floats = [name for name, kind in kinds.items() if kind == T.FLOAT][-6:]
        result = f"v{index}"
        shape = draw(st.sampled_from(("unary", "unary", "binary", "binary", "cast", "cast to FP32")))
        if shape == "unary":
            nodes.append(h.make_node(draw(st.sampled_from(_UNARY)), [draw(st.sampled_from(floats))], [result]))
            kinds[result] = T.FLOAT
        elif shape == "binary":
            op = draw(st.sampled_from(_BINARY))
            operands = [draw(st.sampled_from(floats)) for _ in range(2)]
            if op == "Concat":  # and half of it again, so that all shapes are alike
                nodes.append(h.make_node(op, operands, [f"{result}_both"], axis=0))
                nodes.append(
                    h.make_node("Split", [f"{result}_both"], [result, f"{result}_rest"], axis=0, num_outputs=2)
                )
                kinds[f"{result}_rest"] = T.FLOAT
            else:
                nodes.append(h.make_node(op, operands, [result]))
            kinds[result] = T.FLOAT
        else:
            kind = T.FLOAT if shape == "cast to FP32" else draw(st.sampled_from((*_FLOATS, *_WHOLE)))
            others = [name for name, known in kinds.items() if known != kind]
            if others:
                nodes.append(h.make_node("Cast", [draw(st.sampled_from(others))], [result], to=kind))
                kinds[result] = kind
    read = {name for node in nodes for name in node.input}
    made_here = [name for node in nodes for name in node.output if not name.endswith("_both")]
    results = [name for name in made_here if name not in read or draw(st.integers(0, 5)) == 0]
    if not results:  # a cast drawn where there was nothing to cast
        nodes.append(h.make_node("Relu", ["x0"], ["v"]))
        results, kinds["v"] = ["v"], T.FLOAT
    weight = h.make_tensor("w", T.FLOAT, _SHAPE, [0.25] * 16)
    graph = h.make_graph(
        nodes,
        "random",
        [_info(name, kinds[name]) for name in ("x0", "x1", "b")],
        [_info(name, kinds[name]) for name in results],
        [weight],
    )
    made_model = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made_model, full_check=True)
    return made_model


# Lists of tensors are sequences in ONNX, where there are none of BF16, so that they stay as they are there, with the
# casts that come of that. In torch they are gone when a graph is captured.
SEQUENCES = {
    "TensorListSetGet": 4,
    "TensorListFromTensor": 4,
    "TensorListPushPop": 4,
    "TensorListPushBackBatchAndConcatLists": 4,
    "TensorListThroughFunction": 5,
}


def all_casts(graph):
    """The casts of a graph and of its bodies."""
    return [entry for entry in nodes_of(graph) if entry.op_type == "Cast"]


def rules_of(graph: TensorFlowGraph, preset: str):
    return {"version": 1, "extends": preset, "rules": list(graph.rules)}


def model_of(graph: TensorFlowGraph, dtype: str):
    """The model, with casts of its own to the low type that is asked for."""
    result = graph.model()
    for cast in all_casts(result.graph):
        if cast.attribute[0].i == T.FLOAT16:
            cast.attribute[0].i = LOW[dtype]
    return result


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name in GRAPHS for dtype in DTYPES[: 1 if name in SEQUENCES else None]]
)
def test_no_more_casts_than_tensorflow_puts_into_its_own_graphs(name, dtype):
    graph = GRAPHS[name]
    source = model_of(graph, dtype)
    done = check(source, dtype, rules_of(graph, "tensorflow"))
    assert len(all_casts(done.model.graph)) - len(all_casts(source.graph)) <= graph.casts
    precisions = {planned.name: planned.precision for planned in done.plan.nodes}
    assert [one for one in graph.of("low") if precisions[one] != "low"] == []
    assert [one for one in graph.of("fp32") if precisions[one] == "low"] == []


def test_what_is_fetched_by_name_stays_as_it_is():
    """TensorFlow runs a fetched product in FP32, and has two casts; in 16 bits it takes two more."""
    graph = GRAPHS["PreserveFetches"]
    for rules, product, casts in ((rules_of(graph, "tensorflow"), "keep", 2), ("tensorflow", "low", 4)):
        done = check(graph.model(), "fp16", rules)
        assert {planned.name: planned.precision for planned in done.plan.nodes}["allow1"] == product
        assert len(all_casts(done.model.graph)) == casts


def test_widest_behind_follow_takes_part_in_the_cut():
    """What is cast up for an output anyway is read in FP32 by a follower and by the root behind it."""
    graph = GRAPHS["PreserveFetches"]
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"op": "onnx.Sqrt"}, "precision": "widest"}]}
    plan = convert_onnx(graph.model(), rules=rules).plan
    nodes = {planned.name: planned for planned in plan.nodes}
    assert (nodes["clr1"].precision, nodes["infer1"].precision) == ("fp32", "fp32")
    assert len([cast for cast in plan.casts if cast.src != cast.dst]) == 4


def mask(kind, readers):
    """A mask that the model makes FP32, and what reads it."""
    return model(
        [node("Cast", ["b"], ["m"], "own", to=T.FLOAT), *readers],
        [info("x", 4, 4), info("b", 4, 4, kind=kind)],
        [info("y", 4, 4)],
        [weight("w", 4, 4)],
    )


WHOLE = [T.BOOL, T.INT64, T.INT32, T.UINT8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WHOLE, ids=T.DataType.Name)
def test_a_mask_that_is_read_low_is_cast_once(kind, dtype):
    source = mask(kind, [node("MatMul", ["x", "m"], ["y"])])
    result = check(source, dtype).model
    (cast,) = [entry for entry in result.graph.node if entry.input[0] == "b"]
    if dtype == "fp16" and kind in (T.INT64, T.INT32):  # nothing says that it is a mask: it may be beyond FP16
        assert (cast.op_type, cast.attribute[0].i, cast.output[0]) == ("Cast", T.FLOAT, "m")
        return
    assert (cast.op_type, cast.attribute[0].i) == ("Cast", LOW[dtype])
    assert "m" not in types(result), "the model's own cast is read by nobody"


def test_a_mask_that_is_read_in_both_types_is_cast_to_each_from_the_start():
    readers = [node("MatMul", ["x", "m"], ["a"]), node("Exp", ["m"], ["e"]), node("Add", ["a", "e"], ["y"])]
    source = mask(T.BOOL, readers)
    done = check(source, "fp16")
    assert sorted(entry.attribute[0].i for entry in done.model.graph.node if entry.input[0] == "b") == [1, 10]
    feeds = {"x": np.full((4, 4), 0.5, np.float32), "b": np.eye(4, dtype=bool)}
    assert np.allclose(run(source, feeds)[0], run(done.model, feeds)[0], atol=1e-2)


def test_an_output_that_the_model_cast_keeps_its_cast():
    source = mask(T.BOOL, [node("MatMul", ["x", "m"], ["y"])])
    source.graph.output.append(info("m", 4, 4))
    result = check(source, "fp16").model
    assert types(result)["m"] == T.FLOAT


def test_a_cast_that_has_become_idle_goes():
    """The model casts a product to FP16 by itself, which it is now."""
    nodes = [
        node("MatMul", ["x", "w"], ["a"]),
        node("Cast", ["a"], ["c"], "own", to=T.FLOAT16),
        node("Relu", ["c"], ["d"]),
        node("Cast", ["d"], ["y"], to=T.FLOAT),
    ]
    result = check(model(nodes, [info("x", 4, 4)], [info("y", 4, 4)], [weight("w", 4, 4)]), "fp16").model
    assert [entry.op_type for entry in result.graph.node] == ["Cast", "MatMul", "Relu", "Cast"]


def test_an_idle_cast_that_makes_an_output_passes_it_on():
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Cast", ["a"], ["y"], "own", to=T.FLOAT16)]
    source = model(nodes, [info("x", 4, 4)], [info("y", 4, 4, kind=T.FLOAT16)], [weight("w", 4, 4)])
    result = check(source, "fp16").model
    assert [entry.op_type for entry in result.graph.node] == ["Cast", "MatMul", "Identity"]


def test_casts_that_were_idle_before_stay():
    nodes = [node("Cast", ["x"], ["a"], to=T.FLOAT), node("MatMul", ["a", "w"], ["y"])]
    result = check(model(nodes, [info("x", 4, 4)], [info("y", 4, 4)], [weight("w", 4, 4)]), "fp16").model
    assert next(entry for entry in result.graph.node if entry.output[0] == "a").attribute[0].i == T.FLOAT


def wrongs(source: onnx.ModelProto, built: onnx.ModelProto) -> list[str]:
    """Casts of ours that read a cast where the model had no two in a row, and new ones between equal types."""
    own = {entry.output[0] for entry in source.graph.node if entry.op_type == "Cast"}
    rows = {entry.input[0] for entry in source.graph.node if entry.op_type == "Cast" and entry.input[0] in own}
    before, after = types(source), types(built)
    casts = {entry.output[0]: entry for entry in built.graph.node if entry.op_type == "Cast"}
    chained = [out for out, entry in casts.items() if out not in own and entry.input[0] in set(casts) - rows]
    idle = [
        out
        for out, entry in casts.items()
        if after[entry.input[0]] == after[out] and not (out in own and before.get(entry.input[0]) == before[out])
    ]
    return chained + idle


@pytest.mark.parametrize("rules", ["default", "tensorflow", "safe"])
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(source=models(), dtype=st.sampled_from(DTYPES), keep=st.booleans())
def test_no_cast_of_ours_reads_a_cast_and_none_is_idle(rules, source, dtype, keep):
    result = convert_onnx(source, rules=rules, dtype=dtype, keep_io_types=keep).model
    onnx.checker.check_model(result, full_check=True)
    assert wrongs(source, result) == []


def inputs_of(source):
    """Tensors for the inputs of a model."""
    kinds = {T.FLOAT: torch.float32, T.BOOL: torch.bool, T.INT64: torch.int64}
    tensors = ((entry.type.tensor_type.elem_type, entry.type.tensor_type.shape.dim) for entry in source.graph.input)
    return tuple(torch.ones([dim.dim_value for dim in dims], dtype=kinds[kind]) for kind, dims in tensors)


NOT_IN_TORCH = (*SEQUENCES, "RecurrentEdgeColorMismatch", "PreserveCPUNodes")  # lists, loops, names of nodes


@pytest.mark.usefixtures("bf16_kernels")
@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in NOT_IN_TORCH])
def test_no_more_casts_than_tensorflow_in_a_torch_graph(name):
    graph = GRAPHS[name]
    source = model_of(graph, "bf16")
    own = sum(entry.op_type == "Cast" for entry in source.graph.node)
    rules = rules_of(graph, "tensorflow")
    compiled = amp.compile(amp.onnx_to_fx(source).eval(), rules=rules, dtype="bf16", backend="eager")
    with torch.no_grad():
        compiled(*inputs_of(source))
    result = [entry for entry in compiled.graph_module.graph.nodes if entry.target is torch.ops.aten.to.dtype]
    assert len(result) - own <= graph.casts


@pytest.mark.parametrize(("name", "casts"), SEQUENCES.items())
def test_there_are_no_sequences_of_bf16(name, casts):
    """So they hold what they held, and each product is cast on its way in and out."""
    done = check(GRAPHS[name].model(), "bf16", "tensorflow")
    assert len(all_casts(done.model.graph)) == casts
    precisions = {planned.name: planned.precision for planned in done.plan.nodes}
    assert [one for one in GRAPHS[name].of("low") if precisions[one] != "low"] == []
