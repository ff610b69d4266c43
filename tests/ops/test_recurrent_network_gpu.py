"""Recurrent networks on a CUDA device: as exact as eager torch under autocast, replayed as one CUDA graph."""

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp
from amp_compiler.ops import recurrent_network

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Net(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(64, 64)
        self.recurrent = KINDS[kind](64, 128, **options)
        self.head = nn.Linear(self.recurrent.proj_size or 128 * (1 + self.recurrent.bidirectional), 10)

    def forward(self, x):
        return self.head(self.recurrent(self.front(x))[0])


def square(model, x):
    return model(x).float().square().mean()


def data(count=1, steps=20):
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(steps, 16, 64, device="cuda", generator=generator) for _ in range(count)]


def results(run, model, x):
    x = x.clone().requires_grad_()
    out = run(x)
    out.float().square().mean().backward()
    return [out.detach(), x.grad, *[one.grad for one in model.parameters()]]


def relative(values, references):
    return [float((v.double() - r).norm() / r.norm()) for v, r in zip(values, references, strict=True)]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("kind", [*KINDS, "lstm with a projection"])
def test_it_errs_no_more_than_autocast(kind, dtype, options):
    more = {"proj_size": 32} if kind != (kind := kind.partition(" ")[0]) else {}
    if more and options.get("bidirectional"):
        pytest.skip("the head of this net reads one direction of a projection")
    model = Net(kind, **options, **more).cuda()
    exact, theirs, ours = (copy.deepcopy(model) for _ in range(3))
    ((x),) = data()
    reference = results(exact.double(), exact, x.double())
    with torch.autocast("cuda", dtype=TYPES[dtype]):
        autocast = relative(results(theirs, theirs, x), reference)
    mine = relative(results(amp.compile(ours, dtype=dtype), ours, x), reference)
    unit = torch.finfo(TYPES[dtype]).eps / 2
    for place, (one, other) in enumerate(zip(mine, autocast, strict=True)):
        assert one < 1.5 * other + unit, place


@pytest.mark.parametrize("projected", [0, 32])
@pytest.mark.parametrize("bias", [True, False])
def test_the_operator_is_eager_torchs_network(bias, projected):
    """FP32 without tensor cores: the weights lie where cuDNN looks for them, and so do their gradients."""
    torch.manual_seed(0)
    layer = nn.LSTM(64, 128, 2, bias=bias, proj_size=projected, bidirectional=True).cuda()
    (x,) = data()
    states = [torch.randn(4, 16, size, device="cuda") for size in (projected or 128, 128)]
    leaves = [x.requires_grad_(), *(one.requires_grad_() for one in states), *layer.parameters()]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        out, last = layer(x, tuple(states))
        result = recurrent_network.network("lstm", x, states, layer._flat_weights, bias, 2, 0.0, True, True, False)
        expected = torch.autograd.grad(out.square().sum() + last[1].sum(), leaves)
        mine = torch.autograd.grad(result[0].square().sum() + result[2].sum(), leaves)
    for one, other in zip([*result, *mine], [out, *last, *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_step_is_replayed_and_learns_as_eager_torch_does(kind, dtype, dropout):
    inputs = data(40)
    model = Net(kind, num_layers=2, dropout=dropout).cuda()
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(one.parameters(), 1e-3) for one in (model, eager)]
    step = amp.training_step(model, square, optimizers[0], dtype=dtype, loss_scale=None if dtype == "bf16" else 1024.0)
    mine = torch.stack([step(x) for x in inputs])
    assert step.execution == "as one graph, replayed as a CUDA graph"
    theirs = []
    for x in inputs:
        with torch.autocast("cuda", dtype=TYPES[dtype]):
            loss = square(eager, x)
        optimizers[1].zero_grad()
        (loss * 1024).backward()
        for one in eager.parameters():
            one.grad /= 1024
        optimizers[1].step()
        theirs.append(loss.detach())
    error = (mine - torch.stack(theirs)).abs() / mine.abs().max()
    assert float(error.max()) < (0.2 if dropout else 0.02)
    assert float(mine[-1]) < float(mine[0])


def test_dropout_draws_anew_in_every_replay_and_a_seed_repeats_it():
    model = Net("lstm", num_layers=3, dropout=0.5).cuda()
    step = amp.training_step(model, square, torch.optim.SGD(model.parameters(), 0.0), dtype="bf16")
    (x,) = data()
    for _ in range(5):
        step(x)
    assert step.execution == "as one graph, replayed as a CUDA graph"
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([float(step(x)) for _ in range(6)])
    assert runs[0] == runs[1] and len(set(runs[0])) == 6
