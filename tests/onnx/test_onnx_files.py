"""Files that `convert_onnx` reads and writes: whole, atomic, external data, in little memory."""

import io
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import make_model, mlp, run_program, value

import amp_compiler as amp
from amp_compiler.errors import OnnxError
from amp_compiler.onnx.convert import convert_onnx


@pytest.mark.parametrize("output", [b"out.onnx", 3, io.BytesIO()])
def test_an_output_that_is_no_path_is_refused(output):
    with pytest.raises(OnnxError, match=f"cannot write to a {type(output).__name__}"):
        convert_onnx(mlp(), output)


@pytest.mark.parametrize("name", ["m.onnx", "m.onnx.data"])
def test_a_pointer_of_git_lfs_is_told_as_one(name, tmp_path):
    """In the place of the model, or of its data."""
    onnx.save(mlp(), tmp_path / "m.onnx", save_as_external_data=True, location="m.onnx.data", size_threshold=0)
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234567\n"
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(OnnxError, match=rf"{name}: it is a Git LFS pointer, .*git lfs pull"):
        convert_onnx(tmp_path / "m.onnx")


def test_files_are_written_whole_and_the_input_is_never_touched(tmp_path):
    source, target = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(mlp(), source)
    before = source.read_bytes()
    done = convert_onnx(source, target)
    assert done.path == target and done.model is None and source.read_bytes() == before
    assert target.read_bytes() == convert_onnx(source).model.SerializeToString(deterministic=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "out.onnx"]
    for wrong in (source, tmp_path / "no" / "out.onnx"):
        with pytest.raises(OnnxError):
            convert_onnx(source, wrong)
    with pytest.raises(OnnxError, match="cannot be read"):
        convert_onnx(tmp_path / "none.onnx")
    (tmp_path / "junk.onnx").write_bytes(b"no model at all")
    with pytest.raises(OnnxError, match="no ONNX model"):
        convert_onnx(tmp_path / "junk.onnx")
    (tmp_path / "junk.json").write_text("{}}")  # ONNX's text forms, told by the suffix, have errors of their own
    with pytest.raises(OnnxError, match="no ONNX model"):
        convert_onnx(tmp_path / "junk.json")
    with pytest.raises(OnnxError, match="cannot read a int"):
        convert_onnx(3)
    for wrong in ({"calibration": 3}, {"verify": True}, {"verify": {}}):
        with pytest.raises(OnnxError, match=f"{next(iter(wrong))}: it is a [a-z]+; give a list of dicts"):
            convert_onnx(source, **wrong)
    with pytest.raises(amp.AmpError, match="trainable= is a str, not a function"):
        amp.onnx_to_fx(source, trainable="weight")


def test_data_of_the_input_are_not_written_over(tmp_path):
    onnx.save(mlp(64), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    with pytest.raises(OnnxError, match="data file of the input"):
        convert_onnx(tmp_path / "m.onnx", tmp_path / "m.data")


def test_explain_reads_onnx(tmp_path):
    onnx.save(mlp(), tmp_path / "m.onnx")
    assert amp.explain(tmp_path / "m.onnx") == amp.explain(mlp(), dtype="fp16") == convert_onnx(mlp()).plan


CONVERT = """
import sys
from own_memory import peak
from amp_compiler.onnx.convert import convert_onnx
start = peak()
done = convert_onnx(sys.argv[1], sys.argv[2], dtype="fp16")
print(peak() - start, done.plan.low_nodes)
"""


def size_of(folder: Path, pattern: str) -> int:
    return sum(file.stat().st_size for file in folder.glob(pattern))


@pytest.mark.long
@pytest.mark.parametrize(("outside", "times"), [(False, 3), (True, 1)])
def test_peak_memory_is_a_few_times_that_of_the_model(tmp_path, outside, times):
    """256 MB in one file, or beside it, where they are mapped; the libraries' own memory is taken off."""
    one = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    weights = {f"w{index}": np.roll(one, index) for index in range(16)}
    names = ["x", *(f"h{index}" for index in range(15)), "y"]
    nodes = [
        helper.make_node("MatMul", [one, weight], [two], name=weight)
        for one, two, weight in zip(names, names[1:], weights, strict=False)
    ]
    source = tmp_path / "in.onnx"
    model = make_model(nodes, [value("x", ["n", 2048])], [value("y", ["n", 2048])], weights)
    onnx.save(model, source, save_as_external_data=outside, location="in.data")
    taken, low = map(int, run_program(CONVERT, source, tmp_path / "out.onnx").split())
    assert low == 16 and taken < times * size_of(tmp_path, "in.*")
    assert size_of(tmp_path, "out.*") <= 0.52 * size_of(tmp_path, "in.*")
