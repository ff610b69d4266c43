"""Nets and optimizers for the tests of a training step whose optimizer has no fused update."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch import optim as O

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 8, generator=GENERATOR)
Y = torch.randint(0, 5, (32,), generator=GENERATOR)
STEPS = 10


class Net(nn.Module):
    """A matrix, vectors, a scalar, a buffer that moves, and a layer without a gradient."""

    def __init__(self, biases: bool = True) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16, affine=biases)
        self.b, self.unused = nn.Linear(16, 5, bias=biases), nn.Linear(3, 3, bias=biases)
        if biases:
            self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.b(F.relu(self.norm(self.a(x)))) * (self.gain if hasattr(self, "gain") else 1)


OPTIMIZERS = {
    "rmsprop": lambda p: O.RMSprop(p, 1e-2),
    "rmsprop, all options": lambda p: O.RMSprop(p, 1e-2, momentum=0.5, centered=True, weight_decay=0.01, maximize=True),
    "radam, decoupled": lambda p: O.RAdam(p, 1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "nadam": lambda p: O.NAdam(p, 1e-2, weight_decay=0.01),
    "asgd": lambda p: O.ASGD(p, 1e-2, t0=3, weight_decay=0.01),
    "rprop": lambda p: O.Rprop(p, 1e-3),
    "adafactor": lambda p: O.Adafactor(p, 1e-2, weight_decay=0.1),
    "muon": lambda p: O.Muon(p, 1e-2),
}


def models(name="") -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Net(biases=name != "muon")
    return model, copy.deepcopy(model)


def states(optimizer):
    return {
        (number, key): value
        for number, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }


def tensors_of(model, optimizer):
    held = [value for value in states(optimizer).values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *held)]


def split(model):
    return [p for p in model.parameters() if p.dim() == 2], [p for p in model.parameters() if p.dim() != 2]
