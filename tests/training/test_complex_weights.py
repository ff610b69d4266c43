"""Complex weights, as of a Fourier neural operator, in one training step with weights that have 16-bit copies."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import eager_step

import amp_compiler as amp

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [torch.randn(2, 4, 24, generator=GENERATOR) for _ in range(4)]


class SpectralConvolution(nn.Module):
    """The low frequencies, times a complex matrix each; with a branch on values, where the graph breaks."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.weight, self.breaks = nn.Parameter(torch.randn(6, 6, 5, dtype=torch.complex64) / 6), breaks

    def forward(self, x):
        spectrum = torch.fft.rfft(x.float())
        if self.breaks and x.sum() > 1e9:
            return x
        low = torch.einsum("bim,iom->bom", spectrum[:, :, :5], self.weight)
        return torch.fft.irfft(F.pad(low, (0, spectrum.shape[-1] - 5)), n=x.shape[-1])


class FourierOperator(nn.Module):
    def __init__(self, breaks: bool = False) -> None:
        super().__init__()
        self.lift, self.project = nn.Linear(1, 6), nn.Linear(6, 1)
        self.spectral, self.skip = SpectralConvolution(breaks), nn.Conv1d(6, 6, 1)

    def forward(self, x):
        hidden = self.lift(x[..., None]).transpose(1, 2)
        return self.project(F.gelu(self.spectral(hidden) + self.skip(hidden)).transpose(1, 2))[..., 0]


def loss(model, batch):
    return (model(batch[0]).float() - batch[1]).square().mean()


def models(breaks=False):
    torch.manual_seed(0)
    model = FourierOperator(breaks)
    return model, copy.deepcopy(model)


def autocast(model, batches, accumulate=1):
    """What torch's own loop makes of it, with clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=False)
    for number, batch in enumerate(batches, 1):
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(model, batch)
        (value / accumulate).backward()
        if number % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return optimizer


def step_of(model, optimizer, **options):
    return eager_step(model, loss, optimizer, clip_norm=0.1, **options)


def check_near(ours, theirs, start):
    ours, theirs, start = (
        torch.cat([torch.view_as_real(p + 0j).flatten() for p in model.parameters()]).detach()
        for model in (ours, theirs, start)
    )
    assert (ours - theirs).norm() < 0.05 * (theirs - start).norm()


@pytest.mark.parametrize(
    ("breaks", "accumulate"),
    [(False, 1), (True, 2)],
)
def test_it_trains_as_under_autocast(breaks, accumulate):
    start, theirs = models(breaks)
    ours = copy.deepcopy(start)
    torchs = autocast(theirs, BATCHES, accumulate)
    optimizer = torch.optim.AdamW(ours.parameters(), 1e-2)
    step = step_of(ours, optimizer, dtype="bf16", accumulate=accumulate)
    for batch in BATCHES:
        step(batch)
    assert (" subgraph" in step.execution) == breaks
    assert {node.precision for node in step.plan.nodes if node.family == "convolution"} == {"low"}
    check_near(ours, theirs, start)
    entry, known = optimizer.state[ours.spectral.weight], torchs.state[theirs.spectral.weight]
    assert entry["exp_avg"].dtype is torch.complex64 and entry["exp_avg_sq"].dtype is known["exp_avg_sq"].dtype
    assert float((entry["exp_avg"] - known["exp_avg"]).abs().max() / known["exp_avg"].abs().max()) < 0.05


def test_an_infinite_gradient_is_skipped_and_a_saved_run_goes_on_bit_for_bit():
    model, other = models()
    optimizer, again = (torch.optim.AdamW(one.parameters(), 1e-2) for one in (model, other))
    step, resumed = step_of(model, optimizer, dtype="fp16"), step_of(other, again, dtype="fp16")
    step(BATCHES[0])
    before, bad = [parameter.detach().clone() for parameter in model.parameters()], BATCHES[1].clone()
    bad[1, 0, 0] = float("inf")
    skipped = int(step.skipped_steps)
    step(bad)
    assert int(step.skipped_steps) == skipped + 1 and all(map(torch.equal, before, model.parameters()))
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    resumed.load_state_dict(step.state_dict())
    for batch in BATCHES[1:]:
        assert torch.equal(step(batch), resumed(batch))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert not torch.equal(model.spectral.weight, before[0])


def test_other_complex_types_are_refused():
    model, _ = models()
    model.spectral.weight = nn.Parameter(model.spectral.weight.to(torch.complex128))
    with pytest.raises(amp.AmpError, match=r"spectral\.weight' is complex128.*complex64"):
        step_of(model, torch.optim.AdamW(model.parameters(), 1e-2), dtype="bf16")
