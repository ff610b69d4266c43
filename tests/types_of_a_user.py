"""What a type checker says of code that uses the package: mistyped choices are errors, and results have their types.

`make types` runs it in the copy that it has checked: what mypy has read of the package is read once.
"""

from __future__ import annotations

import re
import sys

from mypy import api

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
reveal_type(amp.compile(net).plan)  # PrecisionPlan
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


def errors_and_types(code: str, options: list[str]) -> tuple[dict[int, str], str]:
    """By line, `error` or the type that is revealed; and all that mypy said."""
    said, failed, _ = api.run([*options, "-c", code])
    result = {}
    for number, kind, text in re.findall(r'<string>:(\d+): (?:(error)|note: Revealed type is "(.*)")', said):
        result[int(number)] = kind or re.sub(r"[a-z_]+\.", "", text)
    return result, said + failed


if __name__ == "__main__":
    expected = {number: line.partition("  # ")[2] for number, line in enumerate(USER.splitlines(), 1) if "  # " in line}
    result, said = errors_and_types(USER, sys.argv[1:])
    sys.exit(0 if result == expected else f"of the code of a user mypy says otherwise than expected:\n{said}")
