"""ONNX models for the tests of `convert_onnx`, and what must hold of every conversion."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

from amp_compiler.onnx.check.emulate import emulate
from amp_compiler.onnx.check.run import Runner
from amp_compiler.onnx.convert import convert_onnx

RNG = np.random.default_rng(0)
DTYPES = ("fp16", "bf16")
LOW = {"fp16": T.FLOAT16, "bf16": T.BFLOAT16}


def info(name, *shape, kind=T.FLOAT):
    return h.make_tensor_value_info(name, kind, list(shape))


def weight(name, *shape, scale=0.5):
    return nh.from_array((RNG.standard_normal(shape) * scale).astype(np.float32), name)


def scalar(name, number, kind=np.float32):
    return nh.from_array(np.asarray(number, kind), name)


def model(nodes, inputs, outputs, data=(), opset=18, ir_version=9, extra=(), **facts):
    graph = h.make_graph(list(nodes), "g", list(inputs), list(outputs), initializer=list(data), **facts)
    imports = [h.make_opsetid("", opset), *extra]
    made = h.make_model(graph, opset_imports=imports, ir_version=ir_version)
    onnx.checker.check_model(made, full_check=not extra)
    return made


def node(op, inputs, outputs, name="", **attrs):
    return h.make_node(op, list(inputs), list(outputs), name=name or None, **attrs)


def check(source, dtype, rules="default", *, full=True, **options):
    """Convert, and check everything that must hold of every conversion."""
    before = source.SerializeToString()
    done = convert_onnx(source, rules=rules, dtype=dtype, **options)
    made = done.model
    assert source.SerializeToString() == before, "the input was touched"
    onnx.checker.check_model(made, full_check=full)
    again = convert_onnx(made, rules=rules, dtype=dtype, **options)
    assert again.model.SerializeToString() == made.SerializeToString(), "not idempotent"
    if options.get("keep_io_types", True) is True:
        assert list(made.graph.input) == list(source.graph.input)
        assert list(made.graph.output) == list(source.graph.output)
    names = [output for entry in made.graph.node for output in entry.output if output]
    assert len(names) == len(set(names))
    if full and dtype == "fp16":
        session(made)
    return done


def session(source):
    """Load a model in ONNX Runtime with its default optimisations: its fusions want types that agree."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # more wait by spinning
    return ort.InferenceSession(source.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(source, feeds):
    return session(source).run(None, feeds)


def same_numbers(source, made, feeds, tolerance=4e-3):
    for want, got in zip(run(source, feeds), run(made, feeds), strict=True):
        assert want.dtype == got.dtype and want.shape == got.shape
        assert np.linalg.norm(want - got) <= tolerance * np.linalg.norm(want) + 1e-7


def outputs(proto, feeds):
    """What a model gives with true rounding after every node."""
    twin = emulate(proto)
    return list(Runner(twin.proto, None).run(twin.feeds(feeds)).values())


def error(source, made, feeds):
    """Of the first output with true rounding after every node, relative; infinity where one is not finite."""
    want, got = outputs(source, feeds)[0], outputs(made, feeds)[0]
    return np.linalg.norm(want - got) / np.linalg.norm(want) if np.isfinite(got).all() else np.inf


def low_nodes(done):
    return {entry.name for entry in done.plan.nodes if entry.precision == "low"}


def casts(made):
    return [entry for entry in made.graph.node if entry.op_type == "Cast"]


def types(made):
    """Element type of every value, by ONNX's own inference."""
    inferred = onnx.shape_inference.infer_shapes(made)
    graph = inferred.graph
    found = {tensor.name: tensor.data_type for tensor in graph.initializer}
    for entry in (*graph.input, *graph.output, *graph.value_info):
        found[entry.name] = entry.type.tensor_type.elem_type
    return found


def mlp(width=8):
    return model(
        [
            node("MatMul", ["x", "w1"], ["a"], "first"),
            node("Relu", ["a"], ["b"], "act"),
            node("MatMul", ["b", "w2"], ["y"], "second"),
        ],
        [info("x", 4, width)],
        [info("y", 4, width)],
        [weight("w1", width, width), weight("w2", width, width)],
    )


X = RNG.standard_normal((4, 8)).astype(np.float32)


def loop(scan=False):
    body_nodes = [node("MatMul", ["s", "w"], ["t"]), node("Tanh", ["t"], ["o"]), node("MatMul", ["o", "k"], ["u"])]
    if scan:
        body = h.make_graph([*body_nodes, node("Add", ["u", "e"], ["r"])], "body",
                            [info("s", 4, 8), info("e", 4, 8)], [info("o", 4, 8), info("r", 4, 8)])  # fmt: skip
        inner = h.make_node("Scan", ["x", "seq"], ["f", "y"], body=body, num_scan_inputs=1)
        return model([inner], [info("x", 4, 8), info("seq", 3, 4, 8)], [info("f", 4, 8), info("y", 3, 4, 8)],
                     [weight("w", 8, 8), weight("k", 8, 8)])  # fmt: skip
    body = h.make_graph(
        [*body_nodes, node("Identity", ["cond"], ["more"])],
        "body",
        [info("i", kind=T.INT64), info("cond", kind=T.BOOL), info("s", 4, 8)],
        [info("more", kind=T.BOOL), info("o", 4, 8), info("u", 4, 8)],
    )
    inner = h.make_node("Loop", ["n", "go", "x"], ["f", "y"], body=body)
    return model(
        [node("MatMul", ["z", "w"], ["k"]), inner, node("MatMul", ["f", "k"], ["last"])],
        [info("x", 4, 8), info("z", 8, 8), info("n", kind=T.INT64), info("go", kind=T.BOOL)],
        [info("last", 4, 8), h.make_tensor_value_info("y", T.FLOAT, [None, 4, 8])],
        [weight("w", 8, 8)],
    )


def masked(number):
    """softmax(x·w + (1 - mask) * number)·w"""
    nodes = [
        node("MatMul", ["x", "w"], ["s"], "scores"),
        node("Sub", ["one", "mask"], ["off"], "off"),
        node("Mul", ["off", "big"], ["bias"], "bias"),
        node("Add", ["s", "bias"], ["m"], "masked"),
        node("Softmax", ["m"], ["p"], "softmax", axis=-1),
        node("MatMul", ["p", "w"], ["y"], "mix"),
    ]
    data = [weight("w", 8, 8), scalar("one", 1.0), scalar("big", number)]
    return model(nodes, [info("x", 4, 8), info("mask", 4, 8)], [info("y", 4, 8)], data)


def copy(source):
    copied = onnx.ModelProto()
    copied.CopyFrom(source)
    return copied
