"""Gradients of weight matrices that are products of two 16-bit matrices and are not made until somebody reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_FIELDS = 10  # of a `Product` in cpu_product.h; the last says whether the check has counted it in the norm


class Product:
    """`left @ right` as a gradient that lies nowhere in memory.

    The update of the weight makes it a panel of rows at a time and uses each panel while it is in the cache. That saves
    one write and two reads of the gradient, and the gradient's memory; it costs keeping the factors until then.

    Args:
        left: bf16 [rows, inner], of any strides: the gradient of the layer's output, transposed, or its input.
        right: bf16 [inner, columns], of any strides: the other one.

    Example:
        >>> Product(torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(3, 4, dtype=torch.bfloat16)).tensor()[0, 0]
        tensor(3., dtype=torch.bfloat16)
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        (rows, inner), columns = left.shape, right.shape[1]
        self.shape = torch.Size((rows, columns))  # of the gradient; see `reshaped`
        self.fields: Any = np.array(
            [left.data_ptr(), *left.stride(), right.data_ptr(), *right.stride(), rows, columns, inner, 0], np.int64
        )

    @property
    def dtype(self) -> torch.dtype:
        """The type that the gradient is rounded to."""
        return self.left.dtype

    @property
    def is_matrix(self) -> bool:
        """Whether the gradient has the shape of the product itself."""
        return self.shape == (self.left.shape[0], self.right.shape[1])

    @property
    def counted(self) -> bool:
        """Whether the check has added its squares to the norm."""
        return bool(self.fields[-1])

    def numel(self) -> int:
        """Number of elements of the gradient."""
        return self.shape.numel()

    def transposed(self) -> Product:
        """The gradient of the transposed weight, with the same place in the norm."""
        other = Product(self.right.t(), self.left.t())
        other.fields[-1] = self.fields[-1]
        return other

    def reshaped(self, *shape: int) -> Product:
        """The gradient of a weight of more dimensions, whose elements in their order are those of the matrix."""
        other = Product(self.left, self.right)
        other.fields, other.shape = self.fields, torch.Size(shape)
        return other

    def tensor(self) -> Tensor:
        """The gradient, made now."""
        return (self.left @ self.right).reshape(self.shape)

    def float(self) -> Tensor:
        """The same in FP32."""
        return self.tensor().float()


def pays(rows: int, inner: int, columns: int) -> bool:
    """Whether the factors are smaller than the product, so that keeping them instead saves memory."""
    return inner * (rows + columns) < rows * columns
