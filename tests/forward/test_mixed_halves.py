"""Operands that the model itself made of the other 16-bit type: they are cast, as torch.autocast casts them."""

import copy

import pytest
import torch
from torch import nn

import amp_compiler as amp
from amp_compiler.errors import AmpError

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}
OTHER = {"fp16": torch.bfloat16, "bf16": torch.float16}
MODELS = {
    "the data of a layer": lambda layer, x, half: layer(x.to(half)),
    "behind another layer": lambda layer, x, half: layer(layer(x).to(half)),
    "a factor": lambda layer, x, half: torch.mm(layer(x), x.to(half).t()),
    "the summand of a product": lambda layer, x, half: torch.addmm(layer(x).to(half), x, x.t() @ x),
}


class Model(nn.Module):
    """A layer, and what is done with it."""

    def __init__(self, compute, half):
        super().__init__()
        self.layer, self.compute, self.half = nn.Linear(8, 8), compute, half

    def forward(self, x):
        return self.compute(self.layer, x, self.half)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(("name", "trained"), [(name, number % 2 == 0) for number, name in enumerate(MODELS)])
@pytest.mark.usefixtures("bf16_kernels")
def test_it_runs_as_under_autocast(name, dtype, trained):
    torch.manual_seed(0)
    model = Model(MODELS[name], OTHER[dtype])
    x = torch.randn(4, 8)
    result = []
    for run in (model, amp.compile(model, dtype=dtype, backend="eager")):
        inputs = x.clone().requires_grad_(trained)
        with torch.set_grad_enabled(trained), torch.autocast("cpu", LOW[dtype], enabled=run is model):
            y = run(inputs)
        if trained:
            y.float().square().sum().backward()
        result.append([y.detach().float(), *([inputs.grad, model.layer.weight.grad.clone()] if trained else [])])
        model.zero_grad()
    for want, got in zip(*result, strict=True):
        torch.testing.assert_close(got, want, rtol=4 * torch.finfo(LOW[dtype]).eps, atol=1e-6 * want.abs().max().item())


def test_the_plan_shows_the_cast():
    plan = amp.explain(Model(MODELS["a factor"], torch.bfloat16), (torch.ones(4, 8),), dtype="fp16", device="cpu")
    assert [(cast.src, cast.dst) for cast in plan.casts if cast.users and cast.src == "bf16"] == [("bf16", "fp16")]
    assert {node.precision for node in plan.nodes if node.op == "aten.mm"} == {"low"}


def test_a_rule_for_fp32_casts_it_up():
    rules = {"version": 1, "extends": "default", "rules": [{"match": {"op": "aten.mm"}, "precision": "fp32"}]}
    model, x = Model(MODELS["a factor"], torch.bfloat16), torch.randn(4, 8)
    with torch.no_grad():
        got = amp.compile(model, dtype="fp16", rules=rules, backend="eager")(x)
        layer = nn.functional.linear(
            x.half().float(), model.layer.weight.half().float(), model.layer.bias.half().float()
        )
    torch.testing.assert_close(got, layer.half().float() @ x.bfloat16().float().t(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", LOW)
def test_a_result_of_the_other_type_is_refused(dtype):
    """To torch, which traces it without autocast, the product is of the type of its first factor."""
    model = Model(lambda layer, x, half: torch.mm(x.to(half), layer(x).t()), OTHER[dtype])
    with pytest.raises(AmpError, match=r"two 16-bit types.*\.float\(\)"):
        amp.compile(model, dtype=dtype, backend="eager")(torch.ones(4, 8))


def _has_a_shape(*types: torch.dtype) -> bool:
    try:
        torch.bmm(*(torch.empty(1, 1, 1, dtype=one, device="meta") for one in types))
    except RuntimeError:
        return False
    return True


def test_what_torch_cannot_even_trace_runs_under_autocast(caplog):
    """A batched product of two types has no shape for torch from 2.13 on."""
    if _has_a_shape(torch.float16, torch.bfloat16):
        pytest.skip("this torch traces a batched product of two types, which is refused as above")
    model, x = Model(lambda layer, x, half: layer(x)[None] @ x.to(half).t()[None], torch.bfloat16), torch.ones(4, 8)
    result = amp.compile(model, dtype="fp16", backend="eager")(x)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(result, model(x))
    assert "runs under torch.autocast" in caplog.text
    with pytest.raises(AmpError, match=r"test_mixed_halves\.py"):
        amp.explain(model, (x,), dtype="fp16")


@pytest.mark.parametrize("way", ["compile", "step"])
@pytest.mark.parametrize(("rules", "shift"), [("default", 1e5), ("fast", 1.0)])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_running_statistics_of_16_bits_are_rounded_once(norm, rules, shift, way):
    """A constant beyond FP16 makes the data of the norm FP32; `fast` computes a norm of 16 bits in FP32."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(3, 4, 3), norm(4, track_running_stats=True)
    model = nn.Sequential(convolution, norm).to(torch.float16)
    plain, x = copy.deepcopy(model).float(), torch.randn(2, 3, 8, 8).to(torch.float16)

    def run(of, x):
        return of[1](of[0](x) + shift)

    if way == "step":
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        amp.training_step(
            model, lambda m, x: run(m, x).sum(), optimizer, rules=rules, dtype="fp16", loss_scale=1.0, backend="eager"
        )(x)
    else:
        norm.register_forward_pre_hook(lambda _, data: (data[0] + shift,))
        amp.compile(model, rules=rules, dtype="fp16", backend="eager")(x)
    run(plain, x.float())
    for mine, wanted in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine.float(), wanted.float(), rtol=2 * torch.finfo(torch.float16).eps, atol=1e-3)
