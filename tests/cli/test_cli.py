"""The command line, called as a user calls it but in this process; the slow parts behind it have tests of their own."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import onnx
import pytest
import typer

import amp_compiler as amp
from amp_compiler.cli import model_spec
from amp_compiler.cli.main import app
from amp_compiler.ir.dtypes import LowName, low_name
from amp_compiler.ir.plan import PrecisionPlan

MODEL = """
import torch
from torch import nn

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, scale=None):
        y = torch.softmax(self.last(self.drop(torch.relu(self.first(x)))), -1)
        return y if scale is None else y * scale

INSTANCE = Tiny()

def with_example():
    return Tiny(), (torch.ones(2, 8),)

def with_tensor():
    return Tiny(), torch.ones(2, 8)

def broken():
    return 1 / 0

def number():
    return 7

def ends():
    raise SystemExit(3)

def odd():
    return Tiny(), (1, 2, 3)
"""


@pytest.fixture
def model_file(tmp_path) -> str:
    path = tmp_path / "tiny_model.py"
    path.write_text(MODEL, encoding="utf-8")
    path.with_name("script.py").write_text("raise SystemExit(0)\n", encoding="utf-8")
    return str(path)


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The group and all commands below it, each by its words."""
    yield path
    for name, command in group.commands.items():
        yield from commands(command, (*path, name)) if hasattr(command, "commands") else [(*path, name)]


@pytest.mark.parametrize("words", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_every_command_has_a_short_word_for_help(shell, words):
    code, out, err = shell(*words, "-h")
    assert (code, err) == (0, "")
    assert out == shell(*words, "--help")[1] and " ".join(("Usage: amp-compiler", *words)) in out


@pytest.mark.parametrize("name", get_args(LowName))
def test_a_type_is_taken_by_every_name(shell, model_file, name):
    example = f"{model_file}:with_example"
    code, out, _ = shell("explain", example, "--dtype", name, "--format", "text")
    assert code == 0
    assert out == shell("explain", example, "--dtype", low_name(name), "--format", "text")[1]
    assert shell("explain", example, "--dtype", "bflaot16")[2].endswith("did you mean 'bfloat16'?\n")


def test_explain_prints_text(shell, model_file):
    code, out, _ = shell("explain", f"{model_file}:Tiny", "--args", "fp32[2,8]", "--dtype", "fp16", "--format", "text")
    assert code == 0
    model, example = model_spec.load_model(f"{model_file}:Tiny", ["fp32[2,8]"])
    assert out == amp.explain(model, example, dtype="fp16").to_text()


def test_explain_prints_json_that_reads_back(shell, model_file):
    code, out, _ = shell(
        "explain", f"{model_file}:INSTANCE", "--args", "x=fp32[2,8]", "--args", "scale=fp32[]", "--format", "json"
    )
    assert code == 0
    plan = PrecisionPlan.from_dict(json.loads(out))
    assert plan.low_nodes >= 2
    assert plan.rules == "default"


def test_explain_prints_tables_and_writes_files(shell, model_file, tmp_path):
    output, page, picture = tmp_path / "plan.txt", tmp_path / "plan.html", tmp_path / "plan.svg"
    code, table, _ = shell("explain", f"{model_file}:with_example", "--html", str(page), "--svg", str(picture))
    assert code == 0
    for part in ("aten.linear", "aten.softmax", "default.yaml:", "casts", "first", "tiny_model.py:12"):
        assert part in table
    assert shell("explain", f"{model_file}:with_example", "--output", str(output))[:2] == (0, "")
    assert "aten.linear" in output.read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "</svg>" in picture.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("{0}:Tny", ["did you mean 'Tiny'?"]),
        ("{0}:broken", ["ZeroDivisionError", "tiny_model.py:24"]),
        ("{0}:number", ["int", "not an nn.Module"]),
        ("{0}:ends", ["ends the program", "tiny_model.py:ends"]),
        ("{0}:odd", ["tiny_model.py:odd: the example arguments do not fit forward(x, scale=None)"]),
        ("{1}:model", ["ends the program", "__main__"]),
        ("{0}:Tiny", ["example arguments", "--args"]),
        ("{0}", ["names no model"]),
        ("nowhere.py:f", ["no such file"]),
        ("nowhere_at_all:f", ["No module named 'nowhere_at_all'"]),
        ("nowhere.onnx", ["no such file"]),
    ],
)
def test_a_model_that_cannot_be_found(shell, model_file, spec, words):
    code, out, err = shell("explain", spec.format(model_file, Path(model_file).with_name("script.py")))
    assert code == 1
    assert not out
    assert err.startswith("error: ")
    assert "\n  hint: " in err
    for word in words:
        assert word in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--args", "fp32"], ["--args fp32", "fp32[8,64]"]),
        (["--args", "int4[2]"], ["--args int4[2]", "use one of bf16"]),
        (["--args", "fp8[2]"], ["no tensors of type 'fp8'"]),
        (["--args", "fp32[99999999999,99999999]"], ["torch cannot make it", "smaller sizes"]),
        (["--args", "x=fp32[2,8]", "--args", "x=fp32[2,8]"], ["'x' is given twice"]),
        (["--args", "y=fp32[2,8]"], ["forward(x, scale=None)", "missing a required argument: 'x'"]),
        (["--args", "fp32[2,8]"] * 3, ["too many positional arguments"]),
        (["--output", "{tmp}"], ["it is a folder"]),
        (["--output", "{tmp}/none/plan.txt"], ["there is no folder"]),
        (["--html", "{tmp}/none/plan.html"], ["--html", "there is no folder"]),
    ],
)
def test_an_option_that_cannot_be(shell, model_file, tmp_path, options, words):
    """Told with the hint and exit code 2, before anything is written."""
    code, out, err = shell("explain", f"{model_file}:with_example", *(one.format(tmp=tmp_path) for one in options))
    assert code == 2
    assert not out
    assert err.startswith("error: --")
    assert "\n  hint: " in err
    for word in words:
        assert word in err
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"tiny_model.py", "script.py"}


def test_an_output_that_cannot_show_our_signs(shell, model_file, monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    code, _, err = shell("explain", f"{model_file}:with_example")
    assert code == 0, err
    assert b"aten.linear" in written.getvalue() and b"?" in written.getvalue()


@pytest.mark.parametrize("option", [["--eval"], ["--args", "fp32[2]", "--print-after", "all"]])
def test_options_that_an_onnx_file_has_no_use_for(shell, tmp_path, option):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    code, _, err = shell("explain", str(path), *option)
    assert code == 2
    assert f"{option[0]}: " in err and "ONNX file" in err


@pytest.mark.parametrize(
    "command", [["explain", "--html"], ["explain", "--output"], ["explain", "--svg"], ["tune", ""]], ids="-".join
)
def test_the_data_of_an_onnx_file_are_not_overwritten(shell, tmp_path, command):
    path, data = tmp_path / "model.onnx", tmp_path / "weights.bin"
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[1, 2] x) => (float[1, 2] y) { y = MatMul(x, w) }"""
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((2, 2), np.float32), "w"))
    onnx.save(model, path, save_as_external_data=True, location=data.name, size_threshold=0)
    before = data.read_bytes()
    verb, option = command
    code, _, err = shell(verb, str(path), *([option] if option else []), str(data))
    assert code == 2 and "a data file of the model" in err and data.read_bytes() == before


def test_an_onnx_file_is_planned_as_it_is_converted(shell, tmp_path):
    path, requested = tmp_path / "model.onnx", ("--fuse", "--opset", "23")
    text = """<ir_version: 8, opset_import: ["" : 18]> g (float[4, 8] x) => (float[4, 8] y) <float half = {0.5}, float
        one = {1}, float root = {1.4142135}> { e = Div(x, root) f = Erf(e) g = Add(f, one) h = Mul(x, half)
        y = Mul(h, g) }"""
    onnx.save(onnx.parser.parse_model(text), path)
    code, out, _ = shell("explain", str(path), *requested, "--format", "json")
    assert code == 0 and [node["op"] for node in json.loads(out)["nodes"]] == ["onnx.Gelu"]
    code, _, err = shell("explain", str(path), *requested, "--print-after", "all")
    assert code == 2 and "--fuse" in err


def test_an_onnx_file_with_arguments_stands_beside_autocast(shell, tmp_path):
    path = tmp_path / "model.onnx"
    text = (
        '<ir_version: 9, opset_import: ["": 20]> g (float[n, 8] x) => (float[n, 8] y)'
        "<float[8, 8] w = {" + ", ".join(["1"] * 64) + "}> { a = MatMul(x, w) y = Softmax <axis = -1> (a) }"
    )
    onnx.save(onnx.parser.parse_model(text), path)
    code, out, err = shell("explain", str(path), "--args", "fp32[4,8]", "--dtype", "bf16", "--format", "json")
    assert code == 0, err
    # The input and the weight go to BF16, at 4 + 2 bytes an element; autocast leaves a CPU's softmax in what it gets.
    assert json.loads(out)["autocast"] == {"casts": 2, "cast_bytes": 6 * (32 + 64), "low_nodes": 2}


def test_a_module_of_the_current_folder(shell, model_file, monkeypatch):
    monkeypatch.chdir(Path(model_file).parent)
    code, out, _ = shell("explain", "tiny_model:with_tensor", "--format", "text")
    assert code == 0
    assert "aten.linear" in out


def test_rules_list_and_show(shell):
    code, out, _ = shell("rules", "list")
    assert code == 0
    for name in ("default", "fast", "safe"):
        assert name in out
        code, text, _ = shell("rules", "show", name)
        assert code == 0
        assert "version: 1" in text


def test_rules_check(shell, tmp_path):
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("version: 1\nextends: default\n", encoding="utf-8")
    bad.write_text("version: 1\nallow: [matmull]\n", encoding="utf-8")
    assert shell("rules", "check", str(good))[0] == 0
    code, out, err = shell("rules", "check", str(bad), str(good))
    assert code == 1
    assert "good.yaml: good" in out
    assert "bad.yaml:2" in err
    assert "matmul" in err
