"""`RecomputeUpcasts`: a backward widens 16-bit operands once more, rather than keep their FP32 copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import own_upcasts
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import InPlacePass, PassResult

_CONTIGUOUS = torch.ops.aten.contiguous.default


@dataclass(frozen=True)
class RecomputeUpcasts(InPlacePass):
    """Mark what widens a 16-bit value for one node, so that a compiler does it anew in the backward.

    Where a product is emulated in FP32 both sides read its operands, and a compiler would keep them as they are read.

    Before::

        to_dtype: fp32[4, 8] = aten.to.dtype(x, torch.float32)
        linear: fp32[4, 4] = aten.linear.default(to_dtype, w)

    After::

        to_dtype: fp32[4, 8] = aten.to.dtype(x, torch.float32)  # recomputed
        linear: fp32[4, 4] = aten.linear.default(to_dtype, w)

    A contiguous copy of such a value is marked too.

    Left alone: casts that the plan placed or the model wrote, and those of values that are changed in place.
    """

    name: ClassVar[str] = "recompute_upcasts"
    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True
    skippable: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Put the marks on the nodes."""
        upcasts = own_upcasts(subject.graph)
        copies = [user for node in upcasts for user in node.users if user.target is _CONTIGUOUS]
        unmarked = [node for node in (*upcasts, *copies) if Key.RECOMPUTED not in node.meta]
        for node in unmarked:
            node.meta[Key.RECOMPUTED] = True
        return PassResult(subject, bool(unmarked))
