"""`pin_parameters`: FP32 for what reads scales, or parameters of a batch norm, that the low type does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from amp_compiler.ir.graph import Node
from amp_compiler.passes.base import PassResult
from amp_compiler.passes.onnx_plan.pinning import PinPass, Walker
from amp_compiler.planner.draft import Draft
from amp_compiler.policy.targets import Providers

_QUANTISING = ("onnx.QuantizeLinear", "onnx.DequantizeLinear")


@dataclass(frozen=True)
class PinParameters(PinPass):
    """Pin to FP32 what reads stored parameters that have its type, and that the low type does not hold to all digits.

    Such are the scales of what quantises: one among the subnormal numbers has few digits, and everything that is scaled
    by it would be off as a whole. So are the parameters of a batch norm behind a `MatMul`: ONNX lets them be FP32 where
    the data are 16-bit, but ONNX Runtime merges the two, with one type for all, and refuses the model where they have
    two (seen in ONNX Runtime 1.31). Parameters that fit are tied to the type of the data.

    Before (low type fp16):

        const s: fp32[] number=1e-06 subnormal
        q = onnx.QuantizeLinear(x=x, y_scale=s) -> u8[2, 8]
        m = onnx.MatMul(A=x, B=w) -> fp32[2, 8]
        n = onnx.BatchNormalization(X=m, scale=g, B=b, input_mean=mean, input_var=var) -> fp32[2, 8]

    After:

        q = … pin=fp32 "its scale 's' holds numbers that fp16 does not hold to all its digits"
        n = … pin=fp32 "ONNX Runtime merges it into the MatMul before it, in one type, and 'var' holds numbers …"

    Left alone: what the model has pinned; parameters that are computed; a norm that reads anything else, such
    as a convolution. With a target all norms count, and parameters that are computed: kernels of execution providers
    have one type for all that a norm reads.

    Args:
        target: the execution provider that is to run the model, where it is known.
    """

    target: Providers | None = None

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those of the nodes that are not pinned."""
        walker = Walker(draft.graph, draft.context.low)
        low = walker.low.short
        for node in draft.graph.nodes.values():
            if node.op in _QUANTISING and len(node.inputs) > 1:
                scale = node.inputs[1].value
                if walker.holds_data(scale) and not walker.fits(scale):
                    walker.pin(node, f"its scale '{scale}' holds numbers that {low} does not hold to all its digits")
        for node in norms_in_one_type(walker, self.target):
            unfit = next((name for name in _parameters(node) if not walker.fits(name)), None)
            if unfit is not None and self.target is not None:
                walker.pin(node, f"{self.target.name} has it in one type, and '{unfit}' is not known to fit {low}")
            elif unfit is not None:
                merged = "ONNX Runtime merges it into the MatMul before it, in one type"
                walker.pin(node, f"{merged}, and '{unfit}' holds numbers that {low} does not hold")
        return walker.pins

    def run(self, subject: Draft) -> PassResult[Draft]:
        """Pin them, and tie the parameters of the other norms to the type of the data."""
        result = super().run(subject)
        draft = result.subject
        norms = norms_in_one_type(Walker(draft.graph, draft.context.low), self.target)
        loose = [node for node in norms if node.pin is None and not all(one.tied for one in node.inputs[1:])]
        if not loose:
            return result
        graph = draft.graph.changed({})
        for node in loose:
            tied = [replace(operand, tied=True) for operand in node.inputs[1:]]
            graph.nodes[node.name] = replace(node, inputs=(node.inputs[0], *tied))
        return PassResult(replace(draft, graph=graph), True)


def norms_in_one_type(walker: Walker, target: Providers | None) -> Iterator[Node]:
    """The batch norms of which data and parameters must have one type.

    Without a target those of stored parameters that read a `MatMul`, moves of elements looked through; with one all.
    """
    for node in walker.graph.nodes.values():
        if node.op == "onnx.BatchNormalization":
            maker = walker.behind(node, 0)
            merged = maker is not None and maker.op == "onnx.MatMul" and all(map(walker.holds_data, _parameters(node)))
            if merged or target is not None:
                yield node


def _parameters(node: Node) -> list[str]:
    return [operand.value for operand in node.inputs[1:]]
