"""`amp.compile`: a drop-in module, forward and backward, train and eval, as one graph or with graph breaks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_compiler as amp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 16, 5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x, *, scale=None):
        self.calls += 1
        y = F.relu(self.norm(self.conv(x)), inplace=True).flatten(1)
        y = self.head(y)
        return y if scale is None else {"scaled": y * scale, "raw": (y,)}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    with torch.no_grad():
        return float((actual.double() - expected.double()).norm() / expected.double().norm())


X = torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
BF16_ERROR = 2e-2  # a few roundings of 2**-9 each


def pair(**options) -> tuple[nn.Module, amp.CompiledModule]:
    torch.manual_seed(0)
    model = Net()
    return copy.deepcopy(model), amp.compile(model, dtype="bf16", **options)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_forward_backward_and_buffers(backend):
    reference, model = pair(backend=backend)
    for _ in range(2):
        expected, actual = reference(X), model(X)
        assert actual.dtype == torch.float32
        assert error(actual, expected) < BF16_ERROR
        expected.square().sum().backward()
        actual.square().sum().backward()
    for (name, wanted), got in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert got.grad.dtype == torch.float32
        if name != "conv.bias":  # a bias before a BatchNorm has a gradient of rounding errors only
            assert error(got.grad, wanted.grad) < 2 * BF16_ERROR, name
    assert int(model.calls) == 2
    assert error(model.norm.running_var, reference.norm.running_var) < BF16_ERROR


@pytest.mark.usefixtures("bf16_kernels")
def test_it_really_runs_in_the_low_type():
    _, model = pair(backend="eager")
    model(X)
    dtypes = {n.name: n.meta["val"].dtype for n in model.graph_module.graph.nodes if "conv2d" in n.name}
    assert set(dtypes.values()) == {torch.bfloat16}
    assert model.plan.low_nodes > 0 and model.plan.cast_bytes > 0


def test_parameters_state_dict_and_attributes_are_the_originals():
    original = Net()
    model = amp.compile(original, dtype="bf16", backend="eager")
    assert [id(p) for p in model.parameters()] == [id(p) for p in original.parameters()]
    assert list(model.state_dict()) == list(original.state_dict())
    model.load_state_dict({k: torch.zeros_like(v) for k, v in model.state_dict().items()})
    assert float(original.head.weight.detach().abs().sum()) == 0
    assert model.head is original.head
    model.eval()
    assert not original.training and not model.norm.training and not model.training
    model.extra = 3
    assert original.extra == 3
    assert isinstance(pickle.loads(pickle.dumps(model)), amp.CompiledModule)
    assert copy.deepcopy(model).original is not original


def test_nested_outputs_and_keyword_arguments():
    reference, model = pair(backend="eager")
    expected, actual = reference(X, scale=torch.tensor(2.0)), model(X, scale=torch.tensor(2.0))
    assert set(actual) == {"scaled", "raw"} and isinstance(actual["raw"], tuple)
    assert error(actual["scaled"], expected["scaled"]) < BF16_ERROR


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_kept_weights_follow_every_change_of_a_parameter(backend):
    _, model = pair(backend=backend)
    model.eval()
    with torch.no_grad():
        first = model(X)
        assert torch.equal(model(X), first)
        model.head.bias.add_(1.0)
        second = model(X)
        assert error(second, first + 1) < BF16_ERROR
        model.head.bias = nn.Parameter(model.head.bias - 1.0)
        assert error(model(X), first) < BF16_ERROR
        model.head.bias.data.add_(1.0)
        model.eval()
        assert torch.equal(model(X), second)
    with torch.inference_mode():
        assert torch.equal(model(X), second)


def test_weights_are_cast_once_in_eval():
    _, model = pair(backend="eager")
    model.eval()
    with torch.no_grad():
        model(X)
    names = [n.name for n in model.graph_module.graph.find_nodes(op="placeholder")]
    assert sum("_kept_" in name for name in names) == 4  # weight and bias of the convolution and of the linear


def test_an_ambient_autocast_changes_nothing():
    _, model = pair(backend="eager")
    model.eval()
    expected = model(X)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(X), expected)
        assert torch.is_autocast_enabled("cpu")


def test_training_loops_work_unchanged():
    torch.manual_seed(0)
    model = amp.compile(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), dtype="bf16", backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(64, 8)
    y = x[:, :1] * 2 - x[:, 1:2]
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]


def test_double_backward_in_eager():
    model = amp.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), dtype="bf16", backend="eager")
    x = torch.randn(2, 4, requires_grad=True)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    g.square().sum().backward()
    assert model[0].weight.grad is not None and bool(model[0].weight.grad.abs().sum() > 0)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dynamic_shapes_capture_once(backend):
    model = amp.compile(
        nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
        dtype="bf16",
        backend=backend,
        dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
    )
    reference = copy.deepcopy(model.original)
    for size in (4, 7, 9):
        x = torch.randn(size, 8)
        actual, expected = model(x), reference(x)
        assert error(actual, expected) < BF16_ERROR
        actual.square().mul(x).sum().backward()
        expected.square().mul(x).sum().backward()
    for got, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert error(got.grad, wanted.grad) < 2 * BF16_ERROR
    assert model.compilations == 1


def test_tied_weights_get_one_gradient():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.out = nn.Linear(8, 10, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, ids):
            return self.out(self.embed(ids))

    torch.manual_seed(0)
    model = Tied()
    reference = copy.deepcopy(model)
    compiled = amp.compile(model, dtype="bf16", backend="eager")
    ids = torch.arange(10)
    compiled(ids).square().sum().backward()
    reference(ids).square().sum().backward()
    assert error(model.embed.weight.grad, reference.embed.weight.grad) < BF16_ERROR


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        if y.sum() > 0:
            return self.b(y)
        with torch.autocast("cpu", enabled=False):
            return self.b(y.float()) - 1


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_data_dependent_branch(backend):
    torch.manual_seed(0)
    model = Branches()
    compiled = amp.compile(model, dtype="bf16", backend=backend)
    for sign in (1, -1):
        x = sign * torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        assert error(compiled(x), model(x)) < BF16_ERROR
    compiled(x).sum().backward()
    assert model.a.weight.grad is not None
    assert any(node.precision == "low" and node.op == "aten.linear" for node in compiled.plan.nodes)
    pinned = [node for node in compiled.plan.nodes if "enabled=False" in node.reason]
    assert {node.precision for node in pinned if node.op == "aten.linear"} == {"fp32"}


def test_the_dynamo_entry_point():
    torch.manual_seed(0)
    model = Branches()
    compiled = torch.compile(model, backend="amp_compiler", options={"dtype": "bf16", "backend": "eager"})
    x = torch.randn(4, 8)
    actual = compiled(x)
    assert error(actual, model(x)) < BF16_ERROR and not torch.equal(actual, model(x))


def test_a_model_that_nobody_can_take_is_named_with_its_line():
    class Broken(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            y = x.reshape(3, 1000)
            return y

    with pytest.raises(
        amp.CaptureError, match=r"test_compile\.py:\d+: Broken raises RuntimeError.*3, 1000.*; the call or the model is"
    ):
        amp.compile(Broken(), dtype="bf16", backend="eager")(X)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "fp8"}, "use 'fp16', 'bf16' or 'auto'"),
        ({"backend": "tvm"}, "use one of 'inductor', 'eager'"),
        ({"rules": "defualt"}, "default"),
    ],
)
def test_wrong_options_are_refused_at_once(options, text):
    with pytest.raises(amp.AmpError, match=text):
        amp.compile(Net(), **options)
