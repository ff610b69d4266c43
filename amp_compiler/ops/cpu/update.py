"""The update operators on a CPU as native loops over all tensors of a group (`update.cpp`).

They give what `ops/update/reference.py` gives: weights, moments and 16-bit
copies are the same bit for bit, and the norm is summed in another order. A gradient may be a `Product` here: then no
gradient is written to memory, and where the check sees from what it is made of that all of it is finite, its part of
the norm is known from the update only.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import record_function

from amp_compiler.errors import LoweringError
from amp_compiler.ops.cpu.build import library
from amp_compiler.ops.layout import is_dense, laid_out_like, same_layout
from amp_compiler.ops.update.fused import MOST_STATES, FusedOptimizer, Update
from amp_compiler.ops.update.operators import FUSED
from amp_compiler.ops.update.product import Product

Tensors = Sequence[Tensor]
Gradient = Tensor | Product
Gradients = Sequence[Gradient]
TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}  # that gradients may have, by their code in C++
_TAKEN = "give masters and moments in fp32, gradients in fp32, bf16 or fp16, all on the CPU"
# The columns of a `Row` in chunks.h.
_COLUMNS = (
    "count",
    "grad_type",
    "low_type",
    "grad",
    "weight",
    "first",
    "second",
    "largest",
    "low",
    "step",
    "product",
)
_CACHED = 64


def grad_check(grads: Gradients, inv_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.grad_check`; the squares are summed in fp32 per 512 elements, then in fp64 in one order.

    The norm is without those products whose squares the updates give; see `complete_norm`.
    """
    flags = torch.zeros(len(grads), dtype=torch.uint8, device="cpu")
    table = np.zeros((len(grads), len(_COLUMNS)), np.int64)
    table[:, 0] = [grad.numel() for grad in grads]
    dense = [_dense(grad) for grad in grads]
    _set_gradients(table, dense)
    inverse = ctypes.c_float(_number(inv_scale))
    with record_function("amp_compiler::grad_check"):
        squares = _loaded().amp_grad_check(_start(table), len(grads), inverse, _address(flags), _threads())
    return complete_norm(None, squares), _scalar(float(flags.numpy().any())), flags


def complete_norm(norm: Tensor | None, *squares: float) -> Tensor:
    """The norm of all gradients: that of a check together with the squares that updates have given."""
    known = 0.0 if norm is None else _number(norm) ** 2
    return _scalar(sqrt(sum(squares, known)))


def update(optimizer: FusedOptimizer, args: Update) -> float:
    """As `reference.update`, for masters; gives the squares of the unscaled gradients that the check has left out.

    Args:
        optimizer: whose update it is.
        args: the arguments of its operator.
    """
    if not args.weights or _number(args.skip) != 0:
        return 0.0
    states = [*args.states, *[[]] * MOST_STATES][:MOST_STATES]
    table = _TABLES.get(args.weights, *states, args.low_weights, args.steps)
    numbers = _step_numbers(optimizer, args)
    factor = ctypes.c_float((-1 if args.flags["maximize"] else 1) * _number(args.coef))
    begun = args.started is not None and _number(args.started) != 0
    flags = (ctypes.c_bool * (len(args.flags) + 1))(*args.flags.values(), begun)
    stale = None if args.stale is None else _address(args.stale)
    alike, squares = _laid_out_like(args.grads, args.weights, factor.value)
    _set_gradients(table, alike)
    with record_function(f"amp_compiler::{optimizer.operator(low=False)}"):
        loop = getattr(_loaded(), f"amp_{optimizer.operator(low=False)}")
        squares += float(
            loop(_start(table), len(args.weights), _start(numbers), factor, flags, stale, args.takes, _threads())
        )
    if args.started is not None:
        args.started.fill_(1.0)
    return squares


def _function(optimizer: FusedOptimizer) -> Callable[..., float]:
    return lambda *arguments: update(optimizer, optimizer.bound(False, arguments))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "grad_check": grad_check,
    **{optimizer.operator(low=False): _function(optimizer) for optimizer in FUSED},
}


def made_gradient(gradient: Product, target: Tensor) -> Tensor:
    """A gradient as an update of a weight reads it, to the bit: in `target`, FP32, which lies as the weight does.

    Elsewhere a product may be summed in another order. Here SGD with a rate of -1 adds it to zeros.
    """
    target, one = target.zero_(), _scalar(1.0)
    rate = torch.tensor([-1.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    FUNCTIONS["sgd_update"]([target], [gradient], [], [], one, rate, one, _scalar(0.0), False, False)
    return target


def available() -> bool:
    """Whether the native loops can be used on this machine; they are compiled when first asked for."""
    return library() is not None


def most_inner() -> int:
    """Up to how many inner elements a BF16 `Product` is as fast as a library's matrix product; 0 for none."""
    return int(_loaded().amp_most_inner()) if available() else 0


def _loaded() -> ctypes.CDLL:
    loops = library()
    if loops is None:
        raise LoweringError("the CPU updates are not compiled", hint="install a C++ compiler, or set CXX")
    for name in FUNCTIONS:
        getattr(loops, f"amp_{name}").restype = ctypes.c_double
    loops.amp_most_inner.restype = ctypes.c_int64
    return loops


def _threads() -> int:
    return torch.get_num_threads()


def _dense(grad: Gradient) -> Gradient:
    """A gradient whose elements can be read one after another, in whatever order."""
    return grad if isinstance(grad, Product) or is_dense(grad) else grad.contiguous()


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _start(table: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(table.ctypes.data)


def _number(tensor: Tensor) -> float:
    """An fp32 scalar on the CPU, read where it lies."""
    if tensor.dtype != torch.float32 or not tensor.is_cpu:
        raise LoweringError(
            f"the CPU updates take no {tensor.dtype} scalar on {tensor.device}", hint="give an fp32 tensor on the CPU"
        )
    return ctypes.c_float.from_address(tensor.data_ptr()).value


def _scalar(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32, device="cpu")


def _set_gradients(table: Any, grads: Gradients) -> None:
    """Enter the gradients into a table; they must outlive its use."""
    products = [grad.fields.ctypes.data if isinstance(grad, Product) else 0 for grad in grads]
    table[:, _COLUMNS.index("grad")] = [0 if isinstance(grad, Product) else grad.data_ptr() for grad in grads]
    table[:, _COLUMNS.index("product")] = products
    table[:, _COLUMNS.index("grad_type")] = [_type(grad) for grad in grads]


def _laid_out_like(grads: Gradients, masters: Tensors, factor: float) -> tuple[list[Gradient], float]:
    """The gradients as their weights lie in memory; a product can be made row by row or column by column.

    A weight whose layout has changed since the step was built gets its product made whole. Where the check has left the
    squares of such a product out, the update will not count them either: their sum is returned with the gradients.
    """
    result: list[Gradient] = []
    squares = 0.0
    for grad, master in zip(grads, masters, strict=True):
        if not isinstance(grad, Product):
            result += laid_out_like([grad], [master])
        elif master.is_contiguous():
            result.append(grad)
        elif grad.can_be_transposed and master.t().is_contiguous():
            result.append(grad.transposed())
        else:
            whole = grad.tensor()
            result += laid_out_like([whole], [master])
            squares += 0.0 if grad.counted else float((whole.double() * factor).square().sum())
    return result, squares


def _type(tensor: Gradient) -> int:
    code, place = TYPES.get(tensor.dtype), tensor.left if isinstance(tensor, Product) else tensor
    if code is None or not place.is_cpu:
        raise LoweringError(f"the CPU updates take no {tensor.dtype} on {place.device}", hint=_TAKEN)
    return code


class _Tables:
    """Tables of addresses without the gradients, made and checked once for the tensors of a group."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[object, Any]] = OrderedDict()

    def get(self, *columns: Tensors) -> Any:
        """The table of weights, first and second moments, maxima, 16-bit copies and step counts."""
        first = columns[0][0].data_ptr()
        key = [_identity(tensor) for column in columns for tensor in column]
        known, table = self._known.get(first, (None, None))
        if known != (lengths := [len(column) for column in columns], key):
            table = _checked_table(columns)
            self._known[first] = (lengths, key), table
            if len(self._known) > _CACHED:
                self._known.popitem(last=False)
        return table


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """What a table is made from: memory that was freed may come back as a tensor of another type or layout."""
    return tensor.data_ptr(), tensor.dtype, tensor.numel(), tensor.stride()


def _checked_table(columns: Sequence[Tensors]) -> Any:
    masters, low_weights = columns[0], columns[4]
    for number, master in enumerate(masters):
        for place, column in enumerate(columns[:5]):
            tensor = column[number] if column else master
            wanted = (torch.float16, torch.bfloat16) if place == 4 and column else (torch.float32,)
            if tensor.dtype not in wanted or tensor.device.type != "cpu":
                raise LoweringError(f"the CPU updates take no {tensor.dtype} on {tensor.device} there", hint=_TAKEN)
            if tensor.shape != master.shape or not same_layout(tensor, master) or not is_dense(tensor):
                raise LoweringError(
                    f"tensors of shape {list(master.shape)} lie in memory with strides {master.stride()} and"
                    f" {tensor.stride()}",
                    hint="make them dense and of equal strides, for example with torch.empty_like and copy_",
                )
    table = np.zeros((len(masters), len(_COLUMNS)), np.int64)
    table[:, 0] = [master.numel() for master in masters]
    for place, column in enumerate(columns):
        if column:
            table[:, _COLUMNS.index("weight") + place] = [tensor.data_ptr() for tensor in column]
    if low_weights:
        table[:, _COLUMNS.index("low_type")] = [_type(low) for low in low_weights]
    return table


def _step_numbers(optimizer: FusedOptimizer, args: Update) -> Any:
    """As `reference.step_numbers`, in memory of NumPy, one row per tensor; one operation of torch takes longer."""
    counts = [_number(step) for step in args.steps] or [0.0] * len(args.weights)
    hyper = args.hyper.tolist()
    rows = {count: _row_of_numbers(optimizer, hyper, count) for count in dict.fromkeys(counts)}
    with np.errstate(over="ignore"):
        return np.array([rows[count] for count in counts], np.float32)


def _row_of_numbers(optimizer: FusedOptimizer, hyper: list[float], count: float) -> tuple[float, ...]:
    try:
        return tuple(optimizer.numbers.of(hyper, count + 1 if optimizer.counts else None, sqrt))
    except (ArithmeticError, ValueError):  # a tensor becomes inf or NaN there
        tensors = torch.tensor(hyper, dtype=torch.float64).unbind()
        numbers = optimizer.numbers.of(tensors, torch.tensor(count).double() + 1, torch.sqrt)
        return tuple(float(number) for number in numbers)


_TABLES = _Tables()
