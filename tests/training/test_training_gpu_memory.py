"""What a step keeps for its backward on a CUDA device: the allocator's peak, and the numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import squares
from training_gpu import REPLAYED

import amp_compiler as amp
from amp_compiler.passes.device.recompute_cheap import RecomputeCheap

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
ROWS, WIDE, INNER, BLOCKS = 2048, 128, 1024, 6
KEPT = amp.pipelines.DEVICE.skip("recompute_cheap")
RECOMPUTED = KEPT.insert_before("defer_gradients", RecomputeCheap(most=1.0))  # products as small as these take no time


class Residual(nn.Module):
    """Two products with GELU between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, INNER), nn.Linear(INNER, WIDE)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def trained(passes):
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual() for _ in range(BLOCKS)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = amp.training_step(model, squares, optimizer, dtype="bf16", passes=passes)
    batch = torch.randn(2, ROWS, WIDE, device="cuda")
    losses = [step(*batch)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    losses.append(step(*batch))  # in the allocator's own memory still, not in that of a graph
    peak = torch.cuda.max_memory_allocated() - start
    losses += [step(*batch) for _ in range(4)]
    assert step.execution == REPLAYED
    return torch.stack(losses), peak


def test_activations_that_are_computed_again_are_not_kept(record_property):
    (losses, peak), (expected, whole) = trained(RECOMPUTED), trained(KEPT)
    record_property("memory at most, MB", f"{peak / 1e6:.1f} of {whole / 1e6:.1f}")
    torch.testing.assert_close(losses, expected, rtol=2**-8, atol=0)  # loops that fuse otherwise round elsewhere
    assert whole - peak > 2 * ROWS * INNER * (BLOCKS - 2), "GELU's results in 16 bits, but those of the last blocks"
