"""Element types by the names that users write for them."""

from typing import get_args

import numpy as np
import pytest
import torch

from amp_compiler.errors import AmpError
from amp_compiler.ir.dtypes import DType, LowName, dtype_from_short, element_type, low_name, low_type


@pytest.mark.parametrize("name", get_args(LowName))
def test_torch_has_the_type_of_every_name(name):
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name) or getattr(torch, name)
    assert f"torch.{low_type(name).value}" == str(wanted)
    assert low_type(wanted) is low_type(name)


@pytest.mark.parametrize("dtype", [torch.half, np.float16, np.dtype("float16"), "half", DType.FLOAT16.value])
def test_types_of_torch_and_numpy_are_names_too(dtype):
    assert (low_type(dtype), low_name(dtype)) == (DType.FLOAT16, "fp16")


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [
        ("bflaot16", "did you mean 'bfloat16'"),
        ("fp17", "did you mean 'fp16'"),
        ("atuo", "did you mean 'auto'"),
        ("float32", "use 'fp16', 'bf16' or 'auto'"),
        (torch.float32, "use 'fp16', 'bf16' or 'auto'"),
        (np.float64, "use 'fp16', 'bf16' or 'auto'"),
        (None, "use 'fp16', 'bf16' or 'auto'"),
        (10, "use 'fp16', 'bf16' or 'auto'"),
        (["fp16"], "did you mean 'fp16'"),
    ],
)
def test_anything_else_is_refused_with_the_nearest(dtype, hint):
    with pytest.raises(AmpError, match="is no 16-bit type") as caught:
        low_name(dtype)
    assert hint in caught.value.hint and repr(dtype) in caught.value.what


def test_auto_is_for_whoever_knows_the_device():
    assert low_name("auto") == "auto"
    with pytest.raises(AmpError, match=r"dtype='auto' is no 16-bit type; use 'fp16'"):
        low_type("auto")


def test_every_type_has_two_names():
    for dtype in DType:
        assert dtype_from_short(dtype.short) is dtype_from_short(dtype.value) is element_type(dtype.value) is dtype
