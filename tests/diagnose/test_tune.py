"""`amp.tune` on modules and training steps: what it finds, what its file does, and what it refuses."""

import json
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from planted import PLANTED, Net, batch, linear
from torch import nn
from toys import relative, sgd_step

import amp_compiler as amp
from amp_compiler.diagnose.tuning import torch_model
from amp_compiler.diagnose.tuning.deviation import Deviation, Measured
from amp_compiler.errors import AmpError
from amp_compiler.policy.loader import load_rules

TOLERANCE = 5e-3


def places(result) -> set[tuple[str, str]]:
    return {(node.module, node.op) for node in result.nodes}


def loss_fn(model, x):
    return model(x).float().square().mean()


def step_of(model, rules="default", **options):
    return sgd_step(model, loss_fn, 1e-3, rules=rules, **{"dtype": "fp16", **options})


class Small(nn.Module):
    """A linear layer whose values 16 bits do not hold, between two that they do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = linear(8, 8, seed=1), linear(8, 8, 1e5, seed=2), linear(8, 8, seed=3)
        with torch.no_grad():
            self.wide.weight.clamp_(-6e4, 6e4)

    def forward(self, x):
        return self.last(torch.tanh(self.wide(self.first(x)) * 1e-5))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_the_planted_nodes_of_a_model_are_found_and_the_file_fixes_it(tmp_path):
    model, x, path = Net(), batch(), tmp_path / "tuned.yaml"
    result = amp.tune(model, [x], dtype="fp16", tolerance=TOLERANCE, output=path)
    assert places(result) == PLANTED and not result.stopped
    assert result.runs <= 4 * math.log2(result.searched) + len(result.nodes) and result.limit >= result.runs
    assert result.searched >= 100 and result.error <= TOLERANCE < result.before
    assert all(node.without > TOLERANCE for node in result.nodes)

    expected = model(x)
    compiled = amp.compile(model, rules=str(path), dtype="fp16", backend="eager")
    assert relative(compiled(x), expected) == pytest.approx(result.error, rel=1e-6)
    plan = compiled.plan
    assert {(node.module, node.op) for node in plan.nodes if node.rule.startswith(str(path))} >= PLANTED
    assert not plan.unused_rules
    counted = [sum(node.precision == one for node in plan.nodes) for one in ("fp32", "low")]
    assert counted == [result.fp32, result.low]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_small_model_and_its_result(compiled, tmp_path):
    model = Small()
    subject = amp.compile(model, dtype="fp16", backend="eager") if compiled else model
    result = amp.tune(subject, [X, (X * 0.5,)], dtype="fp16", output=tmp_path / "tuned.yaml")
    assert [(node.module, node.op) for node in result.nodes] == [("wide", "aten.linear")]
    untuned = amp.compile(model, dtype="fp16", backend="eager")
    assert not relative(untuned(X), model(X)) <= result.tolerance < result.before
    assert result.batches == 2 and result.path == tmp_path / "tuned.yaml" and result.rules == result.path.read_text()
    message = str(result)
    assert result.table() in message and "wide" in message and "becomes infinite" in message and "2 batches" in message
    data = json.loads(result.to_json(tmp_path / "found.json"))
    assert data == json.loads((tmp_path / "found.json").read_text()) == result.to_dict()
    assert data["nodes"][0]["module"] == "wide" and data["path"] == str(result.path)
    rules = yaml.safe_load(result.rules)
    assert rules["extends"] == "default"
    assert rules["rules"][0]["match"] == {"module": "wide", "op": "aten.linear"}
    assert result.rules.startswith("# Made by amp.tune.") and "without it; it makes" in result.rules


@pytest.mark.parametrize("kind", ["outputs", "step"])
def test_a_model_in_16_bits_is_compared_with_fp32(kind, tmp_path):
    """With `model.half()`, whose parameters the update keeps masters of, too."""
    model, x, path = Small().half(), X.half(), tmp_path / "tuned.yaml"
    if kind == "step":
        result = amp.tune(step_of(model, loss_scale=None), [(x,)], output=path)
    else:
        result = amp.tune(model, [x], dtype="fp16", output=path)
    assert "wide" in {node.module for node in result.nodes} and len(result.nodes) <= 2
    assert result.error <= result.tolerance < result.before
    exact = Small()
    exact.load_state_dict({name: one.float() for name, one in model.state_dict().items()})
    assert relative(amp.compile(model, rules=str(path), dtype="fp16", backend="eager")(x), exact(x.float())) < 1e-2
    assert relative(amp.compile(model, dtype="fp16", backend="eager")(x), exact(x.float())) > 0.1


def test_a_loss_function_compares_loss_and_gradients():
    result = amp.tune(Small(), [X], dtype="fp16", loss_fn=loss_fn, loss_scale=256.0)
    assert result.what == "loss and gradients" and [node.module for node in result.nodes] == ["wide"]
    assert result.path is None and "extends: default" in result.rules


def test_a_dynamic_loss_scale_counts_as_fallen_to_where_gradients_fit():
    model = linear(8, 2, seed=1)
    assert not amp.tune(step_of(model, loss_scale="dynamic"), [30 * X]).nodes
    assert amp.tune(step_of(model, loss_scale=2.0**16), [30 * X]).nodes


class Many(nn.Module):
    """Blocks of two layers each, the second of which 16 bits do not hold in some."""

    def __init__(self, wide: set[int], gain: float = 1e5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "a": linear(8, 8, seed=place), "b": linear(8, 8, gain if place in wide else 1e3, seed=place + 9)
            })
            for place in range(4)
        )  # fmt: skip

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer["b"](layer["a"](x)).clamp(-6e5, 6e5) * 1e-5) + x
        return x


@pytest.mark.parametrize(
    ("wide", "match"),
    [
        ({0, 1, 2, 3}, [{"module": "layers.*.b", "op": "aten.linear"}]),
        ({2}, [{"module": "layers.2.b", "op": "aten.linear"}]),
    ],
)
def test_rules_are_by_module_and_op_where_that_names_no_other_node(wide, match):
    result = amp.tune(Many(wide), [X * 8], dtype="fp16", tolerance=2e-3)
    assert [rule["match"] for rule in yaml.safe_load(result.rules)["rules"]] == match


def test_rules_of_a_file_are_extended_where_it_lies(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("version: 1\nextends: default\nallow: [aten.softmax]\n")
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "tuned.yaml"
    amp.tune(Small(), [X], rules=str(tmp_path / "mine.yaml"), dtype="fp16", output=path)
    assert yaml.safe_load(path.read_text())["extends"] == "../mine.yaml"
    monkeypatch.chdir("/")
    assert len(load_rules(path).rules) == len(load_rules(tmp_path / "mine.yaml").rules) + 1
    monkeypatch.chdir(tmp_path)
    amp.tune(Small(), [X], rules={"version": 1, "extends": "./mine.yaml"}, dtype="fp16", output=path)
    assert yaml.safe_load(path.read_text())["extends"] == "../mine.yaml"
    with pytest.raises(AmpError, match=r"the output is the rule file; name another output"):
        amp.tune(Small(), [X], rules=str(tmp_path / "mine.yaml"), output=tmp_path / "mine.yaml")


def test_rules_of_a_dict_are_written_out(tmp_path):
    rules = {
        "version": 1,
        "extends": "default",
        "allow": ["aten.softmax"],
        "rules": [{"match": {"op": "aten.tanh"}, "precision": "low", "why": 'it\'s small: "yes"'}],
        "loss_scale": {"mode": "dynamic", "init": 8.0},
    }
    result = amp.tune(Small(), [X], rules=rules, dtype="fp16", output=tmp_path / "tuned.yaml")
    read = load_rules(tmp_path / "tuned.yaml")
    assert read.loss_scale["init"] == 8.0 and [rule.why for rule in read.rules][-2] == 'it\'s small: "yes"'
    step = step_of(Small(), rules)
    with pytest.raises(AmpError, match=r"rules came as a dict.*pass rules= with the dict"):
        amp.tune(step, [X], output=tmp_path / "other.yaml")
    behind = amp.tune(step, [X])
    assert "# put these behind the rules of the dict" in behind.rules
    assert {node.module for node in behind.nodes} == {node.module for node in result.nodes} == {"wide"}


def test_nothing_is_kept_where_the_tolerance_is_met(tmp_path):
    path = tmp_path / "tuned.yaml"
    result = amp.tune(linear(8, 2), [X], dtype="bf16", output=path)
    assert result.nodes == () and result.tolerance == 8e-2 and result.before == result.error <= 8e-2
    assert len(load_rules(path).rules) == len(load_rules("default").rules)


# ---- a run that goes on


class KilledError(Exception):
    pass


def test_a_run_that_was_killed_goes_on_from_its_journal(tmp_path, monkeypatch):
    whole = amp.tune(Many({1, 3}), [X * 8], dtype="fp16", tolerance=2e-3, output=tmp_path / "whole.yaml")
    path, requested = tmp_path / "tuned.yaml", []
    measure = torch_model.TorchSubject.measure

    def counted(self, rules):
        requested.append(rules)
        if len(requested) == 4:
            raise KilledError
        return measure(self, rules)

    monkeypatch.setattr(torch_model.TorchSubject, "measure", counted)
    with pytest.raises(KilledError):
        amp.tune(Many({1, 3}), [X * 8], dtype="fp16", tolerance=2e-3, output=path)
    journal = tmp_path / "tuned.yaml.journal"
    assert len(journal.read_text().splitlines()) == 1 + 3 and not path.exists()
    again = amp.tune(Many({1, 3}), [X * 8], dtype="fp16", tolerance=2e-3, output=path)
    assert len(requested) == 4 + whole.runs - 1 - 3  # but for the reference all that was not measured before
    assert again.to_dict() == {**whole.to_dict(), "path": str(path)} and not journal.exists()


def test_a_run_that_is_interrupted_says_where_its_journal_is(tmp_path, monkeypatch, caplog):
    measure = torch_model.TorchSubject.measure

    def interrupted(self, rules):
        if len(rules.rules) > len(load_rules("default").rules):
            raise KeyboardInterrupt
        return measure(self, rules)

    monkeypatch.setattr(torch_model.TorchSubject, "measure", interrupted)
    for output, said in ((tmp_path / "tuned.yaml", True), (None, False)):
        caplog.clear()
        with pytest.raises(KeyboardInterrupt):
            amp.tune(Many({1, 3}), [X * 8], dtype="fp16", tolerance=2e-3, output=output)
        assert (f"{tmp_path / 'tuned.yaml.journal'}, and the same command goes on" in caplog.text) == said


def test_batches_that_go_different_ways_are_refused():
    class Ways(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = linear(8, 8), linear(8, 8, seed=1)

        def forward(self, x, y=None):
            return self.one(x) if y is None else self.two(self.one(x) + y)

    with pytest.raises(AmpError, match="different ways through the model; tune on the batches of one way"):
        amp.tune(Ways(), [{"x": X}, {"x": X, "y": X}], dtype="fp16")
    assert amp.tune(Ways(), [{"x": X}, {"x": X[:2]}], dtype="fp16").batches == 2


def test_a_loss_without_a_gradient_and_arrays_without_numbers():
    with pytest.raises(AmpError, match=r"the loss has no gradient; leave detach\(\)"):
        amp.tune(Small(), [X], dtype="fp16", loss_fn=lambda model, x: model(x).sum().detach())
    with pytest.raises(AmpError, match="an array of <U1 is no tensor"):
        amp.tune(Small(), [np.array(["a"])], dtype="fp16")


def test_classes_that_differ_count_by_their_share():
    result = Deviation()
    result.add("classes", torch.arange(100), torch.arange(100).index_fill(0, torch.tensor([7]), 0))
    assert result.result() == Measured(0.01, "classes")


class Scaled(Many):
    """By a number that no `state_dict` holds."""

    def __init__(self, wide: set[int], scale: float = 1.0) -> None:
        super().__init__(wide)
        self.register_buffer("scale", torch.tensor(scale), persistent=False)

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_journal_of_something_else_is_refused(tmp_path):
    path = tmp_path / "tuned.yaml"
    journal = tmp_path / "tuned.yaml.journal"
    stopped = amp.tune(Scaled({1, 3}), [X * 8], dtype="fp16", tolerance=2e-3, output=path, budget=1e-9)
    assert stopped.stopped == "the time was up" and journal.exists() and stopped.error <= 2e-3
    for model, x, rules in (
        (Scaled({1}), X * 8, "default"), (Scaled({1, 3}), X * 7, "default"), (Scaled({1, 3}), X * 8, "safe"),
        (Scaled({1, 3}, 3.0), X * 8, "default"),
    ):  # fmt: skip
        with pytest.raises(AmpError, match=r"of another model, other rules or other batches; delete it, or name"):
            amp.tune(model, [x], rules=rules, dtype="fp16", tolerance=2e-3, output=path)
    journal.write_text("nonsense")
    with pytest.raises(AmpError, match=r"this is no journal of amp.tune"):
        amp.tune(Scaled({1, 3}), [X * 8], dtype="fp16", tolerance=2e-3, output=path)


def test_budgets_stop_with_nodes_that_meet_the_tolerance():
    result = amp.tune(Many({1, 3}), [X * 8], dtype="fp16", tolerance=2e-3, max_runs=5)
    assert result.runs <= 5 and result.error <= 2e-3 and "runs that were allowed" in result.stopped
    assert "not searched to the end" in str(result)


def test_the_same_call_gives_the_same_result_and_changes_nothing():
    model = nn.Sequential(Small(), nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    drawn = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    one = amp.tune(model, [X], dtype="fp16", loss_fn=loss_fn)
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == drawn[1:]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.manual_seed(4)
    assert amp.tune(model, [X], dtype="fp16", loss_fn=loss_fn) == one
    assert one.nodes


def test_an_attention_whose_backward_has_no_derivative_is_tuned_too():
    result = amp.tune(Attention(), [X], dtype="bf16", loss_fn=loss_fn, tolerance=1e-3)
    assert result.nodes and result.error <= 1e-3


# ---- refusals


def test_what_fp32_does_not_give_either_is_refused():
    class Negative(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear(8, 8)

        def forward(self, x):
            return torch.log(-self.inner(x).abs())

    with pytest.raises(
        AmpError, match=r"in FP32 the output is not finite; no precision fixes that.*amp.find_nonfinite"
    ):
        amp.tune(Negative(), [X], dtype="fp16")
    with pytest.raises(AmpError, match=r"in FP32 the loss is not finite"):
        amp.tune(step_of(Negative()), [X])
    with pytest.raises(AmpError, match=r"in FP32 the output is not finite"):
        amp.tune(linear(8, 8), [X * math.inf], dtype="fp16")


def test_a_tolerance_that_fp32_does_not_meet_is_refused():
    with pytest.raises(
        AmpError, match=r"with every node .* in FP32 the error is still .* the tolerance is 1e-09; pass a"
    ):
        amp.tune(Attention(), [X], dtype="fp16", tolerance=1e-9, loss_fn=loss_fn)


class Attention(nn.Module):
    """Its sums are of another order in the run that is compared than in that of FP32: attention without its kernel."""

    def __init__(self):
        super().__init__()
        self.inner = linear(8, 24, seed=1)

    def forward(self, x):
        query, key, value = self.inner(x).view(1, 4, 3, 8).transpose(1, 2).chunk(3, 1)
        return F.scaled_dot_product_attention(query, key, value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 0.0}, "tolerance=0.0 is no error"),
        ({"tolerance": "small"}, "tolerance='small' is no error"),
        ({"budget": "60"}, "budget='60' is no time"),
        ({"max_runs": 2.5}, r"max_runs=2\.5 is too few runs"),
        ({"budget": -1}, "budget=-1 is no time"),
        ({"max_runs": 4}, "max_runs=4 is too few runs; pass 5 or more"),
        ({"output": "/nowhere/at/all.yaml"}, "nowhere"),
        ({"output": 3}, "output=3 is no path"),
        ({"rules": "defualt"}, "did you mean 'default'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(AmpError, match=message):
        amp.tune(Small(), [X], dtype="fp16", **options)


def test_other_subjects_and_batches_are_refused():
    with pytest.raises(AmpError, match="a int cannot be tuned; pass what"):
        amp.tune(3, [X])
    with pytest.raises(AmpError, match="there are no batches in a Tensor; pass a list"):
        amp.tune(Small(), X)
    with pytest.raises(AmpError, match="there is no batch to tune on"):
        amp.tune(Small(), [])
    with pytest.raises(AmpError, match="loss_fn= is given with a training step"):
        amp.tune(step_of(Small()), [X], loss_fn=lambda model, x: model(x))
    with pytest.raises(AmpError, match=r"runs in FP32 \(enabled=False\)"):
        amp.tune(step_of(Small(), enabled=False), [X])


@pytest.mark.parametrize(("dtype", "step"), [("fp16", 0.5), ("bf16", 4.0)])
def test_a_sum_that_cancels_is_told_with_the_step_of_16_bits_at_its_size(dtype, step):
    class Shifted(nn.Module):
        def forward(self, x):
            small = (x + 1000.0) - 1000.0
            return small, (x * 1000.0) * 1e-3 + 1.0  # small beside what it is made of, without a sum

    rules = {"version": 1, "extends": "default", "allow": ["elementwise"]}
    x = torch.linspace(-1, 1, 64)
    result = amp.tune(Shifted(), [x], rules=rules, dtype=dtype, tolerance=2**-8)
    details = {node.op: node.detail for node in result.nodes if "cancel" in node.detail}
    assert list(details) == ["aten.sub"]
    built = (x + 1000.0 - 1000.0).abs()
    assert details["aten.sub"] == (
        f"it makes {float(built[built > 0].min()):.2g} to {float(built.max()):.2g} of numbers up to 1e+03 that cancel,"
        f" where 16 bits have steps of {step:.2g}"
    )
    one = torch.tensor(999.0, dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[dtype])
    assert float((one.view(torch.int16) + 1).view(one.dtype) - one) == step  # the next number there is


class WithAnOutlier(nn.Module):
    """The first product has a channel beside which one scale makes nothing of the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 16)
        with torch.no_grad():
            self.up.weight[:, 0] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.down(torch.relu(self.up(x)))))  # type: ignore[no-any-return]


def test_products_that_have_to_stay_out_of_fp8_are_found(tmp_path):
    x = torch.randn(64, 32)
    x[:, 0] = 2.0**20
    result = amp.tune(WithAnOutlier(), [x], rules="fp8", dtype="bf16", tolerance=0.1, output=tmp_path / "tuned.yaml")
    assert [node.module for node in result.nodes] == ["up"]
    assert result.error <= 0.1 < result.before
    assert "1 of 3 FP8 products stays in 16 bits" in result.summary()
    plan = amp.explain(WithAnOutlier(), x, rules=tmp_path / "tuned.yaml", dtype="bf16")
    assert [(one.precision, bool(one.math)) for one in plan.nodes if one.op == "aten.linear"] == [
        ("low", False), ("low", True), ("low", True),
    ]  # fmt: skip
    with pytest.raises(amp.AmpError, match="with every FP8 product in 16 bits the error is still"):
        amp.tune(WithAnOutlier(), [x], rules="fp8", dtype="bf16", tolerance=1e-9)
