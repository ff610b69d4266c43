"""An ONNX model in mixed precision: converted with calibration and checked, exported from torch, and trained.

python examples/06_onnx.py
"""

import contextlib
import io
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 256)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.first(x)))
        return self.head(torch.relu(self.second(x)))


def main(folder: str | Path | None = None) -> dict[str, object]:
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return main(temporary)
    torch.manual_seed(0)
    fp32, fp16, exported = (Path(folder) / name for name in ("m.onnx", "m.fp16.onnx", "m.torch.fp16.onnx"))
    model, x = Net().eval(), torch.randn(32, 64)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        torch.onnx.export(model, (x,), fp32, dynamo=True, optimize=False, external_data=False)

    # Convert the file: what the model reaches on these batches decides too, and both models are compared on them.
    batches = [{"x": np.random.default_rng(seed).standard_normal((32, 64), np.float32)} for seed in range(3)]
    done = amp.convert_onnx(fp32, fp16, dtype="fp16", calibration=batches, verify=batches)
    print(done.plan)
    print(done.report)
    ratio = fp16.stat().st_size / fp32.stat().st_size
    print(f"{fp32.stat().st_size} bytes -> {fp16.stat().st_size} (ratio {ratio:.2f})\n")

    # The same from the torch model: the rules see its modules, and the casts are in the file.
    straight = amp.export_onnx(model, (x,), exported, dtype="fp16")
    print(f"exported from torch: {straight.plan.low_nodes} of {len(straight.plan.nodes)} nodes in FP16\n")

    # Train the ONNX model: its initializers are parameters, under the names that torch gave them.
    module = amp.onnx_to_fx(fp32)
    labels = torch.randint(10, (32,))
    step = amp.training_step(
        module,
        lambda model, x, y: F.cross_entropy(model(x), y),
        torch.optim.AdamW(module.parameters(), lr=1e-3),
        dtype="bf16",
        backend="eager",
    )
    losses = [float(step(x, labels)) for _ in range(12)]
    print(f"parameters: {', '.join(name for name, _ in module.named_parameters())}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps")
    return {"conversion": done, "ratio": ratio, "export": straight, "losses": losses}


if __name__ == "__main__":
    main()
