"""Statistics (variances, norms, sums, normalisations) compiled: gradients as exact as node by node."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import amp_compiler as amp

ROUNDED = 2.0**-8
IMAGES, HEADS = (4, 8, 8, 8), (4, 8, 8, 8)


def scale(x: Tensor) -> Tensor:
    """Of eight channels, made of the data, so that its gradient shows in theirs."""
    return x.flatten()[:8]


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "var": lambda x: x.var(-1),
    "std_mean": lambda x: sum(torch.std_mean(x, (0, -1))),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: x.norm(dim=-1),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, 3, -1),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: (1 + 0.01 * x).cumprod(-1),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "prod": lambda x: (1 + 0.01 * x).prod(-1),
    "softmax": lambda x: x.softmax(-1) * x,
    "log_softmax": lambda x: x.log_softmax(-1),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x.view(HEADS)] * 3),
    "causal_attention": lambda x: functional.scaled_dot_product_attention(*[x.view(HEADS)] * 3, is_causal=True),
    "rms_norm": lambda x: functional.rms_norm(x, (64,)),
    "normalize": lambda x: functional.normalize(x, dim=-1),
    "cosine_similarity": lambda x: functional.cosine_similarity(x[:16], x[16:], dim=-1),
    "cross_entropy": lambda x: functional.cross_entropy(x, torch.arange(32)),
    "local_response_norm": lambda x: functional.local_response_norm(x.view(IMAGES), 5),
    "instance_norm": lambda x: functional.instance_norm(x.view(IMAGES)),
    "group_norm": lambda x: functional.group_norm(x.view(IMAGES), 2, scale(x)),
    "batch_norm": lambda x: functional.batch_norm(x.view(IMAGES), None, None, scale(x), training=True),
    "layer_norm": lambda x: functional.layer_norm(x, (64,)),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x.view(IMAGES), 1),
    "by_hand": lambda x: (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-5).rsqrt(),
}
SHORT = ("group_norm",)


class Weighed(nn.Module):
    """A statistic behind a linear layer, and a sum that weighs each of its results differently."""

    def __init__(self, statistic: Callable[[Tensor], Tensor], mean: float) -> None:
        super().__init__()
        self.linear, self.statistic = nn.Linear(64, 64), statistic
        with torch.no_grad():
            self.linear.weight.copy_((torch.eye(64) + 0.02 * torch.randn(64, 64)).bfloat16())
            self.linear.bias.fill_(mean)

    def forward(self, x: Tensor) -> Tensor:
        """The weighed sum."""
        y = self.statistic(self.linear(x))
        return (y * torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def gradients(model: Weighed, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    """Of the input and the layer."""
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(call(x), [x, *model.parameters()]))


def distance(made: Tensor, exact: Tensor) -> float:
    return float((made.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.slow) for name in STATISTICS]
)
@pytest.mark.compiles
def test_compiled_statistics_are_as_exact_as_eager_ones(name: str) -> None:
    for mean in (0.0, 3.0):  # values far from zero: what a variance loses when it is rounded
        torch.manual_seed(0)
        model, x = Weighed(STATISTICS[name], mean), torch.randn(32, 64).bfloat16().float()
        double = copy.deepcopy(model).double()
        exact = gradients(double, double, x.double())
        eager, made = (
            gradients(model, amp.compile(model, dtype="bf16", backend=backend), x) for backend in ("eager", "inductor")
        )
        for number, (one, other, reference) in enumerate(zip(eager, made, exact, strict=True)):
            assert distance(other, reference) <= distance(one, reference) + 2 * ROUNDED, (mean, number)


def test_logcumsumexp_of_large_numbers_keeps_its_gradient() -> None:
    """In BF16 torch's own, under autocast too, is 1 for all that it is of."""
    torch.manual_seed(0)
    model = Weighed(lambda x: x.logcumsumexp(0), 900.0)
    nn.init.eye_(model.linear.weight)
    x = 4.0 * torch.randint(-3, 4, (6, 64))  # BF16 holds what the layer makes of it
    exact = [one.double() for one in gradients(model, model, x)]
    made = gradients(model, amp.compile(model, dtype="bf16", backend="eager"), x)
    assert max(distance(one, other) for one, other in zip(made, exact, strict=True)) < 0.02
