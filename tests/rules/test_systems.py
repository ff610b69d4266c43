"""What a preset does to a model, against what the system does to it that the preset is named after."""

import copy
import re

import pytest
import torch
from torch.nn import functional as F
from toys import sgd_step

import amp_compiler as amp
from amp_compiler.errors import RuleError

BF16 = torch.bfloat16


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def halved(model: torch.nn.Module, *, keep_batchnorm_fp32: bool) -> torch.nn.Module:
    """What Apex makes of a model under O2 and O3, without the cast of its outputs."""
    half = copy.deepcopy(model).to(BF16)
    if keep_batchnorm_fp32:
        for module in half.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.float()
    return half


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> float:
    """The largest difference between parameters and buffers."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((mine.float() - theirs.float()).abs().max()) for mine, theirs in pairs)


BATCH_NORM = [("apex-o2", None, True), ("apex-o2", False, False), ("apex-o3", None, False), ("apex-o3", True, True)]


def rules_of(preset: str, keep: bool | None) -> object:
    return preset if keep is None else {"version": 1, "extends": preset, "keep": {"batch_norm": keep}}


@pytest.mark.parametrize(("preset", "keep", "fp32"), BATCH_NORM)
def test_apex_halves_a_model_with_or_without_its_batch_norms(preset, keep, fp32):
    """Results as those of a model after `.half()`, to the bit, 16-bit statistics too; an evaluation changes none."""
    model = net()
    expected = halved(model, keep_batchnorm_fp32=fp32)
    compiled = amp.compile(model, rules=rules_of(preset, keep), dtype="bf16", backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(X), expected(X.to(BF16)).float())
    for name in ("running_mean", "running_var"):
        # In FP32 the statistics of upcast data and those of the mixed kernel differ in the order of their sums.
        result, wanted = getattr(model[1], name), getattr(expected[1], name).float()
        assert torch.allclose(result, wanted, rtol=1e-6 if fp32 else 0.0, atol=0.0)
    before = model[1].running_var.clone()
    with torch.no_grad():
        assert torch.equal(compiled.eval()(X), expected.eval()(X.to(BF16)).float())
    assert torch.equal(model[1].running_var, before)


@pytest.mark.parametrize(("preset", "keep", "fp32"), BATCH_NORM)
def test_apex_trains_what_it_has_halved(preset, keep, fp32):
    """O3 updates 16-bit weights, O2 the FP32 masters of them; the loss is computed of FP32 outputs."""
    model, masters = net(), net()
    step = sgd_step(model, lambda model, x: (model(x) ** 2).mean(), rules=rules_of(preset, keep), loss_scale=None)
    expected = halved(masters, keep_batchnorm_fp32=fp32)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = (expected(X.to(BF16)).float() ** 2).mean()
        loss.backward()
        # The step's loss is that of the first forward to the bit; later ones differ by the rounding of gradients.
        assert abs(float(step(X) - loss.detach())) <= 2**-7 * float(loss.detach())
        if preset == "apex-o3":
            optimizer.step()
            continue
        with torch.no_grad():
            for master, low in zip(masters.parameters(), expected.parameters(), strict=True):
                master -= 0.1 * low.grad.float()
                low.copy_(master)
    low = {name for name, value in model.state_dict().items() if value.dtype is BF16}
    weights = {"0.weight", "0.bias"} | (set() if fp32 else {"1.weight", "1.bias"})
    assert low == (weights if preset == "apex-o3" else set())
    # Two roundings of a weight near one, and of its gradient, in each of three updates.
    assert same_state(model, expected) <= 3 * 2**-8


NORMS = {
    "layer": torch.nn.LayerNorm([4, 4, 4]),
    "group": torch.nn.GroupNorm(2, 4),
    "instance": torch.nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "rms": torch.nn.RMSNorm([4, 4, 4]),
}


@pytest.mark.parametrize("preset", ["apex-o2", "apex-o3", "deepspeed"])
@pytest.mark.parametrize("norm", NORMS)
def test_other_norms_are_halved_with_their_parameters(norm, preset):
    """Apex keeps batch norms alone, DeepSpeed nothing: to the bit, and otherwise where a rule file keeps them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), copy.deepcopy(NORMS[norm]))
    for parameter in model[1].parameters():
        torch.nn.init.normal_(parameter, 1.0, 0.3)
    kept, expected = copy.deepcopy(model), halved(model, keep_batchnorm_fp32=True)
    result = amp.compile(model, rules=preset, dtype="bf16", backend="eager")(X)
    assert torch.equal(result.float(), expected(X.to(BF16)).float())
    for mine, theirs in zip(model.buffers(), expected.buffers(), strict=True):
        assert torch.equal(mine.float(), theirs.float())
    rules = {"version": 1, "extends": preset, "keep": {"normalization": True}}
    assert not torch.equal(amp.compile(kept, rules=rules, dtype="bf16", backend="eager")(X), result)


@pytest.mark.parametrize("norm", NORMS)
def test_apex_o3_trains_the_parameters_of_every_norm_in_16_bits(norm):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), copy.deepcopy(NORMS[norm]))
    step = sgd_step(model, lambda m, x: (m(x) - 1).square().mean(), rules="apex-o3")
    assert step(X).isfinite() and {value.dtype for value in model.parameters()} == {BF16}


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_16_bit_statistics_are_written_by_a_step_and_kept_by_one_that_is_skipped(backend):
    model, expected = net(), halved(net(), keep_batchnorm_fp32=False)
    step = sgd_step(model, lambda model, x: (model(x) ** 2).mean(), rules="apex-o3", backend=backend)
    step(X)
    expected(X.to(BF16))
    # Inductor rounds elsewhere within its decomposition, to a neighbour among the 16-bit numbers.
    tolerance = 0.0 if backend == "eager" else 2**-7
    assert torch.allclose(model[1].running_var, expected[1].running_var.float(), rtol=tolerance, atol=0.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(X / 0.0)
    assert int(step.skipped_steps) == 1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("preset", ["apex-o2", "apex-o3"])
@pytest.mark.parametrize("loss_fn", [lambda m, x, y: ((m(x) - y) ** 2).mean(), lambda m, x, y: (m(x) - y).exp().sum()])
def test_any_hand_written_loss_sees_fp32(preset, loss_fn):
    """Beyond 256 a square is infinite in FP16, and beyond 11 an exponential."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    x, y = torch.randn(2, 8), torch.full((2, 4), -20.0 if "exp" in loss_fn.__code__.co_names else -400.0)
    step = sgd_step(model, loss_fn, 0.0, rules=preset, dtype="fp16", loss_scale=None)
    expected = loss_fn(copy.deepcopy(model), x, y).detach()
    assert float((step(x, y) - expected) / expected).__abs__() < 1e-2
    outside = [node for node in step.plan.nodes if node.module == "<loss_fn>"]
    assert outside and {node.precision for node in outside} == {"fp32"}
    assert [node.precision for node in step.plan.nodes if node.op == "aten.linear"] == ["low"]


def test_apex_o0_is_plain_fp32():
    plain, model = net(), net()
    step = sgd_step(model, lambda model, x: model(x).sum(), rules="apex-o0", dtype="fp16", loss_scale=None)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss = plain(X).sum()
    loss.backward()
    optimizer.step()
    assert torch.equal(step(X), loss.detach())
    assert step.plan.casts == () or not step.plan.cast_bytes
    assert same_state(model, plain) <= 1e-6


def precisions(
    model: torch.nn.Module, *inputs: torch.Tensor, rules: object, device: str = "cpu"
) -> list[tuple[str, str]]:
    plan = amp.explain(model, inputs, rules=rules, dtype="fp16", device=device)
    return [(node.op.removeprefix("aten."), node.precision) for node in plan.nodes]


class WrittenOut(torch.nn.Module):
    """Functions that torch makes of several ops: Apex casts what they are given."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3)

    def forward(self, x, y):
        normed = F.local_response_norm(self.conv(x), 3)
        return F.multilabel_soft_margin_loss(self.conv(x).mean((2, 3)), y) + normed.mean()


def test_apex_o1_has_functions_that_torch_writes_out_in_fp32():
    result = precisions(WrittenOut(), X, torch.ones(2, 8), rules="apex-o1")
    low = [op for op, precision in result if precision == "low"]
    assert low == ["conv2d", "conv2d", "mean"]
    assert ("mul", "fp32") in result and ("log_sigmoid", "fp32") in result


class Products(torch.nn.Module):
    def forward(self, x, w):
        return torch.einsum("ab,bc->ac", x, w) + torch.tensordot(x, w, 1) + torch.inner(x, w) + F.gelu(x @ w)


def test_apex_o1_leaves_einsum_tensordot_and_inner_in_the_type_of_their_inputs():
    result = dict(precisions(Products(), torch.randn(4, 4), torch.randn(4, 4), rules="apex-o1"))
    assert result["matmul"] == "low"
    assert {result[op] for op in ("einsum", "tensordot", "inner", "gelu")} == {"fp32"}


class Probabilities(torch.nn.Module):
    """A loss of probabilities, within autocast or out of it."""

    def __init__(self, safe: bool = False):
        super().__init__()
        self.layer, self.safe = torch.nn.Linear(8, 4), safe

    def forward(self, x, y):
        probabilities = torch.sigmoid(self.layer(x))
        if not self.safe:
            return F.binary_cross_entropy(probabilities, y)
        with torch.autocast(x.device.type, enabled=False):
            return F.binary_cross_entropy(probabilities.float(), y)


BATCH = (torch.randn(2, 8), torch.rand(2, 4))


def hint_of_torch() -> str:
    """What torch.autocast says on CUDA, asked of its dispatcher without a device."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    with pytest.raises(RuntimeError) as caught:
        torch.ops.aten.binary_cross_entropy.default.redispatch(keys, BATCH[1], BATCH[1])
    return str(caught.value)


def test_torch_amp_refuses_binary_cross_entropy_with_the_hint_of_torch():
    with pytest.raises(RuleError) as caught:
        amp.explain(Probabilities(), BATCH, rules="torch-amp", dtype="fp16", device="cuda")
    message = str(caught.value)
    named = set(
        re.findall(r"torch\.nn[\w.]*binary_cross_entropy_with_logits|torch\.nn\.BCEWithLogitsLoss", hint_of_torch())
    )
    assert len(named) == 2
    assert all(name in message for name in named)
    assert "torch-amp.yaml" in message and "test_systems.py" in message and "aten.binary_cross_entropy" in message


def test_torch_amp_takes_it_where_autocast_does():
    """In a region without autocast; on a CPU, whose autocast runs it in FP32; and where a user's rule says how."""
    lifted = {
        "version": 1,
        "extends": "torch-amp",
        "rules": [{"match": {"op": "aten.binary_cross_entropy"}, "precision": "fp32"}],
    }
    for model, rules, device in (
        (Probabilities(safe=True), "torch-amp", "cpu"),
        (Probabilities(), "torch-amp", "cpu"),
        (Probabilities(), lifted, "cuda"),
    ):
        assert ("binary_cross_entropy", "fp32") in precisions(model, *BATCH, rules=rules, device=device)


class Regions(torch.nn.Module):
    """Layers under autocast, beneath which it is off for one, and operands of two types that meet."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (torch.nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        low = self.one(x)
        with torch.autocast("cpu", enabled=False):
            wide = self.two(low.float())
        return torch.cat([low + wide, self.three(low)]).softmax(-1)


def test_torch_amp_gives_what_autocast_gives():
    torch.manual_seed(0)
    model, x = Regions(), torch.randn(4, 8)
    compiled = amp.compile(model, rules="torch-amp", dtype="bf16", backend="eager")
    with torch.autocast("cpu", BF16):
        expected = model(x)
    assert torch.equal(compiled(x), expected.float())
    grads = torch.autograd.grad(compiled(x).sum(), list(model.parameters()))
    with torch.autocast("cpu", BF16):
        wanted = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(torch.allclose(one, two, rtol=2**-6, atol=1e-6) for one, two in zip(grads, wanted, strict=True))


def test_tensorflow_with_cudnn_8_has_depthwise_convolutions_low():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 4, 3, groups=4), torch.nn.Conv2d(4, 2, 1))
    since = {"version": 1, "extends": "tensorflow", "rules": [{"match": {"depthwise": True}, "precision": "low"}]}
    for rules, wanted in (("tensorflow", ["low", "keep", "low"]), (since, ["low"] * 3)):
        plan = amp.explain(model, (X,), rules=rules, dtype="fp16")
        assert [node.precision for node in plan.nodes if node.op == "aten.conv2d"] == wanted
