"""A model whose data lie in a file of their own is converted as the same model with its data inside."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from compound_models import gelu, norm
from onnx import TensorProto as T
from onnx import numpy_helper as nh
from onnx_corpus import MADE, built
from onnx_models import copy, info, model, node

from amp_compiler.errors import OnnxError
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.model.data import array_of
from amp_compiler.onnx.model.walk import all_tensors

NORMS = {
    "rms": norm(root="reciprocal"),
    "rms, squares by products": norm(square="mul", root="reciprocal", opset=17),
    "rms, opset 23": norm(opset=23),
    "rms, one number as scale": norm(scale_shape=(1,), opset=23),
    "layer norm": norm(centred=True, bias=True),
    "layer norm, opset 12": norm(centred=True, bias=True, opset=12),
    "gelu": gelu("pow"),
    "fp64": norm(kind=T.DOUBLE),
}
WAYS = {
    "default": {},
    "fused": {"fuse": True},
    "in parts": {"fuse": False},
    "bf16, 16-bit ends": {"dtype": "bf16", "keep_io_types": False},
    "fp64 as fp32": {"as_fp32": "fp64"},
}


def saved(source, folder, **options):
    """The file of a model whose numbers are stored as bytes, which alone can be in another file."""
    made = copy(source)
    for _, tensor in all_tensors(made):
        if tensor.data_type != T.STRING:
            tensor.CopyFrom(nh.from_array(nh.to_array(tensor), tensor.name))
    folder.mkdir()
    onnx.save(made, folder / "m.onnx", **options)
    return folder / "m.onnx"


def converted(path, **options):
    """The plan, and the model with all its data."""
    done = convert_onnx(path, path.with_name("made.onnx"), check=False, **options)
    made = onnx.load(done.path)
    for _, tensor in all_tensors(made):
        tensor.ClearField("data_location")
    return done.plan, made


def check_both(source, folder, **options):
    """Convert it with its data inside, and with all of them in another file: nodes, types and data are the same."""
    inside = saved(source, folder / "inside")
    outside = saved(source, folder / "outside", save_as_external_data=True, location="m.data", size_threshold=0,
                    convert_attribute=True)  # fmt: skip
    stored = {name for name, tensor in all_tensors(onnx.load(outside, load_external_data=False))
              if tensor.data_location != T.EXTERNAL and tensor.data_type != T.STRING}  # fmt: skip
    assert not stored
    (plan, made), (other_plan, other) = converted(inside, **options), converted(outside, **options)
    assert plan == other_plan and list(made.graph.node) == list(other.graph.node)
    assert made == other


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NORMS)
def test_norms_and_gelus_in_parts(name, way, tmp_path):
    check_both(NORMS[name], tmp_path, **WAYS[way])


@pytest.mark.parametrize("case", MADE, ids=lambda case: case.name)
def test_the_models_of_the_corpus(case, tmp_path):
    check_both(built(case.name)[0], tmp_path)


def test_a_file_is_mapped_as_long_as_somebody_reads_it(tmp_path):
    (tmp_path / "data").write_bytes(np.arange(8, dtype=np.float32).tobytes())
    tensor = ir.ExternalTensor("data", 0, 32, ir.DataType.FLOAT, shape=ir.Shape([8]), name="w", base_dir=tmp_path)
    first = array_of(tensor)[2:]
    assert tensor.raw is None
    assert array_of(tensor).sum() == 28 and first[0] == 2


def test_an_empty_tensor_has_no_bytes_in_the_file(tmp_path):
    source = model([node("Concat", ["x", "none"], ["y"], axis=0)], [info("x", 2, 2)], [info("y", 2, 2)],
                   [nh.from_array(np.zeros((0, 2), np.float32), "none")])  # fmt: skip
    check_both(source, tmp_path)
    path = saved(source, tmp_path / "wrong", save_as_external_data=True, location="m.data", size_threshold=0)
    wrong = onnx.load(path, load_external_data=False)
    (tensor,) = wrong.graph.initializer
    for entry in tensor.external_data:
        if entry.key == "length":
            entry.value = "16"
    path.write_bytes(wrong.SerializeToString())
    with pytest.raises(OnnxError, match="16 bytes of data, and its type and shape ask for 0"):
        convert_onnx(path)
