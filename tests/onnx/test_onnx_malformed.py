"""Damaged models that were once faults, by name, and data that cannot be read; `test_onnx_fuzz` has thousands more."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import info, mlp, node, weight

import amp_compiler as amp
from amp_compiler.errors import OnnxError
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.model.model import open_model
from amp_compiler.onnx.plan import explain_onnx

WAYS: dict[str, Callable[[Any], Any]] = {
    "convert": convert_onnx,
    "explain": lambda source: amp.explain(source, dtype="fp16"),
    "to_fx": amp.onnx_to_fx,
}


def bare(
    nodes: list[onnx.NodeProto], *, inputs: Any = None, outputs: Any = None, data: Any = (), functions: Any = (),
    opset: int = 18, extra: Any = (), **facts: Any,
) -> onnx.ModelProto:  # fmt: skip
    """A model that nobody has checked."""
    graph = h.make_graph(
        nodes, "g", inputs or [info("x", 4, 8)], outputs or [info("y", 4, 8)], initializer=list(data), **facts
    )
    imports = [h.make_opsetid("", opset), *extra]
    return h.make_model(graph, opset_imports=imports, functions=list(functions), ir_version=9)


def function(name: str, calls: list[str], domain: str = "f") -> onnx.FunctionProto:
    values = ["a", *(f"v{index}" for index in range(len(calls)))]
    nodes = [
        h.make_node(call, [one], [two], domain=domain if call != "Relu" else "")
        for call, one, two in zip(calls, values, values[1:], strict=False)
    ]
    return h.make_function(
        domain, name, ["a"], [values[-1]], nodes, [h.make_opsetid("", 18), h.make_opsetid(domain, 1)]
    )


def with_functions(*functions: onnx.FunctionProto, call: str = "A") -> onnx.ModelProto:
    nodes = [h.make_node(call, ["x"], ["y"], domain="f", name="call")]
    return bare(nodes, functions=functions, extra=[h.make_opsetid("f", 1)])


def damaged_bytes(source: onnx.ModelProto, before: bytes, after: bytes) -> onnx.ModelProto:
    data = source.SerializeToString()
    assert before in data and len(before) == len(after)
    return onnx.ModelProto.FromString(data.replace(before, after))


def tensor(name: str = "w", kind: int = T.FLOAT, dims: tuple[int, ...] = (8, 8), raw: bytes | None = None) -> T:
    one = T(name=name, data_type=kind, dims=dims)
    if raw is not None:
        one.raw_data = raw
    return one


def product(data: T) -> onnx.ModelProto:
    return bare([node("MatMul", ["x", "w"], ["y"], "bad")], data=[data])


def nested(depth: int) -> onnx.ModelProto:
    """If in If in If, made in place: a message that deep can be neither copied nor written."""
    small = h.make_graph([node("Identity", ["x"], ["s"])], "s", [], [info("s", 4, 8)])
    whole = bare([], inputs=[info("c", kind=T.BOOL), info("x", 4, 8)])
    graph = whole.graph
    for level in range(depth):
        outer = graph.node.add(op_type="If", name=f"level{level}", input=["c"])
        outer.output.append(graph.output[0].name)
        outer.attribute.append(h.make_attribute("else_branch", small))
        branch = outer.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH)
        graph = branch.g
        graph.name = f"b{level}"
        graph.output.append(info(f"o{level}", 4, 8))
    graph.node.append(node("Identity", ["x"], [graph.output[0].name]))
    return whole


def branchless() -> onnx.ModelProto:
    body = h.make_graph([node("Identity", ["x"], ["o"])], "b", [], [info("o", 4, 8)])
    return bare(
        [h.make_node("If", ["c"], ["y"], then_branch=body, name="bad")],
        inputs=[info("c", kind=T.BOOL), info("x", 4, 8)],
    )


def doubling() -> onnx.ModelProto:
    """Forty functions, each of which calls the next twice: a million million nodes."""
    names = [f"F{index}" for index in range(40)]
    functions = [function(one, [two, two]) for one, two in pairwise(names)]
    return with_functions(*functions, function(names[-1], ["Relu"]), call="F0")


def with_opset(version: int) -> onnx.ModelProto:
    one = bare([node("Relu", ["x"], ["y"])])
    one.opset_import[0].version = version
    return one


SPARSE = h.make_sparse_tensor(
    nh.from_array(np.ones(2, np.float32), "w"), nh.from_array(np.array([3, 9]), "w_i"), [8, 8]
)  # fmt: skip
CASES: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "no graph": (onnx.ModelProto, "no graph or no opset"),
    "a function that calls itself": (
        lambda: with_functions(function("A", ["A"])), r"function 'f\.A': it calls itself",
    ),
    "functions that call one another": (
        lambda: with_functions(function("A", ["B"]), function("B", ["Relu", "A"])), "calls itself",
    ),
    "functions that fill the memory": (doubling, "nodes once they are written out"),
    "a node's name is no text": (
        lambda: damaged_bytes(bare([node("Relu", ["x"], ["y"], "nnnn")]), b"nnnn", b"\xff\xfe\xfdn"), "no UTF-8 text",
    ),
    "an unknown element type of data": (lambda: product(tensor(kind=99, raw=b"")), "'w'.*number 99, which nobody"),
    "a cast to no type": (
        lambda: bare([h.make_node("Cast", ["x"], ["y"], to=1234, name="bad")]), r"'bad' \(Cast\).*1234, which is no",
    ),
    "too little data": (lambda: product(tensor(raw=b"\0" * 12)), "'w'.*12 bytes of data, and .* ask for 256"),
    "an absurd size": (lambda: product(tensor(dims=(2**40, 2**40), raw=b"\0" * 8)), "'w'.*which no tensor has"),
    "bodies deep in one another": (lambda: nested(40), "deep in one another|nested"),
    "an If without else": (branchless, r"'bad' \(If\).*else_branch"),
    "too many inputs": (lambda: bare([node("Relu", ["x", "x"], ["y"], "bad")]), r"'bad' \(Relu\)"),
    "a circle": (
        lambda: bare([node("Add", ["x", "b"], ["a"], "bad"), node("Relu", ["a"], ["b"]), node("Relu", ["b"], ["y"])]),
        "topologic|no producer|cycle",
    ),
    "a sparse initializer": (
        lambda: bare([node("MatMul", ["x", "w"], ["y"], "mm")], sparse_initializer=[SPARSE]), "'w'.*sparse tensor",
    ),
    "an op that there is not": (lambda: bare([node("Rleu", ["x"], ["y"], "bad")]), "Rleu"),
    "an opset from the future": (lambda: with_opset(9999), "9999|opset|version"),
}  # fmt: skip


def refused(source: Any, message: str, way: str) -> OnnxError:
    with pytest.raises(OnnxError, match=message) as raised:
        WAYS[way](source)
    error = raised.value
    assert error.hint and error.what, str(error)
    return error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_damaged_model_is_refused_by_name(name, way, tmp_path):
    build, message = CASES[name]
    source = build()
    error = refused(source, message, way)
    if "'bad'" in message:
        assert "bad" in error.where
    try:
        data = source.SerializeToString()
        onnx.ModelProto.FromString(data)
    except Exception:  # noqa: BLE001  nested too deep for a file
        return
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    refused(path, ".", way)


# ---- element types that torch and the rules do not know


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2", "FLOAT8E8M0"])
@pytest.mark.parametrize("way", WAYS)
def test_a_cast_to_a_narrow_type_is_converted_and_not_run_by_torch(kind, way):
    number = getattr(T, kind)
    opset = {"FLOAT8E8M0": 24, "INT2": 25, "UINT2": 25}.get(kind, 23)
    source = bare(
        [
            node("MatMul", ["x", "w"], ["a"], "mm"),
            h.make_node("Cast", ["a"], ["q"], to=number, name="bad"),
            h.make_node("Cast", ["q"], ["y"], to=T.FLOAT, name="back"),
        ],
        data=[weight("w", 8, 8)],
        opset=opset,
    )
    source.ir_version = 12
    onnx.checker.check_model(source, full_check=True)
    if way == "to_fx":
        error = refused(source, kind, way)
        assert "'bad'" in error.where and error.hint
    else:
        WAYS[way](source)


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "FLOAT4E2M1"])
def test_data_of_a_narrow_type_are_refused_by_torch_alone(kind):
    number = getattr(T, kind)
    data = tensor("w", number, (8, 8), b"\0" * 32)
    nodes = [h.make_node("Cast", ["w"], ["f"], to=T.FLOAT), node("MatMul", ["x", "f"], ["y"])]
    source = bare(nodes, data=[data], opset=23)
    source.ir_version = 11
    onnx.checker.check_model(source, full_check=True)
    assert convert_onnx(source).plan.low_nodes
    assert refused(source, f"torch has no tensors of type {kind}", "to_fx").where == "w"


# ---- data in files of their own


def beside(folder: Path, **entries: str) -> Path:
    source = mlp(64)
    onnx.save(source, folder / "m.onnx", save_as_external_data=True, location="m.bin", size_threshold=0)
    light = onnx.load(folder / "m.onnx", load_external_data=False)
    known = {entry.key: entry for entry in light.graph.initializer[1].external_data}
    for key, value in entries.items():
        if key in known:
            known[key].value = value
        else:
            light.graph.initializer[1].external_data.add(key=key, value=value)
    (folder / "m.onnx").write_bytes(light.SerializeToString())
    return folder / "m.onnx"


def short(folder: Path) -> Path:
    path = beside(folder)
    with (folder / "m.bin").open("r+b") as file:
        file.truncate(20_000)
    return path


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return beside(folder, location="pipe")


def missing(folder: Path) -> Path:
    path = beside(folder)
    (folder / "m.bin").unlink()
    return path


def linked(folder: Path) -> Path:
    (folder / "outside").mkdir()
    path = beside(folder, location="link")
    (folder / "m.bin").rename(folder / "outside" / "m.bin")
    inner = folder / "in"
    inner.mkdir()
    path.rename(inner / "m.onnx")
    (inner / "link").symlink_to("../outside/m.bin")
    (inner / "m.bin").symlink_to("../outside/m.bin")
    return inner / "m.onnx"


EXTERNAL: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (missing, "cannot be read from 'm.bin'.*keep the data files beside the model"),
    "short": (short, "end at byte 32768 of 'm.bin', which has 20000 bytes"),
    "a pipe": (pipe, "lie in 'pipe', which is no regular file"),
    "a folder": (lambda folder: beside(folder, location="."), "no regular file"),
    "a device": (lambda folder: beside(folder, location="/dev/zero"), "outside the folder"),
    "above": (lambda folder: beside(folder, location="../../../../../etc/passwd"), "outside the folder"),
    "a link to elsewhere": (linked, "outside the folder of the model; put the data file itself"),
    "a NUL": (lambda folder: beside(folder, location="a\0b"), "does not say which file"),
    "an absurd length": (lambda folder: beside(folder, length="9" * 40), "it has 9{40} bytes of data"),
    "a negative offset": (lambda folder: beside(folder, offset="-5"), "where in its file its data lie.*-5"),
    "a huge offset": (lambda folder: beside(folder, offset=str(2**50)), "end at byte"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXTERNAL)
def test_data_that_cannot_be_read_are_refused_by_their_tensor(name, way, tmp_path):
    build, message = EXTERNAL[name]
    error = refused(build(tmp_path), message, way)
    assert error.where.startswith("tensor 'w")


@pytest.mark.parametrize("way", WAYS)
def test_a_link_within_the_folder_is_followed(way, tmp_path):
    path = beside(tmp_path, location="link")
    (tmp_path / "link").symlink_to("m.bin")
    assert WAYS[way](path) is not None  # and no error


@pytest.mark.parametrize("way", WAYS)
def test_a_pipe_is_no_model(way, tmp_path):
    os.mkfifo(tmp_path / "m.onnx")
    refused(tmp_path / "m.onnx", "it is no regular file; name an ONNX file", way)


# ---- what the checker refuses


def odd() -> onnx.ModelProto:
    """What the full checker refuses, and ONNX Runtime takes: a wrong shape among the descriptions of values."""
    nodes = [node("MatMul", ["x", "w"], ["a"], "bad"), node("MatMul", ["a", "w"], ["y"])]
    return bare(nodes, value_info=[info("a", 5, 5)], data=[weight("w", 8, 8)])


def test_a_wrong_declared_shape_is_replaced_where_a_model_is_converted():
    with pytest.raises(onnx.shape_inference.InferenceError):
        onnx.checker.check_model(odd(), full_check=True)
    assert convert_onnx(odd()).notes == ("inferred shapes replace declared ones that they contradict: 'a'",)
    assert convert_onnx(odd(), check=False).plan.low_nodes == 2
    with pytest.raises(OnnxError):
        amp.onnx_to_fx(odd())
    assert amp.onnx_to_fx(odd(), check=False) is not None


def test_a_few_numbers_do_not_fill_the_memory():
    """Folding them would: a constant of 10^13 numbers."""
    sizes = nh.from_array(np.array([10**7, 10**6], np.int64), "s")
    nodes = [
        h.make_node("ConstantOfShape", ["s"], ["big"], name="big"),
        h.make_node("ReduceMax", ["big"], ["m"], keepdims=0),
        node("Add", ["x", "m"], ["y"]),
    ]
    source = bare(nodes, data=[sizes])
    module = amp.onnx_to_fx(source)
    assert any("constant_of_shape" in str(one.target) or "big" in one.name for one in module.graph.nodes)
    amp.explain(source, dtype="fp16")


def test_the_fix_of_a_damaged_file_stands_in_the_shell(tmp_path, shell):
    onnx.save(CASES["too many inputs"][0](), tmp_path / "m.onnx")
    for arguments in (["convert", tmp_path / "m.onnx", tmp_path / "o.onnx"], ["explain", tmp_path / "m.onnx"]):
        code, said = shell(*arguments)
        assert code == 1 and "node 'bad' (Relu)" in said and "hint: " in said
        assert not (tmp_path / "o.onnx").exists()


EDITS = {
    "a node more": lambda graph: graph.node.append(h.make_node("Relu", [graph.output[0].name], ["more"])),
    "another op": lambda graph: setattr(graph.node[1], "op_type", "Exp"),
    "a value renamed": lambda graph: (
        graph.node[0].output.__setitem__(0, "n"),
        graph.node[1].input.__setitem__(0, "n"),
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_message_that_its_owner_changes_is_read_anew(edit):
    source = mlp()
    opened = open_model(source)
    EDITS[edit](source.graph)
    for done in (convert_onnx(opened), convert_onnx(source)):
        onnx.checker.check_model(done.model, full_check=True)
        assert done.plan == explain_onnx(opened) and len(done.plan.nodes) == len(source.graph.node)
    assert convert_onnx(opened).model == convert_onnx(source).model


def test_the_callers_own_error_is_no_fault_of_the_model():
    def trainable(name, tensor):
        raise LookupError(name)

    with pytest.raises(LookupError, match="w1"):
        amp.onnx_to_fx(mlp(), trainable=trainable)


def test_a_pipe_among_the_batches_is_left_out(tmp_path):
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(OnnxError, match="there is no batch in it"):
        convert_onnx(mlp(), calibration=tmp_path)
    np.savez(tmp_path / "b.npz", x=np.ones((4, 8), np.float32))
    assert convert_onnx(mlp(), calibration=tmp_path).plan.low_nodes == 3
