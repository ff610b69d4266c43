"""In torch models sizes, indices and angles are computed as eager torch does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_compiler as amp

OFF = {"sizes": False, "angles": False}


def with_keep(rules, keep):
    return {"version": 1, "extends": rules, **({} if keep is None else {"keep": keep})}


def compiled(module, rules="default", keep=None):
    return amp.compile(module, rules=with_keep(rules, keep), dtype="bf16", backend="eager")


class Rotary(nn.Module):
    """Queries turned by angles that `product` makes of positions and frequencies."""

    def __init__(self, product):
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, 16, 2) / 16))
        self.product = product

    def forward(self, x, positions):
        angles = self.product(positions.float(), self.frequencies)
        first, second = self.query(x).chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )


PRODUCTS = {
    "matmul": lambda a, b: a[:, None] @ b[None],
    "einsum": lambda a, b: torch.einsum("i,j->ij", a, b),
    "bmm": lambda a, b: torch.bmm(a[None, :, None], b[None, None])[0],
    "outer": torch.outer,
    "linear": lambda a, b: nn.functional.linear(a[:, None], b[:, None]),
}


@pytest.mark.parametrize(
    ("product", "rules"), [(name, ("default", "apex-o3", "fast")[number % 3]) for number, name in enumerate(PRODUCTS)]
)
def test_angles_of_positions(product, rules):
    """Within twice the error that torch.autocast makes with exact angles."""
    torch.manual_seed(0)
    module = Rotary(PRODUCTS[product])
    inputs = torch.randn(200, 16), torch.arange(1800, 2000)
    with torch.no_grad():
        want = module(*inputs)
        module.product = torch.outer  # which autocast leaves in FP32
        with torch.autocast("cpu", torch.bfloat16):
            bound = (module(*inputs) - want).norm()
        module.product = PRODUCTS[product]
        assert (compiled(module, rules)(*inputs) - want).norm() <= 2 * bound
        if product != "outer":
            assert (compiled(module, rules, OFF)(*inputs) - want).norm() > 20 * bound


class Rows(nn.Module):
    """Looks up rows whose numbers are computed in floating point, on top of whole ones."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5000, 8)
        self.register_buffer("offset", torch.tensor([4097.0]))

    def forward(self, ids):
        return self.table((ids.float() + self.offset).round().long())


@pytest.mark.parametrize("rules", ["default", "apex-o3"])
def test_an_index_that_is_computed_in_float(rules):
    torch.manual_seed(0)
    module, ids = Rows(), torch.tensor([0, 1, 7, 500, 900])
    with torch.no_grad():
        want = module(ids)
        assert (compiled(module, rules)(ids) - want).norm() < 1e-2 * want.norm()
        if rules == "apex-o3":
            assert (compiled(module, rules, OFF)(ids) - want).norm() > 0.5 * want.norm()
