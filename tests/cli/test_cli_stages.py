"""`amp-compiler explain --print-after`: the graph from pass to pass."""

import io
import json
import re
import sys

import onnx
import pytest
import torch
from onnx_corpus import parts
from rich.console import Console
from torch import nn

import amp_compiler as amp
from amp_compiler.cli.stages import make_stages, print_stages, stages_text
from amp_compiler.passes.pipeline import CAPTURE, DEVICE, FORWARD, INFERENCE, ONNX_PLAN, PLAN, STEP, SUBGRAPH

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x, *, factor=1.0):
        return {"count": 3, "logits": self.last(self.norm(torch.relu(self.first(x)))) * factor}

NET = Net()

def make():
    return NET, ((torch.ones(2, 8),), {"factor": torch.ones(())})

def loss(model, x, target):
    return nn.functional.cross_entropy(model(x)["logits"], target)

class Indices(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x).argmax()

def indices():
    return Indices(), (torch.ones(2, 2),)

class Square(nn.Module):
    def forward(self, x):
        return x @ x

def square():
    return Square(), (torch.ones(2, 2),)

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        y = self.layer(x)
        return self.layer(y + 1 if y.sum() > 0 else y - 1)

def branch():
    return Branch(), (torch.ones(2, 2),)

NUMBER = 7
"""


@pytest.fixture
def explain(shell, tmp_path):
    """Runs `amp-compiler explain FILE:NAME --dtype fp16 ...`."""
    path = tmp_path / "net_model.py"
    path.write_text(MODEL, encoding="utf-8")

    def call(name: str, *options: str):
        return shell("explain", f"{path}:{name}", "--dtype", "fp16", *(one.format(file=path) for one in options))

    return call


@pytest.fixture(scope="module")
def step():
    """A small model's training step, as a user's own code makes it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    step = amp.training_step(
        model, lambda model, x: model(x).float().mean(), torch.optim.AdamW(model.parameters()), dtype="fp16",
        backend="eager",
    )  # fmt: skip
    step(torch.ones(2, 8))
    return step


def names(out: str) -> list[str]:
    return re.findall(r"^=== (\w+)", out, flags=re.MULTILINE)


def test_a_training_step_has_the_stages_that_python_shows(step):
    model = step.model
    stages = make_stages(model, (torch.ones(2, 8),), "fold_loss_scale", dtype="fp16")
    assert [stage.name for stage in stages] == [stage.name for stage in step.stages]
    assert stages["fold_loss_scale"].text == step.stages["fold_loss_scale"].text
    assert "loss_scale" in stages["fold_loss_scale"].text


def test_all_is_the_first_stage_and_then_what_each_pass_changed(explain, tmp_path):
    code, said, _ = explain("make", "--print-after", "all", "--output", str(tmp_path / "stages.txt"))
    assert (code, said) == (0, "")
    out = (tmp_path / "stages.txt").read_text(encoding="utf-8")
    expected = [*CAPTURE.names, *PLAN.names, *FORWARD.names, *STEP.names]
    expected.remove("multiply_convolutions")  # a form that only a compiler runs faster
    assert names(out) == ["capture", *expected]
    parts_of = dict(re.findall(r"^=== (\w+)(.*?)(?=^=== |\Z)", out, flags=re.MULTILINE | re.DOTALL))
    assert "aten._assert_tensor_metadata" in parts_of["capture"] or "aten.linear" in parts_of["capture"]
    assert parts_of["merge_results"] == ": nothing changed\n"
    assert parts_of["differentiate"].startswith("\n--- ")
    assert re.search(r"^\+.*phase=backward", parts_of["differentiate"], flags=re.MULTILINE)
    assert "\x1b" not in out


@pytest.mark.usefixtures("node_by_node")
def test_what_a_compiler_is_given_is_shown_for_its_backend(explain):
    code, out, _ = explain("make", "--print-after", "all", "--backend", "inductor")
    assert code == 0
    shown = names(out)
    assert shown[-len(DEVICE.names) - len(SUBGRAPH.names) :] == [*DEVICE.names, *SUBGRAPH.names]
    parts_of = dict(re.findall(r"^=== (\w+)(.*?)(?=^=== |\Z)", out, flags=re.MULTILINE | re.DOTALL))
    assert "+graph before_check" in parts_of["cut_step"]
    first, *rest = SUBGRAPH.names  # each subgraph is compared with what it was, not with the whole step
    changed = [line for line in parts_of[first].splitlines() if re.match(r"[+-]\w", line)]
    assert changed and all("aten.view." in line or "aten.reshape." in line for line in changed)
    assert all(parts_of[name] == ": nothing changed\n" for name in rest)
    code, out, _ = explain("make", "--print-after", "cut_step", "--backend", "inductor")
    assert code == 0
    assert 'call_module("before_check"' in out


def test_the_diff_has_colours_on_a_terminal(step):
    text = io.StringIO()
    print_stages(step.stages, console=Console(file=text, force_terminal=True, color_system="standard"))
    assert re.search(r"\x1b\[[39]2m\+", text.getvalue())
    assert re.search(r"\x1b\[[39]1m-", text.getvalue())
    assert re.sub(r"\x1b\[[\d;]*m", "", text.getvalue()) == stages_text(step.stages)


def test_the_model_is_not_trained(explain):
    code, _, _ = explain("make", "--print-after", "all")
    assert code == 0
    net = sys.modules["net_model"].NET
    fresh = sys.modules["net_model"].Net()
    assert net is not fresh
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name
    assert all(parameter.grad is None for parameter in net.parameters())


def test_a_loss_of_ones_own(explain):
    code, out, err = explain(
        "make", "--print-after", "differentiate", "--loss", "{file}:loss", "--args", "fp32[2,8]", "--args", "i64[2]"
    )
    assert code == 0, err
    assert "nll_loss" in out
    assert "phase=backward" in out


def test_inference_has_its_own_passes(explain):
    code, out, _ = explain("make", "--print-after", "all", "--eval")
    assert code == 0
    expected = [*CAPTURE.names, *PLAN.names, *INFERENCE.names]
    expected.remove("multiply_convolutions")
    assert names(out) == ["capture", *expected]


def test_a_model_with_graph_breaks_shows_each_subgraph(explain):
    code, out, _ = explain("branch", "--print-after", "classify")
    assert code == 0
    assert "=== graph0/classify\n" in out
    assert "=== graph1/classify\n" in out


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("make", ["--print-after", "fold_loss_scal"], ["no pass 'fold_loss_scal'", "did you mean 'fold_loss_scale'?"]),
        (
            "make",
            ["--print-after", "fold_loss_scale", "--eval"],
            ["did not run", "leave out --eval", "belongs to STEP"],
        ),
        (
            "make",
            ["--print-after", "hoist_weight_casts"],
            ["did not run", "give or leave out --eval", "belongs to INFERENCE"],
        ),
        ("make", ["--print-after", "cut_step"], ["did not run", "give --backend inductor", "belongs to DEVICE"]),
        (
            "make",
            ["--print-after", "keep_images_once"],
            ["did not run", "belongs to LATE", "TORCH_LOGS=post_grad_graphs"],
        ),
        ("make", ["--print-after", "multiply_convolutions"], ["did not run", "give --backend inductor"]),
        ("make", ["--loss", "{file}:loss"], ["--loss", "give --print-after as well"]),
        ("make", ["--backend", "inductor"], ["--backend", "give --print-after as well"]),
        ("make", ["--print-after", "all", "--html", "page.html"], ["--html: it is for the plan"]),
        ("make", ["--print-after", "all", "--loss", "{file}:NUMBER"], ["it is a int, not a function"]),
        ("make", ["--print-after", "all", "--loss", "{file}:loss"], ["do not fit loss(model, x, target)"]),
        ("indices", ["--print-after", "all"], ["no floating-point number to train on", "give a loss"]),
        ("square", ["--print-after", "all"], ["no parameter to train", "give --eval"]),
    ],
)
def test_what_cannot_be_printed(explain, name, options, words):
    """Each is told with its hint and exit code 2, and nothing is printed."""
    code, out, err = explain(name, *options)
    assert (code, out) == (2, "")
    assert "\nerror: --" in f"\n{err}"  # behind what a slow machine is told of a step that is being made
    assert "\n  hint: " in err
    for word in words:
        assert word in err


@pytest.fixture
def onnx_file(tmp_path):
    model, _ = parts.wide_mlp()
    onnx.save(model, tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def test_an_onnx_file_has_the_stages_of_its_plan(shell, onnx_file):
    code, out, _ = shell("explain", onnx_file, "--print-after", "all")
    assert code == 0
    assert names(out) == ["capture", *ONNX_PLAN.names, *PLAN.names]
    assert shell("explain", onnx_file, "--print-after", "pin_norms")[1].startswith("graph onnx")
    code, text, _ = shell("explain", onnx_file, "--print-after", "place_casts")
    assert code == 0
    assert text and out.endswith(text)
    assert shell("explain", onnx_file, "--print-after", "capture")[1].startswith("graph onnx")
    code, out_of_it, err = shell("explain", onnx_file, "--print-after", "apply_plan")
    assert (code, out_of_it) == (2, "") and "hint: " in err
    stages = json.loads(shell("explain", onnx_file, "--print-after", "all", "--format", "json")[1])
    assert [stage["name"] for stage in stages] == names(out) and [*stages[0]] == ["name", "text"]
