"""FP32 tensors and their 16-bit copies compared and brought together on a CUDA device, without waiting for it.

This module can be imported on every machine; Triton is imported at the first launch. CPU tensors run under Triton's
interpreter (environment variable `TRITON_INTERPRET=1`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from amp_compiler.ops.cuda.update import TABLES, _on, _triton_type

_RUN, _RUNS = 64, 16  # elements that are looked at together, and places where; as in stale.cpp
_BLOCK = 4096
_LOW = 2  # the column of the copies
_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


@cache
def kernels() -> Any:
    """The kernels; `None` where there is no Triton."""
    try:
        from amp_compiler.ops.cuda import stale_kernels
    except ImportError:
        return None
    return stale_kernels


class DeviceCopies:
    """Pairs of dense tensors on one device, each copy laid out as its tensor.

    Args:
        pairs: FP32 tensors and their 16-bit copies.
        takes: whether tensors take what their copies have otherwise; else the copies are cast anew.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], takes: bool) -> None:
        self._takes, self._device = takes, pairs[0][0].device
        columns = [[], [wide for wide, _ in pairs], [low for _, low in pairs]]
        with _on(self._device):
            self._groups = TABLES.groups(columns, self._device, _BLOCK)
            self._flags = [torch.zeros(len(one.rows), dtype=torch.int32, device=self._device) for one in self._groups]

    def follow(self, turn: int) -> None:
        """Look as `CopyWatch.look` does, and bring together what differs.

        Args:
            turn: number of the look.
        """
        with _on(self._device):
            for group, flags in zip(self._groups, self._flags, strict=True):
                how = {"LOW_TYPE": _triton_type(group.types[_LOW]), **_OPTIONS}
                kernels().stale_kernel[(len(group.rows),)](group.rows, flags, turn, RUN=_RUN, RUNS=_RUNS, **how)
                kernels().follow_kernel[(len(group.blocks),)](
                    group.rows, group.blocks, flags, TAKES=self._takes, BLOCK=_BLOCK, **how
                )
