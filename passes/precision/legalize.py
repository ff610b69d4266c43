"""`Legalize`: fit a rewritten FX graph to what the device can run."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import canonical_op, node_tensor, refresh, tensor_operands
from amp_compiler.fx.widen import widen
from amp_compiler.passes.base import InPlacePass, PassResult
from amp_compiler.policy.rules import OpTable

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Legalize(InPlacePass):
    """Run an op in FP32 on rounded inputs, and round its result, where the device lacks it in the low type.

    That is what a tensor core does: exact products of 16-bit inputs, FP32 accumulation, one rounding at the end. So
    FP16 numerics, overflow to inf included, can be seen on a CPU at FP32 speed. Which ops on which devices is data: the
    `emulate` field of `rules/ops.yaml`.

    Before (CPU, FP16)::

        linear: "f16[4, 8]" = aten.linear(x16, w16)

    After::

        to: "f32[4, 8]" = aten.to.dtype(x16, float32)
        to_1: "f32[8, 8]" = aten.to.dtype(w16, float32)
        linear: "f32[4, 8]" = aten.linear(to, to_1)
        to_2: "f16[4, 8]" = aten.to.dtype(linear, float16)

    Left alone: ops that the device has (BF16 GEMMs on a CPU, any GEMM on a GPU), and ops without low operands.

    Args:
        ops: the op table.
    """

    ops: OpTable
    exact: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        modified = False
        upcasts: dict[fx.Node, fx.Node] = {}
        for node in list(subject.graph.nodes):
            low = self._emulated_type(node)
            if low is not None:
                widen(node, low, upcasts)
                modified = True
        if modified:
            refresh(subject)
        return PassResult(subject, modified)

    def _emulated_type(self, node: fx.Node) -> torch.dtype | None:
        if node.op != "call_function" or node.target is operator.getitem:
            return None
        emulate = self.ops.info(canonical_op(node.target)).emulate
        in_place = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if not emulate or in_place:  # an op that writes into its operand must be given the operand itself
            return None
        for _, _, operand in tensor_operands(node):
            tensor = node_tensor(operand)
            if tensor is not None and f"{tensor.device.type}.{_SHORT.get(tensor.dtype)}" in emulate:
                return tensor.dtype
        return None
