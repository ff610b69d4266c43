"""`amp.compile`: a drop-in module, forward and backward, train and eval, as one graph or with graph breaks."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import relative as error
from toys import small

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


def test_weights_are_cast_once_in_eval():
    model = pair(backend="eager")[1].eval()
    with torch.no_grad():
        model(X)
    names = [n.name for n in model.graph_module.graph.find_nodes(op="placeholder")]
    assert sum("_kept_" in name for name in names) == 4  # weight and bias of the convolution and of the linear


def test_training_loops_work_unchanged():
    torch.manual_seed(0)
    model = amp.compile(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)), dtype="bf16", backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(64, 8)
    y = x[:, :1] * 2 - x[:, 1:2]
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_dynamic_shapes_capture_once(backend):
    model = amp.compile(small(), dtype="bf16", backend=backend, dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    for size in (4, 7, 9):
        x = torch.randn(size, 8)
        assert error(model(x), model.original(x)) < BF16_ERROR
        model(x).sum().backward()
    assert model.compilations == 1


def test_a_model_that_nobody_can_take_is_named_with_its_line():
    class Broken(nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x.reshape(3, 1000)

    with pytest.raises(amp.CaptureError, match=r"test_compile\.py:\d+: Broken raises RuntimeError.*3, 1000.*; the"):
        amp.compile(Broken(), dtype="bf16", backend="eager")(X)


def test_wrong_options_are_refused_at_once():
    for option, text in (("dtype", "use 'fp16', 'bf16' or 'auto'"), ("backend", "use one of"), ("rules", "default")):
        with pytest.raises(amp.AmpError, match=text):
            amp.compile(Net(), **{option: "defualt"})


def test_without_mixed_precision_the_model_runs_as_it_is():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4))
    off = amp.compile(model, dtype="bf16", enabled=False)
    x = torch.randn(3, 8)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert torch.equal(off(x), expected) and off.execution == "as it is written: enabled=False"
    assert off.compilations == 0 and copy.deepcopy(off).settings.enabled is False
    with pytest.raises(amp.AmpError, match="leave enabled at True"):
        off.plan  # noqa: B018
    with pytest.raises(amp.AmpError, match="pass True or False"):
        amp.compile(model, enabled="no")


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (nn.Module.half, 1),
        (nn.Module.bfloat16, 0),
        (lambda model: model, 0),
        (lambda model: model.half().requires_grad_(False), 0),
        (lambda model: model.half().eval(), 0),
    ],
    ids=["fp16", "bf16", "fp32", "frozen", "eval"],
)
def test_fp16_parameters_that_are_trained_without_masters_are_told_once(prepare, message, caplog):
    model = amp.compile(prepare(nn.Linear(8, 4)), dtype="fp16", backend="eager")
    for _ in range(2):
        model(torch.randn(2, 8).to(model.weight.dtype))
    said = [one.getMessage() for one in caplog.records if "FP32 master" in one.getMessage()]
    assert len(said) == message and all("amp.training_step" in one and "'weight'" in one for one in said)


# ---- products whose left operand is not contiguous: of two matrices, not of a batch of them

TURNED = torch.randn(5, 6, 32, generator=torch.Generator().manual_seed(0))
BATCHED = {"aten::bmm", "aten::baddbmm", "aten::matmul"}


class Products(nn.Module):
    """A product with a matrix of what is turned, and one of a matrix with itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.bias = nn.Linear(32, 16), nn.Parameter(torch.randn(6))

    def forward(self, x, y):
        return x.transpose(0, 1) @ self.head.weight.t(), y @ y + self.bias


def result_and_calls(backend):
    """Of the second call."""
    compiled = amp.compile(Products(), dtype="bf16", backend=backend)
    with torch.no_grad():
        compiled(TURNED, TURNED[0, :, :6])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            result = compiled(TURNED, TURNED[0, :, :6])
    return result, {event.key for event in profile.key_averages()}


@pytest.mark.compiles
def test_a_product_with_a_matrix_is_no_batch_of_products_and_both_operands_may_be_the_same():
    (mine, calls), (theirs, others) = (result_and_calls(backend) for backend in ("inductor", "eager"))
    assert not BATCHED & calls and any("mm" in call or "linear" in call for call in calls)
    assert "aten::bmm" in others  # what torch makes of it
    for one, other in zip(mine, theirs, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype == torch.float32
        # Both round to BF16: at most a number or two apart, of the largest where terms cancel.
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-8 * float(other.abs().max()))


def test_what_must_round_runs_node_by_node_where_inductor_leaves_out_casts(monkeypatch, caplog):
    """As before torch 2.13."""
    monkeypatch.setattr("amp_compiler.forward.program.rounds_each_cast", lambda: False)
    rules = {"version": 1, "rules": [{"match": {}, "precision": "low", "math": "fp32"}]}
    layer, x = nn.GELU(), torch.linspace(-2, 2, 8)
    with caplog.at_level("INFO"):
        result = amp.compile(layer, rules=rules, dtype="bf16")(x)
    assert "node by node, not compiled: before torch 2.13" in caplog.text
    assert torch.equal(result, amp.compile(layer, rules=rules, dtype="bf16", backend="eager")(x))
