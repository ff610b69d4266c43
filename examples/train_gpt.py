"""A whole training of a small GPT: data, cosine rate, clipping, accumulation, evaluation, checkpoints, resuming, logs.

`train` is what one writes with this package, `train_with_autocast` the same loop with torch.autocast and GradScaler.
Break it off and start it again with the same folder: it goes on from the last checkpoint, to the bit.

    python examples/train_gpt.py runs/gpt
"""

import argparse
import inspect
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

LENGTH, BATCH, ACCUMULATE, STEPS, EVERY = 32, 16, 2, 100, 20
TEXT = torch.tensor([min(ord(letter), 127) for letter in inspect.getsource(argparse)])
TRAIN, HELD_BACK = TEXT[: -len(TEXT) // 10], TEXT[-len(TEXT) // 10 :]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mix(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        self.blocks, self.head = nn.Sequential(*(Block(width) for _ in range(depth))), nn.Linear(width, 128)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.letters(letters) + self.places.weight))


def windows(text: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batch `number` of a text, the same at every run."""
    draw = torch.Generator().manual_seed(number)
    starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=draw).tolist()
    rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def loss_fn(model: nn.Module, letters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(letters).flatten(0, 1), following.flatten())


def parts() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, 4e-4)


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    return sum(float(loss_fn(model, *windows(HELD_BACK, -number))) for number in range(1, 5)) / 4


def train(folder: str, steps: int = STEPS, dtype: str = "bf16", backend: str = "eager", logs: str = "") -> list[float]:
    model, optimizer, schedule = parts()
    log = [amp.callbacks.TensorBoard(logs, every=10)] if logs else []
    step = amp.training_step(model, loss_fn, optimizer, dtype=dtype, clip_norm=1.0, accumulate=ACCUMULATE,
                             loss_scale="dynamic", backend=backend, callbacks=log)  # fmt: skip
    fast = amp.compile(model, dtype=dtype, backend=backend)  # on the same weights, for evaluation
    saved = amp.load_checkpoint(step, folder)
    if saved is not None:
        schedule.load_state_dict(saved.extra)
    losses = []
    for number in range(0 if saved is None else saved.number, steps):
        for part in range(ACCUMULATE):
            loss = step(*windows(TRAIN, number * ACCUMULATE + part))
        schedule.step()
        losses.append(float(loss))
        if (number + 1) % EVERY == 0:
            amp.save_checkpoint(step, folder, number + 1, extra=schedule.state_dict(), keep=2)
            print(f"step {number + 1:3}: loss {losses[-1]:.3f}, on what is held back {evaluate(fast.eval()):.3f}")
            model.train()
    return losses


def train_with_autocast(steps: int = STEPS, low: torch.dtype = torch.bfloat16) -> list[float]:
    (model, optimizer, schedule), scaler, losses = parts(), torch.amp.GradScaler("cpu"), []
    for number in range(steps):
        optimizer.zero_grad()
        for part in range(ACCUMULATE):
            with torch.autocast("cpu", low):
                loss = loss_fn(model, *windows(TRAIN, number * ACCUMULATE + part))
            scaler.scale(loss / ACCUMULATE).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
    train(f"{folder}/checkpoints", logs=f"{folder}/logs")
