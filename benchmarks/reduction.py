"""What it costs to sum gradients in 16 bits, on 2 to 4,096 ranks that are simulated. Needs no other process.

    python benchmarks/reduction.py
    python benchmarks/reduction.py --ranks 2 64 --steps 20

Every rank has one image of handwritten digits and the gradient of a small MLP by it. These gradients are rounded as a
step makes them and summed twice over: one after the other, as a ring of ranks does (N-1 roundings), and in pairs, as a
tree does (log2 N); FP16 with the largest power of two as a loss scale at which no sum overflows. Errors are those of
the whole gradient against FP64 (L2 norms); `noise` is how far the mean over so many images is off that over all, as
far as their own deviation tells. Then the MLP is trained: `--steps` steps of Adam on the mean over all ranks, which
differ in nothing but the sum (rings): the mean loss over `--seeds` seeds, with its standard deviation.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import RESULTS, write_results
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parameters_to_vector

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LARGEST = torch.finfo(torch.float16).max


def classifier(seed: int) -> nn.Module:
    """Ten classes of images of 8 x 8 points."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def images() -> tuple[Tensor, Tensor]:
    """1,797 of them, from -1 to 1, and their classes."""
    digits = load_digits()
    return torch.tensor(digits.data / 8 - 1, dtype=torch.float32), torch.tensor(digits.target)


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """FP32 [ranks, elements]: of the cross entropy of one image each."""
    weights = {name: one.detach() for name, one in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, parameters, (image[None],)), label[None])

    per_image = vmap(grad(loss), (None, 0, 0))(weights, x, y)
    return torch.cat([per_image[name].flatten(1) for name, _ in model.named_parameters()], 1)


def ring(summands: Tensor) -> Tensor:
    """The sum over the first dimension, one after the other, rounded to the type of what is given each time."""
    total = summands[0].clone()
    for one in summands[1:]:
        total += one
    return total


def tree(summands: Tensor) -> Tensor:
    """The same in pairs; the number of summands is a power of two."""
    while len(summands) > 1:
        summands = summands[0::2] + summands[1::2]
    return summands[0]


def reduced(grads: Tensor, dtype: torch.dtype, order: Callable[[Tensor], Tensor]) -> Tensor:
    """FP32 mean of gradients that are summed in a type.

    Args:
        grads: fp32 [ranks, elements].
        dtype: of the sum.
        order: `ring` or `tree`.
    """
    scale = 1.0
    if dtype is torch.float16:  # room for every partial sum
        scale = 2.0 ** math.floor(math.log2(LARGEST / float(grads.abs().sum(0).max())))
    return order((grads * scale).to(dtype)).float() / (scale * len(grads))


def errors(grads: Tensor) -> dict[str, float]:
    """Relative errors of the mean, by type and order, and the standard error that the mean has by itself."""
    exact = grads.double().mean(0)
    by_way = {
        f"{name} {order.__name__}": float((reduced(grads, dtype, order).double() - exact).norm() / exact.norm())
        for name, dtype in TYPES.items()
        for order in (ring, tree)
    }
    spread = (grads.double() - exact).square().mean(0).sum().sqrt()
    return {**by_way, "noise": float(spread / len(grads) ** 0.5 / exact.norm())}


def trained(seed: int, ranks: int, steps: int, dtype: torch.dtype) -> float:
    """The loss over all images behind some steps of Adam."""
    model, (x, y) = classifier(seed), images()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(0, len(x), (ranks,), generator=generator)
        mean = reduced(gradients(model, x[chosen], y[chosen]), dtype, ring)
        place = 0
        for one in model.parameters():
            one.grad = mean[place : place + one.numel()].view_as(one).clone()
            place += one.numel()
        optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))


def measured(ranks: int, steps: int, seeds: int) -> dict[str, Any]:
    """One row: errors at the start of training, and losses at its end."""
    model, (x, y) = classifier(0), images()
    chosen = torch.randint(0, len(x), (ranks,), generator=torch.Generator().manual_seed(0))
    losses = {name: [trained(seed, ranks, steps, dtype) for seed in range(seeds)] for name, dtype in TYPES.items()}
    spread = statistics.stdev(losses["fp32"])
    return {
        "ranks": ranks,
        "elements": parameters_to_vector(model.parameters()).numel(),
        **{name: float(f"{value:.2e}") for name, value in errors(gradients(model, x[chosen], y[chosen])).items()},
        "loss": round(statistics.mean(losses["fp32"]), 4),
        "spread": round(spread, 4),
        **{f"{name} loss": round(statistics.mean(losses[name]), 4) for name in ("bf16", "fp16")},
    }


def main() -> None:
    """Simulate, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 512, 4096], help="powers of two")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULTS / "reduction.json", help="where the numbers go")
    options = parser.parse_args()
    if any(ranks < 2 or ranks & (ranks - 1) for ranks in options.ranks):
        parser.error("--ranks takes powers of two from 2 on")
    torch.set_num_threads(1)
    rows = []
    for ranks in options.ranks:
        rows.append(measured(ranks, options.steps, options.seeds))
        print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    options.device, options.threads = "cpu", 1
    write_results(options.json, "reduction", options, rows)


if __name__ == "__main__":
    main()
