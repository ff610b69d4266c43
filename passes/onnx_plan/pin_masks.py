"""`pin_masks`: FP32 from a mask that is an input of the model to the softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.graph import ValueKind
from amp_compiler.passes.onnx_plan.mask_path import mask_path
from amp_compiler.passes.onnx_plan.pinning import PinPass, Walker
from amp_compiler.planner.draft import Draft

_HIDES = 1e3  # a score that is as much lower than others is nothing behind a softmax


@dataclass(frozen=True)
class PinMasks(PinPass):
    """Pin to FP32 what lies between an input of the model that is added to scores, and their softmax.

    Nothing says how low a mask goes that is only given when the model runs: -65504 and a score is minus infinity in
    fp16, and so is -3.4e38 alone in both types. A row that is masked whole would be no numbers. Where the rules keep the
    softmax in FP32, as the presets do, this costs no cast: it stands before the sum in the place of behind it. Stored
    masks that meet one on the way are kept as they are with it, for two floors would hide one mask behind the other.

    Before:

        in m: fp32[8]
        a = onnx.Add(A=s, B=m) -> fp32[2, 8]
        p = onnx.Softmax(input=a) -> fp32[2, 8]

    After:

        a = onnx.Add(A=s, B=m) -> fp32[2, 8]  pin=fp32 "on the way of the input 'm', which may be a mask, to a softmax"
        p = onnx.Softmax(input=a) -> fp32[2, 8]  pin=fp32 "on the way of the input 'm', which may be a mask, to a softmax"

    Left alone: inputs that anything else reads too, or that meet nothing computed; fused attention.
    """

    name: ClassVar[str] = "pin_masks"
    idempotent: ClassVar[bool] = True

    def pins(self, draft: Draft) -> Mapping[str, str]:
        """Those on the way of each input, then those of the stored masks that meet it."""
        walker, graph = Walker(draft.graph, draft.context.low), draft.graph
        for name, value in graph.values.items():
            if value.kind is ValueKind.INPUT and value.dtype is DType.FLOAT32:
                _pin_path(walker, mask_path(walker, name)[0], f"the input '{name}', which may be a mask,")
        hiding = [name for name, numbers in walker.stored() if numbers.least < -_HIDES] if walker.pins else []
        paths = {name: mask_path(walker, name)[0] for name in hiding}
        while met := [name for name, path in paths.items() if not walker.pins.keys().isdisjoint(path)]:
            for name in met:
                _pin_path(walker, paths.pop(name), f"'{name}', a mask that meets another,")
        return walker.pins


def _pin_path(walker: Walker, path: tuple[str, ...], what: str) -> None:
    """Pin the nodes of a path, if something computed meets it and no fused attention ends it."""
    nodes = [walker.graph.nodes[name] for name in path]
    computed = [walker.behind(node, index) for node in nodes for index in range(len(node.inputs))]
    meets = any(maker is not None and maker.name not in path for maker in computed)
    if meets and all(walker.info(node).family != "attention" for node in nodes):
        for node in nodes:
            walker.pin(node, f"on the way of {what} to a softmax")
