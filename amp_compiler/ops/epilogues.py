"""Products of two matrices together with what would be loops behind them: an activation, its gradient, sums for a bias.

On a GPU cuBLASLt does these where the product is still in registers. So an activation and its gradient read the FP32
sums, where a loop behind the product reads what was rounded to 16 bits: they are rounded once less. What is kept for a
gradient is rounded, as the product alone would be. Anywhere else, and for a form of call that no trial has found right
(`ops.cuda.epilogue_trials`), the operators are the loops; a mask that one way has written the other reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from amp_compiler.ops.cuda import cublaslt
from amp_compiler.ops.cuda.cublaslt import Call, Epilogue, Refused, mask_bytes

aten = torch.ops.aten
GELU, RELU = ACTIVATIONS = ("gelu", "relu")  # GELU in its form by tanh
_FORWARD = {GELU: Epilogue.GELU | Epilogue.KEEP, RELU: Epilogue.RELU | Epilogue.KEEP}
_BACKWARD = {GELU: Epilogue.GELU_GRADIENT, RELU: Epilogue.RELU_GRADIENT}
_TAGS = (torch.Tag.flexible_layout,)  # operands are taken as they lie: a compiler need not copy any
Pair = tuple[Tensor, Tensor]


@torch.library.custom_op("amp_compiler::mm_activation", mutates_args=(), tags=_TAGS)
def mm_activation(left: Tensor, right: Tensor, bias: Tensor | None, activation: str) -> Pair:
    """An activation of a product.

    Args:
        left: [rows, inner].
        right: [inner, columns], of the same type.
        bias: [columns], or `None`.
        activation: one of `ACTIVATIONS`.

    Returns:
        The activation, [rows, columns], and what its gradient needs of its argument: for GELU the argument itself, for
        ReLU a bit for each element, uint8 [rows, bytes], see `mask_of`.
    """
    return _run(mm_activation, left, right, bias, activation)


@mm_activation.register_fake
def _(left: Tensor, right: Tensor, bias: Tensor | None, activation: str) -> Pair:
    rows, columns = left.shape[0], right.shape[1]
    return left.new_empty(rows, columns), _kept(left, rows, columns, activation)


@torch.library.custom_op("amp_compiler::mm_activation_backward", mutates_args=(), tags=_TAGS)
def mm_activation_backward(left: Tensor, right: Tensor, kept: Tensor, activation: str, sums: bool) -> Pair:
    """The gradient of an activation's argument, where that of its result is a product.

    Args:
        left: [rows, inner].
        right: [inner, columns], of the same type.
        kept: as `mm_activation` gave it.
        activation: as there.
        sums: whether the sums over rows are wanted, the gradient of a bias.

    Returns:
        The gradient, [rows, columns], and its sums, [columns], of the same type; nothing, [0], where they are not
        wanted.
    """
    return _run(mm_activation_backward, left, right, kept, activation, sums)


@mm_activation_backward.register_fake
def _(left: Tensor, right: Tensor, kept: Tensor, activation: str, sums: bool) -> Pair:
    return left.new_empty(left.shape[0], right.shape[1]), left.new_empty(right.shape[1] if sums else 0)


@torch.library.custom_op("amp_compiler::mm_with_sum", mutates_args=(), tags=_TAGS)
def mm_with_sum(left: Tensor, right: Tensor, of_left: bool) -> Pair:
    """A product, and what one of its operands adds up to over the inner dimension: the gradients of weight and bias.

    Args:
        left: [rows, inner].
        right: [inner, columns], of the same type.
        of_left: whether it is the left one, the rows of which are added up.

    Returns:
        The product, [rows, columns], and the sums, [rows] or [columns], of the same type.
    """
    return _run(mm_with_sum, left, right, of_left)


@mm_with_sum.register_fake
def _(left: Tensor, right: Tensor, of_left: bool) -> Pair:
    rows, columns = left.shape[0], right.shape[1]
    return left.new_empty(rows, columns), left.new_empty(rows if of_left else columns)


ACTIVATION, GRADIENT, WITH_SUM = OPERATORS = (
    torch.ops.amp_compiler.mm_activation.default,
    torch.ops.amp_compiler.mm_activation_backward.default,
    torch.ops.amp_compiler.mm_with_sum.default,
)


@register_flop_formula([operator.overloadpacket for operator in OPERATORS])
def _flops(left: Any, right: Any, *rest: Any, **named: Any) -> int:
    return 2 * left[0] * left[1] * right[1]  # type: ignore[no-any-return]


def _run(operator: Any, *arguments: Any) -> Pair:
    library = cublaslt.CUBLASLT
    if arguments[0].device.type == library.device and library.available():
        call, results = prepared(operator._opoverload, *arguments)
        if library.trusts(call):
            try:
                library.run(call)
            except Refused:  # what is wrong with more than this call shows in the loops as well
                return composed(operator._opoverload, *arguments)
            return results
    return composed(operator._opoverload, *arguments)


def composed(operator: Any, left: Tensor, right: Tensor, *rest: Any) -> Pair:
    """What an operator gives, by a product and loops.

    Args:
        operator: one of `OPERATORS`.
        left: its arguments.
        right: see there.
        rest: see there.
    """
    if operator is WITH_SUM:
        return torch.mm(left, right), left.sum(1) if rest[0] else right.sum(0)
    if operator is ACTIVATION:
        bias, activation = rest
        made = torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)
        if activation == GELU:
            return aten.gelu.default(made, approximate="tanh"), made
        found = torch.relu(made)
        return found, mask_of(found)
    kept, activation, sums = rest
    gradient = torch.mm(left, right)
    if activation == GELU:
        found = aten.gelu_backward.default(gradient, kept, approximate="tanh")
    else:
        found = torch.where(bits_of(kept, gradient.shape[1]), gradient, 0.0)
    return found, found.sum(0) if sums else found.new_empty(0)


def prepared(operator: Any, left: Tensor, right: Tensor, *rest: Any) -> tuple[Call, Pair]:
    """What cuBLASLt is to be asked for, and what that will write.

    Args:
        operator: one of `OPERATORS`.
        left: its arguments.
        right: see there.
        rest: see there.
    """
    rows, columns = left.shape[0], right.shape[1]
    out = left.new_empty(rows, columns)
    if operator is WITH_SUM:
        total = left.new_empty(rows if rest[0] else columns)
        return Call(left, right, out, Epilogue.SUM_LEFT if rest[0] else Epilogue.SUM_RIGHT, total), (out, total)
    if operator is ACTIVATION:
        bias, activation = rest
        aux, epilogue = _kept(left, rows, columns, activation), _FORWARD[activation]
        call = Call(left, right, out, epilogue if bias is None else epilogue | Epilogue.BIAS, bias, aux)
        return call, (out, aux)
    kept, activation, sums = rest
    total = left.new_empty(columns if sums else 0)
    epilogue = _BACKWARD[activation]
    call = Call(left, right, out, epilogue | Epilogue.SUM if sums else epilogue, total if sums else None, kept)
    return call, (out, total)


def shown(operator: Any, arguments: Sequence[Any], results: Sequence[Tensor]) -> Sequence[Tensor]:
    """The results of an operator, with the bits of a mask in the place of it, bool [rows, columns].

    Args:
        operator: one of `OPERATORS`.
        arguments: of it.
        results: what it gave for them.
    """
    if operator is ACTIVATION and arguments[3] == RELU:
        return results[0], bits_of(results[1], results[0].shape[1])
    return results


def mask_of(values: Tensor) -> Tensor:
    """A bit for each element of a matrix that its gradient goes through: all but those that are 0 or less.

    Args:
        values: [rows, columns].

    Returns:
        uint8 [rows, bytes], with zeros behind each row up to a multiple of 128 bits.
    """
    rows, columns = values.shape
    bits = torch.zeros(rows, 8 * mask_bytes(columns), dtype=torch.uint8, device=values.device)
    bits[:, :columns] = ~(values <= 0)
    return (bits.view(rows, -1, 8) << _places(values.device)).sum(2, dtype=torch.uint8)


def bits_of(mask: Tensor, columns: int) -> Tensor:
    """The bits of a mask.

    Args:
        mask: as `mask_of` makes it.
        columns: of the matrix.

    Returns:
        bool [rows, columns].
    """
    bits = (mask[:, :, None] >> _places(mask.device)) & 1
    return bits.flatten(1)[:, :columns].bool()


def _places(device: torch.device) -> Tensor:
    """Of the elements in a byte: the first is its lowest bit."""
    return torch.arange(8, dtype=torch.uint8, device=device)


def _kept(like: Tensor, rows: Any, columns: Any, activation: str) -> Tensor:
    if activation == GELU:
        return like.new_empty(rows, columns)
    return like.new_empty(rows, mask_bytes(columns), dtype=torch.uint8)
