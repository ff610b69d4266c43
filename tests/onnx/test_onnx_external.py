"""A model whose data lie in a file of their own is converted as the same model with its data inside."""

import importlib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from compound_models import gelu, norm
from onnx import TensorProto as T
from onnx import numpy_helper as nh
from onnx_corpus import CASES, MADE, built
from onnx_models import copy, info, model, node, weight

from amp_compiler.errors import AmpError, OnnxError
from amp_compiler.onnx.check.calibrate import calibrate
from amp_compiler.onnx.check.probes import Probes
from amp_compiler.onnx.check.verify import verify
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.importing.api import onnx_to_fx
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
    result = copy(source)
    for tensor in all_tensors(result):
        if tensor.data_type != T.STRING:
            tensor.CopyFrom(nh.from_array(nh.to_array(tensor), tensor.name))
    folder.mkdir()
    onnx.save(result, folder / "m.onnx", **options)
    return folder / "m.onnx"


def converted(path, **options):
    """The plan, and the model with all its data, which stands in another folder."""
    (path.parent / "made").mkdir()
    done = convert_onnx(path, path.parent / "made" / "made.onnx", check=False, **options)
    result = onnx.load(done.path)
    for tensor in all_tensors(result):
        tensor.ClearField("data_location")
        if not tensor.name:  # said to be empty, or not said
            tensor.ClearField("name")
    return done.plan, result


def both_ways(source, folder):
    """The file of a model with its data inside, and that with all of them in another file."""
    inside = saved(source, folder / "inside")
    outside = saved(source, folder / "outside", save_as_external_data=True, location="m.data", size_threshold=0,
                    convert_attribute=True)  # fmt: skip
    stored = {tensor.name for tensor in all_tensors(onnx.load(outside, load_external_data=False))
              if tensor.data_location != T.EXTERNAL and tensor.data_type != T.STRING}  # fmt: skip
    assert not stored
    return inside, outside


def check_both(source, folder, **options):
    """Convert both: nodes, types and data are the same."""
    inside, outside = both_ways(source, folder)
    (plan, result), (other_plan, other) = converted(inside, **options), converted(outside, **options)
    assert plan == other_plan and list(result.graph.node) == list(other.graph.node)
    assert result == other


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NORMS)
def test_norms_and_gelus_in_parts(name, way, tmp_path):
    check_both(NORMS[name], tmp_path, **WAYS[way])


def corpus():
    """All models of the corpus; those that take a while to make are long."""
    for case in CASES:
        marks = [pytest.mark.slow] * case.slow + [pytest.mark.long] * (case not in MADE)
        yield pytest.param(case.name, id=case.name, marks=marks)


BF16 = {"dtype": "bf16", "keep_io_types": False}


@pytest.mark.sweep(30)
@pytest.mark.parametrize("options", [{}, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", list(corpus()))
def test_the_models_of_the_corpus(name, options, tmp_path):
    """For BF16 the opset is raised, by a converter that looks at stored numbers."""
    check_both(built(name)[0], tmp_path, **options)


def outcome(work):
    """What some work gives, or the error that it ends in, but for the place."""
    try:
        return work()
    except AmpError as refused:
        return type(refused), refused.what


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", list(corpus()))
def test_what_runs_the_models_of_the_corpus(name, tmp_path):
    """Calibration, verification, drawn inputs and the way to FX give the same."""
    check_runs(*built(name), tmp_path)


def check_runs(source, batches, folder):
    """What runs a model gives the same for both files."""
    results = []
    for path in both_ways(source, folder):
        result = path.with_name("made.onnx")
        ranges = outcome(lambda path=path: calibrate(path, batches))
        done = convert_onnx(path, result, check=False)
        report = outcome(lambda path=path, result=result: str(verify(path, result, batches)))
        drawn = outcome(lambda path=path: [_bits(batch) for batch in Probes(path)])
        module = outcome(lambda path=path: onnx_to_fx(path))
        state = module if isinstance(module, tuple) else (module.code, _bits(module.state_dict()))
        results.append((ranges, report, drawn, state, done.plan))
    assert results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(29))
def test_a_real_file(number, tmp_path, monkeypatch):
    """As the corpus. `python -m benchmarks.onnx_real` fetches them: no test goes to the network."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    real = importlib.import_module("benchmarks.onnx_real")
    assert len(real.FILES) == 29
    file = real.FILES[number]
    path = real.CACHE / file.package / file.path
    if not path.exists():
        pytest.skip(f"python -m benchmarks.onnx_real fetches {path.name}")
    source = onnx.load(path)
    for name, options in (("fp16", {}), ("bf16", BF16)):
        (tmp_path / name).mkdir()
        check_both(source, tmp_path / name, **options)
    check_runs(source, [file.draw(np.random.default_rng(0))], tmp_path)


def _bits(arrays):
    return {name: (np.shape(array), np.asarray(array).tobytes()) for name, array in arrays.items()}


def test_a_16_bit_weight_that_is_an_input_too(tmp_path):
    source = model([node("MatMul", ["x", "w"], ["y"])], [info("x", 2, 64), info("w", 64, 64)], [info("y", 2, 64)],
                   [weight("w", 64, 64)], ir_version=3)  # fmt: skip
    done = [convert_onnx(path, path.with_name("made.onnx"), keep_io_types=False, check=False)
            for path in both_ways(source, tmp_path)]  # fmt: skip
    batch = [{"x": np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)}]
    reports = [verify(source, one.path, batch) for one in done]
    assert reports[0] == reports[1] and reports[0].ok(1e-2)


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
