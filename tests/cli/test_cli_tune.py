"""`amp-compiler tune`, called as a user calls it but in this process."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_corpus import ranges

import amp_compiler as amp
from amp_compiler.policy.loader import load_rules


@pytest.fixture
def run(shell):
    """Runs `amp-compiler tune` with arguments and gives (exit code, standard output, standard error)."""
    return partial(shell, "tune")


def test_a_model_is_tuned_on_loss_and_gradients_as_json(run, wide, tmp_path):
    out, loss = tmp_path / "tuned.yaml", wide.replace(":Wide", ":loss")
    code, text, _ = run(wide, out, "--args", "fp32[3,4]", "--dtype", "fp16", "--loss", loss, "--json")
    result = json.loads(text)
    assert code == 0 and result["what"] == "loss and gradients" and result["nodes"][0]["module"] == "wide"
    assert load_rules(out).rules[-1].match.get("module") == ("wide",)


def test_a_stopped_search_of_an_onnx_file_on_its_data_ends_with_three_and_goes_on(run, tmp_path):
    """To what the function finds in one go."""
    model, batches = ranges.overflow_in_activations()
    onnx.save(model, tmp_path / "in.onnx")
    np.savez(tmp_path / "data.npz", **batches[0])
    out = tmp_path / "a.yaml"
    command = (tmp_path / "in.onnx", out, "--data", tmp_path / "data.npz", "--tolerance", 0.02)
    code, text, _ = run(*command, "--max-runs", 5)
    assert code == 3 and "not searched to the end" in text and Path(f"{command[1]}.journal").exists()
    code, text, _ = run(*command)
    assert code == 0 and "not searched" not in text and not Path(f"{command[1]}.journal").exists()
    assert "outputs against FP32: error infinite" in text and "tolerance 0.02 in fp16" in text
    assert f"written to {out}" in text and load_rules(out).rules
    amp.tune(str(command[0]), batches[:1], tolerance=0.02, output=tmp_path / "b.yaml")
    assert (tmp_path / "b.yaml").read_text() == out.read_text()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--data", "x.npz"), 2, "--data: it is for an ONNX file"),
        (("--tolerance", "0"), 1, "tolerance=0.0 is no error"),
        (("--rules", "defualt"), 1, "did you mean 'default'"),
        ((), 1, "the model needs example arguments"),
    ],
)
def test_wrong_usage(run, wide, tmp_path, options, code, message):
    inputs = () if message.startswith("the model") else ("--args", "fp32[3,4]")
    result, _, err = run(wide, tmp_path / "tuned.yaml", *inputs, *options)
    assert result == code and message in err
