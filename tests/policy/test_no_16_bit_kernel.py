"""Ops that torch has no 16-bit form of, behind a layer that gives 16 bits: they run, whatever a preset makes low."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from toys import Composed

import amp_compiler as amp

OPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm nuc": lambda h: torch.norm(h, "nuc"),
    "linalg.norm nuc": lambda h: torch.linalg.norm(h, "nuc"),
    "linalg.norm 2": lambda h: torch.linalg.norm(h, 2),
    "matrix_norm": lambda h: torch.linalg.matrix_norm(h),
    "new_empty_strided": lambda h: h.new_empty_strided((2, 3), (3, 1)).zero_() + h.sum(),
}


@pytest.mark.parametrize("preset", ["default", "apex-o3", "nvcaffe", "tensorflow"])
@pytest.mark.parametrize("name", OPS)
def test_it_runs(name: str, preset: str) -> None:
    torch.manual_seed(0)
    model, x = Composed(lambda m, x: OPS[name](m.fc(x)), fc=nn.Linear(4, 4)), torch.eye(4) + 1
    result = amp.compile(model, dtype="bf16", backend="eager", rules=preset)(x)
    torch.testing.assert_close(result, model(x), rtol=2e-2, atol=2e-2)
