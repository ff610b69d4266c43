"""Products of two matrices by cuBLASLt, with what it does at their end: an activation, its gradient, sums.

It is torch's own library, which is in the process already, called through ctypes. Its matrices lie column by column:
what lies row by row is its transpose there, so a product `out = left @ right` is asked for as the transpose of it, with
`right` as the matrix A and `left` as B.
"""

from __future__ import annotations

import ctypes
import enum
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ALIGNED = 8  # elements: what cuBLASLt wants of leading dimensions, and tensor cores of sizes
MASK = 128  # bits: a row of a mask begins at a multiple of it
WORKSPACE = 32 << 20  # bytes at most, as torch gives its own products on an H100
TYPES = {torch.float16: 2, torch.bfloat16: 14}  # as CUDA numbers them
_FP32 = 0
_COMPUTE_FP32 = 68
_IN_FP32 = 2  # partial sums of a product are added up in FP32, or there are none
_BYTES = 16  # that addresses are multiples of: what a thread loads at once
_SUCCESS, _NOT_SUPPORTED = 0, 15
_MOST = 8  # ways to compute a product that are asked for


class Epilogue(enum.IntFlag):
    """What is done at the end of a product, as cuBLASLt numbers it; parts are joined by `|`."""

    RELU = 2
    BIAS = 4
    GELU = 32
    KEEP = 128  # what the gradient needs is written as well: GELU's argument, or a bit for each positive element
    RELU_GRADIENT = 8 | 128
    GELU_GRADIENT = 64 | 128
    SUM = 16  # of the columns of the result in row order, beside a gradient
    SUM_RIGHT = 256  # of the right operand's columns
    SUM_LEFT = 512  # of the left operand's rows


class _Descriptor(enum.IntEnum):
    """Attributes of a product."""

    TRANSPOSE_A = 3
    TRANSPOSE_B = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    AUX_POINTER = 11
    AUX_LD = 12
    AUX_TYPE = 22
    BIAS_TYPE = 26


class _Preference(enum.IntEnum):
    """Attributes of what a heuristic is asked for; those of alignment stand in the order A, B, C, D."""

    WORKSPACE = 1
    REDUCTIONS = 3
    ALIGNMENT_A = 5


class _Found(ctypes.Structure):
    """A way to compute a product, as the heuristic gives it."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int),
        ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


class Refused(Exception):
    """cuBLASLt does not compute this; the text says why."""


@dataclass(frozen=True)
class Call:
    """A product and what stands beside it.

    Args:
        left: [rows, inner], its rows or its columns contiguous.
        right: [inner, columns], the same.
        out: [rows, columns], contiguous; written.
        epilogue: what is done at the end.
        vector: the bias, [columns], read; or the sums, [columns] or, of the left operand, [rows], written.
        aux: what is kept, [rows, columns] of the type of `out`, or a mask, uint8 [rows, bytes]; rows contiguous.
    """

    left: Tensor
    right: Tensor
    out: Tensor
    epilogue: Epilogue
    vector: Tensor | None = None
    aux: Tensor | None = None


@dataclass(frozen=True)
class _Matrix:
    """How an operand lies: the sizes and the leading dimension that cuBLASLt is told, by columns."""

    rows: int
    columns: int
    ld: int


@dataclass(frozen=True)
class _Form:
    """What two calls have in common that are computed in the same way."""

    device: int
    dtype: torch.dtype
    a: _Matrix
    b: _Matrix
    d: _Matrix
    transposed: tuple[bool, bool]
    epilogue: Epilogue
    aux_ld: int
    aux_type: int | None


@dataclass
class _Plan:
    """The descriptors of a form, which live as long as the process, and the ways to compute it, best first.

    `preferred` says that the first one was tried out and chosen.
    """

    product: ctypes.c_void_p
    a: ctypes.c_void_p
    b: ctypes.c_void_p
    d: ctypes.c_void_p
    found: list[_Found] = field(default_factory=list)
    preferred: bool = False


def lies(shape: Sequence[int], stride: Sequence[int]) -> tuple[bool, int] | None:
    """Whether the columns, not the rows, of a matrix are contiguous, and its leading dimension in elements.

    Args:
        shape: of the matrix, two numbers.
        stride: of it, in elements.

    Returns:
        `None` where neither are, or where sizes or leading dimension are no multiples of 8.
    """
    (rows, columns), (down, across) = shape, stride
    if rows % ALIGNED or columns % ALIGNED or not rows or not columns:
        return None
    if across == 1 and down >= columns and down % ALIGNED == 0:
        return False, down
    if down == 1 and across >= rows and across % ALIGNED == 0:
        return True, across
    return None


def mask_bytes(columns: int) -> int:
    """Bytes of a row of a mask."""
    return -(-columns // MASK) * MASK // 8


class Cublaslt:
    """The library, with what was found for each form of call.

    Args:
        api: its functions; torch's library where it is `None`, which is looked for at the first use.
        device: type of the devices that it computes on.
    """

    def __init__(self, api: Any = None, device: str = "cuda") -> None:
        self.device = device
        self._api = api
        self._looked = api is not None
        self._handles: dict[int, ctypes.c_void_p] = {}
        self._plans: dict[_Form, _Plan] = {}
        self._lock = threading.Lock()  # what a call points to is written into descriptors that are shared

    def available(self) -> bool:
        """Whether the library is in the process."""
        with self._lock:
            return self._functions() is not None

    def run(self, call: Call, choice: int = 0) -> None:
        """Compute on the current stream.

        Args:
            call: what to compute.
            choice: which of the ways that were found, see `choices`.

        Raises:
            Refused: it cannot be; nothing was written.
        """
        form = _form_of(call)
        with self._lock, _on(call.out.device):
            plan = self._plan(form, call)
            found = plan.found[choice]
            workspace = torch.empty(found.workspace, dtype=torch.uint8, device=call.out.device)
            one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
            out = ctypes.c_void_p(call.out.data_ptr())
            status = self._api.cublasLtMatmul(
                self._handle(form.device), plan.product, ctypes.byref(one), ctypes.c_void_p(call.right.data_ptr()),
                plan.a, ctypes.c_void_p(call.left.data_ptr()), plan.b, ctypes.byref(zero), out, plan.d, out, plan.d,
                ctypes.byref(found.algorithm), ctypes.c_void_p(workspace.data_ptr()),
                ctypes.c_size_t(found.workspace), ctypes.c_void_p(_stream(call.out.device)),
            )  # fmt: skip
            self._check(status)

    def choices(self, call: Call) -> int:
        """How many ways to compute it are known; raises as `run` does."""
        form = _form_of(call)
        with self._lock, _on(call.out.device):
            return len(self._plan(form, call).found)

    def prefer(self, call: Call, choice: int) -> None:
        """Let calls of this form run in one of the ways from now on, which was found to be right."""
        with self._lock:
            plan = self._plans[_form_of(call)]
            plan.found.insert(0, plan.found.pop(choice))
            plan.preferred = True

    def trusts(self, call: Call) -> bool:
        """Whether a way was found to be right for calls of this form; a compiler may lay operands out otherwise."""
        try:
            plan = self._plans.get(_form_of(call))
        except Refused:
            return False
        return plan is not None and plan.preferred

    def _functions(self) -> Any:
        if not self._looked:
            self._looked, self._api = True, _loaded()
        return self._api

    def _handle(self, device: int) -> ctypes.c_void_p:
        if device not in self._handles:
            if self._functions() is None:
                raise Refused("the library is not there")
            handle = ctypes.c_void_p()
            self._check(self._api.cublasLtCreate(ctypes.byref(handle)))
            self._handles[device] = handle
        return self._handles[device]

    def _plan(self, form: _Form, call: Call) -> _Plan:
        """The plan of a form, pointed to what a call is given."""
        handle = self._handle(form.device)
        pointers = [(_Descriptor.BIAS_POINTER, call.vector), (_Descriptor.AUX_POINTER, call.aux)]
        plan = self._plans.get(form)
        if plan is None:
            plan = self._described(form)
            for attribute, tensor in pointers:  # the heuristic looks at how it is aligned
                if tensor is not None:
                    self._set(plan.product, attribute, ctypes.c_void_p(_BYTES))
            plan.found = self._asked(plan, handle)
            self._plans[form] = plan
        for attribute, tensor in pointers:
            if tensor is not None:
                self._set(plan.product, attribute, ctypes.c_void_p(tensor.data_ptr()))
        return plan

    def _described(self, form: _Form) -> _Plan:
        product, code = ctypes.c_void_p(), TYPES[form.dtype]
        self._check(self._api.cublasLtMatmulDescCreate(ctypes.byref(product), _COMPUTE_FP32, _FP32))
        for attribute, transposed in zip(
            (_Descriptor.TRANSPOSE_A, _Descriptor.TRANSPOSE_B), form.transposed, strict=True
        ):
            self._set(product, attribute, ctypes.c_int32(int(transposed)))
        self._set(product, _Descriptor.EPILOGUE, ctypes.c_uint32(int(form.epilogue)))
        self._set(product, _Descriptor.BIAS_TYPE, ctypes.c_int32(code))
        if form.aux_ld:
            self._set(product, _Descriptor.AUX_LD, ctypes.c_int64(form.aux_ld))
        if form.aux_type is not None:
            self._set(product, _Descriptor.AUX_TYPE, ctypes.c_int32(form.aux_type))
        return _Plan(product, self._layout(form.a, code), self._layout(form.b, code), self._layout(form.d, code))

    def _layout(self, matrix: _Matrix, code: int) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        sizes = ctypes.c_uint64(matrix.rows), ctypes.c_uint64(matrix.columns), ctypes.c_int64(matrix.ld)
        self._check(self._api.cublasLtMatrixLayoutCreate(ctypes.byref(made), code, *sizes))
        return made

    def _asked(self, plan: _Plan, handle: ctypes.c_void_p) -> list[_Found]:
        """What the heuristic finds, in its order."""
        preference, count, found = ctypes.c_void_p(), ctypes.c_int(0), (_Found * _MOST)()
        self._check(self._api.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        try:
            values: list[tuple[int, Any]] = [
                (_Preference.WORKSPACE, ctypes.c_uint64(WORKSPACE)),
                (_Preference.REDUCTIONS, ctypes.c_uint32(_IN_FP32)),
            ]
            values += [(_Preference.ALIGNMENT_A + place, ctypes.c_uint32(_BYTES)) for place in range(4)]
            for attribute, value in values:
                size = ctypes.c_size_t(ctypes.sizeof(value))
                set_value = self._api.cublasLtMatmulPreferenceSetAttribute
                self._check(set_value(preference, int(attribute), ctypes.byref(value), size))
            self._check(
                self._api.cublasLtMatmulAlgoGetHeuristic(
                    handle, plan.product, plan.a, plan.b, plan.d, plan.d, preference, _MOST, found, ctypes.byref(count)
                )
            )
        finally:
            self._api.cublasLtMatmulPreferenceDestroy(preference)
        good = [one for one in found[: count.value] if one.state == _SUCCESS]
        if not good:
            self._check(_NOT_SUPPORTED)
        return good

    def _set(self, product: ctypes.c_void_p, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        self._check(self._api.cublasLtMatmulDescSetAttribute(product, int(attribute), ctypes.byref(value), size))

    def _check(self, status: int) -> None:
        if status != _SUCCESS:
            raise Refused(_NAMES.get(status, f"status {status}"))


_NAMES = {
    1: "not initialised", 3: "no memory", 7: "an invalid value", 8: "not on this GPU", 13: "it failed",
    14: "an internal error", 15: "not supported",
}  # fmt: skip
CUBLASLT = Cublaslt()


def _loaded() -> Any:
    """Torch's library where it is in the process; another of the same name beside it would be a risk, and no use."""
    if torch.version.cuda is None or not hasattr(os, "RTLD_NOLOAD"):
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None


def _form_of(call: Call) -> _Form:
    left, right = (lies(one.shape, one.stride()) for one in (call.left, call.right))
    out = lies(call.out.shape, call.out.stride())
    dtypes = {one.dtype for one in (call.left, call.right, call.out)}
    if left is None or right is None or out is None or out[0] or len(dtypes) != 1 or call.out.dtype not in TYPES:
        raise Refused("its layout or type")
    rows, inner = call.left.shape
    columns = call.right.shape[1]
    a = _Matrix(*((inner, columns) if right[0] else (columns, inner)), right[1])
    b = _Matrix(*((rows, inner) if left[0] else (inner, rows)), left[1])
    aux_ld = 0
    if call.aux is not None:
        aux_ld = call.aux.stride(0) * (8 if call.aux.dtype is torch.uint8 else 1)
        if call.aux.stride(1) != 1 or aux_ld < columns or aux_ld % ALIGNED:
            raise Refused("the layout of what is kept")
    given = (call.left, call.right, call.out, call.vector, call.aux)
    if any(one.data_ptr() % _BYTES for one in given if one is not None):
        raise Refused("an address")
    return _Form(
        call.out.device.index or 0, call.out.dtype, a, b, _Matrix(columns, rows, out[1]), (right[0], left[0]),
        call.epilogue, aux_ld, TYPES.get(call.aux.dtype) if call.aux is not None else None,
    )  # fmt: skip


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
