"""The Triton kernel of cross-entropy against torch under Triton's interpreter: `test_classifier_loss.py` runs this.

It needs TRITON_INTERPRET=1 before Triton is imported. What the interpreter does otherwise than a device, and is put
right here: its conversion from FP32 to BF16 drops bits, and Triton 3.6's takes an array of one element for a number.
"""

import numpy as np
import pytest
import torch
from interpreting import convert_as_devices_do

from amp_compiler.ops.cuda import cross_entropy

F = torch.nn.functional
BLOCK = cross_entropy.BLOCK


@pytest.fixture(autouse=True)
def device_arithmetic(monkeypatch):
    convert_as_devices_do(monkeypatch)
    with np.errstate(all="ignore"):
        yield


def by_torch(logits, target, factor, low, smoothing):
    wide = logits.to(low).double().requires_grad_()  # in FP32 torch's sum over the classes is less exact
    losses = F.cross_entropy(wide, target, reduction="none", label_smoothing=smoothing)
    losses.backward(factor.double())
    return losses.detach().float(), wide.grad.float().to(low).to(logits.dtype)


def compared(logits, target, low, smoothing, room):
    rows, classes = logits.shape
    factor = torch.rand(rows) + 0.5
    expected, gradient = by_torch(logits, target, factor, low, smoothing)
    memory = torch.full((rows, classes + room), 7.0, dtype=logits.dtype)
    memory[:, :classes] = logits
    losses = torch.zeros(rows)
    cross_entropy.run(memory[:, :classes], target, None, losses, low, smoothing)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(memory[:, :classes], logits, rtol=0, atol=0, equal_nan=True)  # they stay as they were
    losses.zero_()
    cross_entropy.run(memory[:, :classes], target, factor, losses, low, smoothing)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=2e-6, equal_nan=True)
    step = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}[low]
    torch.testing.assert_close(memory[:, :classes], gradient, rtol=step, atol=5e-7, equal_nan=True)


TYPES = [(one, one) for one in (torch.float32, torch.bfloat16, torch.float16)] + [(torch.float32, torch.float16)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("dtype", "low"), TYPES)
@pytest.mark.parametrize("classes", [1, 2, 100, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 70])
def test_any_number_of_classes(classes, dtype, low, smoothing):
    torch.manual_seed(classes)
    rows = 3
    logits = (torch.randn(rows, classes) * 5).to(dtype)
    target = torch.randint(0, classes, (rows,))
    target[0], target[-1] = 0, classes - 1
    compared(logits, target, low, smoothing, room=-classes % 64)
    compared(logits, target, low, smoothing, room=0)


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 1e30, -1e30])
@pytest.mark.parametrize("place", [0, 5, BLOCK + 3])
def test_numbers_at_the_edge(number, place):
    torch.manual_seed(0)
    logits = torch.randn(2, BLOCK + 9)
    logits[0, place] = number
    compared(logits, torch.tensor([5, 7]), torch.float32, 0.0, room=3)


def test_logits_that_are_all_minus_infinity():
    compared(torch.full((2, 70), float("-inf")), torch.tensor([5, 7]), torch.float32, 0.0, room=0)
