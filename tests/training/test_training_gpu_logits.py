"""A classifier's loss in chunks on a CUDA device: the numbers of stored logits, no such memory, one CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from training_gpu import REPLAYED, NoWaiting

import amp_compiler as amp
from amp_compiler.ops import classifier_loss
from amp_compiler.ops.classifier_loss import MEAN
from amp_compiler.passes.step.chunk_logits import ChunkLogits

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
F = nn.functional
WORDS, WIDE, ROWS = 5003, 64, 512
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
WHOLE = amp.pipelines.STEP.skip("chunk_logits")
CHUNKED = WHOLE.insert_before("differentiate", ChunkLogits(least=0, rows=128))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("low", ROUNDING)
def test_chunks_give_what_stored_logits_give(low, bias, smoothing):
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (torch.randn(n, WIDE, device="cuda", generator=generator).to(low) for n in (ROWS, WORDS))
    some = torch.randn(WORDS, device="cuda", generator=generator).to(low) if bias else None
    target = torch.randint(0, WORDS, (ROWS,), device="cuda", generator=generator)
    target[::5] = -100
    scale = torch.tensor(1024.0, device="cuda")
    leaves = [one.clone().requires_grad_() for one in (x, weight, some) if one is not None]
    loss = F.cross_entropy(F.linear(*leaves).float(), target, label_smoothing=smoothing)
    expected = [loss.detach(), *torch.autograd.grad(loss, leaves, scale)]
    options = (low, MEAN, -100, smoothing, 96, [True, True, bias])
    found = classifier_loss.classifier_loss_gradients(scale, x, weight, some, target, *options)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    for one, other in zip(found[1:], expected[1:], strict=False):
        torch.testing.assert_close(one, other, rtol=ROUNDING[low], atol=ROUNDING[low] * float(other.abs().max()))


class Words(nn.Module):
    """A tied classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x):
        return self.inner(self.table(x)).tanh() @ self.table.weight.t()


def next_word(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def trained(passes, dtype, steps=8):
    torch.manual_seed(0)
    model = Words().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    options = {"loss_scale": "dynamic", "clip_norm": 1.0} if dtype == "fp16" else {}
    step = amp.training_step(model, next_word, optimizer, dtype=dtype, passes=passes, **options)
    generator = torch.Generator("cuda").manual_seed(1)
    batch = torch.randint(0, WORDS, (2, 4, ROWS // 4), device="cuda", generator=generator)
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    losses = [step(*batch) for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() - start
    assert step.execution == REPLAYED
    with NoWaiting():
        losses.append(step(*batch))
    return torch.stack(losses), peak


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_step_learns_the_same_in_less_memory(dtype, record_property):
    (losses, peak), (expected, whole) = trained(CHUNKED, dtype), trained(WHOLE, dtype)
    error = ((losses - expected).abs() / expected).max()
    record_property("largest relative difference of a loss", f"{float(error):.1e}")
    record_property("memory at most, MB", f"{peak / 1e6:.1f} of {whole / 1e6:.1f}")
    assert float(error) < 1e-2 and float((losses[0] - expected[0]).abs() / expected[0]) < 1e-4
    assert whole - peak > 2 * ROWS * WORDS, "one copy of all logits, at the least"
