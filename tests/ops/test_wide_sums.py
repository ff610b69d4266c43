"""FP32 sums of several ranks' gradients that are added where they are read: against the same sums made before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_update import hyper, number

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.update.wide_sum import WideSum, add_wide

QUICK = settings(max_examples=40, deadline=None, derandomize=True, database=None)
TYPES = [torch.bfloat16, torch.float16, torch.float32]

pytestmark = pytest.mark.skipif(not cpu_update.available(), reason="no C++ compiler on this machine")


def added(gradient, weight):
    """A weight to which SGD adds a gradient."""
    options = (number(1.0), hyper(-1.0, 0, 0, 0, 0), number(1.0), number(0.0), False, False)
    cpu_update.FUNCTIONS["sgd_update"]([weight], [gradient], [], [], *options)
    return weight


@QUICK
@given(st.integers(1, 40_000), st.integers(1, 5), st.sampled_from(TYPES), st.booleans())
def test_sums_are_added_in_fp32_in_their_order(size, ranks, dtype, gaps):
    torch.manual_seed(size)
    rows = torch.randn(ranks, size + 7 * gaps).to(dtype)[:, :size]  # of a message that holds others behind them
    gradient = WideSum(list(rows.unbind()))
    expected = torch.zeros(size)
    for row in rows.float():
        expected = expected + row
    norm, nonfinite, flags = cpu_update.grad_check([gradient], number(0.5))
    same, _, _ = cpu_update.grad_check([expected], number(0.5))
    assert torch.equal(added(gradient, torch.zeros(size)), expected)
    assert torch.equal(gradient.tensor(), expected) and torch.equal(add_wide(rows.unbind()), expected)
    assert float(norm) == pytest.approx(float(same), rel=1e-6) and float(nonfinite) == 0 and flags.tolist() == [0]
    assert gradient.dtype == torch.float32 and gradient.shape == (size,)


def test_a_sum_that_the_type_of_its_parts_cannot_hold_is_finite():
    halves = [torch.full((600,), 60000.0, dtype=torch.float16)] * 2
    assert float(cpu_update.grad_check([WideSum(halves)], number(1.0))[1]) == 0
    halves[1] = halves[1].clone()
    halves[1][599] = torch.inf
    assert float(cpu_update.grad_check([WideSum(halves)], number(1.0))[1]) == 1


def test_a_weight_of_another_layout_gets_the_sum_made_before():
    parts = [torch.randn(4, 6).bfloat16(), torch.randn(4, 6).bfloat16()]
    turned = torch.zeros(6, 4).t()
    assert torch.equal(added(WideSum(parts), turned), parts[0].float() + parts[1].float())
    mixed = WideSum([parts[0], parts[1].t().contiguous().t()])
    assert torch.equal(added(mixed, torch.zeros(4, 6)), mixed.tensor())
    assert float(cpu_update.grad_check([mixed], number(1.0))[0]) == pytest.approx(float(mixed.tensor().norm()))


def test_what_cannot_be_added_is_refused():
    with pytest.raises(LoweringError, match="gradients of 2 types and shapes are added"):
        WideSum([torch.ones(2), torch.ones(2).half()])
    with pytest.raises(LoweringError, match="gradients of 0 types"):
        WideSum([])
