"""Small models whose gradients have a type of their own, and the same gradients written by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(32, 8, generator=GENERATOR)
Y = torch.randint(0, 5, (32,), generator=GENERATOR)


def rules(backward: Any, *, precision: str | None = None, extends: str = "default", **match: Any) -> dict[str, Any]:
    asked = {"match": match or {"family": "matmul"}, "backward": backward}
    return {"version": 1, "extends": extends, "rules": [asked | ({"precision": precision} if precision else {})]}


WIDE = rules({"precision": "fp32"})
NARROW = rules({"precision": "low"}, precision="fp32")


class Net(nn.Module):
    def __init__(self, between: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.between, self.b = nn.Linear(8, 16), between or nn.ReLU(), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self.a(x)))


def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).float(), y)


def stepped(model: nn.Module, rule: Any, dtype: str = "bf16", backend: str = "eager", **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    step = amp.training_step(
        model, loss_fn, optimizer, rules=rule, dtype=dtype, loss_scale=None, backend=backend, **options
    )
    step(X, Y)
    return step


def gradients(model: nn.Module, rule: Any, dtype: str = "bf16", backend: str = "eager") -> dict[str, torch.Tensor]:
    return {name: g.clone() for name, g in stepped(model, rule, dtype, backend).gradients().items()}


def by_autograd(model: nn.Module, rule: Any, dtype: str = "bf16", backend: str = "eager") -> dict[str, torch.Tensor]:
    compiled = amp.compile(model, rules=rule, dtype=dtype, backend=backend)
    loss_fn(compiled, X, Y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def by_hand(net: Net, forward: torch.dtype, backward: torch.dtype) -> dict[str, torch.Tensor]:
    """Linear layers in `forward` with gradients in `backward`; the ReLU in `forward` both ways; the loss in FP32."""
    wa, ba, wb, bb = [p.detach().to(forward) for p in (net.a.weight, net.a.bias, net.b.weight, net.b.bias)]
    x = X.to(forward)
    h = F.linear(x, wa, ba)
    r = F.relu(h)
    logits = F.linear(r, wb, bb).float().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(logits, Y), logits)
    g = g.to(backward)
    gr = (g @ wb.to(backward)).to(forward)
    gh = torch.where(h > 0, gr, 0).to(backward)
    made = [gh.t() @ x.to(backward), gh.sum(0), g.t() @ r.to(backward), g.sum(0)]
    return dict(zip(["a.weight", "a.bias", "b.weight", "b.bias"], [m.float() for m in made], strict=True))


def check(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    assert set(got) == set(wanted)
    for name, gradient in wanted.items():
        assert torch.allclose(got[name].float(), gradient, rtol=tolerance, atol=tolerance * float(gradient.abs().max()))
