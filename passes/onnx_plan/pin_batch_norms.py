"""`pin_batch_norms`: FP32 for batch norms behind products whose parameters the low type does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from amp_compiler.ir.graph import Node
from amp_compiler.passes.onnx_plan.pinning import PinPass, Walker
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.targets import Providers


@dataclass(frozen=True)
class PinBatchNorms(PinPass):
    """Pin to FP32 the batch norms behind a `MatMul` whose parameters the low type does not hold to all their digits.

    ONNX lets a `BatchNormalization` of 16-bit data keep its parameters in FP32. ONNX Runtime merges one that reads a
    `MatMul` into its weight, with one type for all of them, and refuses the model where they have two (seen in ONNX
    Runtime 1.31). So there the parameters are rounded too, and where they cannot be, the norm runs in FP32.

    Before (low type fp16):

        param var: fp32[8] least=1e-06 most=1.0 subnormal
        m = onnx.MatMul(A=x, B=w) -> fp32[2, 8]
        n = onnx.BatchNormalization(X=m, scale=s, B=b, input_mean=mean, input_var=var) -> fp32[2, 8]

    After:

        n = onnx.BatchNormalization(…) -> fp32[2, 8]  pin=fp32 "ONNX Runtime merges it into the MatMul before it, …"

    Left alone: one that reads anything else, such as a convolution, unless there is a target: kernels of execution
    providers have one type for all that a norm reads. Parameters that fit, and without a target such as are computed.

    Args:
        target: the execution provider that is to run the model, where it is known.
    """

    target: Providers | None = None
    name: ClassVar[str] = "pin_batch_norms"
    idempotent: ClassVar[bool] = True

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of the norms that are not pinned."""
        walker = Walker(draft.graph, draft.context.low)
        for node in norms_in_one_type(walker, self.target):
            unfit = next((name for name in _parameters(node) if not walker.fits(name)), None)
            if unfit is not None:
                reason = (
                    f"ONNX Runtime merges it into the MatMul before it, in one type, and '{unfit}' holds numbers that"
                    f" {walker.low.short} does not hold"
                )
                if self.target is not None:
                    provider, low = self.target.name, walker.low.short
                    reason = f"{provider} has it in one type, and '{unfit}' is not known to fit {low}"
                walker.pin(node, reason)
        return walker.pins


def norms_in_one_type(walker: Walker, target: Providers | None) -> Iterator[Node]:
    """Without a target, the batch norms of stored parameters that read a `MatMul`, moves of elements looked through."""
    for node in walker.graph.nodes.values():
        if node.op == "onnx.BatchNormalization":
            maker = walker.behind(node, 0)
            merged = maker is not None and maker.op == "onnx.MatMul" and all(map(walker.holds_data, _parameters(node)))
            if merged or target is not None:
                yield node


def _parameters(node: Node) -> list[str]:
    return [operand.value for operand in node.inputs[1:]]
