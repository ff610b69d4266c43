"""ONNX models for the tests of `convert_onnx`, and what must hold of every conversion."""

import functools
import hashlib
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx import parser

from amp_compiler.onnx.check.emulate import emulate
from amp_compiler.onnx.check.run import Runner
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.model.infer import infer

MAKERS = ("numpy", "onnx", "onnxscript", "torch", "transformers")
RNG = np.random.default_rng(0)
DTYPES = ("fp16", "bf16")
BOTH = pytest.mark.parametrize("dtype", DTYPES)
NEAR = {"fp16": 4e-3, "bf16": 3e-2}  # a few roundings to the type
LOW = {"fp16": T.FLOAT16, "bf16": T.BFLOAT16}


def info(name, *shape, kind=T.FLOAT):
    return h.make_tensor_value_info(name, kind, list(shape))


def weight(name, *shape, scale=0.5):
    return nh.from_array((RNG.standard_normal(shape) * scale).astype(np.float32), name)


def scalar(name, number, kind=np.float32):
    return nh.from_array(np.asarray(number, kind), name)


def read_by(nodes):
    """Names that nodes and their bodies read."""
    bodies = [one.g for entry in nodes for one in entry.attribute if one.HasField("g")]
    inner = {value.name for body in bodies for value in body.output}.union(*(read_by(body.node) for body in bodies))
    return inner | {name for entry in nodes for name in entry.input}


def model(nodes, inputs, outputs, data=(), opset=18, ir_version=9, extra=(), **facts):
    """A model, with those of the data that something reads."""
    read = read_by(nodes) | {one.name for one in (*inputs, *outputs)}
    data = [one for one in data if one.name in read]
    graph = h.make_graph(list(nodes), "g", list(inputs), list(outputs), initializer=list(data), **facts)
    imports = [h.make_opsetid("", opset), *extra]
    result = h.make_model(graph, opset_imports=imports, ir_version=ir_version)
    onnx.checker.check_model(result, full_check=not extra)
    return result


def node(op, inputs, outputs, name="", **attrs):
    return h.make_node(op, list(inputs), list(outputs), name=name or None, **attrs)


def program(text):
    """The nodes that a text in ONNX's own syntax stands for."""
    return list(parser.parse_graph(f"g () => () {{ {text} }}").node)


def check(source, dtype, rules="default", *, full=True, **options):
    """Convert, and check everything that must hold of every conversion."""
    before = source.SerializeToString()
    done = convert_onnx(source, rules=rules, dtype=dtype, **options)
    result = done.model
    assert source.SerializeToString() == before, "the input was touched"
    onnx.checker.check_model(result, full_check=full)
    again = convert_onnx(result, rules=rules, dtype=dtype, **options)
    assert again.model.SerializeToString() == result.SerializeToString(), "not idempotent"
    if options.get("keep_io_types", True) is True:
        assert list(result.graph.input) == list(source.graph.input)
        assert list(result.graph.output) == list(source.graph.output)
    names = [output for entry in result.graph.node for output in entry.output if output]
    assert len(names) == len(set(names))
    if full and dtype == "fp16":
        session(result)
    return done


def session(source):
    """Load a model in ONNX Runtime with its default optimisations: its fusions want types that agree."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # more wait by spinning
    return ort.InferenceSession(source.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(source, feeds):
    return session(source).run(None, feeds)


def run_tensors(source, *inputs):
    """What a model gives first for tensors of torch, in the order of its inputs."""
    return run(
        source, dict(zip([one.name for one in source.graph.input], (one.numpy() for one in inputs), strict=True))
    )[0]


def same_numbers(source, built, feeds, tolerance=4e-3):
    for want, got in zip(run(source, feeds), run(built, feeds), strict=True):
        assert want.dtype == got.dtype and want.shape == got.shape
        assert np.linalg.norm(want - got) <= tolerance * np.linalg.norm(want) + 1e-7


def outputs(proto, feeds):
    """What a model gives with true rounding after every node."""
    twin = emulate(proto)
    return list(Runner(twin.proto, None).run(twin.feeds(feeds)).values())


def error(source, built, feeds):
    """Of the first output with true rounding after every node, relative; infinity where one is not finite."""
    want, got = outputs(source, feeds)[0], outputs(built, feeds)[0]
    return np.linalg.norm(want - got) / np.linalg.norm(want) if np.isfinite(got).all() else np.inf


def precisions(done):
    """By name of the node, or of its module where a torch model is exported."""
    return {entry.module or entry.name: entry.precision for entry in done.plan.nodes}


def low_nodes(done):
    return {entry.name for entry in done.plan.nodes if entry.precision == "low"}


def casts(built):
    return [entry for entry in built.graph.node if entry.op_type == "Cast"]


def nodes_of(graph):
    """The nodes of a graph, those of bodies before the node that holds them."""
    for entry in graph.node:
        for one in entry.attribute:
            if one.HasField("g"):
                yield from nodes_of(one.g)
        yield entry


def types(built):
    """Element type of every value, in bodies too, by ONNX's own inference and that for ops of ONNX Runtime's own."""
    graphs, result = [infer(built, strict=True).graph], {}
    for graph in graphs:
        values = (*graph.input, *graph.output, *graph.value_info)
        result.update((tensor.name, tensor.data_type) for tensor in graph.initializer)
        result.update((entry.name, entry.type.tensor_type.elem_type) for entry in values)
        graphs += [one.g for entry in graph.node for one in entry.attribute if one.HasField("g")]
    return result


def convolution(opset=17):
    """One convolution, which takes BF16 from opset 22 on."""
    return model([node("Conv", ["x", "w"], ["y"], "conv")], [info("x", 1, 2, 5, 5)], [info("y", 1, 3, 3, 3)],
                 [weight("w", 3, 2, 3, 3)], opset=opset)  # fmt: skip


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


def run_program(code, *arguments, **environment):
    """What a program writes that runs in a process of its own, beside the helper modules of the tests."""
    here = [str(Path(__file__).parent), str(Path(__file__).parent / "onnx"), *sys.path]
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(here), **environment},
    )  # fmt: skip
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stdout[-300:]}\n{done.stderr[-3000:]}"
    return done.stdout


def copy(source):
    copied = onnx.ModelProto()
    copied.CopyFrom(source)
    return copied


def kept(name: str, make: Callable[[], Any], *sources: str) -> Any:
    """What takes long to make and is the same each time, kept for other processes, by what it is made of.

    Args:
        name: its name.
        make: makes it.
        sources: files whose text says what it is.
    """
    texts = [Path(source).read_text(encoding="utf-8") for source in sources]
    known = hashlib.sha256("\0".join([*texts, *map(version, MAKERS)]).encode()).hexdigest()[:16]
    file = Path(__file__).parents[1] / ".cache" / "models" / f"{name}_{known}.pickle"
    if file.is_file():
        return pickle.loads(file.read_bytes())
    result = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = file.with_suffix(f".{os.getpid()}")  # another process may read
    whole.write_bytes(pickle.dumps(result))
    whole.replace(file)
    return result


@functools.cache
def node_tests() -> tuple[Any, ...]:
    """ONNX's own tests of single nodes. Making them takes seconds."""
    return kept("node_tests", _node_tests)


def _node_tests() -> tuple[Any, ...]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reference divides by zero on purpose
        return tuple(case for case in collect_testcases(None) if case.model is not None)


def value(name: str, shape: Sequence[int | str] | None, kind: int = T.FLOAT) -> onnx.ValueInfoProto:
    return h.make_tensor_value_info(name, kind, shape)


def make_model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: dict[str, np.ndarray] | None = None,
    opset: int = 17,
    functions: Sequence[onnx.FunctionProto] = (),
    domains: Sequence[str] = (),
) -> onnx.ModelProto:
    tensors = [nh.from_array(array, name) for name, array in (weights or {}).items()]
    graph = h.make_graph(list(nodes), "g", list(inputs), list(outputs), tensors)
    imports = [h.make_opsetid("", opset), *(h.make_opsetid(domain, 1) for domain in domains)]
    # The oldest IR version that the opset goes with, so that any onnxruntime of the time reads it.
    ir_version = h.find_min_ir_version_for([imports[0]], ignore_unknown=True)
    return h.make_model(graph, opset_imports=imports, ir_version=max(ir_version, 8), functions=list(functions))
