"""A training that is watched: lines of JSON and a live view, and a picture of two runs.

A small CNN reads handwritten digits in FP16, with a loss scale and without one. The loss has a small weight in front,
as auxiliary losses have, so that gradients need the scale. Callbacks write what a step knows of itself: loss, loss
scale, skipped steps, the norm of the gradients, and which of them FP16 loses. Of the steps between nothing is read, so
that a GPU never waits. A damaged batch shows a skipped step.

    python examples/08_watch_a_run.py            # or with a folder for the files
    amp-compiler plot scaled.jsonl unscaled.jsonl -o runs.svg
    tensorboard --logdir runs                    # with amp.callbacks.TensorBoard("runs/scaled", every=5)
"""

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

WEIGHT = 2e-5  # of the loss
DAMAGED = 75  # number of the step whose batch is damaged


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def loss_fn(
    model: nn.Module, images: torch.Tensor, digits: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and beside it a number that one would like to see too."""
    logits = model(images)
    right = (logits.argmax(-1) == digits).float().mean()
    return WEIGHT * F.cross_entropy(logits, digits), {"read right": right}


def train(callbacks: list[amp.callbacks.Callback], steps: int, backend: str, loss_scale: object) -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    model, generator = network(), torch.Generator().manual_seed(0)
    step = amp.training_step(
        model, loss_fn, torch.optim.Adam(model.parameters(), 2e-3, eps=1e-12), dtype="fp16", loss_scale=loss_scale,
        backend=backend, callbacks=callbacks,
    )  # fmt: skip
    for number in range(1, steps + 1):
        chosen = torch.randint(0, len(images), (64,), generator=generator)
        batch = images[chosen]
        if number == DAMAGED:
            batch[0] = torch.inf
        step(batch, labels[chosen])


def main(folder: str = "", backend: str = "eager", steps: int = 150) -> list[Path]:
    place = Path(folder or tempfile.mkdtemp(prefix="runs-"))
    files = [place / "scaled.jsonl", place / "unscaled.jsonl"]
    high = {"mode": "dynamic", "init": 2.0**24}
    for file, loss_scale in zip(files, (high, 1.0), strict=True):
        view = amp.callbacks.Terminal(every=25)
        train([amp.callbacks.JSONLines(file, every=5), view], steps, backend, loss_scale)
        last = amp.callbacks.read_run(file).records[-1]
        print(
            f"{file.stem}: {last.aux['read right']:.0%} read right, {last.zero:.0%} of the gradients are zero in FP16"
        )
    print(f"amp-compiler plot {files[0]} {files[1]}")
    return files


if __name__ == "__main__":
    main(*sys.argv[1:])
