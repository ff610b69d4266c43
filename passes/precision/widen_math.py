"""`WidenMath`: carry out `math: fp32` on a node that reads and writes 16 bits."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from amp_compiler.fx.alias import takes_statistics, written_operands
from amp_compiler.fx.graph import LOW_TYPES, canonical_op, node_tensor, refresh, tensor_operands, user_source
from amp_compiler.fx.meta import Key
from amp_compiler.fx.widen import widen
from amp_compiler.ops.typed_op import typed_op
from amp_compiler.passes.base import InPlacePass, PassResult
from amp_compiler.policy.marks import error_at
from amp_compiler.policy.rules import OpInfo, OpTable

_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class WidenMath(InPlacePass):
    """Let every node that the plan marks `math: fp32` compute in FP32 between 16-bit operands and 16-bit results.

    An upcast stands in front of each 16-bit operand and a downcast behind each result, for this node alone: no FP32
    value is handed on to others, and a compiler fuses the casts with the node. Autograd's reversal of the casts makes
    the backward alike: 16-bit gradients outside, FP32 arithmetic between.

    Before (`gelu` marked)::

        linear: bf16[4, 8] = aten.linear.default(x, w)
        gelu: bf16[4, 8] = aten.gelu.default(linear)  # math

    After::

        linear: bf16[4, 8] = aten.linear.default(x, w)
        to_dtype: fp32[4, 8] = aten.to.dtype(linear, torch.float32)
        gelu: fp32[4, 8] = aten.gelu.default(to_dtype)  # math
        to_dtype_1: bf16[4, 8] = aten.to.dtype(gelu, torch.bfloat16)

    Left alone: ops whose kernels compute in FP32 by themselves (field `accumulates` of `rules/ops.yaml`: products and
    convolutions), ops with which rounding commutes where no gradient is made, ops that `legalize` will widen, and
    `typed_op` nodes, to which `type_backward` said it: the adjoint of an upcast in front would round their gradients.

    Args:
        ops: the op table.
        differentiable: whether gradients will be asked for; what is exact forward may be a sum backward.
        device: device whose kernels run the graph, where that is not the device of its tensors (`onnx`).
    """

    ops: OpTable
    differentiable: bool = True
    device: str = ""
    exact: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place.

        Raises:
            RuleError: a marked node changes 16-bit memory in place, and not running statistics.
        """
        modified = False
        for node in list(subject.graph.nodes):
            low = self._low_type(node)
            if low is None:
                continue
            written = [] if takes_statistics(node) else written_operands(node)
            if any(one.meta["val"].dtype == low for one in written):
                raise error_at(
                    node.meta[Key.MATH],
                    f"'math: fp32' cannot be carried out on node '{node.name}' ({canonical_op(node.target)}"
                    f"{_at(node)}): it changes 16-bit memory in place",
                    f"except it by a later rule, 'match: {{op: {canonical_op(node.target)}}}', with a precision and no"
                    " 'math', or write the model without the change in place",
                )
            modified |= widen(node, low, {}, self.ops.info(canonical_op(node.target)).any)
        if modified:
            refresh(subject)
        return PassResult(subject, modified)

    def _low_type(self, node: fx.Node) -> torch.dtype | None:
        """The 16-bit type that a node must be widened from; `None` where nothing is to be done."""
        if node.op != "call_function" or Key.MATH not in node.meta or node.target in (operator.getitem, typed_op):
            return None
        info = self.ops.info(canonical_op(node.target))
        for slot, _, operand in tensor_operands(node):
            tensor = node_tensor(operand)
            if tensor is not None and tensor.dtype in LOW_TYPES and slot not in info.any:
                device = self.device or tensor.device.type
                done = needs_nothing(info, device, tensor.dtype, self.differentiable)
                return None if done else tensor.dtype
        return None


def needs_nothing(info: OpInfo, device: str, low: torch.dtype, differentiable: bool) -> bool:
    """Whether an op computes in FP32 between 16-bit operands and results without casts of ours.

    Args:
        info: the entry of the op.
        device: device whose kernels run it.
        low: the 16-bit type.
        differentiable: whether gradients will be asked for.
    """
    emulated = f"{device}.{_SHORT[low]}" in info.emulate  # `legalize` does the same
    return info.accumulates_on(device) or emulated or (info.exact and not differentiable)


def _at(node: fx.Node) -> str:
    source = user_source(node.meta.get("stack_trace"))
    return f", {source}" if source else ""
