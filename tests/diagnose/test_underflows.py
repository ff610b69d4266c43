"""What becomes zero makes nothing infinite: `find_nonfinite`, `profile` and `tune` find it all the same."""

import re

import numpy as np
import onnx
import pytest
import torch
from onnx_models import info, model, node, scalar
from planted import linear
from torch import nn
from toys import eager_step, sgd_step

import amp_compiler as amp

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
SMALL = 1e-9


class Faint(nn.Module):
    """A loss that is as large as others, the gradients of which are below FP16's least number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = linear(8, 8, seed=1), linear(8, 2, seed=2)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x))).float() * SMALL + 1.0


def imported() -> nn.Module:
    """Such a model from an ONNX file."""
    layers = {"w": linear(8, 8, seed=1), "v": linear(8, 2, seed=2)}
    stored = [scalar(name, one.weight.detach().numpy().T) for name, one in layers.items()]
    nodes = [
        node("MatMul", ["x", "w"], ["h"]),
        node("Tanh", ["h"], ["t"]),
        node("MatMul", ["t", "v"], ["m"]),
        node("Mul", ["m", "s"], ["n"]),
        node("Mul", ["n", "s"], ["o"]),
        node("Add", ["o", "b"], ["y"]),
    ]
    stored += [scalar("s", np.full(2, 1e-4)), scalar("b", np.ones(2))]
    source = model(nodes, [info("x", 4, 8)], [info("y", 4, 2)], stored)
    return amp.onnx_to_fx(source, trainable=lambda name, tensor: name in layers)


def mean(model, x):
    return model(x).float().mean()


def step_of(model, **options):
    return eager_step(model, mean, torch.optim.AdamW(model.parameters(), 1e-3), dtype="fp16", **options)


@pytest.mark.parametrize("make", [Faint, imported], ids=["FX", "ONNX"])
def test_a_gradient_that_underflows_is_named_and_its_rule_or_a_scale_fixes_it(make, tmp_path):
    model = make()
    names = tuple(name for name, _ in model.named_parameters())
    report = amp.find_nonfinite(step_of(model, loss_scale=None), X)
    assert report and not report.parameters and set(report.zeros) == set(names)
    first = report.nodes[0]
    assert first.phase == "backward" and first.output.dtype == "fp16" and first.output.is_zero
    assert all(one.greatest > 0 for _, one in first.inputs)
    assert str(report).startswith(f"zero, and not so in FP32: the gradients of {report.zeros[0]}")

    rules = tmp_path / "rules.yaml"
    rules.write_text(report.rule)
    model = make()
    step = step_of(model, loss_scale=None, rules=rules)
    assert not amp.find_nonfinite(step, X)
    step(X)
    plain = make()
    plain(X).float().mean().backward()
    for name, parameter in plain.named_parameters():
        assert (step.gradients()[name] - parameter.grad).norm() < 1e-2 * parameter.grad.norm()

    scale = float(re.search(r"a loss scale of (\S+) fixes it too", report.cure).group(1))
    assert not amp.find_nonfinite(step_of(make(), loss_scale=scale), X)


def test_a_loss_scale_is_advised_that_keeps_the_gradients_not_some_of_them():
    sizes = torch.logspace(-46, -26, 64, base=2)  # with a scale of 16 a few of FP16's numbers are not zero
    model = linear(64, 64, seed=1)

    def step_with(scale, loss_of=lambda y: (y.float() * sizes).sum()):
        return sgd_step(model, lambda model, x: loss_of(model(x)), 0.0, dtype="fp16", loss_scale=scale)

    x = torch.ones(1, 64)
    cure = amp.find_nonfinite(step_with(None), x).cure
    scale, left = re.search(r"a loss scale of (\S+) fixes it too, and leaves (\S+)% of the gradients", cure).groups()
    step = step_with(float(scale))
    step(x)
    gradients = step.gradients()
    lost = np.concatenate([(one == 0).numpy().ravel() for one in gradients.values()]).mean()
    assert round(float(lost), 4) == float(left) / 100 <= 1e-3 and float(scale) < 2.0**26

    # A lower scale, with which all is finite, is none where it loses what FP32 has.
    both = torch.cat([torch.full((32,), 2.0**-40), torch.full((32,), 2.0**3)])
    report = amp.find_nonfinite(step_with(2.0**16, lambda y: (y.float() * both).sum()), x)
    assert report.parameters and "fixes it too" not in report.cure


def test_gradients_that_are_zero_in_fp32_too_are_nobodys_fault():
    model = nn.Sequential(linear(8, 8, seed=1), nn.ReLU(), linear(8, 2, seed=2))
    nn.init.constant_(model[0].bias, -1e3)  # no unit is ever active
    assert not amp.find_nonfinite(step_of(model, loss_scale=None), X)


def test_a_gradient_that_underflows_only_in_the_backward():
    step = step_of(Faint(), loss_scale=None)
    profile = amp.profile(step, [X])
    assert all(row.stored.zeros == row.stored.total for row in profile.of("weight gradient") if "inner" in row.name)
    rows = [row for row in profile.of("activation gradient") if row.dtype == "fp16"]
    assert rows and all(row.stored.zeros == row.stored.total for row in rows)

    result = amp.tune(step_of(Faint(), loss_scale=None), [X])
    assert {node.module for node in result.nodes} == {"inner", "head"} and result.worst_before.startswith("the grad")
    scaled = step_of(Faint(), loss_scale=2.0**28)
    assert not amp.tune(scaled, [X]).nodes  # a loss scale fixes it too


def test_a_second_moment_below_the_range_of_fp16_is_kept_in_fp32():
    model = Faint()
    step = step_of(model, loss_scale=2.0**20)
    assert not amp.find_nonfinite(step, X)
    step(X)
    moments = [state["exp_avg_sq"] for state in step._optimizers[0].state.values()]
    assert moments and all(one.dtype is torch.float32 for one in moments)
    numbers = torch.cat([one.flatten() for one in moments])
    numbers = numbers[numbers != 0]
    assert numbers.numel() and bool((numbers.half() == 0).all())  # none of which FP16 would hold
    rows = amp.profile(step, [X]).of("weight gradient")
    assert all(2 * row.histogram.highest < -24 for row in rows if row.histogram.highest is not None)


@pytest.mark.parametrize("name", ["Adagrad", "RMSprop"])
def test_state_of_16_bit_parameters_is_fp32_whoever_makes_it(name):
    """Adagrad's constructor makes its sum of squares in the type of the parameter: in FP16 it stayed zero."""
    x = X * 1e-3

    def trained(model, **options):
        optimizer = getattr(torch.optim, name)(model.parameters(), 1e-3)
        step = eager_step(model, lambda model, x: mean(model, x) * 1e-3, optimizer, **options)
        for _ in range(3):
            step(x.to(model.weight.dtype))
        return optimizer.state[model.weight], model

    state, low = trained(linear(8, 2, seed=1).half(), dtype="fp16", loss_scale=2.0**16)
    assert all(one.dtype is torch.float32 for one in state.values())
    assert any(bool((one != 0).any() and (one.half() == 0).all()) for one in state.values() if one.shape == (2, 8))
    exact = linear(8, 2, seed=1)
    with torch.no_grad():
        exact.weight.copy_(exact.weight.half())
    before = exact.weight.detach().clone()
    _, exact = trained(exact, enabled=False)
    moved, wanted = state["master"] - before, exact.weight.detach() - before
    assert (moved - wanted).norm() < 1e-2 * wanted.norm() and torch.equal(low.weight, state["master"].half())


def test_narrowed_state_of_a_traced_optimizer_is_refused():
    model = linear(8, 2, seed=1).half()
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-3)
    optimizer.state[model.weight] = {"step": torch.tensor(3.0), "square_avg": torch.zeros_like(model.weight)}
    step = eager_step(model, mean, optimizer, dtype="fp16")
    with pytest.raises(amp.AmpError, match=r"optimizer\.state holds 'square_avg' in float16"):
        step(X.half())


def faint_file() -> onnx.ModelProto:
    """Numbers made too small for FP16, and large again."""
    nodes = [
        node("Tanh", ["x"], ["t"], "tanh"),
        node("Mul", ["t", "small"], ["s"], "down"),
        node("Mul", ["s", "small"], ["u"], "further"),
        node("Mul", ["u", "large"], ["v"], "up"),
        node("Mul", ["v", "large"], ["y"], "last"),
    ]
    return model(nodes, [info("x", 4, 8)], [info("y", 4, 8)], [scalar("small", 1e-4), scalar("large", 1e4)])


def test_an_underflow_in_a_file():
    batch = {"x": X.numpy()}
    low = {"match": {"op": ["onnx.Mul", "onnx.Tanh"]}, "precision": "low"}  # casts around them cost more than they save
    rules = {"version": 1, "extends": "default", "rules": [low]}
    report = amp.find_nonfinite(faint_file(), batch, rules=rules, dtype="fp16")
    assert not report and "counted by amp.profile" in str(report)
    result = amp.tune(faint_file(), [batch], rules=rules)
    assert result.before >= 1.0 and result.error <= result.tolerance
    assert {"further", "up"} <= {one.name for one in result.nodes}
    assert any("becomes zero" in one.detail for one in result.nodes)
