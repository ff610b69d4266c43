"""How far the rounding of the sums of four ranks leads, over many seeds: one process plays all ranks of all seeds.

The training is that of `low_types_of_seeds`, whose few seeds see a tenth of a difference; these see a hundredth.
"""

from __future__ import annotations

import math

import pytest
import torch
from rank_harness import dense, rows
from torch import nn

from amp_compiler.ops.companding import filled, packed, unpacked

SEEDS, RANKS, SCALE = 1024, 4, 128.0
NORM = (2, 3)  # places of the norm's weights, which autocast leaves in FP32
F = nn.functional


def gradients(weights, x, y, dtype, scale):
    """FP32 [seeds, ranks, *weight] each: of the loss of each rank's rows, in FP32 or as autocast has it.

    Args:
        weights: [seeds, *weight] each.
        x: [seeds, ranks, rows, 8].
        y: [seeds, ranks, rows, 4].
        dtype: of the products.
        scale: of the loss.
    """
    seeds, ranks = x.shape[:2]
    spread = (one[:, None].expand(-1, ranks, *one.shape[1:]).flatten(0, 1) for one in weights)
    each = [(one if place in NORM else one.to(dtype)).detach().requires_grad_() for place, one in enumerate(spread)]
    first, bias, gain, shift, second, last = each
    hidden = F.gelu(torch.baddbmm(bias[:, None], x.flatten(0, 1).to(dtype), first.mT))
    hidden = (F.layer_norm(hidden.float(), (16,)) * gain[:, None] + shift[:, None]).to(dtype)
    found = torch.baddbmm(last[:, None], hidden, second.mT)
    loss = (found - y.flatten(0, 1)).square().mean((1, 2)).sum() * scale
    return [one.float().unflatten(0, (seeds, ranks)) for one in torch.autograd.grad(loss, each)]


def packed_sums(sums):
    """As `ReduceGradients` sends them in one bucket, of which each rank has added a part."""
    row = torch.cat([one.flatten(1) for one in sums], 1)
    part = filled(-(-row.shape[1] // RANKS))
    parts = F.pad(row, (0, part * RANKS - row.shape[1])).view(len(row), RANKS, part)
    came = unpacked(torch.vmap(packed)(parts.flatten(0, 1))).view(len(row), -1)
    sizes = [one[0].numel() for one in sums]
    return [one.view_as(like) for one, like in zip(came.split([*sizes, came.shape[1] - sum(sizes)], 1), sums)]  # noqa: B905  # the last is filling


def rounded_to(dtype):
    """Sums that are rounded to a type, once."""
    return lambda sums: [one.to(dtype).float() for one in sums]


def trained(optimizer, dtype=torch.float32, rounded=None):
    """FP64 [seeds, elements]: weights behind 50 steps.

    Args:
        optimizer: `sgd` or `adamw`.
        dtype: of the products.
        rounded: makes of 16-bit gradients' FP32 sums what the ranks get; none is one process on whole batches.
    """
    models = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        models.append([one.detach() for one in dense().parameters()])
    weights = [nn.Parameter(torch.stack(one)) for one in zip(*models, strict=True)]
    made = torch.optim.SGD(weights, 0.05, momentum=0.9) if optimizer == "sgd" else torch.optim.AdamW(weights, 1e-2)
    scale, ranks = SCALE if dtype is torch.float16 else 1.0, RANKS if rounded else 1
    for batches in zip(*(rows(50, 1000 + seed) for seed in range(SEEDS)), strict=True):
        x, y = (torch.stack(one).unflatten(1, (ranks, -1)) for one in zip(*batches, strict=True))
        sums = [one.sum(1) for one in gradients(weights, x, y, dtype, scale)]
        low = iter(rounded([one for place, one in enumerate(sums) if place not in NORM]) if rounded else ())
        for place, (weight, total) in enumerate(zip(weights, sums, strict=True)):
            weight.grad = (total if place in NORM or not rounded else next(low)) / (ranks * scale)
        made.step()
    return torch.cat([one.detach().double().flatten(1) for one in weights], 1)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_packed_sums_lead_as_far_from_fp32_as_those_that_are_not_rounded(optimizer):
    exact, seen = trained(optimizer), {}
    for dtype in (torch.bfloat16, torch.float16):
        ways = {"not rounded": lambda sums: sums, "packed": packed_sums, "in the type": rounded_to(dtype)}
        distances = {way: (trained(optimizer, dtype, rounded) - exact).norm(dim=1) for way, rounded in ways.items()}
        for way, found in distances.items():
            ratios = (found / distances["not rounded"]).log()
            seen[dtype, way] = math.exp(ratios.mean()), float(ratios.std()) / math.sqrt(SEEDS)
            print(f"{str(dtype)[6:]:8} {optimizer:5} {way:12} {found.mean():.3e} {seen[dtype, way]}")
        ratio, error = seen[dtype, "packed"]
        assert ratio <= 1 + 2 * error < 1.01
        ratio, error = seen[dtype, "in the type"]
        assert ratio > 1 + 4 * error  # so that this bound can tell
