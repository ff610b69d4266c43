"""What the installed ONNX Runtime loads: opsets raised no further, one type where it wants one, and the report."""

import logging
import signal

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import X, check, convolution, info, mlp, model, node, run_program, same_numbers, weight

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check import loads
from amp_compiler.onnx.check.loads import latest_opset, refusal_of
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx

LOW = {"version": 1, "rules": [{"match": {}, "precision": "low"}]}


def opset(proto: onnx.ModelProto) -> int:
    return next(entry.version for entry in proto.opset_import if entry.domain == "")


# ---- raising the opset


def one_op(op: str, **attributes) -> onnx.ModelProto:
    """A model of opset 17 with a product, behind which stands an op that takes bfloat16 from a later opset on."""
    ints = {"lengths": nh.from_array(np.full(8, 4, np.int64), "lengths")}
    extra = {
        "Compress": ["condition"], "ReverseSequence": ["lengths"], "Einsum": ["w"],
    }.get(op, [])  # fmt: skip
    data = [weight("w", 8, 8), ints["lengths"], nh.from_array(np.array([True] * 4), "condition")]
    nodes = [node("MatMul", ["x", "w"], ["a"], "mm"), node(op, ["a", *extra], ["y"], "late", **attributes)]
    return model(nodes, [info("x", 4, 8)], [info("y", None, None)], data, opset=17)


@pytest.mark.parametrize(
    "source",
    [
        one_op("Celu", alpha=0.5),
        one_op("Einsum", equation="ij,jk->ik"),
        one_op("Compress", axis=0),
        one_op("ReverseSequence", time_axis=0, batch_axis=1),
        one_op("Unique", axis=0),
    ],
    ids=["Celu", "Einsum", "Compress", "ReverseSequence", "Unique"],
)
@pytest.mark.parametrize("rules", ["default", LOW], ids=["default", "low"])
def test_the_opset_is_raised_no_further_than_onnx_runtime_loads(source, rules):
    """In FP32 the raised model loads; an op whose later form has no kernel stays as it is."""
    done = convert_onnx(source, dtype="bf16", rules=rules)
    assert opset(done.model) <= latest_opset()
    plain = convert_onnx(source, rules={"version": 1}, opset=opset(done.model))
    assert refusal_of(plain.model, None) is None
    assert next(entry for entry in done.plan.nodes if entry.name == "mm").precision == "low"


def test_what_stays_fp32_for_its_opset_is_told(monkeypatch, caplog):
    source = convolution()
    assert opset(convert_onnx(source, dtype="bf16").model) == 22 and not convert_onnx(source, dtype="bf16").notes
    with caplog.at_level(logging.WARNING, "amp_compiler"):
        kept = convert_onnx(source, dtype="bf16", raise_opset=False)
    message = (
        "1 node stays FP32 because the opset is 17: bf16 comes later for 1 Conv (opset 22); allow the opset to be "
    )
    message += "raised"
    assert kept.notes == (message,) and message in caplog.text and opset(kept.model) == 17
    monkeypatch.setattr("amp_compiler.onnx.later_opset.latest_opset", lambda: 21)
    older = convert_onnx(source, dtype="bf16")
    assert opset(older.model) == 17 and "onnxruntime loads opsets up to 21" in older.notes[0]
    assert opset(convert_onnx(source, dtype="bf16", opset=22).model) == 22


def test_where_the_raised_model_does_not_load_a_lower_opset_is_tried(monkeypatch):
    requested = []

    def refuse(proto, folder, **options):
        requested.append(opset(proto))
        return object() if opset(proto) > 13 else None

    nodes = [node("Relu", ["x"], ["a"], "relu"), node("Conv", ["a", "w"], ["y"], "conv")]
    source = model(nodes, [info("x", 1, 2, 5, 5)], [info("y", 1, 3, 3, 3)], [weight("w", 3, 2, 3, 3)], opset=12)
    monkeypatch.setattr("amp_compiler.onnx.later_opset.refusal_of", refuse)
    plan = convert_onnx(source, dtype="bf16", rules=LOW, check=False)
    assert requested == [22, 12, 13] and opset(plan.model) == 13
    assert {entry.name: entry.precision for entry in plan.plan.nodes} == {"relu": "low", "conv": "keep"}


@pytest.mark.parametrize(("wanted", "message"), [(12, "would lower it"), (99, "is no opset"), (True, "is no opset")])
def test_an_opset_that_cannot_be_is_refused(wanted, message):
    with pytest.raises(OnnxError, match=message):
        convert_onnx(mlp(), opset=wanted)
    with pytest.raises(OnnxError, match="raise_opset=False forbids it"):
        convert_onnx(mlp(), opset=20, raise_opset=False)


def test_an_opset_is_named():
    done = check(mlp(), "fp16", opset=20)
    assert opset(done.model) == 20 and done.plan.low_nodes == 3
    assert opset(convert_onnx(mlp(), opset=18, raise_opset=False).model) == 18


def test_a_model_with_functions_is_raised():
    steps = [node("Conv", ["a", "b"], ["t"]), node("Relu", ["t"], ["o"])]
    inner = h.make_function("f", "Block", ["a", "b"], ["o"], steps, [h.make_opsetid("", 18)])
    graph = h.make_graph([h.make_node("Block", ["x", "w"], ["y"], domain="f")], "g", [info("x", 1, 2, 5, 5)],
                         [info("y", 1, 3, 3, 3)], [weight("w", 3, 2, 3, 3)])  # fmt: skip
    source = h.make_model(
        graph, functions=[inner], opset_imports=[h.make_opsetid("", 18), h.make_opsetid("f", 1)], ir_version=9
    )
    assert convert_onnx(source, dtype="bf16").plan.low_nodes == 2


# ---- one type where ONNX Runtime wants one


def product_and_norm(version: int, variance: float, between: str = "") -> onnx.ModelProto:
    values = {"s": 1.5, "b": 0.1, "m": 0.2, "v": variance}
    data = [weight("w", 8, 8), nh.from_array(np.array([0, 1], np.int64), "perm")]
    data += [nh.from_array(np.full(8, number, np.float32), name) for name, number in values.items()]
    nodes = [node("MatMul", ["x", "w"], ["a"], "mm")]
    if between:
        nodes.append(node("Reshape", ["a", "sizes"], ["a2"]))
        data.append(nh.from_array(np.array([4, 8], np.int64), "sizes"))
    nodes.append(node("BatchNormalization", ["a2" if between else "a", "s", "b", "m", "v"], ["y"], "norm"))
    return model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], data, opset=version)


@pytest.mark.parametrize("between", ["", "Reshape"])
@pytest.mark.parametrize("version", [13, 14, 15, 21])
@pytest.mark.parametrize(("variance", "precision"), [(0.7, "low"), (1e-6, "fp32")])
def test_a_batch_norm_behind_a_product_has_one_type(version, variance, precision, between):
    source = product_and_norm(version, variance, between)
    done = check(source, "fp16")
    assert done.refusal is None
    (norm,) = [entry for entry in done.plan.nodes if entry.name == "norm"]
    kinds = {tensor.name: tensor.data_type for tensor in done.model.graph.initializer}
    (written,) = [entry for entry in done.model.graph.node if entry.op_type == "BatchNormalization"]
    assert {kinds[name] for name in written.input[1:]} == {T.FLOAT16 if precision == "low" else T.FLOAT}
    assert norm.precision == precision or version == 13
    same_numbers(source, done.model, {"x": X}, 6e-3)


def test_a_parameter_that_another_node_reads_stays_as_it_is():
    source = product_and_norm(15, 0.7)
    source.graph.node.append(node("Exp", ["s"], ["e"]))
    source.graph.output.append(info("e", 8))
    kinds = {tensor.data_type for tensor in check(source, "fp16").model.graph.initializer if tensor.name[0] == "s"}
    assert kinds == {T.FLOAT, T.FLOAT16}


@pytest.mark.parametrize("rules", ["default", "fast", "apex-o3", LOW], ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_mean_variance_normalization_stays_fp32(rules, dtype):
    """ONNX defines it by a function with FP32 constants: no 16-bit input is valid."""
    nodes = [node("MatMul", ["x", "w"], ["a"], "mm"), node("MeanVarianceNormalization", ["a"], ["y"], "mvn", axes=[1])]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)])
    done = check(source, dtype, rules)
    assert {entry.name: entry.precision for entry in done.plan.nodes} == {"mm": "low", "mvn": "fp32"}


@pytest.mark.parametrize(("op", "index"), [("ScatterND", [[0], [0], [2]]), ("ScatterElements", [[0] * 8, [0] * 8])])
@pytest.mark.parametrize("reduction", ["add", "mul", "max", "none"])
def test_what_is_scattered_and_summed_runs(op, index, reduction):
    """On a CPU ONNX Runtime loads it in FP16 and then refuses to run it."""
    index = nh.from_array(np.array(index), "i")
    nodes = [node("MatMul", ["x", "w"], ["a"], "mm"), node(op, ["a", "i", "u"], ["y"], "scatter", reduction=reduction)]
    data = [weight("w", 8, 8), index, weight("u", *index.dims[:1], 8)]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], data)
    same_numbers(source, check(source, "fp16").model, {"x": X})


# ---- the report


def test_a_kernel_that_the_cpu_lacks_is_told_and_is_no_warning(caplog):
    with caplog.at_level(logging.WARNING, "amp_compiler"):
        refusal = convert_onnx(mlp(), dtype="bf16").refusal
    assert (refusal.node, refusal.op, refusal.kernel, refusal.before) == ("first", "MatMul", True, False)
    assert "does not load it: at node 'first' (MatMul)" in str(refusal) and not caplog.text
    assert convert_onnx(mlp(), dtype="bf16", check=False).refusal is None


def test_a_model_that_did_not_load_before_is_told_as_such():
    source = model(
        [node("MatMul", ["x", "w"], ["a"]), h.make_node("Odd", ["a"], ["y"], domain="my.ops", name="odd")],
        [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)], extra=[h.make_opsetid("my.ops", 1)],
    )  # fmt: skip
    refusal = convert_onnx(source).refusal
    assert refusal.before and "as it does not load the original" in str(refusal) and "Odd" in refusal.problem


def test_an_unnamed_node_is_named_by_what_it_makes():
    source = model(
        [node("MatMul", ["x", "w"], ["a"]), h.make_node("MatMul", ["a", "w"], ["y"])],
        [info("x", 4, 8)], [info("y", 4, 8)], [weight("w", 8, 8)],
    )  # fmt: skip
    assert convert_onnx(source, dtype="bf16").refusal.node == "of a"


@pytest.mark.parametrize("limit", ["MOST_NODES", "MOST_DEPTH"])
def test_a_long_model_is_not_loaded_and_that_is_told(monkeypatch, limit):
    monkeypatch.setattr(loads, limit, 2)
    monkeypatch.setattr(loads, "_load", lambda *inputs: pytest.fail("it was loaded"))
    done = convert_onnx(mlp())
    assert done.refusal is None and done.notes[0].startswith("it was not loaded in ONNX Runtime")


def test_without_onnx_runtime_nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(loads, "is_installed", lambda: False)
    loads.latest_opset.cache_clear()
    try:
        assert loads.latest_opset() is None and convert_onnx(mlp(), dtype="bf16").refusal is None
        source = convolution()
        assert opset(convert_onnx(source, dtype="bf16").model) == 22
    finally:
        loads.latest_opset.cache_clear()


# ---- the shell


def test_the_shell_has_all_of_it(tmp_path, shell):
    source = convolution()
    onnx.save(source, tmp_path / "m.onnx")
    convert = ("convert", tmp_path / "m.onnx", tmp_path / "o.onnx")
    code, out = shell(*convert, "--dtype", "bf16")
    assert not code and opset(onnx.load(tmp_path / "o.onnx")) == 22
    assert "note: onnxruntime" in out and "at node 'conv' (Conv)" in out
    code, out = shell(*convert, "--dtype", "bf16", "--no-raise-opset", "--no-check")
    assert "note: 1 node stays FP32 because the opset is 17" in out and "does not load" not in out
    assert not code and opset(onnx.load(tmp_path / "o.onnx")) == 17
    code, out = shell(*convert, "--opset", "20", "--json")
    assert not code and opset(onnx.load(tmp_path / "o.onnx")) == 20 and '"refusal": null' in out


# ---- what takes the process down

EACH_ALONE = """
import os, sys, onnxruntime as ort
left_out, *paths = sys.argv[1:]
for path in paths:
    child = os.fork()
    if not child:
        try:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            ort.InferenceSession(path, options, disabled_optimizers=left_out.split())
        except Exception:
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def exit_codes(paths, left_out=""):
    """How a process ends that loads a file as users do, for each."""
    return [int(line) for line in run_program(EACH_ALONE, left_out, *paths).split()]


def turned(perm, opset=17, *, source=T.FLOAT, dynamic=False, right=False, between=(), within=False):
    """A product behind a transpose, as exporters write `batch_first` behind an LSTM."""
    sizes = [2, 3, 5, 4][-len(perm) :]
    named = [f"d{axis}" if dynamic and axis < len(perm) - 2 else size for axis, size in enumerate(sizes)]
    inputs = [named[perm.index(axis)] for axis in range(len(perm))]
    nodes = [node("Transpose", ["x"], ["t0"], "turn", perm=perm)]
    nodes += [node(op, [f"t{index}"], [f"t{index + 1}"], **facts) for index, (op, facts) in enumerate(between)]
    last = f"t{len(between)}"
    nodes.append(node("MatMul", ["w", last] if right else [last, "w"], ["y"], "product"))
    result = [*named[:-2], 7, sizes[-1]] if right else [*named[:-1], 7]
    data = [weight("w", 7, sizes[-2]) if right else weight("w", sizes[-1], 7)]
    ends = [info("x", *inputs, kind=source)], [info("y", *result)]
    if not within:
        return model(nodes, *ends, data, opset=opset)
    body = h.make_graph(nodes, "body", [], [info("y", *result)], data)
    other = h.make_graph([node("Identity", ["z"], ["y"])], "other", [], [info("y", *result)], [weight("z", *result)])
    chosen = node("If", ["c"], ["y"], "choice", then_branch=body, else_branch=other)
    return model([chosen], [info("c", kind=T.BOOL), *ends[0]], ends[1], opset=opset)


CAST = ("Cast", {"to": T.FLOAT})
TURNED = {
    **{f"{perm}": turned(perm) for perm in ([1, 0, 2], [1, 2, 0], [1, 2, 0, 3], [1, 2, 3, 0])},
    "opset 11": turned([1, 0, 2], 11), "sizes left open": turned([1, 0, 2], dynamic=True),
    "right operand": turned([1, 0, 2], right=True), "identity": turned([1, 0, 2], between=[("Identity", {})]),
    "cast of the model's own": turned([1, 0, 2], source=T.INT32, between=[CAST]),
    "in a branch": turned([1, 2, 0], within=True),
}  # fmt: skip
FP32_PRODUCT = {
    "version": 1,
    "extends": "default",
    "rules": [
        {"match": {"op": "onnx.MatMul"}, "precision": "fp32"},
        {"match": {"op": "onnx.Transpose"}, "precision": "low"},
    ],
}


@pytest.mark.long
def test_what_would_crash_is_written_in_a_form_that_loads(tmp_path):
    """The process of whoever loads such a model ended."""
    paths = []
    for number, source in enumerate(TURNED.values()):
        for rules in ("default", FP32_PRODUCT):
            paths.append(tmp_path / f"{number}{rules == 'default'}.onnx")
            done = convert_onnx(source, paths[-1], rules=rules)
            assert done.refusal is None
            onnx.checker.check_model(paths[-1], full_check=True)
    assert exit_codes(paths) == [0] * len(paths)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", TURNED)
def test_a_transpose_that_loads_gives_the_same_numbers(name, dtype):
    source = TURNED[name]
    done = check(source, dtype, full=name != "in a branch")
    kind = {value.name: value.type.tensor_type.elem_type for value in source.graph.input}["x"]
    sizes = [dim.dim_value or 3 for dim in source.graph.input[-1].type.tensor_type.shape.dim]
    x = np.random.default_rng(0).standard_normal(sizes).astype(h.tensor_dtype_to_np_dtype(kind))
    feeds = {"x": x} | ({"c": np.array(True)} if name == "in a branch" else {})
    assert verify(source, done.model, [feeds]).ok(3e-3 if dtype == "fp16" else 2.4e-2)


def test_other_transposes_stay_as_they_are():
    for source in (turned([0, 2, 1]), turned([0, 2, 1, 3]), turned([1, 0, 2], between=[("Relu", {})])):
        assert "Unsqueeze" not in {one.op_type for one in check(source, "fp16").model.graph.node}
    kept = {"version": 1, "rules": [{"match": {}, "precision": "fp32"}]}
    assert len(convert_onnx(turned([1, 0, 2]), rules=kept).model.graph.node) == 2


@pytest.mark.slow  # two processes that import onnxruntime
def test_it_does_crash(tmp_path):
    """Where this fails, ONNX Runtime is right again, and `guard_transposes` can go for its version."""
    source = turned([1, 0, 2], source=T.FLOAT16, between=[CAST])
    onnx.save(source, tmp_path / "m.onnx")
    assert exit_codes([tmp_path / "m.onnx"]) == [-signal.SIGSEGV]
    assert exit_codes([tmp_path / "m.onnx"], "NchwcTransformer") == [0]
