"""A step within a `TorchDispatchMode`, as counters of operations and of memory are."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toys import eager_step, small, squares


class Products(TorchDispatchMode):
    """Counts the products of matrices that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_what_runs_and_nothing_is_compiled_for_it():
    model = small()
    step = eager_step(model, squares)
    batch = torch.randn(3, 8), torch.randn(3, 4)
    for _ in range(3):
        with Products() as products:
            step(*batch)
        assert products.seen == 5  # two of the forward, three of the backward
        step(*batch)
    assert step._choice.compilations == 1
