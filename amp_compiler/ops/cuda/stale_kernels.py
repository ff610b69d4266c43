"""The Triton kernels that compare FP32 tensors with their 16-bit copies; imported only where they are needed.

Tables are those of `ops.cuda.triton_kernels`: the FP32 tensor is the column of the weight, its copy that of the extra.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Parameters are values on the device, which have no Python types.

from __future__ import annotations

import triton
import triton.language as tl

from amp_compiler.ops.cuda.triton_parts import COLUMNS, EXTRA, SIZE, WEIGHT, differ


@triton.jit
def _pointers(row, places, LOW_TYPE: tl.constexpr):
    wide = tl.load(row + WEIGHT).to(tl.pointer_type(tl.float32)) + places
    return wide, tl.load(row + EXTRA).to(tl.pointer_type(LOW_TYPE)) + places


@triton.jit
def stale_kernel(rows, flags, turn, LOW_TYPE: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr):
    """One program a pair: `flags` says whether it differs where this turn looks."""
    number = tl.program_id(0)
    row = rows + number * COLUMNS
    size = tl.load(row + SIZE)
    spacing = tl.maximum((size + RUNS - 1) // RUNS, RUN)
    first = turn % ((spacing + RUN - 1) // RUN) * RUN
    element = tl.arange(0, RUN * RUNS).to(tl.int64)
    places = element // RUN * spacing + first + element % RUN
    wide, low = _pointers(row, places, LOW_TYPE)
    inside = places < size
    differs = differ(tl.load(wide, mask=inside, other=0.0), tl.load(low, mask=inside, other=0.0)) & inside
    tl.store(flags + number, tl.max(differs.to(tl.int32), 0))


@triton.jit
def follow_kernel(rows, blocks, flags, LOW_TYPE: tl.constexpr, TAKES: tl.constexpr, BLOCK: tl.constexpr):
    """Cast anew the pairs that a flag is set of; with `TAKES` the FP32 tensor takes what its copy has otherwise."""
    entry = tl.load(blocks + tl.program_id(0))
    number = entry >> 32
    if tl.load(flags + number) != 0:
        row = rows + number * COLUMNS
        places = (entry & 0xFFFFFFFF) * BLOCK + tl.arange(0, BLOCK)
        inside = places < tl.load(row + SIZE)
        wides, low_weights = _pointers(row, places, LOW_TYPE)
        wide = tl.load(wides, mask=inside, other=0.0)
        if TAKES:
            low = tl.load(low_weights, mask=inside, other=0.0)
            tl.store(wides, low.to(tl.float32), mask=inside & differ(wide, low))
        else:
            tl.store(low_weights, wide.to(LOW_TYPE), mask=inside)
