"""Every pair of words of a rule, against NumPy arithmetic that rounds where the words say."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from toys import sgd_step

import amp_compiler as amp

pytestmark = pytest.mark.usefixtures("bf16_kernels")

TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}
SMALL = 2.0**-30  # zero in FP16, rounded in BF16
OPS = ("linear", "convolution", "scale")
BEFORE = ("", "low", "fp32")  # what stands before the op: the input; a low node; a low node with FP32 gradients
# Numbers near 1 and multiples of 2^-11, more bits than the low types have. Of three products of two of them the sum is
# exact in FP32, in any order, so that every comparison is to the bit.
NEAR = 1 + np.array([1, -3, 5, 9, -7, 13]) * 2.0**-11
X = {"linear": NEAR[[0, 3, 1, 5]].reshape(2, 2), "convolution": NEAR[[2, 0, 4]].reshape(1, 1, 1, 3)}
X["scale"] = X["linear"]
WEIGHT = {"linear": NEAR[[1, 4, 5, 2, 3, 0]].reshape(3, 2), "convolution": NEAR[[5, 1]].reshape(1, 1, 1, 2)}
WEIGHT["scale"] = NEAR[[4, 2]]
BIAS = {"linear": NEAR[:3] - 1, "convolution": NEAR[3:4] - 1}
GRADIENT = {"linear": NEAR[[5, 0, 2, 3, 3, 1]].reshape(2, 3), "convolution": NEAR[[0, 4]].reshape(1, 1, 1, 2)}
GRADIENT["scale"] = NEAR[[1, 3, 5, 0]].reshape(2, 2)


@dataclass(frozen=True)
class Words:
    """A rule for one op, and what stands before it."""

    precision: str
    math: str
    backward: str
    backward_math: str
    before: str

    @property
    def rule(self) -> dict[str, Any]:
        backward = {"precision": self.backward, "math": self.backward_math}
        said = {"precision": self.precision, "math": self.math, "backward": {k: v for k, v in backward.items() if v}}
        return {key: value for key, value in said.items() if value}


WORDS = [Words(*one) for one in itertools.product(("low", "fp32"), ("", "fp32"), BEFORE, ("", "fp32"), BEFORE)]
BEHIND_LOW = [words for words in WORDS if words.before == "low"]
COMPILED = [words for words in BEHIND_LOW if words.precision == "low" and words.backward == "fp32"]


# ---- the arithmetic by hand


def rounded(values: Any, dtype: str) -> Any:
    if dtype == "fp16":
        return values.astype(np.float16).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def forward(op: str, x: Any, weight: Any, bias: Any) -> Any:
    if op == "linear":
        return x @ weight.T + bias
    if op == "scale":
        return x * weight
    return x[..., :2] * weight[..., :1] + x[..., 1:] * weight[..., 1:] + bias


def backward(op: str, x: Any, weight: Any, g: Any, by_element: Any) -> dict[str, Any]:
    if op == "linear":
        return {"x": g @ weight, "weight": g.T @ x, "bias": g.sum(0)}
    if op == "scale":
        return {"x": g * weight, "weight": by_element(g * x).sum(0)}
    along = np.concatenate([g * weight[..., :1], np.zeros((1, 1, 1, 1))], -1)
    along[..., 1:] += g * weight[..., 1:]
    return {
        "x": along,
        "weight": np.stack([(g * x[..., :2]).sum(-1), (g * x[..., 1:]).sum(-1)], -1),
        "bias": g.sum((0, 2, 3)),
    }


def by_hand(op: str, words: Words, dtype: str, small: float, given_low: bool = False) -> dict[str, Any]:
    """The result and the gradients of a model, which may be given in 16 bits, its inputs and results with it."""

    def low(values: Any) -> Any:
        return rounded(values, dtype)

    def same(values: Any) -> Any:
        return values

    x, weight, bias = X[op], WEIGHT[op], BIAS.get(op, np.zeros(1))
    x = low(x) if words.before or given_low else x
    x = -x if words.before else x
    weight, bias = (low(weight), low(bias)) if given_low else (weight, bias)
    reads = low if words.precision == "low" else same
    x, weight, bias = reads(x), reads(weight), reads(bias)
    result = {"result": (low if given_low else reads)(forward(op, x, weight, bias))}
    gradient = low if (words.backward or words.precision) == "low" else same
    wide = words.backward_math or (words.math and words.precision == "low")
    g = gradient(GRADIENT[op] * small)
    built = backward(op, gradient(x), gradient(weight), g, same if wide else gradient)
    result |= {name: gradient(value) for name, value in built.items()}
    if words.before:
        result["x"] = -(low(result["x"]) if words.before == "low" else result["x"])
    return result


# ---- the same by the compiler


class Case(nn.Module):
    def __init__(self, op: str, before: str) -> None:
        super().__init__()
        self.kind, self.before = op, Neg() if before else nn.Identity()
        self.op: nn.Module = {"linear": lambda: nn.Linear(2, 3), "convolution": lambda: nn.Conv2d(1, 1, (1, 2)),
                              "scale": Scale}[op]()  # fmt: skip
        self.op.weight.data = torch.tensor(WEIGHT[op], dtype=torch.float32)
        if op in BIAS:
            self.op.bias.data = torch.tensor(BIAS[op], dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(self.before(x))


class Neg(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Cases(nn.Module):
    """Several words side by side: one graph."""

    def __init__(self, op: str, several: list[Words]) -> None:
        super().__init__()
        self.cases = nn.ModuleList(Case(op, words.before) for words in several)

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return [case(x) for case, x in zip(self.cases, inputs, strict=True)]


def rules(several: list[Words], **more: Any) -> dict[str, Any]:
    said: list[dict[str, Any]] = [{"match": {}, "precision": "fp32"}]
    for place, words in enumerate(several):
        said.append({"match": {"module": f"cases.{place}.op"}, **words.rule})
        if words.before:
            wide = {"backward": {"precision": "fp32"}} if words.before == "fp32" else {}
            said.append({"match": {"module": f"cases.{place}.before"}, "precision": "low", **wide})
    return {"version": 1, "rules": said, **more}


def batch_of(op: str, small: float, number: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    coefficients = torch.tensor(GRADIENT[op] * small, dtype=torch.float32)
    return [coefficients, *[torch.tensor(X[op], dtype=dtype).requires_grad_() for _ in range(number)]]


def loss_fn(model: nn.Module, coefficients: torch.Tensor, *inputs: torch.Tensor) -> Any:
    results = model(*inputs)
    return sum((one.float() * coefficients).sum() for one in results), [one.detach() for one in results]


def check(
    op: str, dtype: str, small: float, matches: dict[Words, dict[str, torch.Tensor]], given_low: bool = False
) -> list[str]:
    """What is not as by hand."""
    wrong = []
    for words, numbers in matches.items():
        expected = by_hand(op, words, dtype, small, given_low)
        for name, value in numbers.items():
            if not np.array_equal(value.double().numpy(), expected[name]):
                wrong.append(f"{name} of {words} times {small}: {value.tolist()} for {expected[name].tolist()}")
    return wrong


def test_the_words_differ_in_the_arithmetic_by_hand() -> None:
    """The test of the test: where FP32 is lost, the numbers are others."""
    for op, dtype in itertools.product(OPS, TORCH):
        for words in [words for words in WORDS if (words.precision, words.backward) == ("low", "fp32")]:
            kept = by_hand(op, words, dtype, SMALL)["weight"]
            lost = by_hand(op, replace(words, backward="low", backward_math=""), dtype, SMALL)["weight"]
            assert kept.all() and (kept != lost).all() and bool(lost.any()) == (dtype == "bf16")


def looped(op: str, dtype: str, several: list[Words], backend: str) -> None:
    model, wrong = Cases(op, several), []
    compiled = amp.compile(model, rules=rules(several), dtype=dtype, backend=backend)
    for small in (1.0, SMALL):
        model.zero_grad()
        batch = batch_of(op, small, len(several))
        total, results = loss_fn(compiled, *batch)
        total.backward()
        matches = {
            words: {"result": result, "x": x.grad} | {name: one.grad for name, one in case.op.named_parameters()}
            for words, case, result, x in zip(several, model.cases, results, batch[1:], strict=True)
        }
        wrong += check(op, dtype, small, matches)
    assert not wrong, "\n".join(wrong)


def stepped(op: str, dtype: str, storage: str, several: list[Words], backend: str) -> None:
    weights, low = STORAGE[storage]
    model, wrong = Cases(op, several), []
    inputs = TORCH[dtype] if low else torch.float32
    model.to(inputs)
    options = {"rules": rules(several, weights=weights), "dtype": dtype, "backend": backend}
    step = sgd_step(model, loss_fn, 0.0, loss_scale=None, **options)
    for small in (1.0, SMALL):
        _, results = step(*batch_of(op, small, len(several), inputs))
        gradients = step.gradients()
        result = {
            words: {"result": results[place]}
            | {name: gradients[f"cases.{place}.op.{name}"] for name, _ in model.cases[place].op.named_parameters()}
            for place, words in enumerate(several)
        }
        wrong += check(op, dtype, small, result, low)
    assert not wrong, "\n".join(wrong)


STORAGE: dict[str, tuple[dict[str, Any], bool]] = {  # the section `weights`, and whether the model is given in 16 bits
    "masters": ({"master": "fp32"}, False),
    "no masters": ({"master": "low"}, False),
    "masters of 16-bit weights": ({"master": "fp32"}, True),
    "16-bit weights": ({"master": "low"}, True),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("op", OPS)
def test_a_loop_of_ones_own(op: str, dtype: str) -> None:
    looped(op, dtype, WORDS, "eager")


@pytest.mark.sweep(5)  # every op, type and storage
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("op", OPS)
def test_a_training_step(op: str, dtype: str, storage: str) -> None:
    stepped(op, dtype, storage, BEHIND_LOW, "eager")


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("op", OPS)
def test_compiled(op: str) -> None:
    """In FP16, where every down-cast really rounds: of BF16 a compiler may leave some out."""
    looped(op, "fp16", COMPILED, "inductor")
    stepped(op, "fp16", "masters", COMPILED, "inductor")
