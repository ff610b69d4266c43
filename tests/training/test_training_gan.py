"""A GAN: two training steps with an optimizer each over shared modules, beside torch's own loop."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp

ROUNDS = 10
GENERATOR = torch.Generator().manual_seed(0)
REAL = torch.randn(ROUNDS, 32, 6, generator=GENERATOR) * 0.5 + 1.0
NOISE = torch.randn(ROUNDS, 2, 32, 4, generator=GENERATOR)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.5),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, betas=(0.5, 0.999)),
}


def networks():
    torch.manual_seed(0)
    # No bias before the BatchNorm: its gradient is rounding error alone, which Adam would blow up to full steps.
    generator = nn.Sequential(nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 6))
    discriminator = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return {"generator": generator, "discriminator": discriminator}


def softplus(logits, label):
    """The cross entropy, written out."""
    return F.softplus(logits * (1 - 2 * label)).mean()


def discriminator_loss(nets, real, noise):
    fake = nets["generator"](noise).detach()
    return softplus(nets["discriminator"](real), 1.0) + softplus(nets["discriminator"](fake), 0.0)


def generator_loss(nets, noise):
    return softplus(nets["discriminator"](nets["generator"](noise)), 1.0)


def ours(name, **options):
    nets = networks()
    optimizers = {key: OPTIMIZERS[name](net.parameters()) for key, net in nets.items()}
    learn_d = amp.training_step(nets, discriminator_loss, optimizers["discriminator"], **options)
    learn_g = amp.training_step(nets, generator_loss, optimizers["generator"], **options)
    losses = []
    for real, (first, second) in zip(REAL, NOISE, strict=True):
        losses += [learn_d(real, first), learn_g(second)]
    return nets, optimizers, torch.stack(losses), (learn_d, learn_g)


def theirs(name):
    nets = networks()
    optimizers = {key: OPTIMIZERS[name](net.parameters()) for key, net in nets.items()}
    losses = []
    for real, (first, second) in zip(REAL, NOISE, strict=True):
        for key, loss_fn, batch in (
            ("discriminator", discriminator_loss, (real, first)),
            ("generator", generator_loss, (second,)),
        ):
            optimizers[key].zero_grad()
            loss = loss_fn(nets, *batch)
            loss.backward()
            optimizers[key].step()
            losses.append(loss.detach())
    return nets, optimizers, torch.stack(losses)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_fp32_a_gan_trains_as_in_torchs_loop(name):
    nets, optimizers, losses, _ = ours(name, enabled=False, backend="eager")
    expected, plain, wanted_losses = theirs(name)
    tolerance = {"rtol": 0, "atol": 0 if name == "sgd" else 1e-6}
    torch.testing.assert_close(losses, wanted_losses, **tolerance)
    for key in nets:
        torch.testing.assert_close(nets[key].state_dict(), expected[key].state_dict(), **tolerance)
        states = (each[key].state_dict()["state"] for each in (optimizers, plain))
        torch.testing.assert_close(*states, **tolerance)
    assert int(nets["generator"][1].num_batches_tracked) == 2 * ROUNDS  # both steps run the generator


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_in_bf16_a_gan_has_the_losses_of_torchs_loop_in_fp32(backend):
    nets, _, losses, steps = ours("sgd", dtype="bf16", backend=backend)
    _, _, wanted = theirs("sgd")
    # From the noise to the logit of a fake there are four products, and each rounds two factors and a result to 8 bits:
    # twelve relative errors of 2**-9 in logits of about 1, and a loss moves by no more than the logit does.
    bound = 12 * 2.0**-9
    assert float((losses - wanted).abs().max()) < bound
    assert float(wanted[0] - wanted[-2]) > 10 * bound  # the discriminator learns more than that
    assert all(step.plan.low_nodes >= 2 and int(step.skipped_steps) == 0 for step in steps)
    assert all(p.dtype is torch.float32 for net in nets.values() for p in net.parameters())
    assert not torch.equal(losses, wanted)
