"""The Triton kernel of `ops.cuda.cross_entropy`, imported only where it is needed. A program works on one row."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters are values on the device, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _read(row, columns, classes, stride, LOW: tl.constexpr):
    """A block of logits in FP32; minus infinity behind the last class, in memory or not.

    What lies behind the last class is read, too, up to the next row: so whole blocks are loaded 16 bytes at a time.
    """
    logits = tl.load(row + columns, mask=columns < stride, other=0.0).to(LOW).to(tl.float32)
    return tl.where(columns < classes, logits, float("-inf"))


@triton.jit
def cross_entropy_kernel(
    logits, target, factor, losses, classes, stride, share, smoothing,
    LOW: tl.constexpr, GRADIENT: tl.constexpr, SMOOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss of a row and, with `GRADIENT`, `factor` times its gradient in the place of the logits."""
    place = tl.program_id(0).to(tl.int64)
    row = logits + place * stride
    mark = tl.load(target + place)
    # Here, because threads wait for one another below: none has written a gradient yet.
    picked = tl.load(row + mark).to(LOW).to(tl.float32)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    linear = tl.zeros([BLOCK], tl.float32)
    for start in range(0, classes, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        read = _read(row, columns, classes, stride, LOW)
        new = tl.maximum(largest, read)
        shift = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - shift) + tl.exp(read - shift)
        largest = new
        if SMOOTH:
            linear += tl.where(columns < classes, read, 0.0)
    top = tl.max(largest, 0)
    log = tl.log(tl.sum(total * tl.exp(largest - tl.where(top == float("-inf"), 0.0, top)), 0))
    loss = -((picked - top) - log)
    if SMOOTH:
        loss = share * loss - smoothing * (tl.sum(linear, 0) - classes * (top + log))
    tl.store(losses + place, loss)
    if GRADIENT:
        each = tl.load(factor + place)
        hit = share * each
        for start in range(0, classes, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            found = tl.exp((_read(row, columns, classes, stride, LOW) - top) - log) * each
            found -= tl.where(columns == mark, hit, 0.0)
            if SMOOTH:
                found -= smoothing * each
            rounded = found.to(LOW).to(logits.dtype.element_ty)
            tl.store(row + columns, rounded, mask=columns < stride)
