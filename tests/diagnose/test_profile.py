"""`amp.profile`: what a step computes, counted in its graph, and the loss scale that follows."""

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import yaml
from counted_by_numpy import counted_by_numpy, update_by_numpy
from onnx_models import info, node, scalar
from onnx_models import model as onnx_model
from torch import nn
from torch.nn import functional as F
from toys import classes, eager_step, sgd_step

import amp_compiler as amp
from amp_compiler.cli.demo import SmallCnn, load_digits
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ops.cpu.update import most_inner
from amp_compiler.ops.update.product import Product


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(16, 8, generator=generator), torch.randint(0, 4, (16,), generator=generator)) for _ in range(count)
    ]


def step_of(model: nn.Module, loss: Any = classes, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return eager_step(model, loss, optimizer, **{"dtype": "fp16", "clip_norm": 1.0, **options})


class Followed:
    """What a step does to its weights, counted from outside by NumPy, batch by batch."""

    def __init__(self) -> None:
        self.gradients: dict[str, np.ndarray] = {}
        self.ratios: dict[str, np.ndarray] = {}
        self.counted: dict[str, np.ndarray] = {}

    def take(self, step: Any, batch: Any, accumulate: int) -> None:
        before = {name: one.detach().clone() for name, one in step.model.named_parameters()}
        scale = float(step.loss_scale) * accumulate  # powers of two
        step(*batch)
        for name, gradient in step.gradients().items():
            self.gradients[name] = self.gradients.get(name, 0) + counted_by_numpy(gradient.float() * scale)
        for name, one in step.model.named_parameters():
            ratios, result = update_by_numpy(before[name], one)
            self.ratios[name] = self.ratios.get(name, 0) + ratios
            self.counted[name] = self.counted.get(name, 0) + np.array(result)

    def assert_is(self, matches: amp.Profile) -> None:
        gradients = {row.name: row.stored.counts for row in matches.of("weight gradient")}
        assert gradients.keys() == self.gradients.keys()
        for name, expected in self.gradients.items():
            np.testing.assert_array_equal(gradients[name], expected, err_msg=name)
        assert [row.name for row in matches.updates] == list(self.counted)
        for row in matches.updates:
            np.testing.assert_array_equal(row.ratios.counts, self.ratios[row.name], err_msg=row.name)
            assert [row.changed, row.lost["fp16"], row.lost["bf16"]] == self.counted[row.name].tolist(), row.name
            assert row.fraction_lost("bf16") * row.changed == pytest.approx(row.lost["bf16"])


def test_every_third_step_is_counted_and_all_of_them_train() -> None:
    plain, profiled = Net(), Net()
    step, other, followed = step_of(plain), step_of(profiled), Followed()
    for number, batch in enumerate(batches(5)):
        if number % 3:
            step(*batch)
        else:
            followed.take(step, batch, 1)
    profile = amp.profile(other, batches(5), every=3)
    for (name, one), two in zip(plain.state_dict().items(), profiled.state_dict().values(), strict=True):
        assert torch.equal(one, two), name
    assert len(other._choice.programs) == len(step._choice.programs)
    followed.assert_is(profile)
    assert (profile.batches, [*profile.counted]) == (5, [1, 4])
    assert "over 5 batches, 0 of them skipped, counted in 2: the first of every 3; as fp16" in str(profile)
    of_model = amp.profile(plain, [batch[:1] for batch in batches(3)], every=2, dtype="fp16")
    seen = amp.profile(plain, [batches(3)[0][:1], batches(3)[2][:1]], dtype="fp16")
    assert of_model.rows == seen.rows and [*of_model.counted] == [1, 3]


class Convolutions(nn.Module):
    """With dropout, statistics, a residual, and products of one row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.drop, self.gate = nn.BatchNorm2d(8), nn.Dropout(0.25), nn.Linear(8, 1)
        self.out = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x.reshape(-1, 1, 4, 2))))
        x = F.max_pool2d(x + self.second(x), 2).flatten(2).mean(2)
        return self.out(self.drop(x) * torch.sigmoid(self.gate(x))) + x[:, :4]


class Wide(nn.Module):
    """With a weight whose gradient is left as a product, a tie, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.wide, self.down = nn.Linear(8, 96), nn.Linear(96, 80), nn.Linear(80, 4, bias=False)
        self.again = nn.Linear(80, 4)
        self.again.weight = self.down.weight
        self.up.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.wide(self.up(x)))
        return self.down(x) + self.again(x.tanh())


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Wide, {}),
        (Net, {"momentum": 0.9}),
        (Net, {"dtype": "fp16", "loss_scale": 2.0**20, "clip_norm": 1.0}),  # every step is skipped
        (Net, {"accumulate": 2}),
        (Net, {"hook": True}),
        (Convolutions, {"dtype": "fp16", "loss_scale": 8.0}),
    ],
    ids=str,
)
def test_updates_are_counted_as_numpy_counts_them(
    make: Callable[[], nn.Module], options: dict[str, Any], compiler: str
) -> None:
    plain, profiled = make(), make()
    accumulate, hooked = options.get("accumulate", 1), "hook" in options
    # Of two rows a product has one sum only, in whatever order.
    inputs = [(x[:2], y[:2]) if make is Wide else (x, y) for x, y in batches(4)]

    def clipped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for one in optimizer.param_groups[0]["params"]:
            one.data.clamp_(-0.1, 0.1)

    def built(model: nn.Module) -> Any:
        own = {name: value for name, value in options.items() if name not in ("momentum", "hook")}
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if "momentum" in options:
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=options["momentum"])
        if hooked:
            optimizer.register_step_post_hook(clipped)
        return amp.training_step(model, classes, optimizer, **{"dtype": "bf16", "backend": "inductor", **own})

    followed, step, other = Followed(), built(plain), built(profiled)
    torch.manual_seed(0)
    for batch in inputs:
        followed.take(step, batch, accumulate)
    torch.manual_seed(0)
    result = amp.profile(other, inputs)
    followed.assert_is(result)
    assert result.skipped == (4 if options.get("loss_scale", 0) > 2**16 else 0)
    assert any(isinstance(one, Product) for one in other._seen()[1].gradients) == (make is Wide and most_inner() > 0)


def test_weights_that_are_written_between_two_batches_are_counted_as_they_are() -> None:
    """Past their version counters too, beside which a step keeps 16-bit copies."""
    model = Net()

    def inputs() -> Iterator[Any]:
        first, second = batches(2)
        yield first
        model.up.weight.data.mul_(2.0**20)
        yield second

    rows = amp.profile(step_of(model, dtype="bf16"), inputs()).of("activation")
    (result,) = [row.histogram for row in rows if row.module == "up" and row.op == "aten.addmm"]
    assert result.highest > 15 and result.total == 2 * 16 * 32


def test_a_batch_that_the_loss_writes_to_is_counted_as_the_step_reads_it() -> None:
    def doubled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return classes(model, x.mul_(2), y)

    x, y = batches(1)[0]
    expected = amp.profile(step_of(Net()), [(x * 2, y)])
    written = x.clone()
    result = amp.profile(step_of(Net(), doubled), [(written, y)])
    assert torch.equal(written, x * 2)
    assert result.of("weight gradient") == expected.of("weight gradient")
    counts = {(row.module, row.dtype): row.histogram for row in expected.of("activation") if row.module}
    assert counts.items() <= {(row.module, row.dtype): row.histogram for row in result.of("activation")}.items()


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("dtype", "scale", "part"), [("bf16", None, 2.0**-10), ("fp16", None, 1.0), ("fp16", 1024.0, 2.0**-10)], ids=str
)
def test_the_static_scale_that_a_profile_advises_loses_next_to_nothing_of_the_digits(
    dtype: str, scale: float | None, part: float
) -> None:
    """Of what FP32 has of the gradients, an FP16 step with that scale makes at most 0.1% zero, counted by NumPy."""
    digits = load_digits(train_images=128)
    inputs = [(digits.train_images[at : at + 32], digits.train_labels[at : at + 32]) for at in range(0, 128, 32)]

    def scaled(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y) * part

    def built() -> nn.Module:
        torch.manual_seed(0)
        return SmallCnn(batch_norm=False)

    advice = amp.profile(sgd_step(built(), scaled, dtype=dtype, loss_scale=scale), inputs).loss_scale("fp16")
    assert advice.unknown == ()
    model, lost, of = built(), 0, 0
    step = sgd_step(model, scaled, dtype="fp16", loss_scale=advice.scale)
    for batch in inputs:
        plain = copy.deepcopy(model)
        scaled(plain, *batch).backward()
        step(*batch)
        result = step.gradients()
        for name, parameter in plain.named_parameters():
            there = parameter.grad.numpy() != 0
            of += there.sum()
            lost += (there & (result[name].numpy() == 0)).sum()
        assert int(step.skipped_steps) == 0
    assert lost <= 1e-3 * of, f"{lost} of {of}"


def test_activations_are_counted_where_they_are_made() -> None:
    model = Net()
    result = amp.profile(step_of(model, loss_scale=256.0), batches(2))
    (norm,) = [row for row in result.of("activation") if row.planned == "layer_norm" and row.histogram.total == 1024]
    assert norm.module == "norm" and "test_profile.py:" in norm.where and norm.op == "aten.native_layer_norm"
    assert {row.name for row in result.of("weight")} == dict(model.named_parameters()).keys()
    assert any(row.kind == "activation gradient" and row.module == "norm" for row in result.rows)
    assert result.batches == 2 and result.skipped == 0


def test_a_dynamic_scale_that_falls_is_taken_out_step_by_step() -> None:
    scaled, unscaled = (amp.profile(step_of(Net(), loss_scale=scale), batches(6)) for scale in ("dynamic", 2.0**12))
    assert scaled.batches == 6
    highest = {row.name: row.histogram.highest for row in unscaled.of("weight gradient")}
    kept = [row for row in scaled.of("weight gradient") if not row.histogram.nonfinite]
    assert kept and all(abs(row.histogram.highest - highest[row.name]) <= 1 for row in kept)


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_model_with_a_loss_is_counted_as_a_step_is(compiled: bool) -> None:
    model, trained = Net(), Net()
    subject = amp.compile(model, dtype="fp16", backend="eager") if compiled else model
    before = {name: one.clone() for name, one in model.state_dict().items()}
    result = amp.profile(subject, batches(1), dtype="fp16", loss_fn=classes, loss_scale=256.0)
    expected = amp.profile(step_of(trained, loss_scale=256.0), batches(1))
    for kind in ("activation", "activation gradient", "weight gradient"):
        assert result.of(kind) == expected.of(kind) and result.of(kind), kind
    assert result.updates == () and result.batches == 1 and result.skipped == 0
    assert result.loss_scale("fp16") == expected.loss_scale("fp16")
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]), name
    assert all(one.grad is None for one in model.parameters())


def test_batches_by_name_and_statistics_and_dropout_of_a_model_with_a_loss() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    inputs = [{"y": y, "x": x} for x, y in batches(2)]
    result = amp.profile(model, inputs, dtype="bf16", loss_fn=lambda model, x, y: F.cross_entropy(model(x), y))
    assert torch.equal(torch.get_rng_state(), state)
    assert {row.name for row in result.of("weight gradient")} == dict(model.named_parameters()).keys()
    assert all(row.histogram.total == 2 * before[row.name].numel() for row in result.of("weight gradient"))
    for name, one in model.state_dict().items():
        assert torch.equal(one, before[name]), name


def test_frozen_parameters_have_no_gradient_to_count() -> None:
    model = Net()
    model.up.requires_grad_(False)
    result = amp.profile(model, batches(1), dtype="bf16", loss_fn=classes)
    assert {row.module for row in result.of("weight gradient")} == {"norm", "down"}
    with pytest.raises(amp.AmpError, match="no parameter of the model has a gradient"):
        amp.profile(model.requires_grad_(False), batches(1), loss_fn=classes)


def test_an_onnx_model_with_a_loss(tmp_path: Any) -> None:
    torch.onnx.export(Net().eval(), (batches(1)[0][0],), str(tmp_path / "m.onnx"), verbose=False)
    result = amp.profile(str(tmp_path / "m.onnx"), batches(1), dtype="bf16", loss_fn=classes)
    assert len(result.of("weight gradient")) >= 4
    plan = amp.explain(tmp_path / "m.onnx", dtype="bf16")
    planned = {one.name for one in plan.nodes}
    named = {row.name: row.planned for row in result.of("activation")}
    for one in plan.nodes:  # each value that the file makes is a row at its node, and has its name if it is alone
        assert one.name in named.values()
        assert one.op == "LayerNormalization" or named[one.outputs[0][0]] == one.name
    assert planned - {plan.nodes[0].name} <= {row.planned for row in result.of("activation gradient")}


@pytest.mark.parametrize("loss", [False, True])
def test_results_of_one_onnx_node_are_told_of_the_node(tmp_path: Any, loss: bool) -> None:
    nodes = [
        node("LayerNormalization", ["x", "scale"], ["normed", "average"], "norm"),
        node("Mul", ["normed", "average"], ["y"], "times"),
    ]
    source = onnx_model(nodes, [info("x", 2, 4)], [info("y", 2, 4)], [scalar("scale", np.ones(4))])
    onnx.save(source, tmp_path / "m.onnx")
    batch = {"x": np.array([[1, 3, 60, 64]] * 2, np.float32)}  # of mean 32
    loss_fn = (lambda model, x: model(x=x).sum()) if loss else None
    result = amp.profile(tmp_path / "m.onnx", [batch], dtype="bf16", loss_fn=loss_fn)
    rows = {row.name: row for row in result.of("activation")}
    assert rows.pop("y").planned == "times" and {row.planned for row in rows.values()} >= {"norm"}
    assert {row.histogram.highest for row in rows.values() if row.planned == "norm"} >= {0, 5}
    assert not {"normed", "average"} & set(rows)  # which of the parts of a normalisation these are is not known


def test_losses_that_are_none_are_told() -> None:
    model = Net()
    with pytest.raises(amp.AmpError, match="as the loss"):
        amp.profile(model, batches(1), loss_fn=lambda model, x, y: model(x))
    with pytest.raises(amp.AmpError, match="exponents are counted in one graph, which the loss is not"):
        amp.profile(model, batches(1), loss_fn=lambda model, x, y: model(x).sum() if x.sum() > 1e9 else model(x).mean())


def test_gradients_in_fp32_set_no_bound_to_the_loss_scale() -> None:
    """The gradient of the last multiplication, a number within the loss, is greater than any that is 16 bits."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    inputs = [torch.randn(32, 64) * 2.0 ** -torch.linspace(0, 30, 64)]  # gradients of all sizes, down to 2^-50
    result = amp.profile(model, inputs, dtype="bf16", loss_fn=lambda model, x: 0.5 * model(x).float().square().mean())
    low = [row for row in result.rows if "gradient" in row.kind and row.dtype == "bf16"]
    highest = max(row.histogram.highest for row in low)
    assert highest < max(row.histogram.highest for row in result.of("activation gradient"))
    assert result.loss_scale("fp16").scale == 2.0 ** (15 - 2 - highest)


def test_a_profile_is_written_as_json(tmp_path: Any) -> None:
    result = amp.profile(step_of(Net()), batches(1))
    result.to_json(tmp_path / "profile.json")
    data = json.loads((tmp_path / "profile.json").read_text())
    assert [row["name"] for row in data["rows"]] == [row.name for row in result.rows]
    places = [str(exponent) for exponent in range(-149, 128)] + ["zero", "infinite", "nan"]
    for row, one in zip(result.rows, data["rows"], strict=True):
        assert [one["stored"].get(place, 0) for place in places] == row.stored.counts.tolist()
        assert sum(one["exponents"].values()) == row.histogram.total


def test_wrong_arguments() -> None:
    step = step_of(Net())
    with pytest.raises(amp.AmpError, match="profile cannot run a int"):
        amp.profile(3, batches(1))
    for every in (0, 2.0, True, "2", None):
        with pytest.raises(amp.AmpError, match="is no number of batches"):
            amp.profile(Net(), batches(1), every=every)
    with pytest.raises(amp.AmpError, match="no batch"):
        amp.profile(step, [])
    with pytest.raises(amp.AmpError, match="int"):
        amp.profile(step, 3)  # type: ignore[arg-type]
    with pytest.raises(amp.AmpError, match=r"fp17.*fp16, bf16"):
        amp.profile(step, batches(1)).loss_scale("fp17")


@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_is_profiled(compiled: bool) -> None:
    model = Net()
    model.down.weight.data *= 2.0**17
    inputs = amp.compile(model, dtype="fp16", backend="eager") if compiled else model
    result = amp.profile(inputs, [(x,) for x, _ in batches(2)], dtype="fp16")
    assert {row.kind for row in result.rows} == {"activation", "weight"} and result.batches == 2 and not result.updates
    overflowing = [row for row in result.rows if row.histogram.fractions("fp16").infinite or row.histogram.nonfinite]
    assert {row.module for row in overflowing} == {"down"}
    assert set(result.loss_scale().hopeless) & {row.name for row in overflowing}


class Normed(nn.Module):
    """Writes to its buffers, an attribute and what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        self.last = self.norm(self.linear(x))
        return self.last.relu()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_profile_of_a_model_in_training_writes_nothing(compiled: bool) -> None:
    torch.manual_seed(0)
    model, x = Normed(), torch.randn(6, 4)
    state, before = copy.deepcopy(model.state_dict()), x.clone()
    result = amp.profile(amp.compile(model, dtype="bf16", backend="eager") if compiled else model, [(x,)], dtype="bf16")
    assert result.rows and torch.equal(x, before) and "last" not in vars(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_step_that_runs_in_subgraphs_is_told_what_is_not_counted() -> None:
    def branching(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = classes(model, x, y)
        return loss * 2 if loss > 0 else loss

    model = Net()
    step = sgd_step(model, branching)
    step(*batches(1)[0])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(amp.AmpError, match=r"test_profile.py:\d+: exponents are counted in one graph") as message:
        amp.profile(step, batches(1))
    assert "branches on the values" in str(message.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_weight_that_is_trained_no_longer_has_no_updates_from_then_on():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = amp.training_step(model, classes, optimizer, dtype="bf16", backend="eager")

    def inputs():
        for number, batch in enumerate(batches(6)):
            if number == 3:
                optimizer.param_groups[0]["params"].pop(0)
            yield batch

    result = {row.name: row.changed for row in amp.profile(step, inputs()).updates}
    assert 0 < result["up.weight"] <= 3 * 32 * 8 and result["down.weight"] > 5 * 4 * 32


@pytest.mark.parametrize("rules", ["fp8-delayed", "mxfp8"])
def test_a_product_of_fp8_operands_is_counted_as_one_of_16_bits_is(rules: str) -> None:
    rows = []
    for name in ("default", rules):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 64))
        step = sgd_step(model, lambda m, x: m[:3](x).square().mean() + m[3](x).mean(), rules=name)
        result = amp.profile(step, [torch.ones(4, 32)])
        rows.append([(row.kind, row.planned, row.dtype) for row in result.rows])
    assert rows[0] == rows[1]


class FourProducts(nn.Module):
    """Of operands and gradients that are spread over many exponents, or not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.gradient, self.operand = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.images = nn.Conv1d(64, 64, 1)

    def forward(self, normal: torch.Tensor, spread: torch.Tensor) -> list[torch.Tensor]:
        return [self.narrow(normal * 2), self.gradient(normal * 2), self.operand(spread * 2), self.images(spread * 2)]


@pytest.mark.parametrize("rules", ["default", "fp8-delayed"])
def test_the_format_and_the_scaling_of_a_product_follow_from_its_operands_and_its_gradient(rules: str) -> None:
    normal = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    spread = torch.linspace(0, -24, 4096).exp2().reshape(64, 64)
    model = FourProducts()
    products = sgd_step(
        model, lambda m, *x: sum((one * g).sum() for one, g in zip(m(*x[:2]), x[2:], strict=True)), 0.0, rules=rules
    )
    result = amp.profile(products, [(normal, spread, normal, spread, normal, normal)])
    advice = result.fp8()
    said = {one.product.match["module"]: (one.format, one.scaling) for one in advice}
    assert said == {
        "narrow": ("e4m3", "tensorwise"),
        "gradient": ("hybrid", "tensorwise"),
        "operand": ("e4m3", "rowwise"),
        "images": ("e4m3", ""),
    }
    lost = {one.product.match["module"]: one.lost for one in advice}
    share = (spread * 2.0**8 < 2.0**-10).float().mean().item()
    assert lost["operand"] == lost["images"] == pytest.approx(share, abs=2e-3) and lost["narrow"] < 1e-3
    pasted = yaml.safe_load("\n".join(map(str, advice)))
    inputs = {"version": 1, "extends": "default", "rules": pasted}
    plan = amp.explain(model, (normal, spread), rules=inputs, dtype="bf16")
    way = {one.module: Fp8.parse(one.math) for one in plan.nodes if one.module}
    assert {name: (one.format, one.scaling) if one else ("e4m3", "") for name, one in way.items()} == said


def test_a_forward_and_a_file_have_advice_of_their_products_as_well() -> None:
    model = FourProducts().eval()
    inputs = torch.randn(64, 64), torch.linspace(0, -24, 4096).exp2().reshape(64, 64)
    forward = {one.product.name: one.scaling for one in amp.profile(model, [inputs], dtype="bf16").fp8()}
    assert forward == {"linear": "tensorwise", "linear_1": "tensorwise", "linear_2": "rowwise", "conv1d": ""}
