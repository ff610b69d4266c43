"""NVCaffe's numbers inside a real step, against its formulas written out in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn
from toys import eager_step

import amp_compiler as amp

F = np.float32


class Two(nn.Module):
    """Two vectors whose gradients are the two rows of the batch."""

    def __init__(self, values=(0.0, 0.0)):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((2,), float(one))) for one in values)

    def forward(self, x):
        return (self.a * x[0]).sum() + (self.b * x[1]).sum()


def step_of(model, optimizer=None, **options):
    """Of a model whose output is its loss."""
    return eager_step(model, lambda m, x: m(x), optimizer or torch.optim.SGD(model.parameters(), 1.0), **options)


def global_grad_scale(formula, coefficient, gradients):
    """`Net::update_grad_scale` of NVCaffe, behind a step with these unscaled gradients, one of each parameter."""
    if formula == "l2":  # 0.16.5 to 0.17.0
        squares = F(sum(F(np.sum(g.astype(F) ** 2)) for g in gradients))
        return F(np.sqrt(squares)) * F(coefficient) if squares > 0 else F(coefficient)
    result = [np.max(np.abs(g)).astype(F) for g in gradients]  # 0.17.1 to 0.17.4
    largest = max((one for one in result if np.isfinite(one)), default=F(0))
    factor = F(4) / largest if largest > 0 else F(1)
    return factor * F(coefficient)


@pytest.mark.parametrize(("formula", "coefficient"), [("max", 32.0), ("l2", 10.0)])
def test_the_scale_is_what_nvcaffe_makes_of_the_gradients(formula, coefficient):
    rows = [((3.0, 4.0), (0.0, 0.0)), ((0.0, 0.75), (0.0, 0.0)), ((0.0, 0.0), (0.0, 0.0)), ((0.5, -6.0), (0.0, 8.0))]
    model = Two()
    step = step_of(model, loss_scale={"mode": "nvcaffe", "coefficient": coefficient, "formula": formula})
    ran_with = 1.0
    for row in rows:
        batch = torch.tensor(row)
        step(batch)
        assert float(step._last[1].scale) == ran_with
        ran_with = float(step.loss_scale)
        assert ran_with == global_grad_scale(formula, coefficient, [one.numpy() for one in batch])


def test_a_gradient_that_is_not_finite_does_not_count():
    model = Two()
    step = step_of(model, loss_scale=amp.NvcaffeLossScale(coefficient=2.0, patience=2))
    row = torch.tensor([[float("inf"), 1.0], [0.5, 0.25]])
    step(row)
    assert float(step.loss_scale) == global_grad_scale("max", 2.0, [one.numpy() for one in row]) == 16.0
    assert int(step.skipped_steps) == 1 and not model.b.any()  # NVCaffe would have gone on with the infinity
    saved = step.state_dict()
    with pytest.raises(amp.LossScaleError):
        step(row)
    step.load_state_dict(saved)
    assert float(step.loss_scale) == 16.0


# ---- the update


def fused(a, b, c):
    """a * b + c rounded once: a product of two FP32 numbers is exact in FP64."""
    return (a.astype(np.float64) * np.float64(b) + c.astype(np.float64)).astype(F)


def half_clip(values):
    """`float2half_clip`: rounded to half, and the largest finite number where that is infinite."""
    with np.errstate(over="ignore"):
        result = values.astype(np.float16)
    return np.where(np.isinf(result), np.copysign(np.float16(65504), result), result)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01} | options)


def test_the_decay_is_added_to_unscaled_gradients_and_the_rate_stays_out_of_the_momentum():
    """Scaling by K = 1000, which is no power of two: unscaled by 1/K as NVCaffe does, then decay, momentum, rate."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    step = eager_step(model, lambda m, x: m(x).square().mean(), sgd(model), rules="nvcaffe", dtype="fp16")
    optimizer = step._optimizers[0]
    kept = [np.zeros(one.shape, F) for one in model.parameters()]
    for number in range(5):
        before = [one.detach().numpy().copy() for one in model.parameters()]
        step(torch.randn(6, 8))
        assert float(step.loss_scale) == 1000.0
        inverse = F(1 / np.float64(1000.0))
        for place, (parameter, result) in enumerate(zip(model.parameters(), step._last[1].gradients, strict=True)):
            gradient = fused(before[place], F(0.01), result.float().numpy() * inverse)
            kept[place] = gradient if number == 0 else gradient + kept[place] * F(0.9)
            assert np.array_equal(optimizer.state[parameter]["momentum_buffer"].numpy(), kept[place])
            assert np.array_equal(parameter.detach().numpy(), fused(kept[place], -F(0.05), before[place]))


def nvcaffe_code(rates, gradients, kind):
    """`SGDRegUpdateAllAndClear` of NVCaffe's code, where the rate is in the history."""
    narrow = half_clip if kind is np.float16 else (lambda values: values.astype(F))
    weight = history = np.zeros_like(gradients[0], kind)
    for rate, gradient in zip(rates, gradients, strict=True):
        history_wide = F(0.5) * history.astype(F) + F(rate) * gradient
        weight, history = narrow(weight.astype(F) - history_wide), narrow(history_wide)
    return weight


def step_of_ours(rates, gradients, low, rescaled=False, scale=1024.0):
    model = Two()
    optimizer = sgd(model, lr=rates[0], momentum=0.5, weight_decay=0.0)
    weights = {"master": "low"} if low else {}
    rules = {"version": 1, "extends": "nvcaffe", "weights": weights}
    step = step_of(model, optimizer, rules=rules, dtype="fp16", loss_scale=scale)
    for rate, gradient in zip(rates, gradients, strict=True):
        group = optimizer.param_groups[0]
        if rescaled and rate != group["lr"]:
            for state in optimizer.state.values():
                state["momentum_buffer"].mul_(group["lr"] / rate)
        group["lr"] = rate
        step(torch.from_numpy(gradient))
    return torch.stack([model.a, model.b]).detach().numpy()


GRADIENTS = [np.array([[1.5, -3.0], [0.25, 7.0]], F) * F(one) for one in (1.0, 0.5, 2.0, 0.75)]


def test_at_a_constant_rate_both_forms_of_momentum_are_one_and_where_it_changes_by_rescaling_the_buffer():
    rates = [2.0**-4] * 4  # a power of two, so that no product rounds
    assert np.array_equal(step_of_ours(rates, GRADIENTS, low=False), nvcaffe_code(rates, GRADIENTS, F))
    rates = [2.0**-4, 2.0**-4, 2.0**-6, 2.0**-6]
    theirs = nvcaffe_code(rates, GRADIENTS, F)
    assert not np.array_equal(step_of_ours(rates, GRADIENTS, low=False), theirs)
    assert np.array_equal(step_of_ours(rates, GRADIENTS, low=False, rescaled=True), theirs)


def test_in_16_bits_a_small_rate_would_flush_the_momentum():
    rates, gradients = [2.0**-12] * 4, [np.full((2, 2), 2.0**-13, F)] * 4
    assert not nvcaffe_code(rates, gradients, np.float16).any()
    assert (step_of_ours(rates, gradients, low=True) < 0).all()


def test_weights_in_16_bits_are_clipped_as_nvcaffe_clips_them():
    rates, gradients = [16.0], [np.array([[-4092, 4094], [-4096, 2.0**13]], F)]
    theirs = nvcaffe_code(rates, gradients, np.float16)
    assert np.array_equal(theirs, np.array([[65472, -65504], [65504, -65504]], np.float16))
    assert np.array_equal(step_of_ours(rates, gradients, low=True, scale=1.0), theirs)
    # What is infinite already is no matter of storage: such a step is skipped, where NVCaffe would store 65504.
    assert not step_of_ours(rates, [np.full((2, 2), np.inf, F)], low=True).any()


# ---- what torch.optim lacks


class Sag(torch.optim.Optimizer):
    """NVCaffe's SAG, as anyone may write it: the momentum is a running mean."""

    def __init__(self, params, lr, momentum, weight_decay):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                history = self.state[p].setdefault("history", torch.zeros_like(p))
                history.lerp_(p.grad + group["weight_decay"] * p, 1 - group["momentum"])
                p.sub_(group["lr"] * history)


def test_sag_is_an_optimizer_of_ones_own():
    """`SAGRegUpdateAllAndClear`: history = m*history + (1-m)*(g + decay*w), and w -= rate*history."""
    model = Two((1.0, -2.0))
    optimizer = Sag(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    step = step_of(model, optimizer, rules="nvcaffe", dtype="fp16", loss_scale=1024.0)
    weight, history = np.array([[1.0, 1.0], [-2.0, -2.0]], F), np.zeros((2, 2), F)
    for gradient in GRADIENTS:
        step(torch.from_numpy(gradient))
        history = F(0.9) * history + F(0.1) * (gradient + F(0.01) * weight)
        weight = weight - F(0.05) * history
        result = torch.stack([model.a, model.b]).detach().numpy()
        assert np.allclose(result, weight, rtol=8 * np.finfo(F).eps, atol=0)  # some roundings a step


class Larc(torch.optim.Optimizer):
    """NVCaffe's SGD with `larc: true`, `larc_policy: "clip"` and `regularization_type: "WD"`."""

    def __init__(self, params, lr, momentum, weight_decay, eta):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                history = self.state[p].setdefault("history", torch.zeros_like(p))
                own = (1 - group["momentum"]) * group["eta"] * p.norm() / p.grad.norm()
                rate = own.clamp(max=group["lr"])
                history.mul_(group["momentum"]).add_(rate * p.grad)
                p.sub_(history + group["weight_decay"] * rate * p)


def test_wd_and_larc_are_an_optimizer_of_ones_own_which_sees_unscaled_gradients():
    """`SGDWdUpdateAllAndClear` behind `SGDSolver::GetLocalRate`; of one parameter the rate is clipped."""
    model = Two((1.0, -2000.0))
    optimizer = Larc(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01, eta=0.02)
    step = step_of(model, optimizer, rules="nvcaffe", dtype="fp16", loss_scale=1024.0)
    weights, histories = [np.full(2, one, F) for one in (1.0, -2000.0)], [np.zeros(2, F)] * 2
    clipped = set()
    for gradients in GRADIENTS:
        step(torch.from_numpy(gradients))
        for place, gradient in enumerate(gradients):
            own = F(0.1) * F(0.02) * np.linalg.norm(weights[place]) / np.linalg.norm(gradient)
            rate = min(F(0.05), own)
            clipped.add((place, bool(rate < own)))
            histories[place] = F(0.9) * histories[place] + rate * gradient
            weights[place] = weights[place] - (histories[place] + F(0.01) * rate * weights[place])
        result = torch.stack([model.a, model.b]).detach().numpy()
        assert np.allclose(result, np.stack(weights), rtol=16 * np.finfo(F).eps, atol=0)  # some roundings a step
    assert clipped == {(0, False), (1, True)}


@pytest.mark.parametrize("rules", ["nvcaffe", {"version": 1, "extends": "nvcaffe", "weights": {"master": "low"}}])
def test_an_activation_beyond_fp16_is_infinite_and_told(rules):
    """As on a GPU that has FP16 arithmetic: nothing saturates but what is stored in weights."""

    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, 150.0)
    loss_fn = lambda m, x: (m(x) + 30000.0).log().square().sum()  # noqa: E731
    step = eager_step(model, loss_fn, sgd(model, momentum=0.0), rules=rules, dtype="fp16")
    for size, overflows in ((100.0, False), (200.0, True)):  # 150 * 2 * 100 = 30000
        step(torch.full((1, 2), size))
        message = [(node.op, node.output.infinite > 0) for node in step.nonfinite_report().nodes]
        assert message == ([("aten.add", True)] if overflows else []), message
