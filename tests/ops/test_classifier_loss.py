"""A classifier's loss in chunks of rows, held to the same graph with all its logits stored."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_compiler.ops import classifier_loss
from amp_compiler.ops.classifier_loss import MEAN, SUM

F = torch.nn.functional
OPS = torch.ops.amp_compiler
NAMES = {MEAN: "mean", SUM: "sum"}
# What one rounding of the type is, relative to the largest element of a gradient.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def stored(grad, x, weight, bias, target, low, reduction, ignore_index, label_smoothing):
    """The loss and its gradients by torch, through all logits, computed and rounded as a graph of a step does."""
    leaves = [one.detach().requires_grad_() for one in (x, weight, bias) if one is not None]
    logits = F.linear(*leaves).to(low).float()
    options = {"reduction": NAMES[reduction], "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits, target, **options)
    return loss.detach(), *torch.autograd.grad(loss, leaves, grad)


def arguments(rows, features, classes, dtype=torch.float32, bias=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(size, features, generator=generator) for size in (rows, classes))
    some = torch.randn(classes, generator=generator).to(dtype) if bias else None
    return x.to(dtype), weight.to(dtype), some, torch.randint(0, classes, (rows,), generator=generator)


def bounds(grad, x, weight, bias, target, low, reduction, ignore_index, label_smoothing):
    """How far each element of the gradients may be off: its terms' magnitudes, rounded twice; they may cancel."""
    logits = F.linear(x, weight, bias).to(low).float().requires_grad_()
    options = {"reduction": NAMES[reduction], "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = F.cross_entropy(logits, target, **options)
    each = torch.autograd.grad(loss, logits, grad)[0].abs().nan_to_num()
    # A term is a difference of numbers up to `grad` (over the rows, of a mean), taken in FP32.
    counted = 1 if reduction == SUM else max(int((target != ignore_index).sum()), 1)
    off = 2 * ROUNDING[low] * each + 4 * 2**-23 * grad / counted
    return [off @ weight.float().abs(), off.t() @ x.float().abs(), off.sum(0)][: 2 + (bias is not None)]


def assert_near(found, expected, low, allowed=()):
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype is other.dtype and one.shape == other.shape
        largest = other.float().abs().nan_to_num().max().item() if other.numel() else 0.0
        # Terms of the size of the loss's gradient, 8 or less but for the large scale, may cancel in FP32.
        bound = 2 * ROUNDING[low if one.dim() else torch.float32] * largest + 4e-6
        if allowed and number:  # and both sums are rounded to the type of the gradient
            bound = allowed[number - 1] + ROUNDING[one.dtype] * other.float().abs().nan_to_num()
        one, other = one.float(), other.float()
        assert torch.equal(one.isnan(), other.isnan())
        assert bool(((one - other).abs().nan_to_num() <= bound).all()), (one, other, bound)


@settings(max_examples=60, deadline=None)
@example(2, 1, 2, 1, torch.bfloat16, False, False, MEAN, 0.1, 0.0, 49)  # two rows that nearly cancel
@example(8, 3, 46, 2, torch.float16, False, False, MEAN, 0.1, 0.3, 8)  # sums on both sides of a rounding
@given(
    rows=st.integers(1, 40),
    features=st.integers(1, 9),
    classes=st.integers(1, 70),
    at_once=st.integers(1, 50),
    low=st.sampled_from(list(ROUNDING)),
    wide=st.booleans(),
    bias=st.booleans(),
    reduction=st.sampled_from([MEAN, SUM]),
    smoothing=st.sampled_from([0.0, 0.1]),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_shape_gives_what_stored_logits_give(
    rows, features, classes, at_once, low, wide, bias, reduction, smoothing, ignored, seed
):
    dtype = torch.float32 if wide else low
    x, weight, some, target = arguments(rows, features, classes, dtype, bias, seed)
    generator = torch.Generator().manual_seed(seed)
    target[torch.rand(rows, generator=generator) < ignored] = -100
    options = (low, reduction, -100, smoothing)
    expected = stored(torch.tensor(8.0), x, weight, some, target, *options)
    wanted = [True, True, bias]
    found = OPS.classifier_loss_gradients(torch.tensor(8.0), x, weight, some, target, *options, at_once, wanted)
    assert_near(found[: len(expected)], expected, low, bounds(torch.tensor(8.0), x, weight, some, target, *options))
    alone = OPS.classifier_loss(x, weight, some, target, *options, at_once)
    torch.testing.assert_close(alone, found[0], rtol=1e-6, atol=0, equal_nan=True)


def test_no_row_counts():
    x, weight, _, target = arguments(6, 4, 9)
    target[:] = -1
    loss, *gradients = OPS.classifier_loss_gradients(
        torch.tensor(1.0), x, weight, None, target, torch.float32, MEAN, -1, 0.0, 4, [True, True, False]
    )
    assert loss.isnan() and F.cross_entropy(x @ weight.t(), target, ignore_index=-1).isnan()
    assert all(not one.any() for one in gradients[:2])


def test_no_rows_at_all():
    x, weight, bias, target = arguments(0, 4, 9, bias=True)
    loss, *gradients = OPS.classifier_loss_gradients(
        torch.tensor(1.0), x, weight, bias, target, torch.float32, SUM, -100, 0.0, 4, [True, True, True]
    )
    assert loss == 0 and all(not one.any() for one in gradients)


@pytest.mark.parametrize("number", [9, -1, 1 << 40])
def test_a_class_that_there_is_not_is_an_error(number):
    x, weight, _, target = arguments(6, 4, 9)
    target[3] = number
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        F.cross_entropy(x @ weight.t(), target)
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        OPS.classifier_loss(x, weight, None, target, torch.float32, MEAN, -100, 0.0, 4)


def test_a_large_loss_scale_is_multiplied_in_before_fp16_is_reached():
    """The gradient of one row among many is below FP16's least number without the scale, and above it with it."""
    x, weight, _, target = arguments(64, 8, 200, torch.float16)
    options = (torch.float16, MEAN, -100, 0.0)
    for scale in (1.0, 65536.0):
        expected = stored(torch.tensor(scale), x.float(), weight.float(), None, target, *options)
        found = OPS.classifier_loss_gradients(
            torch.tensor(scale), x.float(), weight.float(), None, target, *options, 16, [True, True, False]
        )
        assert_near(found[:3], expected, torch.float16)
    assert all(one.isfinite().all() for one in found[:3])


def test_only_what_is_asked_for():
    x, weight, bias, target = arguments(6, 4, 9, bias=True)
    whole = None
    for wanted in itertools.product([True, False], repeat=3):
        made = OPS.classifier_loss_gradients(
            torch.tensor(1.0), x, weight, bias, target, torch.float32, MEAN, -100, 0.0, 4, list(wanted)
        )
        whole = whole or made
        for one, other, asked in zip(made[1:], whole[1:], wanted, strict=True):
            assert torch.equal(one, other) if asked else not one.numel()


def test_the_operators_keep_torchs_rules():
    x, weight, bias, target = arguments(6, 4, 9, bias=True)
    leaves = [one.requires_grad_() for one in (x, weight, bias)]
    rest = (torch.float32, MEAN, -100, 0.1, 4)
    torch.library.opcheck(OPS.classifier_loss.default, (*leaves, target, *rest))
    plain = [one.detach() for one in leaves]
    torch.library.opcheck(
        OPS.classifier_loss_gradients.default, (torch.tensor(2.0), *plain, target, *rest, [True, True, True])
    )


class _Largest(TorchDispatchMode):
    """The largest number of elements of anything that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(made) if isinstance(one, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_all_rows_and_all_classes_is_made(dtype):
    rows, features, classes, at_once = 96, 4, 500, 8
    x, weight, _, target = arguments(rows, features, classes, dtype)
    given = (torch.tensor(1.0), x, weight, None, target, torch.bfloat16, MEAN, -100, 0.0, at_once, [True, True, False])
    with _Largest() as largest:
        classifier_loss.classifier_loss_gradients._init_fn(*given)
    assert largest.elements == at_once * classes > classes * features


@pytest.mark.long
def test_the_kernel_under_the_interpreter():
    """In a process of its own: the interpreter replaces Triton's language when Triton is imported."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "cross_entropy_interpreted.py"],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\b[1-9]\d passed", done.stdout)


@pytest.mark.parametrize("low", ["bfloat16", "float16"])
def test_the_kernel_loads_16_bytes_at_a_time_and_spills_nothing(low, tmp_path):
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter has taken the compiler's place")
    import triton.language as tl
    from test_kernels import compile_kernel, ptxas_report

    from amp_compiler.ops.cuda import cross_entropy
    from amp_compiler.ops.cuda.cross_entropy_kernel import cross_entropy_kernel

    short = {"bfloat16": "bf16", "float16": "fp16"}[low]
    signature = {
        "logits": f"*{short}", "target": "*i64", "factor": "*fp32", "losses": "*fp32", "classes": "i32",
        "stride": "i32", "share": "fp32", "smoothing": "fp32",
    }  # fmt: skip
    constants = {"LOW": getattr(tl, low), "GRADIENT": True, "SMOOTH": False, "BLOCK": cross_entropy.BLOCK}
    ptx = compile_kernel(cross_entropy_kernel, signature, constants, 90, aligned=("stride",), **cross_entropy._OPTIONS)
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in ptxas_report(ptx, tmp_path)
    assert re.search(r"ld\.global\.v4\.b32", ptx) and re.search(r"st\.global\.v4\.b32", ptx)
    assert not re.search(r"ld\.global\.(b16|v2)", ptx.replace("ld.global.b16", "", 1)), "one logit is read alone"
