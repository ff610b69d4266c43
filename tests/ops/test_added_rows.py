"""Rows that lookups add to a gradient which is not made: against the same rows added to the gradient made whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from update_arguments import hyper, number

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.update.product import Product

QUICK = settings(max_examples=40, deadline=None, derandomize=True, database=None)

pytestmark = pytest.mark.skipif(not cpu_update.available(), reason="no C++ compiler on this machine")


def product(rows, inner, columns):
    return Product(torch.randn(rows, inner).bfloat16(), torch.randn(inner, columns).bfloat16())


def as_added(gradient):
    """The gradient as an update sees it, and the squares that it gives: SGD adds it to weights of zero."""
    weight = torch.zeros(gradient.shape)
    options = (number(1.0), hyper(-1.0, 0, 0, 0, 0), number(1.0), number(0.0), False, False)
    squares = cpu_update.FUNCTIONS["sgd_update"]([weight], [gradient], [], [], *options)
    return weight, squares


def added_one_by_one(gradient, values, places, skipped=-1):
    result = gradient.float().clone()
    for row, place in zip(values.reshape(-1, values.shape[-1]), places.reshape(-1).tolist(), strict=True):
        if skipped < 0 or place != skipped:
            result[place] += row
    return result


@QUICK
@given(
    st.integers(1, 70), st.sampled_from([0, 1, 2, 8, 9, 40]), st.sampled_from([1, 16, 70, 513, 1100]),
    st.integers(0, 90), st.sampled_from([-1, 0, 3]), st.sampled_from([torch.int64, torch.int32]), st.booleans(),
)  # fmt: skip
def test_rows_are_added_in_their_order(rows, inner, columns, added, skipped, kind, gaps):
    torch.manual_seed(rows)
    base, places = product(rows, inner, columns), torch.randint(0, rows, (added,), dtype=kind)
    values = torch.randn(added, 2 * columns)[:, ::2] if gaps else torch.randn(added, columns)
    gradient = base.plus_rows(values, places, skipped)
    exact = as_added(base)[0]
    expected = added_one_by_one(exact, values, places, skipped)
    norm, nonfinite, flags = cpu_update.grad_check([gradient], number(1.0))
    weight, squares = as_added(gradient)
    assert torch.equal(weight, expected) and gradient.dtype == torch.float32
    assert float(nonfinite) == 0 and flags.tolist() == [0] and not gradient.counted
    complete = float(cpu_update.complete_norm(norm, squares))
    assert complete == pytest.approx(float(expected.double().norm()), rel=1e-5)
    assert ((gradient.tensor() - expected).abs() <= (exact.abs() + expected.abs()) * 2**-8 + 1e-5).all()


def test_shapes_of_lookups_and_rows_counted_from_the_end():
    values, places = torch.randn(2, 3, 5), torch.tensor([[0, 3, 3], [-1, 1, 0]])
    weight, _ = as_added(Product.zeros(4, 5).plus_rows(values, places, -1))
    assert torch.equal(weight, added_one_by_one(torch.zeros(4, 5), values, places))


def test_rows_of_several_lookups():
    torch.manual_seed(0)
    first, second = torch.randn(6, 20), torch.randn(4, 20)
    here, there = torch.tensor([1, 2, 1, 0, 2, 1]), torch.tensor([2, 0, 3, 2])
    base = product(4, 9, 20)
    gradient = base.plus_rows(first, here, 0).plus_rows(second, there, 3)
    expected = added_one_by_one(added_one_by_one(as_added(base)[0], first, here, 0), second, there, 3)
    assert torch.equal(as_added(gradient)[0], expected)
    torch.testing.assert_close(gradient.tensor(), expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("inner", [0, 2, 9])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_row_that_is_not_finite_is_found_where_it_counts(inner, bad):
    base, values = product(6, inner, 70), torch.randn(3, 70)
    values[1, 69] = bad
    gradients = [base.plus_rows(values, torch.tensor([2, 4, 2]), skipped) for skipped in (-1, 4)]
    norm, nonfinite, flags = cpu_update.grad_check([*gradients, torch.ones(3)], number(1.0))
    assert flags.tolist() == [1, 0, 0] and float(nonfinite) == 1 and not norm.isfinite()
    assert [gradient.counted for gradient in gradients] == [True, False]


@pytest.mark.parametrize("inner", [0, 9])
def test_a_row_that_is_not_finite_is_found_behind_skipped_ones_and_in_any_lookup(inner):
    bad, good = torch.randn(3, 70), torch.randn(3, 70)
    bad[2, 5] = float("nan")
    places = torch.tensor([4, 4, 2])
    for lookups in ((bad,), (bad, good), (good, bad)):
        gradient = product(6, inner, 70)
        for values in lookups:
            gradient = gradient.plus_rows(values, places, 4)
        norm, _, flags = cpu_update.grad_check([gradient], number(1.0))
        assert flags.tolist() == [1] and not norm.isfinite()


def test_rows_whose_sum_leaves_the_range_are_found():
    for sizes, finite in (([3e38, 3e38], False), ([3e38, -3e38], True), ([1e38, 1e38], True)):
        values = torch.tensor(sizes)[:, None].expand(2, 64)
        gradient = product(5, 0, 64).plus_rows(values, torch.tensor([3, 3]), -1)
        norm, _, flags = cpu_update.grad_check([gradient], number(1e-30))
        assert flags.tolist() == [not finite]
        assert gradient.counted == (sizes != [1e38, 1e38])  # what may overflow is made to be seen
        assert not finite or float(norm) == pytest.approx(8e-30 * sum(sizes) * gradient.counted)


def test_a_weight_in_columns_gets_them_too():
    gradient = product(20, 9, 30).plus_rows(torch.randn(2, 30), torch.tensor([3, 3]), -1)
    weight = torch.zeros(30, 20).t()
    options = (number(1.0), hyper(-1.0, 0, 0, 0, 0), number(2.0), number(0.0), False, False)
    squares = cpu_update.FUNCTIONS["sgd_update"]([weight], [gradient], [], [], *options)
    assert torch.equal(weight, 2 * as_added(gradient)[0])
    assert squares == pytest.approx(float(weight.double().square().sum()), rel=1e-5)


def test_another_default_device_changes_nothing():
    gradients = [Product.zeros(4, 5).plus_rows(torch.randn(2, 5), torch.tensor([1, 1]), -1), torch.randn(3)]
    inverse = number(1.0)
    expected = cpu_update.grad_check(gradients, inverse)
    with torch.device("meta"):
        zeros = Product.zeros(4, 5)
        result = cpu_update.grad_check(gradients, inverse)
    assert zeros.left.device.type == "cpu"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(result, expected, strict=True))


def test_what_cannot_be_done_is_refused():
    zeros, values = Product.zeros(4, 5), torch.randn(2, 5)
    gradient = zeros.plus_rows(values, torch.tensor([1, 1]), -1)
    for change, says in (
        (gradient.transposed, "with added rows cannot be"),
        (lambda: gradient.reshaped(20), "with added rows cannot be"),
        (lambda: zeros.plus_rows(values[:1], torch.tensor([1, 1]), -1), "1 rows of values are added at 2 places"),
        (lambda: zeros.plus_rows(values, torch.tensor([0, 4]), -1), r"places 0 to 4 .* 4 rows"),
        (lambda: zeros.plus_rows(values, torch.tensor([1, -5]), -1), r"places -1 to 1 .* 4 rows"),
    ):
        with pytest.raises(LoweringError, match=says):
            change()
