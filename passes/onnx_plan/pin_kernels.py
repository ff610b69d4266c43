"""`pin_kernels`: FP32 for what the execution provider of the target has no 16-bit kernel for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from amp_compiler.passes.onnx_plan.pinning import PinPass, Walker
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.targets import Providers


@dataclass(frozen=True)
class PinKernels(PinPass):
    """Pin to FP32 what the provider that is to run the model has no kernel for in the low type.

    Such a node would be cast back by the runtime, node by node, or fall to the CPU. A node without an FP32 kernel falls
    in any case, and is asked of the provider that takes it.

    Before (target cpu, low type fp16):

        y = onnx.MatMul(A=x, B=w) -> fp32[2, 8]

    After:

        y = onnx.MatMul(A=x, B=w) -> fp32[2, 8]  pin=fp32 "cpu has no fp16 kernel of onnx.MatMul … (cpu.yaml:162)"

    Left alone: all without a target; what has a kernel, and what no label moves.

    Args:
        target: the providers; `None` for a file that is to run anywhere.
        versions: by node, the opset of its domain.
    """

    target: Providers | None = None
    versions: Mapping[str, int] = field(default_factory=dict)
    name: ClassVar[str] = "pin_kernels"
    idempotent: ClassVar[bool] = True

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of all nodes that a rule may move."""
        low = draft.context.low
        walker = Walker(draft.graph, low)
        for name, node in draft.graph.nodes.items() if self.target is not None else ():
            if node.pin is None and draft.typing[name].movable:
                reason = self.target.obstacle(node.op, self.versions[name], low)
                if reason is not None:
                    walker.pin(node, reason)
        return walker.pins
