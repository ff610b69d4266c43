"""A whole training step as one graph: forward, backward, check, clipping, update.

A small transformer learns to write like the sources of Python's standard library. `amp.training_step` takes the place
of `loss.backward()`, `GradScaler`, `clip_grad_norm_` and `optimizer.step()`; the optimizer, its state and the scheduler
stay torch's own. A damaged batch shows what the loss scale does: nothing is learned from it, and the scale is halved.

    python examples/04_training_step.py
"""

import argparse
import inspect

import torch
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

LENGTH = 32
TEXT = torch.tensor([min(ord(letter), 127) for letter in inspect.getsource(argparse)])


class LanguageModel(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, 128)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters) + self.places.weight
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(self.norm2(x)))


def batch(size: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    starts = torch.randint(0, len(TEXT) - LENGTH - 1, (size,)).tolist()
    windows = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:], torch.ones(size)


def loss_fn(
    model: nn.Module, letters: torch.Tensor, following: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and beside it what one would like to log."""
    logits = model(letters)
    losses = F.cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="none").view_as(letters)
    right = (logits.argmax(-1) == following).float().mean()
    return (losses.mean(1) * weights).mean(), {"right": right}


def main(backend: str = "eager", steps: int = 120) -> list[float]:
    torch.manual_seed(0)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    step = amp.training_step(
        model, loss_fn, optimizer, dtype="fp16", loss_scale="dynamic", clip_norm=1.0, backend=backend
    )
    losses = []
    for number in range(steps):
        letters, following, weights = batch()
        if number == steps // 2:
            weights[0] = torch.inf  # a damaged batch
        loss, aux = step(letters, following, weights)
        schedule.step()
        losses.append(float(loss))
        if number % 20 == 0 or number == steps // 2:
            print(
                f"step {number:3}: loss {float(loss):.3f}, {100 * float(aux['right']):4.1f} % of the letters right, "
                f"norm of the gradients {float(step.grad_norm):.2f}, scale {float(step.loss_scale):.0f}, "
                f"{int(step.skipped_steps)} steps skipped"
            )
    print(f"{step.plan.low_nodes} of {len(step.plan.nodes)} nodes of the forward run in FP16")
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scale": step.state_dict()}
    print(f"a checkpoint is three plain state dicts; that of the scale is GradScaler's: {checkpoint['scale']}")
    return losses


if __name__ == "__main__":
    main()
