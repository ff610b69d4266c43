"""In torch models sizes, indices and angles are computed as eager torch does, and probabilities in FP32."""

import pytest
import torch
import torch.nn.functional as F
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


# ---- a model that ends in a sigmoid or a softmax, for the loss outside of it

X = torch.tensor([[-20.0], [-6.0], [3.0], [6.0], [8.0], [20.0]])
Y = torch.tensor([[1.0], [0.0], [1.0], [0.0], [0.0], [0.0]])


class Classifier(nn.Module):
    def __init__(self, end) -> None:
        super().__init__()
        self.fc, self.end = nn.Linear(1, 1, bias=False), end
        nn.init.ones_(self.fc.weight)

    def forward(self, x):
        return self.end(self.fc(x))


@pytest.mark.parametrize(
    ("end", "dtype"), [(torch.sigmoid, "bf16"), (lambda h: torch.sigmoid(h).squeeze(-1).unsqueeze(-1), "fp16")]
)
def test_a_cross_entropy_outside_sees_no_rounded_probability(end, dtype):
    """In FP16, sigmoid(-20) would be 0 and the gradient NaN."""
    model = Classifier(end)
    compiled = amp.compile(model, dtype=dtype, backend="eager")
    result = compiled(X)
    torch.testing.assert_close(result, torch.sigmoid(X), rtol=1e-6, atol=0)
    loss = F.binary_cross_entropy(result, Y)
    torch.testing.assert_close(loss, F.binary_cross_entropy(torch.sigmoid(X), Y))
    loss.backward()
    ours = model.fc.weight.grad.clone()
    model.fc.weight.grad = None
    F.binary_cross_entropy(model(X), Y).backward()
    torch.testing.assert_close(ours, model.fc.weight.grad, rtol=1e-2, atol=1e-3)


def precision_of(end, **options):
    plan = amp.explain(Classifier(end), (X,), dtype="bf16", **options)
    return [node.precision for node in plan.nodes if node.op in ("aten.sigmoid", "aten.softmax")]


def test_only_the_last_op_before_an_output_is_unless_a_rule_says_otherwise():
    assert precision_of(torch.sigmoid) == precision_of(lambda h: torch.softmax(h, -1)) == ["fp32"]
    assert precision_of(lambda h: h * torch.sigmoid(h)) == ["low"]
    assert precision_of(lambda h: (lambda gate: (gate, gate * h))(torch.sigmoid(h))) == ["low"]
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"op": "aten.sigmoid"}, "precision": "low"}]}
    assert precision_of(torch.sigmoid, rules=rules) == ["low"]
