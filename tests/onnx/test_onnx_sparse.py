"""Sparse initializers are converted like others, and stay sparse."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx.reference import ReferenceEvaluator
from onnx_models import LOW, X, check, info, model, node, same_numbers, weight

import amp_compiler as amp
from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx

VALUES = np.array([1.5, -2.25, 0.3, -0.0, 3.0], np.float32)
PLACES = np.array([[0, 0], [2, 5], [3, 1], [5, 2], [7, 7]], np.int64)


def sparse(name: str = "w", flat: bool = False, values: np.ndarray = VALUES, places: np.ndarray = PLACES):
    indices = places[:, 0] * 8 + places[:, 1] if flat else places
    return h.make_sparse_tensor(nh.from_array(values, name), nh.from_array(indices, f"{name}_i"), [8, 8])


def source(*, flat: bool = False, both: bool = False) -> onnx.ModelProto:
    nodes = [node("MatMul", ["x", "w"], ["a"], "mm"), node("MatMul", ["a", "v"], ["y"], "last")]
    outputs = [info("y", 4, 8)]
    if both:
        nodes.append(node("Exp", ["w"], ["e"], "e"))
        outputs.append(info("e", 8, 8))
    graph = h.make_graph(
        nodes, "g", [info("x", 4, 8)], outputs, [weight("v", 8, 8)], sparse_initializer=[sparse(flat=flat)]
    )
    made = h.make_model(graph, opset_imports=[h.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(made)  # the full check takes a sparse initializer for a tensor of another kind
    return made


@pytest.mark.parametrize("flat", [False, True], ids=["places", "flat"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_they_are_rounded_and_stay_sparse(flat, dtype):
    original = source(flat=flat)
    done = check(original, dtype, full=False)
    (made,) = done.model.graph.sparse_initializer
    assert made.values.name == "w" and made.values.data_type == LOW[dtype] and list(made.dims) == [8, 8]
    assert [tensor.name for tensor in done.model.graph.initializer] == ["v"]
    order = np.argsort(PLACES[:, 0] * 8 + PLACES[:, 1])
    np.testing.assert_array_equal(nh.to_array(made.indices), (PLACES[:, 0] * 8 + PLACES[:, 1])[order])
    found = nh.to_array(made.values)
    np.testing.assert_array_equal(found, VALUES[order].astype(found.dtype))
    assert np.signbit(found.astype(np.float32)).sum() == 2
    if dtype == "fp16":
        same_numbers(original, done.model, {"x": X})
    assert verify(original, done.model, [{"x": X}]).largest_error < (3e-3 if dtype == "fp16" else 3e-2)


def test_two_copies_of_one_that_is_read_in_both_types():
    done = check(source(both=True), "fp16", full=False)
    kinds = {one.values.name: one.values.data_type for one in done.model.graph.sparse_initializer}
    assert kinds == {"w": T.FLOAT, "w_fp16": T.FLOAT16}


def test_numbers_that_do_not_fit_count():
    large = source()
    large.graph.sparse_initializer[0].CopyFrom(sparse(values=VALUES * np.float32(1e6)))
    assert next(entry for entry in convert_onnx(large).plan.nodes if entry.name == "mm").precision == "fp32"


def test_a_file_is_written_and_read(tmp_path):
    onnx.save(source(), tmp_path / "m.onnx")
    convert_onnx(tmp_path / "m.onnx", tmp_path / "o.onnx")
    onnx.checker.check_model(str(tmp_path / "o.onnx"))
    assert len(onnx.load(tmp_path / "o.onnx").graph.sparse_initializer) == 1


def test_torch_reads_them():
    original = source()
    module = amp.onnx_to_fx(original)
    want = ReferenceEvaluator(dense_twin(original)).run(None, {"x": X})[0]
    assert torch.allclose(module(torch.from_numpy(X)), torch.from_numpy(want), atol=1e-5)


def dense_twin(original: onnx.ModelProto) -> onnx.ModelProto:
    made = onnx.ModelProto()
    made.CopyFrom(original)
    data = np.zeros((8, 8), np.float32)
    data[tuple(PLACES.T)] = VALUES
    made.graph.initializer.append(nh.from_array(data, "w"))
    del made.graph.sparse_initializer[:]
    return made


def test_the_same_as_a_dense_one():
    """The plan of the model with dense data."""
    original = source()
    assert amp.explain(original, dtype="fp16") == amp.explain(dense_twin(original), dtype="fp16")


@pytest.mark.parametrize(
    ("places", "told"),
    [
        (np.array([[9, 0]] * 5, np.int64), "outside its shape|index"),
        (np.array([[-1, 0]] * 5, np.int64), "outside its shape|index"),
        (np.array([[1, 1]] * 3, np.int64), "do not fit its values|index|indices"),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_malformed_ones_are_refused(places, told, check):
    made = source()
    made.graph.sparse_initializer[0].indices.CopyFrom(nh.from_array(places, "w_i"))
    with pytest.raises(OnnxError, match=told):
        convert_onnx(made, check=check)
    with pytest.raises(OnnxError):
        amp.onnx_to_fx(made, check=check)


def test_one_too_large_to_be_dense_is_refused():
    made = model([node("Relu", ["x"], ["y"])], [info("x", 4, 8)], [info("y", 4, 8)])
    one = h.make_sparse_tensor(nh.from_array(VALUES[:1], "w"), nh.from_array(PLACES[:1, 0], "w_i"), [10**6, 10**6])
    made.graph.sparse_initializer.append(one)
    with pytest.raises(OnnxError, match=r"'w'.*too large to be made dense"):
        convert_onnx(made)
