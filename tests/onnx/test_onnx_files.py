"""Files that `convert_onnx` reads and writes: whole, atomic, external data, the same bytes on every run."""

from __future__ import annotations

import io
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper as nh
from onnx_models import (
    copy,
    mlp,
)

import amp_compiler as amp
from amp_compiler.cli.convert import run_convert
from amp_compiler.errors import OnnxError
from amp_compiler.onnx.check.calibrate import calibrate
from amp_compiler.onnx.check.probes import random_batch
from amp_compiler.onnx.check.run import stored_bytes
from amp_compiler.onnx.convert import convert_onnx
from amp_compiler.onnx.model.model import open_model
from amp_compiler.onnx.plan import explain_onnx


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
    with pytest.raises(OnnxError, match="batches: it is a int; give a list of dicts"):
        convert_onnx(source, calibration=3)
    with pytest.raises(amp.AmpError, match="trainable= is a str, not a function"):
        amp.onnx_to_fx(source, trainable="weight")


def test_external_data_stay_external_and_cast_exactly(tmp_path):
    inline = mlp(64)
    onnx.save(copy(inline), tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    convert_onnx(tmp_path / "m.onnx", tmp_path / "out.onnx")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.data", "m.onnx", "out.onnx", "out.onnx.data"]
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check=True)
    made = onnx.load(tmp_path / "out.onnx")
    want = convert_onnx(copy(inline)).model
    for got, expected in zip(made.graph.initializer, want.graph.initializer, strict=True):
        assert got.name == expected.name
        np.testing.assert_array_equal(nh.to_array(got), nh.to_array(expected))
    with pytest.raises(OnnxError, match="data file of the input"):
        convert_onnx(tmp_path / "m.onnx", tmp_path / "m.data")
    (tmp_path / "m.data").unlink()
    with pytest.raises(OnnxError, match="keep the data files beside the model"):
        convert_onnx(tmp_path / "m.onnx")


def test_explain_reads_onnx(tmp_path):
    onnx.save(mlp(), tmp_path / "m.onnx")
    assert amp.explain(tmp_path / "m.onnx") == amp.explain(mlp(), dtype="fp16") == convert_onnx(mlp()).plan


def test_calibration_and_verification_from_a_file(tmp_path):
    big = np.full((4, 8), 3e4, np.float32)
    big[::2] *= -1  # so that what is largest is so behind the activation too, whatever the weights
    np.savez(tmp_path / "data.npz", x=big)
    onnx.save(mlp(), tmp_path / "m.onnx")
    done = convert_onnx(
        tmp_path / "m.onnx", tmp_path / "o.onnx", calibration=tmp_path / "data.npz", verify=tmp_path / "data.npz"
    )
    assert {entry.precision for entry in done.plan.nodes} == {"fp32"}
    assert "in calibration" in done.plan.nodes[0].reason and done.report.first_bad is None


OPENED: Counter[str] = Counter()


@pytest.fixture
def opened():
    """How often Python opens each file, by its name."""
    if "audit" not in OPENED:  # a hook stays for good
        OPENED["audit"] = 1
        sys.addaudithook(_note_open)
    OPENED.update(armed=1)
    yield OPENED
    OPENED.clear()
    OPENED["audit"] = 1


def _note_open(event: str, arguments: tuple) -> None:
    if event == "open" and OPENED["armed"] and isinstance(arguments[0], (str, Path)):
        OPENED[Path(arguments[0]).name] += 1


def test_a_conversion_opens_its_input_once(opened, tmp_path):
    batch = {"x": np.ones((4, 8), np.float32)}
    onnx.save(mlp(), tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", **batch)
    opened["m.onnx"] = 0
    done = convert_onnx(tmp_path / "m.onnx", tmp_path / "o.onnx", calibration=[batch], verify=[batch])
    assert done.report.ok(1e-2) and opened["m.onnx"] == 1
    amp.onnx_to_fx(tmp_path / "m.onnx")
    assert opened["m.onnx"] == 2
    model = open_model(tmp_path / "m.onnx")
    assert opened["m.onnx"] == 3
    ranges = calibrate(model, [batch])
    assert convert_onnx(model).plan == done.plan and explain_onnx(model, ranges=ranges) == done.plan
    assert random_batch(model) and stored_bytes(model) == (tmp_path / "m.onnx").stat().st_size
    assert opened["m.onnx"] == 3


def test_the_command_opens_its_input_and_its_output_once(opened, tmp_path):
    onnx.save(mlp(), tmp_path / "m.onnx")
    opened["m.onnx"] = 0
    for calibrate_with in (None, tmp_path / "data.npz"):
        np.savez(tmp_path / "data.npz", x=np.ones((4, 8), np.float32))
        opened["m.onnx"] = opened["o.onnx"] = 0
        assert not run_convert(tmp_path / "m.onnx", tmp_path / "o.onnx", calibrate=calibrate_with, verify=True).failed
        assert opened["m.onnx"] == 1
        assert opened["o.onnx"] == 2  # written and read
