"""Corpus models with control flow, functions and recurrences."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from onnx_models import make_model, value

from onnx_corpus.case import Built
from onnx_corpus.parts import Builder

WIDTH = 16
BOOL, INT64 = TensorProto.BOOL, TensorProto.INT64


def if_() -> Built:
    """Two branches that read a value from around them: one multiplies by a weight of its own, one by one around it."""
    b = Builder()
    x = b.block("x", WIDTH)
    shared = b.weight(b.normal(WIDTH, WIDTH, scale=0.25), "shared")
    own = numpy_helper.from_array(b.normal(WIDTH, WIDTH, scale=0.25), "own")
    then = helper.make_graph(
        [helper.make_node("MatMul", [x, "own"], ["t"]), helper.make_node("Relu", ["t"], ["then_out"])],
        "then", [], [value("then_out", ["n", WIDTH])], [own],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("MatMul", [x, shared], ["e"]), helper.make_node("Softmax", ["e"], ["else_out"], axis=-1)],
        "else", [], [value("else_out", ["n", WIDTH])],
    )  # fmt: skip
    b.nodes.append(helper.make_node("If", ["c"], ["chosen"], name="if", then_branch=then, else_branch=other))
    y = b.linear(b.node("MatMul", ["chosen", shared]), WIDTH, 4)
    model = b.model(["n", WIDTH], y, ["n", 4])
    model.graph.input.append(value("c", [], BOOL))
    batches = [{**batch, "c": np.array(flag)} for batch, flag in zip(b.batches(4, WIDTH), (True, False), strict=True)]
    return model, batches


def loop() -> Built:
    """Five turns: the state is multiplied by a captured weight, and each turn's state is also a scan output."""
    b = Builder()
    x = b.block("x", WIDTH)
    weight = b.weight(np.linalg.qr(b.normal(WIDTH, WIDTH))[0], "turning")
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["state", weight], ["turned"]),
            helper.make_node("Add", ["turned", x], ["moved"]),
            helper.make_node("Tanh", ["moved"], ["next"]),
            helper.make_node("Identity", ["next"], ["each"]),
            helper.make_node("Identity", ["go"], ["still"]),
        ],
        "body",
        [value("i", [], INT64), value("go", [], BOOL), value("state", ["n", WIDTH])],
        [value("still", [], BOOL), value("next", ["n", WIDTH]), value("each", ["n", WIDTH])],
    )
    turns, go = b.weight(np.array(5, np.int64)), b.weight(np.array(True))
    b.nodes.append(helper.make_node("Loop", [turns, go, x], ["last", "all"], name="loop", body=body))
    total = b.node("ReduceMean", ["all"], axes=[0], keepdims=0)
    y = b.linear(b.node("Add", ["last", total]), WIDTH, 4)
    return b.model(["n", WIDTH], y, ["n", 4]), b.batches(4, WIDTH)


def scan() -> Built:
    """A leaky sum along the sequence, with a product in the body."""
    b = Builder()
    weight = b.weight(b.normal(WIDTH, WIDTH, scale=0.2), "inner")
    decay = numpy_helper.from_array(np.float32([0.5]), "decay")
    body = helper.make_graph(
        [
            helper.make_node("Mul", ["state", "decay"], ["kept"]),
            helper.make_node("MatMul", ["element", weight], ["seen"]),
            helper.make_node("Add", ["kept", "seen"], ["next"]),
            helper.make_node("Relu", ["next"], ["out"]),
        ],
        "body",
        [value("state", ["n", WIDTH]), value("element", ["n", WIDTH])],
        [value("next", ["n", WIDTH]), value("out", ["n", WIDTH])],
        [decay],
    )
    first = b.weight(np.zeros((4, WIDTH)))
    scanned = helper.make_node("Scan", [first, "x"], ["last", "all"], name="scan", body=body, num_scan_inputs=1)
    b.nodes.append(scanned)
    y = b.linear(b.node("Add", ["all", "last"]), WIDTH, 4)
    return b.model([6, 4, WIDTH], y, [6, 4, 4]), b.batches(6, 4, WIDTH)


def nested() -> Built:
    """An If in a Loop, whose branches read the loop's state and a weight of the main graph."""
    b = Builder()
    weight = b.weight(b.normal(WIDTH, WIDTH, scale=0.2), "outer")
    shape = ["n", WIDTH]
    then = helper.make_graph([helper.make_node("MatMul", ["state", weight], ["t"])], "then", [], [value("t", shape)])
    other = helper.make_graph([helper.make_node("Neg", ["state"], ["e"])], "else", [], [value("e", shape)])
    body = helper.make_graph(
        [
            helper.make_node("Less", ["i", "two"], ["early"]),
            helper.make_node("If", ["early"], ["next"], then_branch=then, else_branch=other),
            helper.make_node("Identity", ["go"], ["still"]),
        ],
        "body",
        [value("i", [], INT64), value("go", [], BOOL), value("state", shape)],
        [value("still", [], BOOL), value("next", shape)],
    )
    b.weight(np.array(2, np.int64), "two")
    turns = b.weight(np.array(3, np.int64))
    b.nodes.append(helper.make_node("Loop", [turns, "", b.block("x", WIDTH)], ["last"], name="loop", body=body))
    return b.model(shape, b.linear("last", WIDTH, 4), ["n", 4]), b.batches(4, WIDTH)


def lstm() -> Built:
    """A bidirectional LSTM and a linear layer."""
    b = Builder()
    hidden = 8
    weights = [
        b.weight(b.normal(2, 4 * hidden, WIDTH, scale=0.3)), b.weight(b.normal(2, 4 * hidden, hidden, scale=0.3)),
        b.weight(b.normal(2, 8 * hidden, scale=0.1)),
    ]  # fmt: skip
    out = b.node("LSTM", ["x", *weights], outputs=3, hidden_size=hidden, direction="bidirectional")
    turned = b.node("Transpose", [out], perm=[0, 2, 1, 3])
    flat = b.node("Reshape", [turned, b.weight(np.array([0, 0, -1], np.int64))])
    return b.model([5, "n", WIDTH], b.linear(flat, 2 * hidden, 4), [5, "n", 4]), b.batches(5, 3, WIDTH)


def local_function() -> Built:
    """A model-local function with a product in it, called twice with different weights."""
    b = Builder()
    function = helper.make_function(
        "own", "Layer", ["a", "w", "k"], ["r"],
        [helper.make_node("MatMul", ["a", "w"], ["m"]), helper.make_node("Add", ["m", "k"], ["s"]),
         helper.make_node("Relu", ["s"], ["r"])],
        [helper.make_opsetid("", 17)],
    )  # fmt: skip
    x = b.block("x", WIDTH)
    for _ in range(2):
        inputs = [x, b.weight(b.normal(WIDTH, WIDTH, scale=0.3)), b.weight(b.normal(WIDTH))]
        x = b.node("Layer", inputs, domain="own")
    y = b.linear(x, WIDTH, 4)
    b.nodes.append(helper.make_node("Identity", [y], ["y"], name="result"))
    model = make_model(
        b.nodes, [value("x", ["n", WIDTH])], [value("y", ["n", 4])], b.weights, functions=[function], domains=["own"]
    )
    return model, b.batches(3, WIDTH)
