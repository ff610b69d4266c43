"""A net, batches and guards for the tests of a training step on a CUDA device."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from toys import classes

import amp_compiler as amp
from amp_compiler.ops.loss_scale import DynamicLossScale

REPLAYED = "as one graph, replayed as a CUDA graph"


class Net(nn.Module):
    """Convolution, BatchNorm, dropout and a linear layer: every kind of state that a replay must carry on."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16)
        self.head, self.drop = nn.Linear(16 * 6 * 6, 10), drop

    def forward(self, x):
        hidden = F.dropout(F.relu(self.norm(self.conv(x))), self.drop, training=self.drop > 0)
        return self.head(hidden.flatten(1))


def batches(count, size=32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    for _ in range(count):
        x = torch.randn(size, 3, 8, 8, device="cuda", generator=generator)
        yield x, torch.randint(0, 10, (size,), device="cuda", generator=generator)


def make(backend="inductor", kind=torch.optim.AdamW, drop=0.0, loss=classes, **options):
    torch.manual_seed(0)
    model = Net(drop).cuda()
    optimizer = kind(model.parameters(), 1e-3)
    options = {"dtype": "fp16", "loss_scale": DynamicLossScale(1024.0, growth_interval=8), "clip_norm": 1.0} | options
    return model, optimizer, amp.training_step(model, loss, optimizer, backend=backend, **options)


@contextlib.contextmanager
def one_order_of_sums() -> Iterator[None]:
    """Within it cuDNN's weight gradients have one order of summation, so that runs can be compared.

    Torch's own test modules, which other tests import, forbid to set its flags otherwise.
    """
    cudnn = torch.backends.cudnn
    kept = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "allow_tf32": cudnn.allow_tf32}
    with cudnn.flags(deterministic=True, **kept):
        yield


def weights(model):
    return [value.detach().clone() for value in model.state_dict().values()]


class NoWaiting:
    """Any synchronisation that torch knows of is an error."""

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *caught):
        torch.cuda.set_sync_debug_mode("default")


def without_graphs(step):
    """The same compiled step, never captured."""
    step._state.graphs.most = 0
    return step
