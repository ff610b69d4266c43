"""The benchmarks of many ranks: what is summed, and when messages hide behind products; by hand and by NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

GRADIENTS = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)) + 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sums_in_a_ring_and_in_a_tree_are_numpys(bench, dtype):
    inputs = GRADIENTS.to(dtype)
    array = inputs.numpy()
    total = array[0]
    for one in array[1:]:
        total = total + one
    assert total.dtype == array.dtype and np.array_equal(bench["reduction"].ring(inputs).numpy(), total)
    while len(array) > 1:
        array = array[0::2] + array[1::2]
    assert np.array_equal(bench["reduction"].tree(inputs).numpy(), array[0])


def test_the_errors_are_those_of_the_types(bench):
    result = bench["reduction"].errors(GRADIENTS)
    assert result["fp32 tree"] < 1e-6 < result["fp16 tree"] < 2.0**-11 < result["bf16 tree"] < 2.0**-8
    assert result["fp16 tree"] < result["fp16 ring"] < result["bf16 ring"]
    spread = GRADIENTS.double().std(0, correction=0).norm() / 8 / GRADIENTS.double().mean(0).norm()
    assert result["noise"] == pytest.approx(float(spread))


def test_fp16_sums_have_room_whatever_the_gradients(bench):
    for size in (1e-6, 1.0, 1e4):
        result = GRADIENTS * size
        mean = bench["reduction"].reduced(result, torch.float16, bench["reduction"].ring)
        assert float((mean - result.mean(0)).norm() / result.mean(0).norm()) < 2e-3


def test_gradients_of_each_rank_are_autograds(bench):
    reduction = bench["reduction"]
    model, (x, y) = reduction.classifier(0), reduction.images()
    result = reduction.gradients(model, x[:3], y[:3])
    for one, image, label in zip(result, x, y, strict=False):
        loss = nn.functional.cross_entropy(model(image[None]), label[None])
        wanted = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
        torch.testing.assert_close(one, wanted)
