"""Weights without FP32 masters: NVCaffe's FP16 storage, stochastic rounding, Kahan's compensation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from update_arguments import hyper, number

from amp_compiler.ops.update import operators as fused_update
from amp_compiler.ops.update import rounding
from amp_compiler.ops.update.rounding import Storage

assert fused_update
OPS = torch.ops.amp_compiler


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(value=st.floats(-60000, 60000, width=32) | st.floats(-(2.0**-13), 2.0**-13, width=32), key=st.integers(0, 2**62))
def test_stochastic_rounding_is_unbiased_and_picks_a_neighbour(dtype, value, key):
    count = 20000
    wide = torch.full((count,), value)
    words = rounding.random_words(wide, torch.tensor([key, 0]), 0)
    rounded = rounding.round_stochastically(wide, words, dtype)
    nearest = wide[:1].to(dtype)
    away = torch.where(nearest.double() < wide[:1].double(), 9e9, -9e9).to(torch.float32)
    other = torch.nextafter(nearest, away.to(dtype))
    exact = nearest.double().item() == wide[0].double().item()
    neighbours = {nearest.double().item()} | (set() if exact else {other.double().item()})
    assert set(rounded.double().unique().tolist()) <= neighbours
    gap = max(neighbours) - min(neighbours)
    # The standard deviation is at most half the gap; six of them for the mean of `count`.
    assert abs(rounded.double().mean().item() - value) <= 3 * gap / count**0.5


def test_stochastic_rounding_repeats_itself_and_moves_on():
    def step(rng):
        weights = [torch.ones(64).bfloat16(), torch.ones(64).bfloat16()]
        grads = [torch.full((64,), 0.01)] * 2
        OPS.sgd_update_low(
            weights, grads, [], [], number(0), rng, hyper(0.1, 0, 0, 0, 0), number(1), number(0), 1, False, False
        )
        return torch.stack(weights)

    rng = torch.tensor([42, 0])
    first = step(rng)
    assert rng.tolist() == [42, 1]
    assert torch.equal(first, step(torch.tensor([42, 0])))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, step(rng))


def test_philox_gives_the_published_numbers():
    """Known answers of Philox4x32-10 from the Random123 distribution."""
    zero = torch.zeros(1, dtype=torch.int64)
    ones = zero + 0xFFFFFFFF
    assert [int(word) for word in rounding.philox(zero[0], (zero,) * 4)] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    words = rounding.philox(torch.tensor(-1), (ones,) * 4)
    assert [int(word) for word in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("mode", list(Storage))
@pytest.mark.parametrize(("dtype", "beyond"), [(torch.float16, 70000.0), (torch.bfloat16, 3.4e38)])
def test_what_outgrows_its_type_is_clipped_and_what_is_infinite_stays(dtype, beyond, mode):
    largest = torch.finfo(dtype).max
    value = torch.tensor([beyond, -beyond, largest, torch.inf, -torch.inf, torch.nan])
    stored, error = rounding.narrow(value, value.to(dtype), mode, torch.tensor([0, 0]), 0)
    assert stored[:5].tolist() == [largest, -largest, largest, torch.inf, -torch.inf] and stored[5].isnan()
    assert error is None or error[:3].tolist() == [0, 0, 0]


def test_what_would_be_clipped_is_told_before():
    from amp_compiler.ops.update.operators import overflow

    def message(weight, grad, buffer, dtype=torch.float16):
        one = torch.tensor([weight]).to(dtype), torch.tensor([grad]), torch.tensor([buffer]).to(dtype)
        arguments = [[one[0]], [one[1]], [one[2]], [], number(1), torch.tensor([0, 0]), hyper(1.0, 1.0, 0, 0, 0)]
        before = [tensor.clone() for tensor in one]
        result = overflow("sgd_low", [*arguments, number(1), number(0), 0, False, False])
        assert all(torch.equal(now, then) for now, then in zip(one, before, strict=True))
        return bool(result)

    assert not message(1.0, 10.0, 65000.0) and message(1.0, 10000.0, 65000.0)  # the momentum
    assert not message(-65000.0, 500.0, 0.0) and message(-65000.0, 600.0, 0.0)  # the weight
    assert not message(-65000.0, 515.0, 0.0)  # rounds to 65504
    assert not message(-65000.0, 600.0, 0.0, torch.bfloat16)
    assert not message(1.0, torch.inf, 0.0)
