"""FP16 overflow, seen on a CPU.

FP16 ends at 65504. A GPU overflows there; a CPU that quietly computes in FP32 does not, so the bug shows only after the
model has moved to the GPU. `amp.compile(dtype="fp16")` on a CPU runs each FP16 matrix product in FP32 on FP16-rounded
inputs and rounds the result, as a tensor core does, at the speed of FP32.

    python examples/03_fp16_overflow_on_cpu.py
"""

import torch
from torch import nn

import amp_compiler as amp


class Attention(nn.Module):
    """Attention that scales the scores after the product instead of before it."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.query(x) @ self.key(x).transpose(-1, -2) / x.shape[-1] ** 0.5


class SafeAttention(Attention):
    """The same, scaled before the product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.shape[-1] ** -0.5
        return (self.query(x) * scale) @ self.key(x).transpose(-1, -2)


def main(backend: str = "eager") -> dict[str, int]:
    torch.manual_seed(0)
    x = 100 * torch.randn(1, 64, 256)
    model, safe = Attention(), SafeAttention()
    safe.load_state_dict(model.state_dict())
    with torch.no_grad():
        runs = {
            "FP32": model(x),
            "FP16": amp.compile(model, dtype="fp16", backend=backend)(x),
            "BF16": amp.compile(model, dtype="bf16", backend=backend)(x),
            "FP16, the products denied by a rule": amp.compile(
                model,
                rules={"version": 1, "extends": "default", "deny": ["aten.matmul"]},
                dtype="fp16",
                backend=backend,
            )(x),
            "FP16, scaled before the product": amp.compile(safe, dtype="fp16", backend=backend)(x),
        }
    exact = runs["FP32"]
    infinities = {}
    for name, scores in runs.items():
        infinities[name] = int(scores.isinf().sum())
        finite = scores.isfinite()
        error = (scores[finite] - exact[finite]).norm() / exact[finite].norm()
        print(
            f"{name:36} {infinities[name]:5} of {scores.numel()} scores are infinite, error of the others {error:.1e}"
        )
    return infinities


if __name__ == "__main__":
    main()
