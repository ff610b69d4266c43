"""A DCGAN draws digits: two networks, each with an optimizer and a training step of its own.

Nothing fails here in FP16: weights begin with a deviation of 0.02, Adam changes them by a twentieth of that, and no
gradient is small. The quality is the Fréchet distance between drawn and real digits, taken in the last hidden layer of
a small classifier as the FID takes it in Inception's; three seeds leave much of it to chance.

    python examples/recipes/dcgan.py               # --short: a few steps
"""

import copy
import functools

import torch
from classify import digits
from common import Autocast, Options, Recipe, Training, main
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

BATCH, NOISE, WIDTH = 32, 32, 16


def networks() -> nn.ModuleDict:
    """As Radford, Metz and Chintala have them (2015), for 8 x 8 pixels; weights begin with a deviation of 0.02."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * WIDTH, 2, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.ReLU(),
        nn.ConvTranspose2d(2 * WIDTH, WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(),
        nn.ConvTranspose2d(WIDTH, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, WIDTH, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(WIDTH, 2 * WIDTH, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * WIDTH), nn.LeakyReLU(0.2),
        nn.Conv2d(2 * WIDTH, 1, 2), nn.Flatten(0),
    )  # fmt: skip
    for part in (*generator, *discriminator):
        if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.normal_(part.weight, std=0.02)
    return nn.ModuleDict({"generator": generator, "discriminator": discriminator})


def judged(nets: nn.ModuleDict, images: torch.Tensor, real: float) -> torch.Tensor:
    logits = nets["discriminator"](images)
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real))


def discriminator_loss(nets: nn.ModuleDict, images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return judged(nets, images, 1.0) + judged(nets, nets["generator"](noise).detach(), 0.0)


def generator_loss(nets: nn.ModuleDict, images: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return judged(nets, nets["generator"](noise), 1.0)


@functools.cache
@torch.enable_grad()
def features() -> nn.Sequential:
    """What a classifier of digits has learnt to see."""
    torch.manual_seed(0)
    classifier = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 10)
    )
    images, labels = real_digits()
    optimizer = torch.optim.Adam(classifier.parameters(), 3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(classifier(images), labels).backward()
        optimizer.step()
    return classifier[:-1]


def real_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """In [-1, 1], as the generator draws them."""
    images, labels = digits()
    return 2 * (images - images.min()) / (images.max() - images.min()) - 1, labels


@torch.no_grad()
def frechet_distance(generated: torch.Tensor, real: torch.Tensor) -> float:
    """Between two normal distributions with the means and covariances of two sets of features, [N, 24] each."""
    one, two = torch.cov(generated.T).double(), torch.cov(real.T).double()
    between = torch.linalg.eigvals(one @ two).real.clamp(min=0).sqrt().sum()
    return float((generated.mean(0) - real.mean(0)).square().sum() + one.trace() + two.trace() - 2 * between)


def start(seed: int, options: Options) -> Training:
    torch.manual_seed(seed)
    nets, (images, _) = networks(), real_digits()
    optimizers = [
        torch.optim.Adam(nets[name].parameters(), 1e-3, betas=(0.5, 0.999)) for name in ("discriminator", "generator")
    ]
    low = options.get("autocast")  # a type, beside the options of `amp.training_step`
    steps = [
        Autocast(nets, loss_fn, optimizer, low)
        if low
        else amp.training_step(nets, loss_fn, optimizer, backend="eager", **options)
        for loss_fn, optimizer in zip((discriminator_loss, generator_loss), optimizers, strict=True)
    ]

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100_000 * seed + number)
        chosen = torch.randint(0, len(images), (BATCH,), generator=generator)
        return images[chosen], torch.randn(BATCH, NOISE, 1, 1, generator=generator)

    @torch.no_grad()
    def quality() -> float:
        painter = copy.deepcopy(nets["generator"]).float()
        noise = torch.randn(1024, NOISE, 1, 1, generator=torch.Generator().manual_seed(0))
        return frechet_distance(features()(painter(noise)), features()(images))

    return Training(steps, optimizers, batch, quality)


RECIPE = Recipe("dcgan", "A DCGAN that draws digits", "Fréchet distance", start, higher=False, length=250, seeds=6)

if __name__ == "__main__":
    main(RECIPE)
