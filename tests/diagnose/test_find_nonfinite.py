"""`amp.find_nonfinite` and the rule of a report: planted faults are named, and the rule fixes them in a new step."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from toys import eager_step, sgd_step

import amp_compiler as amp
from amp_compiler.errors import AmpError, LossScaleError
from amp_compiler.ops.loss_scale import DynamicLossScale


def linear(inputs: int, built: int, gain: float = 1.0) -> nn.Linear:
    """Weights between `gain` and twice that, in order, the signs in turns."""
    layer = nn.Linear(inputs, built)
    with torch.no_grad():
        sizes = torch.linspace(gain, 2 * gain, inputs * built).view(built, inputs)
        layer.weight.copy_(sizes * (1 - 2 * (torch.arange(built)[:, None] % 2)))
        layer.bias.zero_()
    return layer


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.head = linear(4, 4, 80.0), linear(4, 4, 80.0), linear(4, 2)

    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        mask = torch.full(scores.shape[-2:], float("-inf")).triu(1)  # an infinity that is put in on purpose
        return self.head((scores + mask).softmax(-1) @ x)


class Variance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = linear(4, 4, 200.0), linear(4, 2)

    def forward(self, x):
        hidden = self.inner(x)
        centred = hidden - hidden.mean(-1, keepdim=True)
        return self.head(centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5))


class Channel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = linear(4, 8), linear(8, 2)
        with torch.no_grad():
            self.up.weight[3].fill_(4e4)  # one channel of eight

    def forward(self, x):
        return self.head(self.up(x) * 1e-3)


class LogSoftmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = linear(4, 4, 3.0), linear(4, 2)

    def forward(self, x):
        return self.head(torch.log(torch.softmax(self.inner(x), -1)) * 0.01)


class Total(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(1, 1)

    def forward(self, x):
        return self.inner(x).sum() * 1e-5


class Steep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = linear(4, 4), linear(4, 2)

    def forward(self, x):
        return self.head(self.inner(x)) * 1e5


X = torch.linspace(0.5, 1.0, 24).view(2, 3, 4)
ONES = torch.ones(1, 100_000, 1)
# Model, batch, what `default` is extended by, op of the node that breaks and its phase, the ops that its rule names.
FAULTS = {
    "attention logits": (Logits, X, {}, "aten.matmul", "forward", {"aten.matmul"}),
    "variance of large numbers": (
        Variance, X, {"allow": ["reduction"]}, "aten.mul", "forward", {"aten.mul", "aten.mean"},
    ),
    "outlier channel": (Channel, X, {}, "aten.linear", "forward", {"aten.linear"}),
    "log of an underflowed softmax": (
        LogSoftmax, X, {"allow": ["aten.softmax", "aten.log"]}, "aten.log", "forward", {"aten.log", "aten.softmax"},
    ),
    "sum of 100,000 terms": (Total, ONES, {"allow": ["aten.sum"]}, "aten.sum", "forward", {"aten.sum"}),
    "overflow in the backward alone": (Steep, X, {}, "aten.mul", "backward", {"aten.linear"}),
}  # fmt: skip


def loss_fn(model, x):
    return model(x).float().square().mean()


def step_of(model: nn.Module, rules, **options) -> amp.TrainingStep:
    return sgd_step(model, loss_fn, 1e-30, rules=rules, **{"dtype": "fp16", "loss_scale": None, **options})


def rule_file(folder: Path, more: dict[str, list[str]]) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "extends": "default", **more}))
    return str(path)


@pytest.mark.sweep(4)  # tests below have the variance and the sum
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_its_rule_fixes_it_in_a_new_step(fault, tmp_path):
    make, x, more, op, phase, named = FAULTS[fault]
    step = step_of(make(), rule_file(tmp_path, more) if more else "default")
    report = amp.find_nonfinite(step, x)
    node = report.nodes[0]
    step(x)
    planned = {one.name: one for one in step.plan.nodes}
    assert report and node.phase == phase and planned[node.planned].op == op
    assert node.output.infinite and Path(__file__).name in node.where

    (tmp_path / "cured.yaml").write_text(report.rule)
    cured = step_of(make(), str(tmp_path / "cured.yaml"))
    assert torch.isfinite(cured(x)) and not cured.nonfinite_report() and not amp.find_nonfinite(cured, x)
    changed = [one for one in cured.plan.nodes if one.precision != planned[one.name].precision]
    decided = [one for one in cured.plan.nodes if "cured.yaml" in one.rule]
    assert {one.op for one in decided} == named and len(changed) <= 4
    assert node.planned in {one.name for one in decided} or phase == "backward"


def test_the_report_of_a_step_that_ran_has_the_same_rule(tmp_path):
    make, x, more, *_ = FAULTS["log of an underflowed softmax"]
    step = step_of(make(), rule_file(tmp_path, more))
    result = amp.find_nonfinite(step, x)
    step(x)
    report = step.nonfinite_report()
    assert report.rule == result.rule != "" and report.cure == result.cure
    assert report.rule in str(report) and report.cure in str(report)
    assert step.nonfinite_report(cure=False).rule == step.nonfinite_report(cure=False).cure == ""


def test_an_overflow_that_leaves_no_trace_is_found():
    make, x, more, *_ = FAULTS["variance of large numbers"]
    step = step_of(make(), {"version": 1, "extends": "default", **more})
    report = amp.find_nonfinite(step, x)
    assert torch.isfinite(step(x)) and not step.nonfinite_report()  # 1 / inf is 0
    assert report.results == report.parameters == () and "finite all the same, and may be wrong" in str(report)
    wrong, right = float(step(x)), float(step_of(make(), "default", enabled=False)(x))
    assert abs(wrong - right) > 0.5 * right
    assert amp.find_nonfinite(make(), x, dtype="fp16", rules={"version": 1, "extends": "default", **more})


class Guarded(nn.Module):
    """An exponential that overflows in FP32 as well where its value is not taken."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear(4, 2)

    def forward(self, x):
        hidden = self.inner(x)
        return torch.where(hidden > 0, hidden, torch.exp(100 * hidden.abs()).reciprocal())


def test_an_overflow_that_fp32_has_too_and_nothing_comes_of_is_none():
    assert not amp.find_nonfinite(Guarded(), X, dtype="fp16")


class Large(nn.Module):
    """What overflows goes through a view and a ReLU to the next product."""

    def __init__(self):
        super().__init__()
        self.up, self.head = linear(4, 4, 4e4), linear(4, 2)

    def forward(self, x):
        return self.head(F.relu(self.up(x).reshape(-1, 4))) * 1e-5


def test_a_rule_names_no_node_that_goes_with_its_neighbours():
    report = amp.find_nonfinite(step_of(Large(), "default"), X)
    matches = [one["match"] for one in yaml.safe_load(report.rule)["rules"]]
    assert matches == [{"module": name, "op": "aten.linear"} for name in ("up", "head")], report.rule


def test_a_weight_that_is_rounded_to_infinity_is_told_with_what_reads_it():
    model = Large()
    with torch.no_grad():
        model.up.weight.mul_(10)
    report = amp.find_nonfinite(step_of(model, "default"), X * 1e-6)
    (node,) = report.nodes
    assert (node.op, node.module, node.phase, node.planned) == ("input", "up", "forward", "p_model_up_weight")
    assert node.decision.startswith("read by linear, low by default.yaml:") and Path(__file__).name in node.where
    assert "first made by up.weight (input," in str(report) and "in the plan: up.weight, read by" in str(report)
    assert "given up.weight: " in str(amp.find_nonfinite(model, X * 1e-6, dtype="fp16"))
    assert yaml.safe_load(report.rule)["rules"][0]["match"] == {"module": "up", "op": "aten.linear"}


def test_nothing_is_changed():
    torch.manual_seed(0)
    model = nn.Sequential(linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Steep())
    step = step_of(model, "default")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    assert amp.find_nonfinite(step, X[0])
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), drawn) and int(step.skipped_steps) == 0
    assert all(one.grad is None for one in model.parameters()) and not step._optimizers[0].state


@pytest.mark.parametrize("stored", ["fp16", "kahan"])
def test_a_step_that_stores_its_weights_in_16_bits_needs_no_call_first(stored, tmp_path):
    """The first call makes masters of FP16 parameters, or FP16 of FP32 ones without masters."""

    def model() -> nn.Module:
        built = nn.Sequential(nn.RMSNorm(4), Channel())
        return built.half() if stored == "fp16" else built

    weights = {"master": "low", "rounding": "kahan"}
    rules = {"version": 1, "extends": "default", **({} if stored == "fp16" else {"weights": weights})}
    x = X.half() if stored == "fp16" else X

    def built() -> tuple[amp.TrainingStep, nn.Module]:
        new = model()
        optimizer = torch.optim.AdamW(new.parameters(), 1e-3)
        return eager_step(new, loss_fn, optimizer, dtype="fp16", loss_scale=None, rules=rules), new

    step, requested = built()
    before = [(one, one.dtype, one.data_ptr(), one.detach().clone()) for one in requested.parameters()]
    report = amp.find_nonfinite(step, x)
    assert report.nodes[0].planned == "linear" and report.rule
    assert not step._optimizers[0].state
    for one, dtype, place, value in before:
        assert one.dtype is dtype and one.data_ptr() == place and torch.equal(one, value)
    assert requested.state_dict().keys() == model().state_dict().keys() and not hasattr(before[0][0], "amp_stored_low")

    rules = {**rules, "rules": yaml.safe_load(report.rule)["rules"]}
    (asked_step, requested), (step, other) = built(), built()
    assert not amp.find_nonfinite(asked_step, x)
    for _ in range(2):
        assert torch.equal(asked_step(x), step(x))
        assert not amp.find_nonfinite(asked_step, x)
    assert all(torch.equal(one, two) for one, two in zip(requested.parameters(), other.parameters(), strict=True))


def test_a_search_leaves_no_masters_in_the_state_of_an_optimizer():
    model = nn.Linear(4, 4).half()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    rules = {"version": 1, "extends": "default", "weights": {"master": "low"}}
    step = eager_step(model, loss_fn, optimizer, rules=rules, dtype="fp16", loss_scale=None)
    step(X.half())
    before = {key: {**held} for key, held in optimizer.state.items()}
    amp.find_nonfinite(step, X.half() * 6e4)
    assert optimizer.state.keys() == before.keys()
    assert all(held.keys() == before[key].keys() for key, held in optimizer.state.items())


def test_a_gradient_that_is_errors_of_rounding_in_fp32_is_not_lost():
    """The bias of the keys has no other gradient, as a softmax takes no note of it: in FP16 here it is zero."""
    report = amp.find_nonfinite(step_of(nn.Sequential(linear(4, 4), nn.LayerNorm(4), Logits()), "default"), X)
    assert not report, report


def test_data_that_are_not_finite_are_named_and_get_no_rule():
    x = X.clone()
    x[0, 0, 0] = float("nan")
    report = amp.find_nonfinite(step_of(Steep(), "default"), (x,))
    assert report.rule == "" and "the batch itself (batch[0]) holds 1 NaN" in report.cure
    model = Steep()
    nn.init.constant_(model.head.bias, float("inf"))
    assert "the parameter head.bias holds 2 infinite" in amp.find_nonfinite(step_of(model, "default"), X).cure


def test_what_fp32_makes_too_gets_no_rule():
    report = amp.find_nonfinite(step_of(nn.Sequential(linear(4, 2), Negative()), "default"), X)
    assert report.nodes[0].op == "aten.log" and report.rule == "" and "FP32 makes it too" in report.cure


def test_a_norm_with_16_bit_statistics_gets_a_rule_and_keeps_them():
    """They are read in FP32 beside data of FP32."""
    model = nn.Sequential(linear(4, 4, 3e4), nn.BatchNorm1d(4)).half()
    for options in ({}, {"loss_fn": loss_fn}):
        report = amp.find_nonfinite(model, X[0].half(), dtype="fp16", **options)
        assert report.nodes[0].planned == "linear" and "precision: fp32" in report.rule
        assert not model[1].running_mean.any() and not model[1].num_batches_tracked  # nothing is changed


class Negative(nn.Module):
    def forward(self, x):
        return torch.log(-x.abs())


def test_a_loss_scale_that_is_too_high_is_told_apart():
    scale = DynamicLossScale(init_scale=2.0**24)
    report = amp.find_nonfinite(step_of(linear(4, 2), "default", loss_scale=scale), X)
    assert report.parameters and report.rule == "" and "only the loss scale was too high: at " in report.cure
    lower = float(report.cure.partition(": at ")[2].split()[0])
    assert not amp.find_nonfinite(step_of(linear(4, 2), "default", loss_scale=lower), X)
    assert amp.find_nonfinite(step_of(linear(4, 2), "default", loss_scale=2 * lower), X)


def test_a_scale_that_falls_adds_no_node_to_a_rule():
    high = amp.find_nonfinite(step_of(Logits(), "default", loss_scale=DynamicLossScale(init_scale=2.0**30)), X)
    low = amp.find_nonfinite(step_of(Logits(), "default", loss_scale=1.0), X)
    assert high.rule == low.rule != ""
    assert "at a loss scale of " in high.cure and "falls by itself" in high.cure and "scale" not in low.cure


def test_rules_of_a_dict_are_continued():
    rules = {"version": 1, "extends": "default", "allow": ["aten.sum"]}
    report = amp.find_nonfinite(step_of(Total(), rules), ONES)
    assert report.rule.startswith("# put these behind the rules of the dict\nrules:\n")
    cured = {**rules, "rules": yaml.safe_load(report.rule)["rules"]}
    assert not amp.find_nonfinite(step_of(Total(), cured), ONES)


def test_the_error_at_the_floor_carries_the_report():
    step = step_of(Logits(), "default", loss_scale=DynamicLossScale(init_scale=1.0, min=1.0, patience=2))
    with pytest.raises(LossScaleError) as caught:
        for _ in range(3):
            step(X)
    report = caught.value.report
    assert report.rule and report.rule in str(caught.value) and report.nodes[0].planned in str(caught.value)


class Broken(Logits):
    def forward(self, x):
        hidden = self.query(x)
        if float(hidden.detach().sum()) > 0:  # which no graph can hold
            hidden = hidden * 1.0
        return self.head((hidden @ self.key(x).transpose(-1, -2)).softmax(-1) @ x)


class BrokenWithStatistics(Broken):
    def __init__(self):
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(X.shape[1]), 0

    def forward(self, x):
        self.calls += 1
        return super().forward(self.norm(x)) + 0 * torch.rand(())


@pytest.mark.parametrize(("compiled", "way"), [(True, "loss_fn"), (False, "forward")])
def test_a_model_in_subgraphs_gets_a_rule_too(way, compiled, tmp_path):
    def search(rules, x):
        inputs = amp.compile(model, dtype="fp16", rules=rules, backend="eager") if compiled else model
        options = {} if compiled else {"dtype": "fp16", "rules": rules}
        if way == "loss_fn":
            options["loss_fn"] = lambda model, x: model(x).square().mean()
        return amp.find_nonfinite(inputs, x, **options)

    torch.manual_seed(0)
    model = BrokenWithStatistics()
    with torch.no_grad():
        model.norm.weight.fill_(float(X.abs().max()))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    random = torch.get_rng_state()
    report = search("default", X)
    assert report.results == (("the loss",) if way == "loss_fn" else ("the output",))
    assert report.nodes[0].planned.startswith("graph") and "matmul" in report.nodes[0].planned and report.rule
    (tmp_path / "cured.yaml").write_text(report.rule)
    assert not search(str(tmp_path / "cured.yaml"), X)
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and model.calls == 0


class Raises(BrokenWithStatistics):
    def forward(self, x):
        if float(super().forward(x).detach().sum()) == float(x.sum()):
            return x
        raise ValueError("no such batch")


def test_a_model_in_subgraphs_that_raises_is_told_and_left_as_it_was():
    model = Raises()
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "raise ValueError(" in text)
    words = rf"test_find_nonfinite.py:{line}: Raises raised ValueError: no such batch; call the model itself"
    with pytest.raises(amp.AmpError, match=words):
        amp.find_nonfinite(model, X * 1e-3, dtype="fp16")
    assert not model.norm.running_mean.any() and model.calls == 0


def test_any_batch_of_a_step_in_subgraphs(tmp_path):
    model = Broken()
    step = step_of(model, "default")
    before = {name: one.clone() for name, one in model.state_dict().items()}
    random = torch.get_rng_state()
    report = amp.find_nonfinite(step, X)
    assert "head.weight" in report.parameters and "the loss" in report.results
    assert report.nodes[0].planned.startswith("graph") and report.rule
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and all(one.grad is None for one in model.parameters())
    (tmp_path / "cured.yaml").write_text(report.rule)
    assert not amp.find_nonfinite(step_of(Broken(), str(tmp_path / "cured.yaml")), X)
    assert not amp.find_nonfinite(step, X * 1e-3)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("fault", ["attention logits", "log of an underflowed softmax"])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_whose_output_is_not_finite(fault, compiled, tmp_path):
    make, x, more, op, _, named = FAULTS[fault]
    options = {"rules": rule_file(tmp_path, more) if more else "default", "dtype": "fp16"}
    model = make()
    whole = amp.compile(model, backend="eager", **options) if compiled else model
    report = amp.find_nonfinite(whole, x, **({} if compiled else options))
    assert report.results == ("the output",) and not report.parameters
    plan = {one.name: one for one in amp.explain(model, x, **options).nodes}
    assert plan[report.nodes[0].planned].op == op
    (tmp_path / "cured.yaml").write_text(report.rule)
    cured = amp.compile(model, rules=str(tmp_path / "cured.yaml"), dtype="fp16", backend="eager")
    assert torch.isfinite(cured(x)).all() and not amp.find_nonfinite(cured, x)
    assert {one.op for one in cured.plan.nodes if "cured.yaml" in one.rule} == named


def test_the_backward_of_a_loop_of_the_users_own(tmp_path):
    model = Steep()
    compiled = amp.compile(model, dtype="fp16", backend="eager")
    assert not amp.find_nonfinite(compiled, X)  # the forward alone
    report = amp.find_nonfinite(compiled, X, loss_fn=lambda model, x: model(x).square().mean(), loss_scale=4.0)
    assert "head.weight" in report.parameters and {node.phase for node in report.nodes} == {"backward"}
    first = report.nodes[0]
    ((_, range_given),) = first.inputs
    assert not range_given.spoilt and first.output.infinite
    assert all(one.grad is None for one in model.parameters())
    (tmp_path / "cured.yaml").write_text(report.rule)
    cured = amp.compile(model, rules=str(tmp_path / "cured.yaml"), dtype="fp16", backend="eager")
    (cured(X).square().mean() * 4.0).backward()
    assert all(bool(torch.isfinite(one.grad).all()) for one in model.parameters())


def test_a_backward_needs_a_loss():
    with pytest.raises(AmpError, match=r"no loss to begin the backward from.*pass loss_fn="):
        amp.find_nonfinite(linear(4, 2), X, dtype="fp16", backward=True)
    loss = nn.Sequential(linear(4, 2), Mean())
    assert not amp.find_nonfinite(loss, X, dtype="fp16", backward=True)


class Mean(nn.Module):
    def forward(self, x):
        return F.relu(x).mean()


def test_other_things_are_refused():
    with pytest.raises(AmpError, match="cannot look into a int"):
        amp.find_nonfinite(3, X)
