"""`amp-compiler convert`, called as a user calls it but in this process."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx_corpus import parts, ranges

from amp_compiler.errors import AmpError
from amp_compiler.onnx import convert
from amp_compiler.onnx.check.verify import verify


@pytest.fixture
def run(shell):
    """Runs `amp-compiler convert` with arguments and gives (exit code, standard output, standard error)."""
    return partial(shell, "convert")


@pytest.fixture
def benign(tmp_path) -> Path:
    model, batches = parts.wide_mlp()
    onnx.save(model, tmp_path / "in.onnx")
    (tmp_path / "data").mkdir()
    for index, batch in enumerate(batches):
        np.savez(tmp_path / "data" / f"{index}.npz", **batch)
    return tmp_path / "in.onnx"


@pytest.fixture
def overflowing(tmp_path) -> Path:
    model, batches = ranges.overflow_in_activations()
    onnx.save(model, tmp_path / "in.onnx")
    np.savez(tmp_path / "data.npz", **batches[0])
    return tmp_path / "in.onnx"


def test_it_converts_and_sums_up(run, benign, tmp_path):
    before, out, page = benign.read_bytes(), tmp_path / "out.onnx", tmp_path / "plan.html"
    code, text, err = run(
        benign, out, "--dtype", "fp16", "--calibrate", tmp_path / "data", "--verify", "--report", page
    )
    assert code == 0, err
    for part in ("fp16", "fp32", "casts", "ratio 0.50", "largest error", "passed", "out.onnx"):
        assert part in text
    assert not err  # no progress bar where there is no terminal
    assert benign.read_bytes() == before
    model = onnx.load(out)
    onnx.checker.check_model(model, full_check=True)
    assert TensorProto.FLOAT16 in {tensor.data_type for tensor in model.graph.initializer}
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_is_the_same_facts(run, benign, tmp_path):
    out = tmp_path / "out.onnx"
    code, text, _ = run(benign, out, "--verify", "--calibrate", tmp_path / "data", "--json", "--dtype", "bf16")
    facts = json.loads(text)
    assert code == 0
    assert facts["dtype"] == "bf16" and facts["rules"] == "default" and facts["nodes"]["low"] > 20
    assert facts["output_bytes"] == out.stat().st_size and facts["input_bytes"] == benign.stat().st_size
    assert facts["size_ratio"] == pytest.approx(out.stat().st_size / benign.stat().st_size)
    result = facts["verification"]
    assert result["passed"] and not result["random_inputs"] and result["tolerance"] == 0.08 and result["batches"] == 2
    assert result["largest_error"] == verify(benign, out, tmp_path / "data").largest_error > 0
    assert facts["cast_bytes"] == 0 or facts["casts"] > 0


def test_random_inputs_where_there_are_no_data(run, benign, tmp_path):
    code, text, _ = run(benign, tmp_path / "out.onnx", "--verify", "--json")
    result = json.loads(text)["verification"]
    assert code == 0 and result["random_inputs"] and 0 < result["largest_error"] < 0.01
    assert json.loads(run(benign, tmp_path / "out.onnx", "--json")[1])["verification"] is None


def test_a_failed_verification_exits_with_3(run, benign, overflowing, tmp_path):
    code, text, _ = run(overflowing, tmp_path / "out.onnx", "--verify", "--tolerance", "1e-9")
    assert code == 3 and "FAILED" in text and "amp-compiler tune" in text
    # The same model without calibration: the overflow shows only when it runs.
    rules = tmp_path / "rules.yaml"
    rules.write_text("version: 1\nrules:\n  - match: {}\n    precision: low\n", encoding="utf-8")
    code, text, _ = run(overflowing, tmp_path / "out.onnx", "--verify", "--rules", rules)
    assert code == 3
    assert "not finite first at" in text and "inf" in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["in.onnx"], 2, "Usage:"),
        (["in.onnx", "out.onnx", "--dtype", "auto"], 2, "Usage:"),
        (["in.onnx", "out.onnx", "--tolerance", "-1"], 2, "Usage:"),
        (["in.onnx", "out.onnx", "--tolerance", "0.1"], 2, "give --verify as well"),
        (["in.onnx", "out.onnx", "--report", "nowhere/plan.html"], 2, "there is no folder 'nowhere'"),
        (["nowhere.onnx", "out.onnx"], 1, "no such file"),
        (["in.onnx", "out.onnx", "--rules", "defalt"], 1, "default"),
        (["in.onnx", "out.onnx", "--calibrate", "nowhere.npz"], 1, "no such file or folder"),
        (["in.onnx", "out.onnx", "--calibrate", "wrong.npz"], 1, "'x' is missing"),
        (["in.onnx", "in.onnx"], 1, "the output is the input"),
        (["in.onnx", "nowhere/out.onnx"], 1, "no such folder"),
        (["broken.onnx", "out.onnx"], 1, "no ONNX model"),
    ],
)
def test_wrong_arguments(run, benign, tmp_path, monkeypatch, arguments, code, words):
    monkeypatch.chdir(tmp_path)
    np.savez("wrong.npz", y=np.zeros(2))
    Path("broken.onnx").write_bytes(b"\xff\xff no protobuf")
    before = benign.read_bytes()
    result, out, err = run(*arguments)
    assert (result, out) == (code, "")
    assert words in err
    assert code != 1 or (err.startswith("error: ") and "hint: " in err)
    assert benign.read_bytes() == before
    assert not Path("out.onnx").exists()


def test_a_target_is_planned_for_and_what_it_saves_is_noted(run, shell, benign, tmp_path):
    out = tmp_path / "out.onnx"
    code, text, err = run(benign, out, "--target", "cpu", "--json")
    assert code == 0, err
    (note,) = json.loads(text)["notes"]
    assert (
        note.startswith("target cpu: 0 nodes without a kernel in their type, 0 casts")
        and json.loads(text)["casts"] == 0
    )
    assert "fp16 kernel of onnx.MatMul" in shell("explain", benign, "--target", "cpu", "--format", "text")[1]
    code, _, err = run(benign, out, "--target", "webgpu", "--dtype", "bf16")
    assert code == 1 and "the target webgpu has no bf16" in err and "fp16" in err
    code, _, err = run(benign, out, "--target", "gpu")
    assert code == 1 and "'gpu' is no target" in err and "did you mean 'webgpu'?" in err


GIVEN = {
    (): {},
    ("--dtype", "bfloat16", "--rules", "fast"): {"dtype": "bf16", "rules": "fast"},
    ("--no-keep-io-types",): {"keep_io_types": False},
    ("--keep-io-type", "x", "--keep-io-type", "y"): {"keep_io_types": ["x", "y"]},
    ("--fuse", "--opset", "23", "--no-raise-opset"): {"fuse": True, "opset": 23, "raise_opset": False},
    ("--no-check", "--target", "webgpu"): {"check": False, "target": "webgpu"},
    ("--as-fp32", "fp64", "--provider", "one", "--provider", "two", "--custom-ops", "ops.so"): {
        "as_fp32": ("fp64",), "providers": ["one", "two"], "custom_ops": [Path("ops.so")],
    },
}  # fmt: skip


@pytest.mark.parametrize("options", GIVEN, ids=" ".join)
def test_options_are_those_of_convert_onnx(run, benign, tmp_path, monkeypatch, options):
    def converted(source, output, **inputs):
        assert inputs == {
            "dtype": "fp16", "calibration": None, "providers": None, "custom_ops": None, "rules": "default",
            "keep_io_types": True, "raise_opset": True, "opset": None, "check": True, "as_fp32": (), "fuse": False,
            "target": None, **GIVEN[options],
        }  # fmt: skip
        raise AmpError("all options are there", hint="none")

    monkeypatch.setattr(convert, "convert_onnx", converted)
    code, _, err = run(benign, tmp_path / "out.onnx", *options)
    assert code == 1 and "all options are there" in err
