"""A backward that is differentiated (a gradient penalty, a Hessian product) goes through compiled code."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import amp_compiler as amp

pytestmark = [pytest.mark.compiles, pytest.mark.long]
BF16_ERROR = 2e-2  # a few roundings of 2**-9 each
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A batch norm, whose buffers a call writes, and an output that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        y = self.norm(self.fc(x))
        return self.out(F.softplus(y)), (y > 0).sum()


def pair() -> tuple[nn.Module, nn.Module]:
    """The same model compiled by Inductor and run node by node."""
    torch.manual_seed(0)
    net = Net()
    return tuple(amp.compile(copy.deepcopy(net), dtype="bf16", backend=name) for name in ("inductor", "eager"))


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    """The pair that the tests share: a graph takes Inductor seconds."""
    return pair()


def penalty(model: nn.Module, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()


def hessian_product(model: nn.Module, x: torch.Tensor) -> None:
    parameters = [*model.parameters()]
    gradients = torch.autograd.grad(model(x)[0].square().mean(), parameters, create_graph=True)
    product = torch.autograd.grad(sum((g * (i + 1)).sum() for i, g in enumerate(gradients)), parameters)
    for parameter, one in zip(parameters, product, strict=True):
        parameter.grad = one


def two_losses(model: nn.Module, x: torch.Tensor) -> None:
    model(x)[0].sum().backward()
    y = model(x)[0]
    y.sum().backward(retain_graph=True)
    y.square().mean().backward()


@pytest.mark.parametrize("use", [penalty, hessian_product, two_losses])
def test_it_is_what_the_eager_backend_gives(models, use):
    for model in models:
        model.zero_grad()
        use(model, X)
    compiled, eager = models
    for (name, mine), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            assert (mine.grad - theirs.grad).norm() <= BF16_ERROR * (1 + theirs.grad.norm()), name
    torch.testing.assert_close(list(compiled.buffers()), list(eager.buffers()), rtol=1e-3, atol=1e-3)
    assert compiled.norm.num_batches_tracked == eager.norm.num_batches_tracked
    with torch.no_grad():  # what wrote a buffer twice would go on from another one
        for mine, theirs in zip(compiled.buffers(), eager.buffers(), strict=True):
            mine.copy_(theirs)


def test_it_is_said_once_and_other_calls_stay_compiled(caplog):
    model, _ = pair()
    for _ in range(2):
        penalty(model, X)
    assert [one.getMessage().count("node by node") for one in caplog.records] == [1]
    before = model.compilations
    x = X.clone().requires_grad_()
    model(x)[0].sum().backward()
    assert model.compilations == before and x.grad is not None and len(caplog.records) == 1


def test_a_third_derivative_and_the_door_of_torch_compile():
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    grads = []
    for backend in ("inductor", "eager"):
        torch._dynamo.reset()
        model = torch.compile(net, backend="amp_compiler", options={"dtype": "bf16", "backend": backend})
        x = X.clone().requires_grad_()
        y = model(x).sum()
        for _ in range(3):
            (y,) = torch.autograd.grad(y, x, create_graph=True)
            y = y.sum()
        grads.append(y.detach())
    assert grads[0] != 0 and torch.equal(*grads)


class Noisy(nn.Module):
    """An operator that draws random numbers, between layers."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.fc, self.out, self.draw = nn.Linear(6, 32), nn.Linear(32, 6), draw

    def forward(self, x):
        return self.out(self.draw(torch.tanh(self.fc(x))))


class Recurrent(nn.LSTM):
    """Dropout between layers."""

    def __init__(self) -> None:
        super().__init__(6, 8, 2, dropout=0.5)

    def forward(self, x):
        return super().forward(x[None])[0]


def attention(y, dropout=0.0):
    return F.scaled_dot_product_attention(y[None], y[None], y[None], dropout_p=dropout)[0]


def by_seeds(y):
    """One of each kind that a compiler draws by a seed, one of them checkpointed."""
    y = F.dropout(attention(y, 0.3) + F.dropout(y, 0.6), 0.1) * torch.bernoulli(torch.sigmoid(y.detach()))
    y = checkpoint(lambda y: torch.tanh(F.dropout(y, 0.2)), y, use_reentrant=False)
    return y * torch.rand_like(y.t()).t() + torch.randn(y.shape) * torch.empty_like(y).exponential_()


DRAWS = {
    "by seeds": by_seeds,
    "selu": lambda y: F.alpha_dropout(y, 0.5, True),
    "channels": lambda y: F.dropout1d(y[:, :, None], 0.5)[:, :, 0],
    "depth": lambda y: y * y.new_empty(y.shape[0], 1).bernoulli_(0.5),
    "uniform": lambda y: y * torch.empty_like(y).uniform_(0.5, 2.0),
    "normal": lambda y: y + torch.normal(0.0, y.detach().abs()),
    "choice": lambda y: y[:, torch.multinomial(torch.softmax(y.detach()[0], 0), 8).repeat(4)],
    "closed": lambda y: sum(y * torch.empty_like(y).bernoulli_(0.5) * (i + 1) for i in range(12)),
    "of both kinds": lambda y: F.dropout(y * torch.empty_like(y).bernoulli_(0.5), 0.5) + y * torch.randn_like(y),
    "order": lambda y: y[torch.randperm(y.shape[0])] + y,
    "unread": lambda y: (F.dropout(y, 0.5), F.dropout(y, 0.3), torch.empty_like(y)[0].bernoulli_(0.5))[0],
    "nothing": lambda y: F.dropout(F.dropout(y, 1.0) + attention(y), 0.0),
}


@pytest.mark.parametrize(
    ("name", "sizes", "dtype"),
    [
        ("by seeds", (16,), "bf16"),
        ("of both kinds", (16,), "fp16"),
        ("unread", (16,), "bf16"),
        *(pytest.param(one, (16, 24), "bf16", marks=pytest.mark.slow) for one in (*DRAWS, "lstm")),
    ],
)
def test_what_draws_random_numbers_draws_those_of_the_compiled_call(name, sizes, dtype):
    """A compiled backward, whose masks are those of its call, gives the same gradients; then the draws go on."""
    torch.manual_seed(0)
    model = amp.compile(Noisy(DRAWS[name]) if name in DRAWS else Recurrent(), dtype=dtype)
    for rows in sizes:
        x = torch.randn(rows, 6).requires_grad_()
        start = torch.get_rng_state()
        (once,) = torch.autograd.grad(model(x).square().sum(), x)
        torch.set_rng_state(start)
        y = model(x)
        behind = torch.get_rng_state()
        torch.rand(3)  # what is drawn since is none of it
        (twice,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        assert (once - twice).norm() <= BF16_ERROR * once.norm() and twice.requires_grad
        (third,) = torch.autograd.grad(twice.square().sum(), x)
        assert third.isfinite().all() and third.any()
        torch.set_rng_state(behind)


def test_what_cannot_be_drawn_again_is_refused_with_the_hint():
    """A compiler leaves out what nobody reads, of which a run node by node draws a part; the user's line is named."""
    model = amp.compile(Noisy(lambda y: y * torch.rand_like(torch.randn_like(y))), dtype="bf16")
    x = X.clone().requires_grad_()
    y = model(x).sum()
    before = torch.get_rng_state()
    with pytest.raises(amp.AmpError, match=r"test_double_backward.py:\d+: .*draws other.*backend='eager'"):
        torch.autograd.grad(y, x, create_graph=True)
    assert torch.equal(torch.get_rng_state(), before)


class Sharing(nn.Module):
    """Results that share memory, also with an input, and buffers that a call reads, then writes, two with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 4)
        self.register_buffer("average", torch.ones(8))
        self.register_buffer("state", torch.zeros(4, 8))
        self.register_buffer("rows", torch.ones(4, 8))

    def forward(self, x):
        y = torch.tanh(self.fc(x) + self.average + self.state)
        self.average.mul_(0.5).add_(y.detach().float().mean(0))
        self.state.copy_(y)
        self.rows[0] = y[1]
        z = self.out(y * self.rows)
        return z[:, :2], z[:, 2:], x, x[:, :2], y, y


@pytest.mark.parametrize("calls", [1, 3])
def test_results_that_share_memory_and_buffers_that_are_read_before_they_are_written(calls):
    torch.manual_seed(0)
    net, results = Sharing(), []
    for name in ("inductor", "eager"):
        model = amp.compile(copy.deepcopy(net), dtype="bf16", backend=name)
        x = X.clone().requires_grad_()
        kept = [*[model(x) for _ in range(calls)][-1], *(one for one in model.buffers() if one.requires_grad)]
        loss = sum((i + 1) * one.float().square().sum() for i, one in enumerate(kept))
        slope, *once = torch.autograd.grad(loss, [x, *model.parameters()], create_graph=True)
        twice = torch.autograd.grad(slope.square().sum(), [*model.parameters()], materialize_grads=True)
        results.append([slope, *once, *twice, *model.buffers()])
    for mine, theirs in zip(*results, strict=True):
        assert (mine - theirs).norm() <= BF16_ERROR * theirs.norm() and theirs.isfinite().all()


def test_an_input_that_was_written_behind_the_call_is_refused(models):
    x = X.clone()
    y = models[0](x)[0].sum()
    x.add_(1)
    with pytest.raises(amp.AmpError, match=r"written in place.*backend='eager'"):
        torch.autograd.grad(y, [*models[0].parameters()], create_graph=True)
