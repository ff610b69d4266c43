"""How `amp.training_step` holds the parameters: FP32 masters of 16-bit models, and 16-bit weights without masters."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toys import Composed, classes, eager_step
from training_weights import (
    GENERATOR,
    LOW,
    OPTIMIZERS,
    XB,
    Line,
    X,
    Y,
    everything,
    linear_loss,
    net,
    rules,
    same,
)

import amp_compiler as amp
from amp_compiler.training.state import LowWeights

# ---- 16-bit weights without masters


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_fp16_storage_is_nvcaffes_to_the_bit(decay):
    torch.manual_seed(1)
    model = Line(16, 33)
    batches = torch.randn(20, 16, 33).half()
    weight, momentum = model.w.detach().half().numpy(), np.zeros((16, 33), np.float16)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=decay)
    step = eager_step(model, linear_loss, optimizer, rules=rules(extends="nvcaffe"), dtype="fp16", loss_scale=512.0)
    rate, m, l2 = np.float32(0.05), np.float32(0.9), np.float32(decay)
    for x in batches:
        step(x.float())
        dw = x.numpy().astype(np.float32)
        if decay:  # products are exact in float64, so this is one rounding, as of a fused multiply-add
            dw = (dw.astype(np.float64) + np.float64(l2) * weight.astype(np.float64)).astype(np.float32)
        momentum = (m * momentum.astype(np.float32) + dw).astype(np.float16)  # G = m*G + dW
        moved = weight.astype(np.float64) - np.float64(rate) * momentum.astype(np.float64)
        weight = moved.astype(np.float32).astype(np.float16)  # W = half(float(W) - lr*float(G))
        assert model.w.dtype is torch.float16 and np.array_equal(model.w.detach().numpy(), weight)
        kept = optimizer.state[model.w]["momentum_buffer"]
        assert kept.dtype is torch.float16 and np.array_equal(kept.numpy(), momentum)
    assert set(optimizer.state[model.w]) == {"momentum_buffer"}


def test_what_the_plan_reads_in_the_low_type_is_converted_in_place_and_nothing_else():
    model = net()
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = eager_step(model, classes, optimizer, rules=rules(), dtype="fp16")
    step(X * float("inf"), Y)  # nothing is updated
    for name, parameter in model.named_parameters():
        wanted = torch.float32 if name.startswith("norm") else torch.float16
        assert parameter.dtype is wanted and id(parameter) == before[name][0]
        assert torch.equal(parameter, before[name][1].to(wanted))
    step(X, Y)
    moments = [optimizer.state[p][k] for p in model.parameters() for k in ("exp_avg", "exp_avg_sq")]
    assert all(moment.dtype is torch.float32 for moment in moments)
    assert step._state.low_weights._copies == {} and len(step._choice.programs) == 1
    targets = {str(node.target) for node in step.graph_module.graph.nodes}
    assert {"amp_compiler.adam_update_low.default", "amp_compiler.adam_update.default"} <= targets
    before_norm = model.norm.weight.detach().clone()
    step(X, Y)
    assert not torch.equal(before_norm, model.norm.weight)


def test_batch_norm_statistics_stay_fp32_under_nvcaffe():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    step = eager_step(model, classes, rules=rules(extends="nvcaffe"), dtype="fp16", loss_scale=64.0)
    assert bool(step(torch.randn(8, 1, 8, 8, generator=GENERATOR), Y[:8] % 3).isfinite())
    types = {name: value.dtype for name, value in model.state_dict().items()}
    assert types["0.weight"] is types["4.bias"] is torch.float16 and bool(model[1].running_mean.any())
    # batch norm's kernels take FP32 parameters, whatever the data
    assert types["1.running_mean"] is types["1.weight"] is torch.float32


@pytest.mark.parametrize(("rounding", "name"), [("nearest", "adamw"), ("stochastic", "sgd"), ("kahan", "adamw")])
def test_tiny_updates_stall_to_nearest_and_move_otherwise(rounding, name):
    count, steps, rate = 4096, 200, 1e-4
    model = Line(count, value=1.25)
    plain = torch.full((count,), 1.25)
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}  # a constant gradient moves Adam by its learning rate
    optimizer = kinds[name](model.parameters(), rate, weight_decay=0.0)
    step = eager_step(model, linear_loss, optimizer, rules=rules(rounding, "nvcaffe"))
    for _ in range(steps):
        step(torch.full((count,), -1.0))
        plain += rate
    weight = model.w.detach().float()
    assert model.w.dtype is torch.bfloat16
    if rounding == "nearest":
        assert torch.equal(weight, torch.full((count,), 1.25))
    elif rounding == "stochastic":
        assert abs(float(weight.mean() - plain.mean())) < 1e-3
    else:
        error = optimizer.state[model.w]["compensation"]
        assert error.dtype is torch.bfloat16
        # A compensation below 2**-8 has a spacing of 2**-16 at most: half of that is lost at each step.
        assert float((weight + error.float() - plain).abs().max()) < steps * 2.0**-17 < 0.1 * steps * rate
        assert torch.equal((weight + error.float()).bfloat16().float(), weight)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["momentum", pytest.param("adamw", marks=pytest.mark.slow)])
def test_a_compiled_update_keeps_the_errors_of_kahans_summation(name):
    """Compiled code may leave out a rounding, of which there would be no error left to keep."""
    result = []
    for backend in ("eager", "inductor"):
        model = nn.Linear(64, 1, bias=False).bfloat16()
        nn.init.constant_(model.weight, 256.0)
        optimizer = OPTIMIZERS[name](model.parameters())
        step = eager_step(model, lambda m, x: -m(x).sum(), optimizer, rules=rules("kahan"), backend=backend)
        for _ in range(5):
            step(torch.full((1, 64), 0.5).bfloat16())
        result.append((model.weight.detach(), optimizer.state[model.weight]["compensation"]))
    for eager, compiled in zip(*result, strict=True):
        assert eager.any() and torch.equal(eager, compiled)


# ---- models that come in as fp16 or bf16


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("momentum", "fp16"), ("nesterov", "bf16"), ("adamw", "fp16"), ("amsgrad", "bf16"), ("rmsprop", "fp16")],
)
def test_a_16_bit_model_with_masters_is_the_fp32_model(dtype, name):
    x = XB if dtype == "bf16" else X
    # In BF16 on a CPU the norm of a 16-bit model runs in 16 bits, as under autocast; that of an FP32 model does not.
    model = net(norm=dtype == "fp16").to(LOW[dtype])
    reference = copy.deepcopy(model).float()
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](reference.parameters())
    options = {"dtype": dtype, "loss_scale": 65536.0, "clip_norm": 0.5}
    step, other = eager_step(model, classes, optimizer, **options), eager_step(reference, classes, plain, **options)
    for _ in range(8):
        loss, expected = step(x.to(LOW[dtype]), Y), other(x, Y)
        assert loss.dtype is torch.float32 and torch.equal(loss, expected)
        assert torch.equal(step.grad_norm, other.grad_norm)
    assert int(step.skipped_steps) == 0
    for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        state = dict(optimizer.state[parameter])
        master = state.pop("master")
        assert master.dtype is torch.float32 and torch.equal(master, wanted)
        assert parameter.dtype is LOW[dtype] and torch.equal(parameter, wanted.to(LOW[dtype]))
        assert set(state) == set(plain.state[wanted])
        assert all(t.dtype is torch.float32 and torch.equal(t, plain.state[wanted][k]) for k, t in state.items())


@pytest.mark.parametrize("inputs", ["default", rules()])
def test_a_gradient_made_in_fp32_is_not_rounded_for_a_16_bit_parameter(inputs):
    model = net().half()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    step = eager_step(model, classes, optimizer, rules=inputs, dtype="fp16", loss_scale=64.0)
    step(X.half(), Y)
    program, output, _ = step._seen()
    kinds = {name: gradient.dtype for name, gradient in zip(program.report.updated, output.gradients, strict=True)}
    wanted = {n: torch.float32 if n.startswith("norm") else torch.float16 for n, _ in model.named_parameters()}
    assert kinds == wanted


# ---- weights and momentum that outgrow FP16


def outgrowing(backend: str, overflow: dict, lr: float = 0.01, **options):
    """A step whose gradient is its batch, with momentum."""
    model = Line(3, value=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    weights = {"version": 1, "extends": "nvcaffe", "weights": {"master": "low", **overflow}}
    step = eager_step(
        model, linear_loss, optimizer, rules=weights, dtype="fp16", backend=backend, **{"loss_scale": 1.0} | options
    )
    return model, optimizer, step


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_momentum_and_a_weight_that_outgrow_fp16_are_clipped(backend):
    model, optimizer, step = outgrowing(backend, {}, lr=1.0)
    for _ in range(3):
        step(torch.tensor([40000.0, -40000.0, 1.0]))
    momentum = optimizer.state[model.w]["momentum_buffer"]
    assert momentum[:2].tolist() == [65504, -65504] and int(step.skipped_steps) == 0
    assert momentum[2].item() == pytest.approx(2.71, rel=1e-3) and model.w[:2].tolist() == [-65504, 65504]
    for _ in range(5):
        step(torch.zeros(3))
    assert 0 < momentum[0] < 40000  # it comes back


@pytest.mark.parametrize("overflow", ["clip", "skip"])
def test_a_weight_or_a_momentum_that_fp16_cannot_hold_is_stored_where_clipping_is_asked_for(overflow, caplog):
    """As the model has it, and as torch has made it in FP32."""
    model, optimizer, step = outgrowing("eager", {"overflow": overflow}, lr=1.0)
    model.w.data.copy_(torch.tensor([1e5, -2e5, 3.0]))
    optimizer.state[model.w]["momentum_buffer"] = torch.tensor([1e5, -1e5, 0.0])
    if overflow == "skip":
        with pytest.raises(amp.AmpError, match=r"2 of the 3 numbers of 'w' are beyond .*master: fp32"):
            step(torch.zeros(3))
        assert model.w.tolist() == [1e5, -2e5, 3] and model.w.dtype is torch.float32
        return
    assert step(torch.zeros(3)) == 0
    assert optimizer.state[model.w]["momentum_buffer"].tolist() == [58944, -58944, 0]  # 0.9 of 65504
    assert model.w.tolist() == [65504 - 58944, 58944 - 65504, 3] and model.w.dtype is torch.float16
    for name in ("w", "momentum_buffer"):
        assert f"2 of the 3 numbers of '{name}' are beyond what float16 holds" in caplog.text


@pytest.mark.parametrize(
    ("lr", "backend"), [(0.01, "eager"), (1.0, "eager"), pytest.param(1.0, "inductor", marks=pytest.mark.slow)]
)
def test_a_step_that_would_outgrow_fp16_is_skipped_where_the_rules_say_so(lr, backend):
    model, optimizer, step = outgrowing(
        backend, {"overflow": "skip"}, lr, loss_scale=amp.DynamicLossScale(init_scale=1.0)
    )
    grown = torch.tensor([40000.0, -40000.0, 1.0])
    step(grown)
    held = everything(model, optimizer)
    assert int(step.skipped_steps) == 0
    step(grown)
    assert int(step.skipped_steps) == 1 and same(held, everything(model, optimizer))
    assert float(step.loss_scale) == 0.5
    step(-grown)
    assert int(step.skipped_steps) == 1 and not same(held, everything(model, optimizer))


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda weight: weight.float() / weight.float().norm(), "bf16"),
        (lambda weight: (weight / weight.double().norm()).float(), "fp16"),
    ],
)
def test_a_weight_that_the_model_casts_itself_is_trained_by_the_kernels_too(function, dtype, node_by_node):
    torch.manual_seed(0)
    product = lambda m, x: F.linear(F.gelu(m.first(x)), function(m.second.weight))  # noqa: E731
    model = Composed(product, first=nn.Linear(8, 16), second=nn.Linear(16, 4))
    plain = copy.deepcopy(model)
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    steps = [
        eager_step(one, lambda model, x, y: (model(x).float() - y).square().mean(), backend="inductor", **options)
        for one, options in ((model, {"dtype": dtype}), (plain, {"enabled": False}))
    ]
    for _ in range(3):
        torch.testing.assert_close(*(step(x, y) for step in steps), rtol=1e-2, atol=0)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one - other).norm() <= 2e-2 * other.norm()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_copy_lies_as_its_master_and_stays_where_it_is(layout):
    weight = torch.nn.Parameter(torch.randn(6, 5, 3, 3).to(memory_format=layout))
    low_weights = LowWeights()
    copy = low_weights.get(weight, torch.bfloat16)
    assert copy.stride() == weight.stride() and torch.equal(copy, weight.bfloat16())
    with torch.no_grad():
        weight.mul_(3)
    low_weights.follow(weight)
    assert torch.equal(copy, weight.bfloat16()) and low_weights.get(weight, torch.bfloat16) is copy
    weight.data = weight.data.transpose(2, 3)
    after = low_weights.get(weight, torch.bfloat16)  # made anew where its master is laid out anew
    assert after.stride() == weight.stride() and torch.equal(after, weight.bfloat16())
