"""Gradients of weight matrices that are products of two 16-bit matrices and are not made until somebody reads them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from amp_compiler.errors import LoweringError

# The fields of a `Product` in product.h from here on; the last says whether the check has counted it in the norm.
_ADDED = slice(9, 13)
_COUNTED = 13


class Product:
    """`left @ right`, and rows that are added to it, as a gradient that lies nowhere in memory.

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
        self.fields: Any = np.zeros(_COUNTED + 1, np.int64)
        self.fields[: _ADDED.start] = [
            *(left.data_ptr(), *left.stride(), right.data_ptr(), *right.stride(), rows, columns, inner)
        ]
        self._added: tuple[Tensor, Tensor, Tensor] | None = None  # values, places in ascending order, their numbers

    @staticmethod
    def zeros(rows: int, columns: int) -> Product:
        """A gradient of zeros, of this shape, for rows to be added to it."""
        left, right = (torch.empty(shape, dtype=torch.bfloat16, device="cpu") for shape in ((rows, 0), (0, columns)))
        return Product(left, right)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the gradient: that of the factors, and FP32 where rows are added."""
        return self.left.dtype if self._added is None else torch.float32

    @property
    def can_be_transposed(self) -> bool:
        """Whether the gradient of the transposed weight is made as easily."""
        return self._added is None and self.shape == (self.left.shape[0], self.right.shape[1])

    @property
    def counted(self) -> bool:
        """Whether the check has added its squares to the norm."""
        return bool(self.fields[_COUNTED])

    def numel(self) -> int:
        """Number of elements of the gradient."""
        return self.shape.numel()

    def transposed(self) -> Product:
        """The gradient of the transposed weight, with the same place in the norm.

        Raises:
            LoweringError: rows have been added.
        """
        self._check_bare("transposed")
        other = Product(self.right.t(), self.left.t())
        other.fields[_COUNTED] = self.fields[_COUNTED]
        return other

    def reshaped(self, *shape: int) -> Product:
        """The gradient of a weight of this shape, whose elements in their order are those of the matrix.

        Raises:
            LoweringError: rows have been added.
        """
        self._check_bare("reshaped")
        other = Product(self.left, self.right)
        other.fields, other.shape = self.fields, torch.Size(shape)
        return other

    def plus_rows(self, values: Tensor, places: Tensor, skipped: int) -> Product:
        """The gradient with rows added to it in FP32, in their order: that of a lookup in the same table.

        Args:
            values: fp32 [..., columns], one row for every place.
            places: int64 or int32 [...], in which row of the gradient each belongs; -1 is the last one.
            skipped: a row that gets none; negative where every row may.

        Raises:
            LoweringError: a place is not one of the gradient's rows, or there are not as many as rows of values.

        Example:
            >>> rows = Product.zeros(3, 2).plus_rows(torch.ones(2, 2), torch.tensor([1, 1]), -1)
            >>> rows.tensor().tolist()
            [[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]
        """
        rows, columns = self.shape
        flat, places = values.reshape(-1, columns).contiguous(), places.reshape(-1).long()
        if len(flat) != len(places):
            raise LoweringError(
                f"{len(flat)} rows of values are added at {len(places)} places",
                where="Product.plus_rows",
                hint="give one row for every place",
            )
        ascending, order = torch.where(places < 0, places + rows, places).sort(stable=True)
        if ascending.numel() and not 0 <= int(ascending[0]) <= int(ascending[-1]) < rows:
            raise LoweringError(
                f"places {int(ascending[0])} to {int(ascending[-1])} are not all among the {rows} rows of a weight",
                where="Product.plus_rows",
                hint="check the indices that the model looks up, such as its token ids",
            )
        if skipped >= 0:
            kept = ascending != skipped
            ascending, order = ascending[kept], order[kept]
        if self._added is not None:
            before, known, numbers = self._added
            ascending, together = torch.cat([known, ascending]).sort(stable=True)
            order = torch.cat([numbers, order + len(before)])[together]
            flat = torch.cat([before, flat])
        other = Product(self.left, self.right)
        other._added = flat, ascending, order
        other.fields[_ADDED] = flat.data_ptr(), ascending.data_ptr(), order.data_ptr(), len(ascending)
        return other

    def _check_bare(self, what: str) -> None:
        if self._added is not None:
            raise LoweringError(
                f"a gradient with added rows cannot be {what}", where="Product", hint="do so before rows are added"
            )

    def tensor(self) -> Tensor:
        """The gradient, made now."""
        product = torch.mm(self.left, self.right).reshape(self.shape)
        if self._added is None:
            return product
        values, places, order = self._added
        return product.float().index_add_(0, places, values[order])

    def float(self) -> Tensor:
        """The same in FP32."""
        return self.tensor().float()


def pays(rows: int, inner: int, columns: int, added: int = 0) -> bool:
    """Whether the factors and the added rows are smaller than the product: keeping them instead saves memory."""
    return inner * (rows + columns) + added * columns < rows * columns
