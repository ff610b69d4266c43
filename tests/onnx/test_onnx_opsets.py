"""`convert_onnx` on old and new opsets, and the raising of an opset that has no 16-bit type for an op."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper as h
from onnx import numpy_helper as nh
from onnx_models import (
    DTYPES,
    RNG,
    check,
    info,
    model,
    node,
    same_numbers,
    weight,
)

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.convert import convert_onnx


@pytest.mark.parametrize("opset", [9, 11, 13, 14, 15, 17, 21])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opsets(opset, dtype):
    """Batch norm in every version: its statistics are tied to the data before opset 15, and bf16 wants opset 22."""
    data = [weight("w", 3, 2, 3, 3), weight("b", 3), weight("s", 3), weight("mean", 3)]
    data.append(nh.from_array(np.array([0.5, 1.0, 2.0], np.float32), "var"))
    source = model(
        [
            node("Conv", ["x", "w", "b"], ["a"], "conv"),
            node("BatchNormalization", ["a", "s", "b", "mean", "var"], ["c"], "norm"),
            node("Relu", ["c"], ["d"], "act"),
            node("GlobalAveragePool", ["d"], ["y"], "pool"),
        ],
        [info("x", 1, 2, 5, 5)],
        [info("y", 1, 3, 1, 1)],
        data,
        opset=opset,
        ir_version=4,
    )
    done = check(source, dtype)
    assert {entry.name: entry.precision for entry in done.plan.nodes} == dict.fromkeys(
        ("conv", "norm", "act", "pool"), "low"
    )
    if dtype == "fp16":
        assert done.model.opset_import[0].version == opset
        same_numbers(source, done.model, {"x": RNG.standard_normal((1, 2, 5, 5)).astype(np.float32)})


def test_an_opset_that_cannot_be_raised_is_an_error_that_says_so(monkeypatch):
    source = model([node("Conv", ["x", "w"], ["y"], "conv")], [info("x", 1, 2, 5, 5)], [info("y", 1, 3, 3, 3)],
                   [weight("w", 3, 2, 3, 3)], opset=17)  # fmt: skip

    def fail(proto, version):
        raise RuntimeError("no adapter")

    monkeypatch.setattr(onnx.version_converter, "convert_version", fail)
    with pytest.raises(
        OnnxError, match=r"Conv takes bf16 from opset 22 on .*cannot raise the model from 17: no adapter"
    ):
        convert_onnx(source, dtype="bf16")
    kept = convert_onnx(source, dtype="bf16", raise_opset=False)
    assert (
        kept.model.SerializeToString()
        == convert_onnx(source, dtype="fp16", rules={"version": 1}).model.SerializeToString()
    )
    assert kept.plan.nodes[0].reason == "Conv takes no bf16 before opset 22; the opset is 17"


def test_raising_keeps_names_doc_strings_and_metadata():
    source = model([h.make_node("Conv", ["x", "w"], ["y"], name="conv", doc_string="a note")], [info("x", 1, 2, 5, 5)],
                   [info("y", 1, 3, 3, 3)], [weight("w", 3, 2, 3, 3)], opset=17)  # fmt: skip
    source.graph.node[0].metadata_props.add(key="k", value="v")
    source.metadata_props.add(key="author", value="me")
    made = check(source, "bf16").model
    conv = next(entry for entry in made.graph.node if entry.op_type == "Conv")
    assert (conv.name, conv.doc_string, conv.metadata_props[0].value) == ("conv", "a note", "v")
    assert made.metadata_props[0].value == "me"
    assert nh.to_array(source.graph.initializer[0]).shape == tuple(made.graph.initializer[0].dims)
