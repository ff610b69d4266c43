"""Damaged models by the thousand: seeded changes of bytes and of graphs, and what becomes of them.

Run as a program, so that a crash or a loop without end in a library is a failure with its number, and not the end of
the tests: `python fuzz_models.py FIRST COUNT` prints a line for each case.
"""

from __future__ import annotations

import logging
import random
import resource
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import info, loop, masked, mlp, model, node, scalar, weight

SECONDS = 20  # of processor time that one case may take
_OPS = [
    "Relu",
    "MatMul",
    "Add",
    "Conv",
    "Cast",
    "If",
    "Loop",
    "Reshape",
    "Gather",
    "Constant",
    "Softmax",
    "Split",
    "Scan",
]


def bases() -> list[onnx.ModelProto]:
    """Small models of many kinds."""
    image = model(
        [
            node("Conv", ["x", "w"], ["a"], "conv", pads=[1, 1, 1, 1]),
            node("BatchNormalization", ["a", "s", "b", "m", "v"], ["c"], "norm"),
            node("Resize", ["c", "", "scales"], ["d"], "resize", mode="nearest"),
            node("Shape", ["d"], ["sizes"]),
            node("Reshape", ["d", "sizes"], ["y"], "reshape"),
        ],
        [info("x", 1, 2, 4, 4)],
        [info("y", 1, 2, 8, 8)],
        [
            weight("w", 2, 2, 3, 3), weight("s", 2), weight("b", 2), weight("m", 2),
            nh.from_array(np.ones(2, np.float32), "v"), nh.from_array(np.array([1, 1, 2, 2], np.float32), "scales"),
        ],
    )  # fmt: skip
    steps = [node("MatMul", ["a", "b"], ["t"]), node("LeakyRelu", ["t"], ["o"], alpha=0.25)]
    inner = h.make_function("f", "Inner", ["a", "b"], ["o"], steps, [h.make_opsetid("", 18)])
    called = h.make_graph(
        [h.make_node("Inner", ["x", "w"], ["y"], domain="f", name="call")], "g", [info("x", 4, 8)], [info("y", 4, 8)],
        [weight("w", 8, 8)],
    )  # fmt: skip
    with_function = h.make_model(
        called, functions=[inner], opset_imports=[h.make_opsetid("", 18), h.make_opsetid("f", 1)], ir_version=9
    )
    quantised = model(
        [
            node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            node("MatMul", ["d", "w"], ["m"]),
            node("Cast", ["m"], ["c"], to=T.FLOAT16),
            node("Cast", ["c"], ["y"], to=T.FLOAT),
        ],
        [info("x", 4, 8)],
        [info("y", 4, 8)],
        [scalar("s", 0.1), scalar("z", 0, np.uint8), weight("w", 8, 8)],
    )
    return [mlp(), masked(-1e9), loop(), loop(scan=True), image, with_function, quantised]


# ---- changes of bytes


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice([1, 1, 2, 8, 40])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _drop(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.randrange(1, 40)]


def _insert(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    data[start:start] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 20)))


def _repeat(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    part = data[start : start + rng.randrange(1, 80)]
    data[start:start] = part * rng.randrange(1, 4)


def _swap(data: bytearray, rng: random.Random) -> None:
    one, two, size = rng.randrange(len(data)), rng.randrange(len(data)), rng.randrange(1, 16)
    data[one : one + size], data[two : two + size] = data[two : two + size], data[one : one + size]


BYTES: list[Callable[[bytearray, random.Random], None]] = [_flip, _flip, _flip, _cut, _drop, _insert, _repeat, _swap]


# ---- changes of graphs


def _graphs(proto: onnx.ModelProto) -> list[Any]:
    found: list[Any] = [proto.graph]
    for graph in found:
        for one in graph.node:
            found += [attribute.g for attribute in one.attribute if attribute.type == onnx.AttributeProto.GRAPH]
    return [*found, *proto.functions]


def _nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [one for graph in _graphs(proto) for one in graph.node]


def _names(proto: onnx.ModelProto) -> list[str]:
    return [name for one in _nodes(proto) for name in (*one.input, *one.output)] + [
        "",
        "nobody",
        "x" * 300,
        "a\0b",
        "ä",
    ]


def _pick(items: Any, rng: random.Random) -> Any:
    return rng.choice(list(items)) if len(items) else None


def _change_operand(proto: onnx.ModelProto, rng: random.Random) -> None:
    one = _pick(_nodes(proto), rng)
    if one is not None:
        names = one.input if rng.random() < 0.6 and len(one.input) else one.output
        if len(names):
            names[rng.randrange(len(names))] = rng.choice(_names(proto))


def _count_operands(proto: onnx.ModelProto, rng: random.Random) -> None:
    one = _pick(_nodes(proto), rng)
    if one is not None:
        names = one.input if rng.random() < 0.5 else one.output
        if len(names) and rng.random() < 0.5:
            del names[-1]
        else:
            names.append(rng.choice(_names(proto)))


def _change_op(proto: onnx.ModelProto, rng: random.Random) -> None:
    one = _pick(_nodes(proto), rng)
    if one is not None:
        one.op_type = rng.choice([*_OPS, "Nothing", "", one.op_type.lower()])
        one.domain = rng.choice(["", "", "", "com.microsoft", "f", "ai.onnx.ml"])


def _change_attribute(proto: onnx.ModelProto, rng: random.Random) -> None:
    one = _pick(_nodes(proto), rng)
    if one is None:
        return
    kind = rng.randrange(4)
    if kind == 0 and len(one.attribute):
        del one.attribute[rng.randrange(len(one.attribute))]
    elif kind == 1 and len(one.attribute):
        attribute = _pick(one.attribute, rng)
        attribute.i = rng.choice([-1, 0, 1, 7, 22, 99, 2**40, -(2**63)])
        attribute.type = rng.randrange(15)
    else:
        name = rng.choice(
            ["axis", "to", "perm", "value", "value_int", "then_branch", "body", "num_scan_inputs", "mode"]
        )
        value = rng.choice([3, -9, 1.5, "text", [1, 2], [5, 5, 5], 2**62])
        one.attribute.append(h.make_attribute(name, value))


def _change_node_list(proto: onnx.ModelProto, rng: random.Random) -> None:
    graph = _pick(_graphs(proto), rng)
    nodes = [onnx.NodeProto.FromString(one.SerializeToString()) for one in graph.node]
    if not nodes:
        return
    kind = rng.randrange(3)
    if kind == 0:
        del nodes[rng.randrange(len(nodes))]
    elif kind == 1:
        nodes.append(rng.choice(nodes))
    else:
        rng.shuffle(nodes)
    del graph.node[:]
    graph.node.extend(nodes)


def _change_tensor(proto: onnx.ModelProto, rng: random.Random) -> None:
    tensor = _pick(proto.graph.initializer, rng)
    if tensor is None:
        return
    kind = rng.randrange(6)
    if kind == 0:
        tensor.data_type = rng.choice([*T.DataType.values(), 99, -1])
    elif kind == 1 and len(tensor.dims):
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice([-1, 0, 1, 3, 2**31, 2**62])
    elif kind == 2:
        tensor.dims.append(rng.choice([1, 2, 2**40]))
    elif kind == 3:
        tensor.raw_data = tensor.raw_data[: rng.randrange(len(tensor.raw_data) + 1)]
    elif kind == 4:
        tensor.data_location = T.EXTERNAL
        for key in ("location", "offset", "length"):
            if rng.random() < 0.7:
                value = rng.choice(["w.bin", "../w.bin", "/etc/passwd", "0", "-1", "99999999999999999999", ""])
                tensor.external_data.add(key=key, value=value)
    else:
        tensor.name = rng.choice(_names(proto))


def _change_type(proto: onnx.ModelProto, rng: random.Random) -> None:
    graph = _pick([one for one in _graphs(proto) if isinstance(one, onnx.GraphProto)], rng)
    known = [*graph.input, *graph.output, *graph.value_info]
    value = _pick(known, rng)
    if value is None:
        return
    kind = rng.randrange(5)
    if kind == 0:
        value.type.tensor_type.elem_type = rng.choice([*T.DataType.values(), 55])
    elif kind == 1:
        value.type.tensor_type.shape.dim.add().dim_value = rng.choice([-1, 0, 3, 2**40])
    elif kind == 2:
        value.ClearField("type")
    elif kind == 3:
        value.type.sequence_type.elem_type.tensor_type.elem_type = T.FLOAT
    else:
        value.name = rng.choice(_names(proto))


def _change_head(proto: onnx.ModelProto, rng: random.Random) -> None:
    kind = rng.randrange(5)
    if kind == 0:
        _pick(proto.opset_import, rng).version = rng.choice([-1, 0, 1, 5, 9, 14, 25, 28, 1000, 2**40])
    elif kind == 1:
        proto.ir_version = rng.choice([0, 1, 3, 99, 2**40])
    elif kind == 2:
        del proto.opset_import[:]
    elif kind == 3:
        if len(proto.functions):
            proto.functions.add().CopyFrom(proto.functions[0])
        else:
            del proto.graph.output[:]
    else:
        proto.graph.output.add().CopyFrom(rng.choice(proto.graph.output or [info("q", 1)]))


GRAPHS: list[Callable[[onnx.ModelProto, random.Random], None]] = [
    _change_operand, _change_operand, _count_operands, _change_op, _change_attribute, _change_attribute,
    _change_node_list, _change_tensor, _change_tensor, _change_type, _change_head,
]  # fmt: skip


def case(number: int, known: list[onnx.ModelProto]) -> tuple[str, bytes | onnx.ModelProto]:
    """The case of a number, which makes it: what was done, and what came of it: bytes, or a message."""
    rng = random.Random(number)
    source = known[number % len(known)]
    if number % 2:
        data = bytearray(source.SerializeToString())
        change = rng.choice(BYTES)
        change(data, rng)
        return change.__name__, bytes(data)
    made = onnx.ModelProto()
    made.CopyFrom(source)
    changes = [rng.choice(GRAPHS) for _ in range(rng.choice([1, 1, 2, 3]))]
    for change in changes:
        change(made, rng)
    return "+".join(change.__name__ for change in changes), made


def outcome(way: Callable[[Any], Any], source: Any) -> str:
    """`made`, or `refused`; anything else is a fault, and told: a result that the checker refuses, too."""
    from amp_compiler.errors import OnnxError

    try:
        way(source)
    except OnnxError as error:
        return "refused" if error.what and error.hint else f"FAULT no hint: {error}"
    except Exception as error:  # noqa: BLE001  what this test is for
        return f"FAULT {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return "made"


def main() -> None:
    """Run cases and print a line for each: its number, what was done, and what each way in made of it."""
    import amp_compiler as amp

    first, count = int(sys.argv[1]), int(sys.argv[2])
    folder = Path(sys.argv[3])
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    known = bases()
    ways: list[Callable[[Any], Any]] = [
        lambda source: onnx.checker.check_model(amp.convert_onnx(source).model, full_check=True),
        lambda source: amp.explain(source, dtype="bf16"),
        amp.onnx_to_fx,
        lambda source: amp.convert_onnx(source, check=False),
        lambda source: amp.onnx_to_fx(source, check=False),
    ]
    for number in range(first, first + count):
        used = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + SECONDS, resource.RLIM_INFINITY))
        print(number, end=" ", flush=True)
        done, source = case(number, known)
        if isinstance(source, bytes):
            path = folder / "case.onnx"
            path.write_bytes(source)
            found = [outcome(way, path) for way in ways]
        else:
            found = [outcome(way, source) for way in ways]
        print(done, *found, sep=" | ", flush=True)


if __name__ == "__main__":
    main()
