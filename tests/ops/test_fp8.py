"""`math: fp8`: bits of the formats by NumPy, products and gradients by their definitions, words of rules."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from toys import mean_square, sgd_step

import amp_compiler as amp
from amp_compiler.errors import OnnxError, RuleError
from amp_compiler.ir.arithmetic import Fp8
from amp_compiler.ops.fp8 import scaled

GENERATOR = torch.Generator().manual_seed(0)
pytestmark = pytest.mark.usefixtures("bf16_kernels")
FORMATS = {torch.float8_e4m3fn: (4, 3, 7, 448.0), torch.float8_e5m2: (5, 2, 15, 57344.0)}


def numbers_of(dtype: torch.dtype) -> np.ndarray:
    """Every finite number of a format from its definition: sign, exponent, mantissa."""
    exponent_bits, mantissa_bits, bias, largest = FORMATS[dtype]
    exponents, mantissas = np.meshgrid(np.arange(2**exponent_bits), np.arange(2**mantissa_bits), indexing="ij")
    fraction = mantissas / 2.0**mantissa_bits
    values = np.where(
        exponents == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponents - bias.__float__())
    )
    return np.unique(values[values <= largest])


def rounded_by_numpy(numbers: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """To the nearest number, ties to the even one, beyond the largest to the largest."""
    known = numbers_of(dtype)
    place = np.clip(np.searchsorted(known, np.abs(numbers)), 1, len(known) - 1)
    below, above = known[place - 1], known[place]
    low, high = np.abs(numbers) - below, above - np.abs(numbers)
    up = (high < low) | ((high == low) & (place % 2 == 0))
    return np.copysign(np.where(up, above, below), numbers)


def expected(x: np.ndarray, dtype: torch.dtype, way: Fp8, axis: int) -> np.ndarray:
    """What an operand stands for, by the definitions alone."""
    largest = FORMATS[dtype][3]
    if way.scaling == "mx":
        rows = np.moveaxis(x, axis, -1)
        blocks = rows.reshape(*rows.shape[:-1], -1, 32)
        power = np.floor(np.log2(largest))
        amax = np.maximum(np.abs(blocks).max(-1, keepdims=True), 2.0 ** (power - 127))
        scale = 2.0 ** (power - np.floor(np.log2(amax)))
        return np.moveaxis((rounded_by_numpy(blocks * scale, dtype) / scale).reshape(rows.shape), -1, axis)
    over = axis if way.scaling == "rowwise" else None
    amax = np.maximum(np.abs(x).max(axis=over, keepdims=over is not None).astype(np.float64), 1e-12)
    scale = np.float32(largest / amax)
    if way.power_of_2:
        scale = np.float32(2.0) ** np.floor(np.log2(scale))
    return rounded_by_numpy(np.float32(x * scale).astype(np.float64), dtype).astype(np.float32) / scale


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["tensorwise", "rowwise", "mx"]), st.booleans(), st.sampled_from(list(FORMATS)), st.data())
def test_operands_are_rounded_as_the_formats_say(
    scaling: Any, power_of_2: bool, dtype: torch.dtype, data: st.DataObject
) -> None:
    exponent = data.draw(st.integers(-115, 100))
    x = np.random.default_rng(data.draw(st.integers(0, 1000))).standard_normal((3, 64)).astype(np.float32)
    x *= np.float32(2.0**exponent)
    x[0, :5] *= np.float32(2.0 ** data.draw(st.integers(-20, 0)))
    way, axis = Fp8(scaling=scaling, power_of_2=power_of_2), 1
    given_x = torch.from_numpy(x).bfloat16()
    result = scaled(given_x, dtype, way, axis).numbers().numpy()
    np.testing.assert_array_equal(result, expected(given_x.float().numpy(), dtype, way, axis).astype(np.float32))


def rules(math: Any, **more: Any) -> dict[str, Any]:
    match = {"family": ["matmul", "convolution"]}
    return {"version": 1, "extends": "default", "rules": [{"match": match, "precision": "low", "math": math, **more}]}


class Mlp(nn.Module):
    """Linear layers of matrices and of batches of them, with numbers that BF16 holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(64, 128), nn.Linear(128, 32), nn.Linear(32, 48, bias=False)
        with torch.no_grad():
            for one in self.parameters():
                one.copy_(one.bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x)))))  # type: ignore[no-any-return]


RECIPES = {
    "tensorwise": "fp8",
    "rowwise": {"scaling": "rowwise"},
    "rowwise_with_gw_hp": {"scaling": "rowwise", "weight_gradient": "low"},
    "gradients of 16 bits": "fp8",
}


def product(left: Any, right: Any) -> Any:
    """Of matrices in FP32, rounded to BF16."""
    return (torch.from_numpy(np.float32(left)) @ torch.from_numpy(np.float32(right))).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_and_its_gradients_are_products_of_the_rounded_operands(recipe: str) -> None:
    """The recipes of torchao's float8 training, from their definitions; `tests/integrations` compares with torchao."""
    low = recipe == "gradients of 16 bits"
    way = Fp8("e4m3", "rowwise", True) if "rowwise" in recipe else Fp8()
    narrow, incoming = torch.float8_e4m3fn, torch.float8_e4m3fn if "rowwise" in recipe else torch.float8_e5m2
    x, w, g = (torch.randn(shape, generator=GENERATOR).bfloat16() for shape in ((24, 64), (48, 64), (24, 48)))
    model, given_x = nn.Linear(64, 48), x.float().requires_grad_()
    with torch.no_grad():
        model.weight.copy_(w)
        model.bias.copy_(torch.arange(48.0))
    requested = rules(RECIPES[recipe], **({"backward": {"math": "fp32"}} if low else {}))
    compiled = amp.compile(model, rules=requested, dtype="bf16", backend="eager")
    result = compiled(given_x)
    result.backward(g.float())
    x_n, w_n, g_n = (one.float().numpy() for one in (x, w, g))
    wanted = product(expected(x_n, narrow, way, 1), expected(w_n, narrow, way, 1).T) + torch.arange(48.0).bfloat16()
    assert torch.equal(result, wanted.float())
    over = Fp8("e4m3", "tensorwise", True) if recipe == "rowwise_with_gw_hp" else way
    to_input = g @ w if low else product(expected(g_n, incoming, way, 1), expected(w_n, narrow, over, 0))
    assert torch.equal(given_x.grad, to_input.float())
    if low or recipe == "rowwise_with_gw_hp":
        to_weight = g.t() @ x
    else:
        to_weight = product(expected(g_n, incoming, way, 0).T, expected(x_n, narrow, way, 0))
    assert torch.equal(model.weight.grad, to_weight.float())


@pytest.mark.parametrize("op", ["mm", "addmm", "matmul", "conv2d", "conv_transpose2d"])
def test_other_products_multiply_the_rounded_operands(op: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shape = (16, 16, 3, 3) if "conv" in op else (32, 48)
            self.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16().float())
            self.b = nn.Parameter(torch.ones(16 if "conv" in op else 48))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if "conv" in op:
                return getattr(F, op)(x, self.w, self.b, 2, 1)  # type: ignore[no-any-return]
            return torch.addmm(self.b, x, self.w) if op == "addmm" else getattr(torch, op)(x, self.w)

    model, way = Product(), Fp8()
    shape = (2, 16, 9, 9) if "conv" in op else (5, 4, 32) if op == "matmul" else (6, 32)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16().float().requires_grad_()
    compiled = amp.compile(model, rules=rules("fp8"), dtype="bf16", backend="eager")
    result = compiled(x)
    operands = [scaled(one.detach().bfloat16(), torch.float8_e4m3fn, way, 1).numbers() for one in (x, model.w)]
    wanted = copy.deepcopy(model)
    wanted.w.data = operands[1]
    fake = operands[0].requires_grad_()
    reference = wanted(fake)
    torch.testing.assert_close(result, reference, rtol=2**-7, atol=2**-6)
    gradient = torch.randn(reference.shape, generator=torch.Generator().manual_seed(3)).bfloat16().float()
    result.backward(gradient)
    reference.backward(scaled(gradient.bfloat16(), torch.float8_e5m2, way, 1).numbers())
    torch.testing.assert_close(x.grad, fake.grad, rtol=2**-7, atol=2**-5)
    torch.testing.assert_close(model.w.grad, wanted.w.grad, rtol=2**-7, atol=2**-4)


def test_what_does_not_fit_stays_in_16_bits_with_the_reason_or_is_refused() -> None:
    model, x = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 10)), torch.randn(3, 64)
    plan = amp.explain(model, x, rules=rules("fp8"), dtype="bf16")
    first, second = (node for node in plan.nodes if node.op == "aten.linear")
    assert first.math == Fp8().short
    assert not second.math
    assert "not in FP8: 10 is no multiple of 16" in second.reason
    with pytest.raises(RuleError, match=r"'math: fp8' cannot be carried out on 'linear_1'.*10 is no multiple of 16"):
        amp.explain(model, x, rules=rules({"unfit": "refuse"}), dtype="bf16")
    wide = amp.explain(model, x, rules=rules("fp8", backward={"precision": "fp32"}), dtype="bf16")
    assert all("its gradients are FP32" in node.reason for node in wide.nodes if node.op == "aten.linear")


@pytest.mark.parametrize(
    ("math", "said"),
    [
        ({"format": "e3m4"}, "e4m3"),
        ({"scaling": "columnwise"}, "tensorwise"),
        ({"power_of_2": "yes"}, "bool"),
        ({"history": 16}, "history"),
        ({"scaling": "rowwise", "history": 2}, "history is for scaling: delayed"),
        ({"scaling": "delayed", "history": 0}, "greater than or equal to 1"),
        ("fp4", "fp4"),
    ],
)
def test_words_that_are_none_are_refused_where_they_stand(math: Any, said: str) -> None:
    with pytest.raises(RuleError, match=said):
        amp.explain(nn.Linear(16, 16), torch.randn(2, 16), rules=rules(math))


@settings(deadline=None)
@given(st.builds(Fp8, power_of_2=st.booleans()))
def test_a_plan_reads_back_what_it_writes(way: Fp8) -> None:
    assert Fp8.parse(way.short) == way
    assert Fp8.parse(way.short.replace("fp8(", "fp4(")) is None


def test_an_export_takes_it_with_calibration() -> None:
    model, x = Mlp().eval(), torch.randn(2, 64)
    with pytest.raises(OnnxError, match=r"takes the scales of operands from data"):
        amp.export_onnx(model, x, rules=rules("fp8"), dtype="fp16")
    done = amp.export_onnx(model, x, rules=rules("fp8"), dtype="fp16", calibration=[x])
    assert [node.op_type for node in done.model.graph.node].count("QuantizeLinear") > 0
    plan = amp.export_onnx(model, x, rules=rules({"scaling": "mx"}), dtype="fp16").plan
    layers = [node for node in plan.nodes if node.op == "onnx.Gemm"]
    assert layers and not any(node.math for node in layers) and all("not in FP8" in node.reason for node in layers)


@pytest.mark.parametrize("math", ["fp8", {"scaling": "mx"}])
def test_sizes_may_change(math: Any) -> None:
    losses = []
    for shapes in ("auto", None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
        step = sgd_step(model, mean_square, 0.05, rules=rules(math), dynamic_shapes=shapes)
        sizes = (4, 7, 40)
        losses.append([float(step(torch.ones(size, 64) * size)) for size in sizes])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("model", [Mlp, lambda: nn.Conv1d(64, 16, 1)], ids=["linear", "convolution"])
def test_a_gradient_that_is_differentiated_is_refused(model: Any) -> None:
    compiled = amp.compile(model(), rules=rules("fp8"), dtype="bf16", backend="eager")
    x = torch.randn(2, 64, 5 if isinstance(compiled, nn.Conv1d) else 64)[..., :64].requires_grad_()
    loss = compiled(x).square().sum()
    with pytest.raises(amp.AmpError, match=r"FP8 products.*precision: low"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_a_convolution_may_be_checkpointed() -> None:
    compiled = amp.compile(nn.Conv1d(64, 16, 1), rules=rules("fp8"), dtype="bf16", backend="eager")
    x, slopes = torch.randn(2, 64, 5, requires_grad=True), []
    for result in (compiled(x), checkpoint(compiled, x, use_reentrant=False)):
        slopes.append(torch.autograd.grad(result.square().sum(), [x, *compiled.parameters()]))
    assert all(map(torch.equal, *slopes))


def test_what_beta_leaves_out_is_not_read() -> None:
    class Added(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(torch.full((16,), torch.nan), x, x, beta=0)

    compiled = amp.compile(Added(), rules=rules("fp8"), dtype="bf16", backend="eager")
    assert compiled(torch.ones(16, 16)).isfinite().all()


def test_a_report_calls_a_node_by_what_it_computes() -> None:
    model = nn.Linear(64, 32)
    nn.init.constant_(model.weight, 1.0)
    report = amp.find_nonfinite(model, torch.full((2, 64), 6e4), rules=rules("fp8"), dtype="fp16")
    assert report is not None
    assert [node.op for node in report.nodes][:1] == ["aten.linear"]
    assert "fp8_product" not in str(report)


@pytest.mark.parametrize("math", [{"scaling": "delayed"}, {"scaling": "mx"}])
def test_what_overflows_in_front_of_a_product_is_named_and_not_what_is_made_of_it(math: Any) -> None:
    model = Mlp()
    step = sgd_step(model, mean_square, 0.05, rules=rules(math), dtype="fp16")
    step(torch.ones(16, 64))
    step(torch.full((16, 64), 1e30))
    assert int(step.skipped_steps) == 1
    assert [(node.op, node.planned) for node in step.nonfinite_report().nodes] == [("aten._to_copy", "batch_0")]


@pytest.mark.parametrize("own", [{}, {"math": "fp32"}])
def test_fp8_of_gradients_alone_is_refused_at_its_rule(own: Any) -> None:
    inputs = rules("fp32", backward={"math": "fp8"})
    inputs["rules"][0] = {**{key: value for key, value in inputs["rules"][0].items() if key != "math"}, **own}
    with pytest.raises(RuleError, match=r"'backward\.math: fp8' needs 'math: fp8'"):
        amp.explain(Mlp(), torch.ones(2, 64), rules=inputs, dtype="bf16")


class Heads(nn.Module):
    """Three products of one value, as those of an attention."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(x)
        return (self.q(x) + self.k(x) * self.v(x)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("preset", "casts"), [("fp8", 1 + 3 + 3), ("fp8-rowwise", 1 + 3 + 1 + 3), ("mxfp8", 8)])
def test_what_several_products_read_is_rounded_once(preset: str, casts: int) -> None:
    """The value, its weights and their gradients; by rows the backward, which sums over others, rounds it once more."""
    results = []
    for pipeline in (amp.pipelines.STEP, amp.pipelines.STEP.skip("simplify_casts")):
        model = Heads()
        step = sgd_step(model, lambda m, x: m(x), 0.1, rules=preset, passes=pipeline)
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
        results.append([step(x), step(x), *model.parameters()])
        result = [
            str(node.meta["val"].dtype) for node in step.graph_module.graph.nodes if "_to_copy" in str(node.target)
        ]
        assert (sum("float8" in dtype for dtype in result) == casts) == (pipeline is amp.pipelines.STEP)
    assert all(map(torch.equal, *results))
