"""Handwritten digits are told apart, by a network without BatchNorm and by one with it.

Without BatchNorm nothing brings numbers back to size: nine convolutions that begin with small weights make each
gradient smaller on its way back. The loss is a mean over a batch of 8192 images, of which this process has 32, as one
of many has. In FP16 a third of the gradients of weights are zero, among them all of the first layers, and nothing is
learnt; with a loss scale it is learnt as in FP32, with or without masters, since Adam makes each update as large as its
learning rate says.

BatchNorm brings gradients back to size, and no scale is needed. But plain SGD with a small learning rate changes a
weight by less than 2^-11 of it, half the distance to its neighbour in FP16. A weight without an FP32 master often stays
where it is, and the network learns less in the same time.

    python examples/recipes/classify.py            # --short: a few steps
"""

import copy
import functools

import torch
from common import MASTERS, NEITHER, Options, Recipe, Training, main, six_ways
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp

TRAINED = 1347  # of the 1797 images; the others are the test


def convolutions(depth: int, width: int, std: float | None) -> nn.Sequential:
    """With weights of that deviation, or by torch's default with BatchNorm behind."""
    layers: list[nn.Module] = []
    for inputs in [1] + [width] * (depth - 1):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
        if std is None:
            layers.insert(-1, nn.BatchNorm2d(width))
        else:
            nn.init.normal_(layers[-2].weight, std=std)
            nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * width, 10))


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 1, 8, 8) with mean 0 and deviation 1, and which digits they are."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None]
    return (images - images.mean()) / images.std(), torch.tensor(data.target)


def start(
    seed: int,
    options: Options,
    network: functools.partial[nn.Sequential],
    optimizer_of: functools.partial[torch.optim.Optimizer],
    images_each: int,
    images_of_all: int,
) -> Training:
    torch.manual_seed(seed)
    model, (images, labels) = network(), digits()
    mixed = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))

    def loss_fn(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images), labels) * (images_each / images_of_all)

    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100_000 * seed + number)
        chosen = mixed[torch.randint(0, TRAINED, (images_each,), generator=generator)]
        return images[chosen], labels[chosen]

    @torch.no_grad()
    def accuracy() -> float:
        judge, tested = copy.deepcopy(model).float().eval(), mixed[TRAINED:]
        return 100 * float((judge(images[tested]).argmax(-1) == labels[tested]).float().mean())

    optimizer = optimizer_of(model.parameters())
    step = amp.training_step(model, loss_fn, optimizer, backend="eager", **options)
    return Training([step], [optimizer], batch, accuracy)


PLAIN = Recipe(
    "classify",
    "Digits without BatchNorm, by Adam",
    "accuracy, %",
    functools.partial(
        start,
        network=functools.partial(convolutions, depth=9, width=16, std=0.04),
        optimizer_of=functools.partial(torch.optim.Adam, lr=1e-3, eps=1e-14),
        images_each=32,
        images_of_all=8192,
    ),
    length=600,
    fails=(NEITHER, MASTERS),
    ways=six_ways,
)
NORMED = Recipe(
    "classify_batch_norm",
    "Digits with BatchNorm, by plain SGD",
    "accuracy, %",
    functools.partial(
        start,
        network=functools.partial(convolutions, depth=4, width=16, std=None),
        optimizer_of=functools.partial(torch.optim.SGD, lr=2e-4),
        images_each=64,
        images_of_all=64,
    ),
    length=700,
    fails=(NEITHER,),
)

if __name__ == "__main__":
    main(PLAIN, NORMED)
