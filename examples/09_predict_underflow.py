"""Before a training begins, its profile says what FP16 will make of it, and which loss scale fixes that.

Five convolutions without BatchNorm, whose weights begin with a deviation of 0.04, draw the mask of a handwritten
digit: which of 48 x 48 pixels are ink. The loss is a mean over all pixels of a large batch, of which a step sees a
part, as one of many processes does. That makes every gradient small, and each convolution makes it smaller on its way
back: in FP16 they become zero, and the network stands still. `amp.profile` sees that in a copy of the network, before
anything is trained in FP16, and names a static loss scale with which FP16 learns as FP32 does.

    python examples/09_predict_underflow.py
"""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

GLOBAL = 8192  # images of the batch that the loss is a mean over
Batch = tuple[torch.Tensor, torch.Tensor]


def network(seed: int, width: int = 32) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, width), (width, width), (width, width), (width, width), (width, 1)):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        nn.init.normal_(convolution.weight, std=0.04)
        nn.init.zeros_(convolution.bias)
        layers += [convolution, nn.LeakyReLU(0.1)]
    return nn.Sequential(*layers[:-1])


def batches(seed: int, count: int, images_each: int) -> list[Batch]:
    """Digits of 48 x 48 pixels with mean 0 and deviation 1, and their masks."""
    digits = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(digits, size=(48, 48), mode="bilinear")
    masks, images = (images > 0.5).float(), (images - images.mean()) / images.std()
    generator = torch.Generator().manual_seed(seed)
    chosen = [torch.randint(0, len(images), (images_each,), generator=generator) for _ in range(count)]
    return [(images[numbers], masks[numbers]) for numbers in chosen]


def loss_fn(model: nn.Module, images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(images), masks) * (len(images) / GLOBAL)


def step_of(model: nn.Module, backend: str, **options: object) -> amp.TrainingStep:
    return amp.training_step(model, loss_fn, torch.optim.Adam(model.parameters(), 1e-4), backend=backend, **options)


def become_zero(profile: amp.Profile, module: str, scale: float) -> float:
    """Fraction of the gradients of what a module gives that FP16 makes zero."""
    rows = [row.histogram for row in profile.of("activation gradient") if row.module == module]
    return sum(rows[1:], rows[0]).fractions("fp16", scale).zero


def main(
    backend: str = "eager", seed: int = 0, steps: int = 80, images: int = 16
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """The last losses of three trainings, and which fractions of gradients each convolution's profile foretold lost."""
    model, data = network(seed), batches(seed, steps, images)
    # BF16 has FP32's range, so that nothing is lost before it is counted.
    profile = amp.profile(step_of(copy.deepcopy(model), backend, dtype="bf16"), data[:4])
    advice = profile.loss_scale("fp16")
    names = sorted({row.module for row in profile.of("activation gradient") if row.module})
    foretold = {
        "FP16 without a loss scale": [become_zero(profile, name, 1.0) for name in names],
        "FP16 with the scale of the profile": [become_zero(profile, name, advice.scale) for name in names],
    }
    print("before training, gradients that become zero on their way back through the network:")
    for name, without, scaled in zip(names, *foretold.values(), strict=True):
        print(f"  behind layer {name}: {without:6.1%} in FP16, {scaled:.2%} with a loss scale of {advice.scale:.0f}")
    print(f"  of the gradients of weights: {advice.lost_without:.1%}, and {advice.lost:.2%} with it")
    trainings = {
        "FP32": {"enabled": False},
        "FP16 without a loss scale": {"dtype": "fp16", "loss_scale": None},
        "FP16 with the scale of the profile": {"dtype": "fp16", "loss_scale": advice.scale},
    }
    losses = {}
    for name, options in trainings.items():
        step = step_of(copy.deepcopy(model), backend, **options)
        last = [float(step(*batch)) * GLOBAL / images for batch in data][-5:]
        losses[name] = sum(last) / len(last)
        print(f"{name:35} loss {losses[name]:.3f} after {steps} steps")
    return losses, {**foretold, "weights": [advice.lost_without, advice.lost]}


if __name__ == "__main__":
    main()
