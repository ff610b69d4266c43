"""Images and settings for the tests of max-pooling, by its own loops and by ATen.

The images have few different values, so that many pixels of a window are equal.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from amp_compiler.ops.cpu import pooling as cpu_pooling

CASES = {  # kernel, stride, padding, dilation, ceil_mode
    "halves": ([2, 2], [2, 2], [0, 0], [1, 1], False),
    "overlapping": ([3, 3], [2, 2], [1, 1], [1, 1], False),
    "all different": ([3, 2], [1, 2], [1, 0], [2, 1], True),
    "over the end": ([3, 3], [2, 2], [0, 0], [1, 1], True),
}
EACH = pytest.mark.parametrize("case", list(CASES))
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TYPED = pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}
LAID_OUT = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
PATHS = pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])

NATIVE = pytest.mark.skipif(not cpu_pooling.can_run(torch.ones(1, 1, 1, 1)), reason="no C++ compiler on this machine")


def on(native):
    if native and not cpu_pooling.can_run(torch.ones(1, 1, 1, 1)):
        pytest.skip("no C++ compiler on this machine")
    return mock.patch.object(cpu_pooling, "can_run", cpu_pooling.can_run if native else lambda tensor: False)


def images(sizes, dtype=torch.float32, layout=torch.contiguous_format, seed=0):
    """Quarters from -1 to 1; of every sixteenth pixel or so a NaN, an infinity or a zero below zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, sizes, generator=generator) / 4
    odd = torch.randint(0, 48, sizes, generator=generator)
    for number, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0)):
        values[odd == number] = value
    return values.to(dtype).contiguous(memory_format=layout)
