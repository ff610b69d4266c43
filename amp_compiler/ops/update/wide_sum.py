"""Gradients that are FP32 sums of what several ranks have made, and are not added until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amp_compiler.errors import LoweringError
from amp_compiler.ops.layout import is_dense, same_layout


def add_wide(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors in FP32, in their order, which is rounded to no narrower type.

    Args:
        parts: tensors of one float type and shape, at least one.

    Example:
        >>> add_wide([torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0**-20], dtype=torch.bfloat16)]) - 1
        tensor([9.5367e-07])
    """
    return reduce(torch.add, (one.float() for one in parts[1:]), parts[0].to(torch.float32, copy=True))


class WideSum:
    """`add_wide` as a gradient that lies nowhere in memory: the check and the update add it where they read it.

    That saves the FP32 sum's memory and the pass that writes it; of two 16-bit gradients each reads as many bytes.

    Args:
        parts: the gradients that are added, of one float type and shape.

    Raises:
        LoweringError: they are of several types or shapes, or there is none.

    Example:
        >>> WideSum([torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.float16)]).tensor()
        tensor([2., 2.])
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        forms = {(one.dtype, one.shape) for one in parts}
        if len(forms) != 1:
            raise LoweringError(
                f"gradients of {len(forms)} types and shapes are added", hint="give some of one type and shape"
            )
        self.given = tuple(parts)
        self.shape, self.dtype = parts[0].shape, torch.float32
        self.others: Any = np.array([one.data_ptr() for one in parts[1:]], np.int64)  # addresses

    def numel(self) -> int:
        """Number of elements of the gradient."""
        return self.given[0].numel()

    def lies_like(self, weight: Tensor | None = None) -> bool:
        """Whether equal positions in memory hold what is added to one element, and are as those of a weight.

        Args:
            weight: of the same shape; `None` where any dense layout does.
        """
        first = self.given[0] if weight is None else weight
        return is_dense(first) and all(same_layout(one, first) for one in self.given)

    def tensor(self) -> Tensor:
        """The gradient, added now."""
        return add_wide(self.given)

    def float(self) -> Tensor:
        """The same."""
        return self.tensor()
