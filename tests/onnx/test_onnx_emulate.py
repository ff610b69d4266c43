"""True rounding against NumPy and ONNX's reference evaluator, bit for bit, in control flow and functions too."""

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_models import make_model, value

from amp_compiler.onnx.check.emulate import emulate
from amp_compiler.onnx.check.run import ORT, Runner

FLOAT, FP16, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
DTYPES = {FP16: np.dtype(np.float16), BF16: np.dtype(ml_dtypes.bfloat16)}
BOTH = pytest.mark.parametrize("kind", [FP16, BF16], ids=["fp16", "bf16"])


def run_twin(model: onnx.ModelProto, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    twin = emulate(model)
    onnx.checker.check_model(twin.proto, full_check=True)
    runner = Runner(twin.proto, None)
    assert runner.engine == ORT
    return runner.run(twin.feeds(batch))


def numbers(count: int = 20_000) -> np.ndarray:
    """Numbers over all of FP32's range, many within FP16's, its subnormals, ties between two FP16 numbers."""
    rng = np.random.default_rng(0)
    parts = [
        rng.standard_normal(count), np.exp(rng.uniform(-90, 90, count)), -np.exp(rng.uniform(-20, 12, count)),
        1 + 2.0**-11 * rng.integers(-64, 64, count), 1 + 2.0**-8 * rng.integers(-64, 64, count),
        2.0**-25 * rng.integers(-64, 64, count),
        [0.0, -0.0, 65504, 65519.99, 65520, -65520, 2.0**-24, 2.0**-25, 3.3895e38, 3.4e38, np.inf, -np.inf],
    ]  # fmt: skip
    with np.errstate(over="ignore"):
        return np.concatenate(parts).astype(np.float32)


def bits(array: np.ndarray) -> np.ndarray:
    array = array.astype(np.float32)
    return np.where(np.isnan(array), np.uint32(0x7FC00000), array.view(np.uint32))


@BOTH
def test_elementwise_nodes_round_as_numpy_does_bit_for_bit(kind):
    nodes = [
        helper.make_node("Add", ["a", "b"], ["sum"]),
        helper.make_node("Mul", ["a", "b"], ["product"]),
        helper.make_node("Div", ["a", "b"], ["quotient"]),
        helper.make_node("Abs", ["a"], ["abs"]),
        helper.make_node("Sqrt", ["abs"], ["root"]),
        helper.make_node("Sub", ["product", "sum"], ["chained"]),
    ]
    names = ["sum", "product", "quotient", "root", "chained"]
    model = make_model(
        nodes, [value("a", ["n"], kind), value("b", ["n"], kind)], [value(n, ["n"], kind) for n in names]
    )
    a = numbers()
    b = np.random.default_rng(1).permutation(a)
    result = run_twin(model, {"a": a, "b": b})
    with np.errstate(all="ignore"):
        low_a, low_b = a.astype(DTYPES[kind]), b.astype(DTYPES[kind])
        expected = {"sum": low_a + low_b, "product": low_a * low_b, "quotient": low_a / low_b}
        expected |= {"root": np.sqrt(np.abs(low_a)), "chained": expected["product"] - expected["sum"]}
    for name in names:
        assert result[name].dtype == np.float32
        np.testing.assert_array_equal(bits(result[name]), bits(expected[name]), err_msg=name)


def branch(name: str, nodes: list[onnx.NodeProto], built: str, kind: int = FP16) -> onnx.GraphProto:
    return helper.make_graph(nodes, name, [], [value(built, None, kind)])


def cast_around(*nodes: onnx.NodeProto, **extra) -> onnx.ModelProto:
    ends = [helper.make_node("Cast", ["x"], ["low"], to=FP16), *nodes, helper.make_node("Cast", ["r"], ["y"], to=FLOAT)]
    inputs = [value("x", [3]), *extra.pop("inputs", [])]
    return make_model(ends, inputs, [value("y", ["k"])], **extra)


def test_the_branches_of_if_round():
    then = branch("then", [helper.make_node("Mul", ["low", "low"], ["t"])], "t")
    other = branch(
        "else", [helper.make_node("Constant", [], ["e"], value=helper.make_tensor("", FP16, [1], [2.0]))], "e"
    )
    model = cast_around(
        helper.make_node("If", ["c"], ["r"], then_branch=then, else_branch=other),
        inputs=[value("c", [], TensorProto.BOOL)],
    )
    x = np.array([0.1, 3.3, 300.0], np.float32)
    with np.errstate(over="ignore"):
        square = x.astype(np.float16) * x.astype(np.float16)
    for condition, expected in ((True, square), (False, np.array([2.0]))):
        np.testing.assert_array_equal(run_twin(model, {"x": x, "c": np.array(condition)})["y"], expected)


def test_the_body_of_loop_rounds_at_every_turn():
    body = helper.make_graph(
        [helper.make_node("Add", ["state", "low"], ["next"]), helper.make_node("Identity", ["go"], ["still"])],
        "body",
        [value("i", [], TensorProto.INT64), value("go", [], TensorProto.BOOL), value("state", [3], FP16)],
        [value("still", [], TensorProto.BOOL), value("next", [3], FP16)],
    )
    model = cast_around(
        helper.make_node("Loop", ["turns", "", "low"], ["r"], body=body), weights={"turns": np.array(1000)}
    )
    x = np.array([0.1, 1.0, 100.0], np.float32)
    low = x.astype(np.float16)
    state = low.copy()
    with np.errstate(over="ignore"):
        for _ in range(1000):
            state = state + low
    np.testing.assert_array_equal(run_twin(model, {"x": x})["y"], state)
    assert state[2] == np.inf and abs(float(state[0]) - 100.1) > 1  # rounding at every turn shows


def test_functions_sequences_and_type_attributes():
    function = helper.make_function(
        "own", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    nodes = [
        helper.make_node("Twice", ["low"], ["twice"], domain="own"),
        helper.make_node("Shape", ["low"], ["shape"]),
        helper.make_node("ConstantOfShape", ["shape"], ["full"], value=helper.make_tensor("", FP16, [1], [0.1])),
        helper.make_node("SequenceConstruct", ["twice", "full"], ["both"]),
        helper.make_node("ConcatFromSequence", ["both"], ["joined"], axis=0),
        helper.make_node("CastLike", ["joined", "low"], ["liked"]),
        helper.make_node("EyeLike", ["square"], ["eye"], dtype=FP16),
        helper.make_node("ReduceMax", ["eye"], ["top"], keepdims=0),
        helper.make_node("Mul", ["liked", "top"], ["r"]),
    ]
    model = cast_around(*nodes, functions=[function], domains=["own"], weights={"square": np.zeros((2, 2), np.float32)})
    x = np.array([0.1, 40000.0, 1.0], np.float32)
    result = run_twin(model, {"x": x})["y"]
    np.testing.assert_array_equal(result, [np.float16(0.2), np.inf, 2.0, *[np.float16(0.1)] * 3])


def test_a_16_bit_initializer_that_is_also_an_input_keeps_its_default():
    nodes = [helper.make_node("Cast", ["x"], ["low"], to=FP16), helper.make_node("Mul", ["low", "k"], ["y"])]
    model = make_model(
        nodes, [value("x", [2]), value("k", [], FP16)], [value("y", [2], FP16)], {"k": np.array(0.1, np.float16)}
    )
    x = np.array([1.0, 3.0], np.float32)
    np.testing.assert_array_equal(run_twin(model, {"x": x})["y"], x.astype(np.float16) * np.float16(0.1))
    inputs = run_twin(model, {"x": x, "k": np.array(0.3, np.float32)})["y"]
    np.testing.assert_array_equal(inputs, x.astype(np.float16) * np.float16(0.3))


def test_a_weight_is_fp32_only_from_its_first_reader_on():
    weights = [onnx.numpy_helper.from_array(np.ones((2, 2), np.float16), name) for name in ("v", "w", "unread")]
    nodes = [helper.make_node("MatMul", ["x", "v"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["y"])]
    model = make_model(nodes, [value("x", [2, 2], FP16)], [value("y", [2, 2], FP16)])
    model.graph.initializer.extend(weights)
    result = [name for node in emulate(model).proto.graph.node for name in node.output]
    order = [result.index(name) for name in ("v/wide", "a", "w/wide", "y", "unread/wide")]
    assert order == sorted(order)
