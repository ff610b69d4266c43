"""What is said where a model cannot be captured: its own cause, the user's line, and a hint that fits."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import assert_three_rows, eager_step

import amp_compiler as amp
from amp_compiler.fx.capture.frontend import Frontend

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Its forward is a function of its first layer's result."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.fc = function, nn.Linear(8, 8)

    def forward(self, x):
        return self.function(self.fc(x))


@torch.library.custom_op("amp_test_errors::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def check(x):
    assert x.abs().sum() > 0
    return x


def repeat(x):
    for _ in range(int(x.abs().sum())):
        x = x + 1
    return x


RECURRENT = nn.GRU(8, 4, batch_first=True)


def packed(x):
    return RECURRENT(nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([4]), batch_first=True))[1]


def one_hot(x):
    return F.one_hot(x.abs().long())


def fake(x):
    return torch.ops.amp_test_errors.opaque(x)


def pointer(x):
    return x + x.data_ptr() % 2


def shapes(x):
    return x @ torch.ones(3, 3)


def own(x):
    raise ValueError("no such thing today")


# What is said, what is not, and the hint.
TABLE = {
    branch: ("branches on the values of a tensor", "use torch.cond"),
    check: ("checks the values of a tensor", "torch._assert_async"),
    repeat: ("repeats something as often as the values", "torch.while_loop"),
    packed: ("needs the values of a tensor as sizes", "do not depend on a tensor"),
    one_hot: ("needs the values of a tensor as Python numbers", "keep them in tensors"),
    fake: ("calls an operator that cannot be traced", "register_fake"),
    pointer: ("leaves torch", "custom_op"),
    shapes: ("raises RuntimeError: a and b must have same reduction dim", "the call or the model is wrong"),
    own: ("raises ValueError: no such thing today", "the call or the model is wrong"),
    assert_three_rows: ("raises AssertionError", "the call or the model is wrong"),
}


@pytest.mark.parametrize("function", TABLE, ids=lambda function: function.__name__)
def test_each_failure_says_its_own_cause_and_fix(function):
    what, hint = TABLE[function]
    line = function.__code__.co_firstlineno
    with pytest.raises(amp.CaptureError) as raised:
        amp.explain(Model(function), X)
    error = raised.value
    assert what in error.what and hint in error.hint
    file, _, number = error.where.rpartition(":")
    assert file.endswith(Path(function.__code__.co_filename).name) and 0 <= int(number) - line <= 2
    assert ("branch" in error.hint) == (function is branch)
    assert "\n" not in str(error)


def in_fp64(x):
    with torch.autocast("cpu", enabled=False):
        return nn.functional.linear(x.double(), torch.ones(4, 8))


MIXED = {
    "fp64": (nn.Linear(8, 4), X.double(), "aten.linear reads float32 and float64"),
    "layer norm": (nn.LayerNorm(8), X.double(), "aten.layer_norm reads float32 and float64"),
    "region": (Model(in_fp64), X, "aten.linear reads float32 and float64"),
    "two inputs": (Model(lambda x: x @ x.double().t()), X, "aten.matmul reads float32 and float64"),
}


@pytest.mark.parametrize("name", MIXED)
def test_types_that_torch_does_not_mix_are_told_with_the_line(name):
    """A capture does not notice; the graph would raise, without a line, when it runs."""
    model, x, said = MIXED[name]
    with pytest.raises(RuntimeError):
        model(x)
    with pytest.raises(amp.AmpError, match=rf"{re.escape(said)}, which torch does not mix; .*x\.float\(\)") as raised:
        amp.compile(model, dtype="bf16", backend="eager")(x)
    assert name != "two inputs" or "test_capture_errors.py" in str(raised.value)
    with pytest.raises(amp.AmpError, match=re.escape(said)):
        eager_step(model, lambda m, x: m(x).mean())(x)


def test_16_bit_data_goes_into_fp32_weights_where_torchs_autocast_takes_it():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
    loss_fn = lambda m, x: m(x).sum()  # noqa: E731
    with torch.autocast("cpu", torch.bfloat16):
        expected = loss_fn(model, X.bfloat16())
    with pytest.raises(amp.AmpError, match=r"aten\.linear reads bfloat16 and float32"):
        eager_step(model, loss_fn, enabled=False)(X.bfloat16())
    torch.testing.assert_close(eager_step(model, loss_fn)(X.bfloat16()), expected.float(), rtol=2e-2, atol=2e-2)


SQUARE = torch.ones(4, 4)


def _penalised(model, x):
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().mean()


def with_backward(model, x, optimizer):
    loss = model(x).square().mean()
    loss.backward()
    return loss


def whole(model, x, optimizer):
    optimizer.zero_grad()
    return with_backward(model, x, optimizer)


def stepped(model, x, optimizer):
    loss = model(x).square().mean()
    optimizer.step()
    return loss


RUNS = {with_backward: "loss.backward()", whole: "optimizer.zero_grad()", stepped: "optimizer.step()"}


@pytest.mark.parametrize("loss_fn", RUNS)
def test_a_loss_that_runs_what_a_step_runs_is_told_to_return_the_loss(loss_fn):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before, model.weight.grad = model.weight.detach().clone(), torch.ones(4, 4)
    with pytest.raises(amp.AmpError, match="return the loss: the step runs backward and update") as caught:
        eager_step(model, lambda model, x: loss_fn(model, x, optimizer), optimizer)(SQUARE)
    assert f"(`{RUNS[loss_fn]}`)" in str(caught.value) and "test_capture_errors.py:" in caught.value.where
    assert torch.equal(model.weight, before) and torch.equal(model.weight.grad, torch.ones(4, 4))


@pytest.mark.parametrize("update", [True, False])
def test_an_update_behind_another_graph_break_is_refused_as_well(update):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def helped(model, x):
        torch._dynamo.graph_break()
        loss = model(x).square().mean()
        torch.compiler.disable(optimizer.step if update else lambda: loss.backward(retain_graph=True))()
        return loss

    before = model.weight.detach().clone()
    with pytest.raises(amp.AmpError, match="return the loss: the step runs backward and update") as caught:
        eager_step(model, helped, optimizer)(SQUARE)
    assert ("calls the step() of its optimizer" if update else "runs a backward itself") in str(caught.value)
    assert torch.equal(model.weight, before)


def test_a_derivative_within_a_loss_is_said_in_the_users_words():
    step = eager_step(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), _penalised)
    step(SQUARE.clone())
    said = str(step.execution)
    assert "takes a derivative itself" in said and "(`x = x.requires_grad_()`)" in said
    assert "test_capture_errors.py:" in said and "dynamo" not in said.lower()


def test_an_assignment_through_a_mask_is_said_in_the_users_words():
    class Masked(nn.Module):
        def forward(self, x):
            x = x.clone()
            x[x > 0] = x[x > 0] * 2
            return x

    model = amp.compile(Masked(), dtype="bf16", backend="eager")
    assert torch.equal(model(SQUARE), 2 * SQUARE)
    said = str(model.execution)
    assert "takes rows by a mask" in said and "(`x[x > 0] = x[x > 0] * 2`)" in said and "torch.where" in said
    assert "_dynamo" not in said and "aten." not in said


def test_a_plain_error_behind_dynamo_is_named():
    def build(graph_module, inputs):
        raise ValueError("no such loop")

    with pytest.raises(amp.CaptureError, match="a graph of X could not be made: ValueError: no such loop"):
        Frontend(lambda x: x + 1, build, "X", whole=True)(SQUARE)


@pytest.mark.parametrize(
    "how", ["the new is written", "the new is returned, and the weight written", "the old is read"]
)
def test_an_exchange_of_memory_that_can_be_told_from_a_copy_is_refused(how):
    class Exchanging(nn.Linear):
        def forward(self, x):
            old, new = self.weight.data, self.weight.data * 0.5
            self.weight.data = new
            if "written" in how:
                (self.weight.data if "returned" in how else new).add_(0.1)
            return super().forward(x), old * 2 if "read" in how else new * 2 if "returned" in how else None

    with pytest.raises(amp.AmpError, match=r"test_capture_errors\.py:\d+: the memory .*weight\.data\.copy_\(new\)"):
        amp.compile(Exchanging(4, 4), dtype="bf16", backend="eager")(torch.randn(2, 4))
