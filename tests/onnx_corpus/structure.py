"""Corpus models that are there for their structure: sharing, naming, types, ages."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnx_models import make_model, value

from onnx_corpus.case import Built
from onnx_corpus.parts import Builder, mlp

WIDTH = 16
FLOAT, DOUBLE = TensorProto.FLOAT, TensorProto.DOUBLE


def resize_with_shared_initializers() -> Built:
    """The scales of two Resize nodes, which must be FP32, are also a factor of the data."""
    b = Builder()
    kernel = b.weight(b.normal(4, 3, 3, 3, scale=0.2))
    x = b.node("Conv", ["x", kernel], kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    scales = b.weight(np.array([1.0, 1.0, 2.0, 2.0]), "scales")
    factor = b.node("ReduceMax", [scales], keepdims=0)
    x = b.node("Resize", [b.node("Mul", [x, factor]), "", scales], mode="linear")
    x = b.node("Resize", [x, "", scales], mode="nearest")
    kernel = b.weight(b.normal(2, 4, 1, 1, scale=0.4))
    x = b.node("Conv", [x, kernel], kernel_shape=[1, 1])
    return b.model(["n", 3, 6, 6], x, ["n", 2, 24, 24]), b.batches(2, 3, 6, 6)


def convolutions_with_batch_norm() -> Built:
    """Convolutions with BatchNormalization, whose statistics keep their type; grouped, strided, pooled."""
    b = Builder()
    x, channels = "x", 3
    for out, stride, group in ((8, 1, 1), (16, 2, 1), (16, 1, 16)):
        kernel = b.weight(b.normal(out, channels // group, 3, 3, scale=(2 / (9 * channels / group)) ** 0.5))
        x = b.node("Conv", [x, kernel], kernel_shape=[3, 3], pads=[1] * 4, strides=[stride] * 2, group=group)
        statistics = [b.weight(array) for array in (np.ones(out), np.zeros(out), b.normal(out, scale=0.1))]
        x = b.node("BatchNormalization", [x, *statistics, b.weight(1 + np.abs(b.normal(out)))], epsilon=1e-5)
        x, channels = b.node("Relu", [x]), out
    x = b.node("Flatten", [b.node("GlobalAveragePool", [x])])
    return b.model(["n", 3, 8, 8], b.linear(x, 16, 10), ["n", 10]), b.batches(2, 3, 8, 8)


def shared_by_both() -> Built:
    """One weight read by a product, which goes low, and by a normalisation, which does not; one of two products."""
    b = Builder()
    shared = b.weight(b.normal(WIDTH), "shared")
    square = b.weight(b.normal(WIDTH, WIDTH, scale=0.25), "square")
    x = b.node("MatMul", ["x", square])
    x = b.node("Add", [b.node("LayerNormalization", [x, shared, shared], axis=-1), shared])
    return b.model(["n", WIDTH], b.node("MatMul", [x, square]), ["n", WIDTH]), b.batches(3, WIDTH)


def unnamed_nodes() -> Built:
    model, batches = mlp(2, WIDTH)
    for node in model.graph.node:
        node.name = ""
    return model, batches


def duplicate_names() -> Built:
    """All nodes have one name, which a value has too."""
    model, batches = mlp(2, WIDTH)
    for node in model.graph.node:
        node.name = model.graph.node[0].output[0]
    return model, batches


def quantised() -> Built:
    """A QDQ product between float layers: scales, zero points and the quantised weight stay as they are."""
    b = Builder()
    x = b.block("x", WIDTH)
    scale, zero = b.weight(0.03), b.weight(np.array(0, np.int8))
    x = b.node("DequantizeLinear", [b.node("QuantizeLinear", [x, scale, zero]), scale, zero])
    eight = b.weight(b.random.integers(-127, 127, (WIDTH, WIDTH)).astype(np.int8))
    weight = b.node("DequantizeLinear", [eight, b.weight(0.002), zero])
    x = b.node("MatMul", [x, weight])
    return b.model(["n", WIDTH], b.linear(x, WIDTH, 4), ["n", 4]), b.batches(4, WIDTH)


def double_part() -> Built:
    """A part in FP64 between FP32 parts, which stays FP64."""
    b = Builder()
    x = b.node("Cast", [b.block("x", WIDTH)], to=DOUBLE)
    b.weights["wide"] = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)) / 4  # FP64
    x = b.node("Cast", [b.node("MatMul", [x, "wide"])], to=FLOAT)
    return b.model(["n", WIDTH], b.block(x, WIDTH), ["n", WIDTH]), b.batches(4, WIDTH)


def initializer_that_is_an_input() -> Built:
    """A weight that callers may give: its declared type is part of the interface."""
    b = Builder()
    weight = b.weight(b.normal(WIDTH, WIDTH, scale=0.25), "given")
    x = b.node("MatMul", [b.block("x", WIDTH), weight])
    model = b.model(["n", WIDTH], b.block(x, WIDTH), ["n", WIDTH])
    model.graph.input.append(value("given", [WIDTH, WIDTH]))
    first, second = b.batches(4, WIDTH)
    return model, [first, {**second, "given": b.normal(WIDTH, WIDTH, scale=0.25)}]


def opset_9() -> Built:
    """As an exporter of 2018 wrote it: attributes where later opsets have inputs, every initializer an input."""
    b = Builder()
    x = b.block("x", WIDTH)
    x = b.node("Clip", [x], min=-3.0, max=3.0)
    x = b.node("Dropout", [x], outputs=1, ratio=0.1)
    x = b.node("Unsqueeze", [x], axes=[1])
    x = b.node("Squeeze", [b.node("Pad", [x], pads=[0, 0, 0, 0, 0, 2], value=0.5)], axes=[1])
    total = b.node("ReduceSum", [x], axes=[1], keepdims=1)
    x = b.node("Add", [b.linear(x, WIDTH + 2, WIDTH), total])
    x = b.node("Softmax", [x], axis=1)
    model = b.model(["n", WIDTH], x, ["n", WIDTH], opset=9)
    model.ir_version = 3
    model.graph.input.extend(value(name, list(array.shape)) for name, array in b.weights.items())
    return model, b.batches(4, WIDTH)


def empty_tensors() -> Built:
    """An initializer and an intermediate value without elements, joined with ones that have some."""
    b = Builder()
    nothing = b.weight(np.zeros((0, WIDTH)))
    x = b.node("Concat", [b.block("x", WIDTH), nothing], axis=0)
    cut = b.node("Slice", [x, *(b.weight(np.array([i], np.int64)) for i in (0, 0, 0))])
    x = b.node("Concat", [x, b.node("Relu", [cut])], axis=0)
    return b.model(["n", WIDTH], b.linear(x, WIDTH, 4), ["n", 4]), [*b.batches(4, WIDTH), *b.batches(0, WIDTH, count=1)]


def existing_casts() -> Built:
    """Casts of the model's own: to FP16 and back, an integer side path, an FP32 cast that changes nothing."""
    b = Builder()
    x = b.node("Cast", [b.block("x", WIDTH)], to=TensorProto.FLOAT16)
    x = b.node("Cast", [b.node("Relu", [x])], to=FLOAT)
    whole = b.node("Cast", [b.node("Floor", [b.node("Mul", [x, b.weight(4.0)])])], to=TensorProto.INT32)
    x = b.node("Add", [x, b.node("Cast", [whole], to=FLOAT)])
    x = b.node("Cast", [b.block(x, WIDTH)], to=FLOAT)
    return b.model(["n", WIDTH], x, ["n", WIDTH]), b.batches(4, WIDTH)


def output_used_inside() -> Built:
    """Two outputs that other nodes read, one of them the input of the other's softmax."""
    b = Builder()
    hidden = b.block("x", WIDTH)
    logits = b.linear(hidden, WIDTH, 4)
    b.nodes.append(helper.make_node("Softmax", [logits], ["p"], name="p", axis=-1))
    b.nodes.append(helper.make_node("MatMul", ["p", b.weight(b.normal(4, 4))], ["again"], name="again"))
    outputs = [value(logits, ["n", 4]), value(hidden, ["n", WIDTH]), value("p", ["n", 4]), value("again", ["n", 4])]
    return make_model(b.nodes, [value("x", ["n", WIDTH])], outputs, b.weights), b.batches(4, WIDTH)


def constant_nodes() -> Built:
    """Weights in Constant nodes, one of them a scalar `value_float`, one read by a product and a normalisation."""
    b = Builder()
    for name, array in (("w", b.normal(WIDTH, WIDTH, scale=0.25)), ("v", b.normal(WIDTH))):
        b.nodes.append(helper.make_node("Constant", [], [name], name=name, value=numpy_helper.from_array(array)))
    b.nodes.append(helper.make_node("Constant", [], ["half"], name="half", value_float=0.5))
    x = b.node("Add", [b.node("MatMul", ["x", "w"]), "v"])
    x = b.node("LayerNormalization", [b.node("Mul", [x, "half"]), "v"], axis=-1)
    return b.model(["n", WIDTH], b.node("MatMul", [x, "w"]), ["n", WIDTH]), b.batches(4, WIDTH)


def passed_through() -> Built:
    """An input that is an output too, an initializer that is one, and an unused input."""
    b = Builder()
    y = b.block("x", WIDTH)
    fixed = b.weight(b.normal(3), "fixed")
    b.nodes.append(helper.make_node("Identity", ["x"], ["copy"], name="copy"))
    outputs = [value(y, ["n", WIDTH]), value("copy", ["n", WIDTH]), value(fixed, [3])]
    inputs = [value("x", ["n", WIDTH]), value("unused", [2])]
    model = make_model(b.nodes, inputs, outputs, b.weights)
    return model, [{**batch, "unused": np.ones(2, np.float32)} for batch in b.batches(4, WIDTH)]
