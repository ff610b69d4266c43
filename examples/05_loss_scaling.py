"""What loss scaling is for: FP16 gradients that are too small to be numbers.

FP16's smallest number is 6e-8. Here an autoencoder of digits learns from a loss that is a mean over pixels with a small
weight in front, as auxiliary losses have, so that the gradients inside of the network are smaller than that. Without a
loss scale they become zero and the network stands still; with one it learns as it does in FP32.

    python examples/05_loss_scaling.py
"""

import torch
from torch import nn

import amp_compiler as amp

WEIGHT = 1e-6  # of the loss


class Autoencoder(nn.Module):
    """64 pixels to 16 numbers and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16))
        self.decode = nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(images))


def loss_fn(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    return WEIGHT * (model(images) - images).square().mean()


def train(steps: int, backend: str, **options: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses without the weight, and the gradients of the first step."""
    torch.manual_seed(0)
    model = Autoencoder()
    basis = torch.randn(6, 64)  # images that six numbers describe
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-14)
    step = amp.training_step(model, loss_fn, optimizer, backend=backend, **options)
    losses, first = [], {}
    for _ in range(steps):
        images = torch.tanh(torch.randn(64, 6) @ basis / 2)
        losses.append(float(step(images)) / WEIGHT)
        first = first or step.gradients()
    return losses, first


def lost(gradients: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Share of the gradients that are zero and should not be."""
    zero = sum(int(((gradients[name] == 0) & (exact[name] != 0)).sum()) for name in exact)
    return zero / sum(int((gradient != 0).sum()) for gradient in exact.values())


def main(backend: str = "eager", steps: int = 150) -> dict[str, tuple[float, float, float]]:
    # Start high: a scale that is too high costs a few skipped steps, one that is too low takes long to grow.
    high = {"mode": "dynamic", "init": 2.0**24}
    exact_losses, exact = train(steps, backend, enabled=False)
    runs = {
        "FP32": (exact_losses, exact),
        "FP16 without a loss scale": train(steps, backend, dtype="fp16", loss_scale=None),
        "FP16 with a dynamic loss scale": train(steps, backend, dtype="fp16", loss_scale=high),
    }
    results = {}
    for name, (losses, gradients) in runs.items():
        results[name] = (losses[0], sum(losses[-10:]) / 10, lost(gradients, exact))
        first, last, share = results[name]
        print(f"{name:32} loss {first:.4f} to {last:.4f}, {100 * share:5.1f} % of the first gradients lost")
    return results


if __name__ == "__main__":
    main()
