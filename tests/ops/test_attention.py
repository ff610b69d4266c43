"""The native backward of attention: against exact arithmetic, beside ATen's, and where it stands in compiled code."""

import math

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import amp_compiler as amp
from amp_compiler.ops import attention
from amp_compiler.ops.cpu import update as cpu_update

ATEN = torch.ops.aten
needs_loops = pytest.mark.skipif(not cpu_update.most_inner(), reason="this processor multiplies no BF16")
shapes = st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 150), st.integers(1, 150), st.sampled_from([1, 8, 33, 64, 80])
)


def tensors(shape, seed=0):
    """Query, key, value and the output's gradient, in the memory order that a projection leaves."""
    batch, heads, queries, keys, width = shape
    random = torch.Generator().manual_seed(seed)
    rows = (queries, keys, keys, queries)
    return [torch.randn(batch, n, heads, width, generator=random).bfloat16().transpose(1, 2) for n in rows]


def both(shape, causal=False, mask=None, scale=None, seed=0):
    """Gradients by the native loops, by ATen, and exact ones, all from one BF16 forward."""
    query, key, value, gradient = tensors(shape, seed)
    wide = [one.double().requires_grad_() for one in (query, key, value)]
    exact = F.scaled_dot_product_attention(
        *wide, attn_mask=None if mask is None else mask.double(), is_causal=causal, scale=scale
    )
    exact.backward(gradient.double())
    out, sums = ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )
    inputs = (gradient, query, key, value, out, sums)
    native = attention.attention_backward(*inputs, 0.0, causal, mask, scale)
    aten = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*inputs, 0.0, causal, attn_mask=mask, scale=scale)
    return native, aten, [one.grad for one in wide]


def check(native, aten, exact):
    """Hardly further from the exact gradients than ATen is, which rounds as often but not the same values.

    A unit of BF16 in the last place of the largest is allowed in any case. Where one key takes all, the exact gradients
    of the scores are 0, and FP32 sums of products of about 1 leave 1e-6.
    """
    for mine, theirs, true in zip(native, aten, exact, strict=True):
        assert mine.shape == theirs.shape
        assert mine.stride() == theirs.stride()
        largest = true.abs().max().item()
        assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max() + largest * 2**-7 + 1e-5
        assert (mine - true).norm() <= 1.5 * (theirs - true).norm() + 2**-8 * true.norm() + 1e-5


@needs_loops
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@example((1, 2, 700, 517, 64), False, None, 0)  # long sequences come in chunks
@example((1, 2, 700, 517, 64), True, None, 0)
@given(shapes, st.booleans(), st.sampled_from([None, 0.5]), st.integers(0, 5))
def test_gradients_are_as_exact_as_atens(shape, causal, scale, seed):
    check(*both(shape, causal, None, scale, seed))


@needs_loops
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(shapes, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 7), st.booleans())
def test_masks_are_added_to_the_scores(shape, dtype, broadcast, hides):
    batch, heads, queries, keys, _ = shape
    size = [1 if broadcast & 1 else batch, 1 if broadcast & 2 else heads, 1 if broadcast & 4 else queries, keys]
    random = torch.Generator().manual_seed(0)
    mask = torch.randn(size, generator=random).to(dtype)
    if hides:  # but never all keys of a query
        mask[..., 1:] = mask[..., 1:].masked_fill(torch.rand(size, generator=random)[..., 1:] < 0.5, -math.inf)
    check(*both(shape, False, mask))


@needs_loops
def test_gradients_are_the_same_for_any_number_of_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = both((2, 3, 70, 70, 32), causal=True)[0]
        torch.set_num_threads(3)
        three = both((2, 3, 70, 70, 32), causal=True)[0]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))


@needs_loops
def test_a_nan_reaches_what_depends_on_it_and_no_other_head():
    query, key, value, gradient = tensors((2, 2, 40, 40, 16))
    out, sums = ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
    gradient[1, 0, 5, 3] = math.nan
    d_query, d_key, d_value = attention.attention_backward(gradient, query, key, value, out, sums, 0.0, True)
    bad = torch.zeros(2, 2, 40, dtype=torch.bool)
    bad[1, 0, 5] = True
    assert torch.equal(d_query.isnan().any(-1), bad)
    bad[1, 0, :6] = True  # the keys that query 5 sees
    assert torch.equal(d_key.isnan().any(-1), bad)
    assert torch.equal(d_value.isnan().flatten(2).any(-1), torch.tensor([[False, False], [True, False]]))


@needs_loops
def test_operands_may_lie_in_any_way():
    query, key, value, gradient = tensors((2, 3, 20, 30, 16))
    out, sums = ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False)
    inputs = (gradient, query, key, value, out)
    plain = attention.attention_backward(*inputs, sums, 0.0, False)
    sparse = [F.pad(one, (0, 3))[..., :16] for one in inputs]
    turned = [one.transpose(2, 3).contiguous().transpose(2, 3) for one in inputs]
    for some in (sparse, turned):
        result = attention.attention_backward(*some, sums.contiguous(), 0.0, False)
        assert all(torch.equal(a, b) for a, b in zip(plain, result, strict=True))


@pytest.mark.parametrize("change", ["fp32", "dropout", "grouped"])
def test_what_the_loops_do_not_take_is_left_to_aten(change):
    query, key, value, gradient = tensors((1, 4, 8, 8, 16))
    if change == "fp32":
        query, key, value, gradient = (one.float() for one in (query, key, value, gradient))
    dropout = 0.5 if change == "dropout" else 0.0
    grouped = key[:, :2] if change == "grouped" else key
    assert not attention.can_run(query, grouped, grouped, dropout, None)
    if change == "fp32":
        out, sums = ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False)
        inputs = (gradient, query, key, value, out, sums, 0.0, False)
        expected = ATEN._scaled_dot_product_flash_attention_for_cpu_backward(*inputs)
        result = attention.attention_backward(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@needs_loops
def test_a_query_that_a_finite_mask_hides_everything_from_is_as_atens():
    mask = torch.zeros(1, 1, 4, 5)
    mask[..., 2, :] = torch.finfo(torch.float32).min
    native, aten, _ = both((1, 2, 4, 5, 16), mask=mask)
    torch.testing.assert_close(native, aten, rtol=2e-2, atol=2e-2)


@needs_loops
def test_another_default_device_changes_nothing():
    shape = (1, 2, 4, 5, 16)
    query, key, value, gradient = tensors(shape)
    out, sums = ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False)
    with torch.device("meta"):
        result = attention.attention_backward(gradient, query, key, value, out, sums, 0.0, False)
    assert all(torch.equal(mine, expected) for mine, expected in zip(result, both(shape)[0], strict=True))


class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.project, self.causal = nn.Linear(32, 96), causal

    def forward(self, x):
        heads = self.project(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*heads, is_causal=self.causal).transpose(1, 2).flatten(2)


def mean_square(model, x):
    return model(x).float().pow(2).mean()


@pytest.fixture
def calls(monkeypatch):
    """Counts what runs in the native loops."""
    counted, loops = [], attention.library
    monkeypatch.setattr(attention, "library", lambda: counted.append(1) or loops())
    return counted


@needs_loops
@pytest.mark.compiles
@torch._functorch.config.patch(enable_autograd_cache=False)  # a graph from a cache goes through no pass
@torch._inductor.config.patch(fx_graph_cache=False)
def test_compiled_models_use_it_and_passes_that_the_user_has_given_inductor_still_run(calls):
    torch.manual_seed(0)
    model, x, seen = Attention(True), torch.randn(2, 10, 32), []

    def note(graph):
        seen.append(graph)

    with torch._inductor.config.patch(post_grad_custom_post_pass=(note, note)):
        mean_square(amp.compile(model, dtype="bf16"), x).backward()
    assert calls == [1]
    assert len(seen) == 4  # each in forward and backward
    result, model.project.weight.grad = model.project.weight.grad, None
    mean_square(model, x).backward()
    assert (result - model.project.weight.grad).norm() < 0.02 * result.norm()


@pytest.mark.compiles
@torch._functorch.config.patch(enable_autograd_cache=False)
@torch._inductor.config.patch(fx_graph_cache=False)
def test_the_pass_puts_no_bounds_on_symbolic_sizes():
    sizes = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("rows", min=2, max=64)}
    weights = {}
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model = Attention(False)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        settings = {"dtype": "bf16", "backend": backend, "dynamic_shapes": (sizes,)}
        step = amp.training_step(model, mean_square, optimizer, **settings)
        for batch in (4, 16):  # 4 is the number of heads
            step(torch.randn(batch, 5, 32, generator=torch.Generator().manual_seed(batch)))
        weights[backend] = model.project.weight.detach().clone()
    assert (weights["eager"] - weights["inductor"]).abs().max() < 1e-3
