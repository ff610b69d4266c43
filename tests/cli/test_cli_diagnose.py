"""`amp-compiler profile`, `find-nonfinite`, `env`, and what all commands have."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from onnx import helper

from amp_compiler import __version__


@pytest.fixture
def file(tmp_path) -> Path:
    graph = onnx.parser.parse_graph("g (float[2,4] x, float[4,2] w) => (float[2,2] y) { y = MatMul(x, w) }")
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    onnx.save(proto, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=np.full((2, 4), 1e3, np.float32), w=np.full((4, 2), 1e3, np.float32))
    return tmp_path / "m.onnx"


def test_find_nonfinite_names_the_node_and_the_rule(shell, wide, tmp_path):
    command = ("find-nonfinite", wide, "--args", "fp32[2,4]", "--dtype")
    code, out, _ = shell(*command, "fp16", "-o", tmp_path / "report.txt")
    assert (code, out) == (3, "")
    report = (tmp_path / "report.txt").read_text(encoding="utf-8")
    assert "in the plan: linear" in report and 'op: "aten.linear"' in report and "precision: fp32" in report
    assert shell(*command, "bf16")[:2] == (0, "all was finite\n")


def test_profile_counts_a_model_and_its_loss(shell, wide):
    code, out, _ = shell("profile", wide, "--args", "fp32[2,4]", "--dtype", "bf16")
    assert code == 0 and "weight gradient" not in out and re.match(r"\d+ tensors over 1 batch", out)
    trained = ("profile", wide, "--args", "fp32[2,4]", "--dtype", "fp16", "--loss", wide.replace(":Wide", ":loss"))
    code, loss, _ = shell(*trained)
    assert code == 0 and "gradients of weights" in loss
    assert int(loss.split()[0]) > int(out.split()[0])
    rules = Path(wide).with_name("fp8.yaml")
    assert shell(*trained, "--fp8", "-o", rules)[0] == 0 and shell("rules", "check", rules)[0] == 0
    written = yaml.safe_load(rules.read_text(encoding="utf-8"))["rules"]
    assert [sorted(one) for one in written] == [["match", "math", "precision"]] * 2


def test_both_take_an_onnx_file_with_data(shell, file):
    data = file.with_name("data.npz")
    code, out, _ = shell("find-nonfinite", file, "--data", data)
    assert code == 3 and "MatMul" in out
    code, out, _ = shell("profile", file, "--data", data, "--dtype", "fp16")
    assert code == 0 and "infinite" in out
    code, _, error = shell("profile", file, "--loss", "scaled.py:loss")
    assert code == 2 and "an ONNX file has no backward" in error


def test_env_tells_versions_devices_and_variables(shell, monkeypatch):
    monkeypatch.setenv("AMP_LOG", "warning")
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, out, _ = shell("env")
    assert code == 0
    for text in (f"amp_compiler: {__version__}", "torch: ", "onnxruntime: ", "CPU: ", "AMP_LOG=warning",
                 "C++ compiler: no-such-compiler does not run"):  # fmt: skip
        assert text in out


def test_no_list_of_commands_is_cut(shell, monkeypatch):
    for arguments in ([], ["rules"]):
        code, out, _ = shell(*arguments, "-h")
        assert code == 0 and "..." not in out.partition("Commands:")[2]


@pytest.mark.long
def test_quiet_and_verbose_set_the_level(wide, shell, monkeypatch):
    explain = ["explain", str(wide), "--args", "fp32[2,4]", "--print-after", "apply_plan"]
    done = subprocess.run(
        [Path(sys.executable).with_name("amp-compiler"), "--verbose", *explain],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "amp_compiler: captured " in done.stderr
    monkeypatch.setenv("AMP_LOG", "info")
    code, _, err = shell("--quiet", "rules", "list")
    assert code == 0 and err == "" and os.environ["AMP_LOG"] == "error"
    code, _, err = shell("-q", "-v", *explain)
    assert code == 2 and "they say the opposite" in err


@pytest.mark.long
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("fin", "find-nonfinite"),
        ("tune --dtype b", "bf16"),
        ("profile --rules mxf", "mxfp8"),
        ("convert --target w", "webgpu"),
        ("explain --print-after cla", "classify"),
    ],
)
def test_a_shell_completes_commands_and_values(typed, completed):
    code = "from amp_compiler.cli.main import main; main()"
    variables = {"_AMP_COMPILER_COMPLETE": "complete_bash", "COMP_WORDS": f"amp-compiler {typed}",
                 "COMP_CWORD": str(len(typed.split()))}  # fmt: skip
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, **variables})  # fmt: skip
    assert done.stdout.split() == [completed], done.stderr
