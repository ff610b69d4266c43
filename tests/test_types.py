"""What a type checker says of code that uses the package: mistyped choices are errors, and results have their types."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
USER = """\
import torch
from torch import Tensor, nn
import amp_compiler as amp

@amp.compile(dtype="bf16", fullgraph=True)
class Net(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x

    @amp.compile
    def encode(self, x: Tensor, times: int) -> list[Tensor]:
        return [x] * times

def loss_fn(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, int]]:
    return model(x).sum(), {}

net, x = Net(), torch.ones(1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
step = amp.training_step(net, loss_fn, optimizer, dtype="half", loss_scale="dynamic")
held: amp.TrainingStep = step
reveal_type(net)  # Net
reveal_type(net.encode(x, times=2))  # list[Tensor]
reveal_type(amp.compile(net, dtype="bfloat16", backend="eager", mode="max-autotune"))  # CompiledModule
reveal_type(amp.compile("m.onnx", dtype=torch.float16))  # CompiledModule
reveal_type(amp.compile(torch.relu)(x))  # Tensor
reveal_type(step(x))  # tuple[Tensor, dict[str, int]]
reveal_type(amp.explain(net, x))  # PrecisionPlan
reveal_type(amp.convert_onnx("m.onnx", "n.onnx").plan)  # PrecisionPlan
amp.compile(net, dtype="fp61")  # error
amp.compile(net, backend="inductr")  # error
amp.compile(net, mode="max-autotun")  # error
amp.compile(net, fulgraph=True)  # error
amp.compile(dtype="fp61")  # error
net.encode(x, times="2")  # error
amp.training_step(net, loss_fn, optimizer, dtype="fp61")  # error
amp.training_step(net, loss_fn, optimizer, backend="inductr")  # error
amp.training_step(net, loss_fn, optimizer, mode="defalt")  # error
amp.training_step(net, loss_fn, optimizer, loss_scale="dynamc")  # error
amp.convert_onnx("m.onnx", "n.onnx", dtype="auto")  # error
amp.complie(net)  # error
"""


@pytest.mark.long
def test_a_type_checker_knows_choices_and_results(tmp_path):
    pytest.importorskip("mypy")
    package = shutil.copytree(ROOT / "amp_compiler", tmp_path / "amp_compiler")
    for folder in ("passes", "rules"):  # as they are installed
        shutil.copytree(ROOT / folder, package / folder)
    (tmp_path / "user.py").write_text(USER, encoding="utf-8")
    options = ["--config-file", ROOT / "pyproject.toml", "--follow-imports=silent", "--cache-dir", ROOT / ".cache/mypy"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "mypy", *map(str, options), "user.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    found: dict[int, str] = {}
    for number, kind, text in re.findall(r'user\.py:(\d+): (?:(error)|note: Revealed type is "(.*)")', done.stdout):
        found[int(number)] = kind or re.sub(r"[a-z_]+\.", "", text)
    expected = {number: line.partition("  # ")[2] for number, line in enumerate(USER.splitlines(), 1) if "  # " in line}
    assert found == expected, done.stdout + done.stderr
