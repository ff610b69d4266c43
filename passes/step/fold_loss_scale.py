"""`FoldLossScale`: the loss scale enters the backward once, as its seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import add_placeholder, call_before, node_tensor, replace_call
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import RewritePass
from amp_compiler.passes.step.widen_seed import SCALAR_OPS, absorb, widen_seed

SCALE = "loss_scale"
WEIGHT, TOTAL = ("samples", "weight", 0), ("samples", "total", 0)  # marks of what a step keeps, see `Samples`
aten = torch.ops.aten
_PRODUCTS = frozenset({aten.mul.Tensor, aten.mul.Scalar})
_OF_SHAPES = frozenset(  # what they make holds nothing of their input's values
    {
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.new_ones.default,
        aten.new_full.default,
        aten.new_empty.default,
    }
)


@dataclass(frozen=True)
class FoldLossScale(RewritePass):
    """Seed the backward with the loss scale, and merge the seed with the constants behind it.

    No gradient is multiplied by the scale: it replaces the 1 that autograd starts from. Where autograd spreads the
    seed over a tensor and then divides (the 1/N of a mean), the division is done on the one number before. The inverse
    is not in the backward at all: the update multiplies by it where it reads the gradient.

    Before::

        ones_like: "f32[]" = aten.ones_like.default(loss)
        expand: "f32[64, 10]" = aten.expand.default(ones_like, [64, 10])
        div: "f32[64, 10]" = aten.div.Scalar(expand, 640)

    After::

        div: "f32[]" = aten.div.Scalar(loss_scale, 640)
        expand: "f32[64, 10]" = aten.expand.default(div, [64, 10])

    In FP16 the scale itself may be infinite (65536 is). Where a loss ends in FP16 ops, what autograd does there with
    the seed is done in FP32, up to and with the first op that makes a tensor of it, which alone is rounded::

        _to_copy: "f16[]" = aten._to_copy.default(loss_scale, dtype = torch.float16)
        expand: "f16[64, 10]" = aten.expand.default(_to_copy, [64, 10])
        div: "f16[64, 10]" = aten.div.Scalar(expand, 640)

    becomes::

        div: "f32[]" = aten.div.Scalar(loss_scale, 640)
        _to_copy: "f16[]" = aten._to_copy.default(div, dtype = torch.float16)
        expand: "f16[64, 10]" = aten.expand.default(_to_copy, [64, 10])

    With `weighs`, the seed is the loss scale times the weight of the batch among others (`Samples`)::

        mul: "f32[]" = aten.mul.Tensor(loss_scale, samples_weight_0)

    Left alone: a graph without a seed (the loss depends on nothing that is differentiated), and a derivative that is a
    product with the seed, as that of binary cross-entropy: `mul(sigmoid - target, loss_scale)`.

    Args:
        weighs: whether the batch has a weight.
    """

    weighs: bool = False
    exact: ClassVar[bool] = False
    idempotent: ClassVar[bool] = True

    def ensures(self, subject: fx.GraphModule, remembered: Any) -> str | None:
        """The scale enters every gradient once: nothing is made that has a power of it other than 1, 0 or -1."""
        powers: dict[fx.Node, int] = {}
        for node in subject.graph.nodes:
            if node.op == "placeholder":
                powers[node] = int(node.name == SCALE)
                continue
            value = node_tensor(node)
            is_bool = value is not None and value.dtype is torch.bool
            # Whether a number is finite says nothing of a scale, nor does 0 times a number.
            free = node.target in _OF_SHAPES or is_bool or (node.target in _PRODUCTS and node.args[1] == 0)
            power = max((powers[one] for one in node.all_input_nodes if not free), key=abs, default=0)
            if node.target in SCALAR_OPS and not free:
                first, *rest = (powers[one] if isinstance(one, fx.Node) else 0 for one in node.args)
                power = first + (sum(rest) if node.target in _PRODUCTS else -sum(rest))
            elif node.target is aten.reciprocal.default:
                power = -power
            if abs(power) > 1:
                return f"'{node.name}' multiplies or divides two values that have the loss scale in them"
            powers[node] = power
        return None

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place; adds the placeholder `loss_scale` (FP32 scalar) behind the others."""
        seed = next((node for node in graph.nodes if node.meta.get(Key.SEED)), None)
        if seed is None:
            return False
        placeholders = graph.find_nodes(op="placeholder")
        loss = node_tensor(seed)
        scale = add_placeholder(placeholders[-1], SCALE, {"val": loss.new_empty((), dtype=torch.float32)})  # type: ignore[union-attr]
        if self.weighs:
            scale = _weighed(scale, seed)
        source = scale
        if loss is not None and (loss.dtype is not torch.float32 or loss.dim()):
            source = _fit(scale, seed, loss)
        replace_call(seed, source)
        for expand in list(source.users):  # of which constants right behind the seed become part
            if expand.target is aten.expand.default:
                expand.update_arg(0, absorb(graph, expand, source))
        widen_seed(graph, scale)
        return True


def _weighed(scale: fx.Node, seed: fx.Node) -> fx.Node:
    meta = {"val": torch.empty_like(scale.meta["val"]), Key.STATE: WEIGHT}
    weight = add_placeholder(scale, "_".join(map(str, WEIGHT)), meta)
    return call_before(seed, aten.mul.Tensor, [scale, weight], "backward")


def _fit(scale: fx.Node, seed: fx.Node, loss: torch.Tensor) -> fx.Node:
    number = call_before(seed, aten._to_copy.default, [scale], "backward", dtype=loss.dtype)
    return call_before(seed, aten.view.default, [number, list(loss.shape)], "backward") if loss.dim() else number
