"""The loss scale enters a step once and leaves it without a trace: no product with it, no bit changed by it."""

from __future__ import annotations

import pytest
import torch
from toys import classes, eager_step
from training_optimizers import X, Y, models

from amp_compiler.fx.graph import canonical_op, node_tensor

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}
# BF16 has FP32's range. FP16 is exact where no gradient is below its normal numbers at the first scale, none too large
# at the last.
SCALES = {"bf16": (None, 2.0**4, 2.0**12), "fp16": (2.0**11, 2.0**13, 2.0**15)}
aten = torch.ops.aten


def trained(scale, dtype, name):
    model, _ = models()
    optimizer = OPTIMIZERS[name](model.parameters())
    step = eager_step(model, classes, optimizer, dtype=dtype, loss_scale=scale, clip_norm=0.25)
    losses = []
    for _ in range(5):
        losses.append(step(X, Y))
        assert float(step.grad_norm) > 0.25  # every step is clipped
        if dtype == "fp16":
            made = [g[g != 0].abs() for g in step._last[1].gradients if g.dtype == torch.float16]
            assert made and min(float(g.min()) for g in made) >= torch.finfo(torch.float16).smallest_normal
    assert int(step.skipped_steps) == 0
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [*losses, *[p.detach() for p in model.parameters()], *state]


@pytest.mark.parametrize(("dtype", "name"), [("bf16", "momentum"), ("fp16", "adamw")])
def test_a_power_of_two_scale_changes_no_bit(dtype, name):
    first, *others = [trained(scale, dtype, name) for scale in SCALES[dtype]]
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def is_tensor_of_many(node):
    value = node_tensor(node)
    return value is None or value.numel() != 1


def products_with_the_scale(graph):
    """Nodes that multiply or divide a tensor by the loss scale.

    Or by what is made of the scale and single numbers alone: an inverse, a view, the scale spread over a shape.
    """
    scales, found = {node for node in graph.nodes if node.name == "loss_scale"}, []
    for node in graph.nodes:
        read = node.all_input_nodes
        if scales.isdisjoint(read) or node.op != "call_function" or "amp_compiler" in str(node.target):
            continue
        if not any(is_tensor_of_many(other) for other in read if other not in scales):
            scales.add(node)
        elif canonical_op(node.target) in ("aten.mul", "aten.div"):
            found.append(node)
    return found


def test_nothing_multiplies_a_gradient_by_the_scale():
    model, _ = models()
    step = eager_step(model, classes, dtype="fp16")
    step(X, Y)
    graph = step.graph_module.graph
    assert products_with_the_scale(graph) == []
    updates = [node for node in graph.nodes if "sgd_update" in str(node.target)]
    assert len(updates) == 2  # one for weights with a 16-bit copy, one for those that are read in FP32
    (scale,) = [node for node in graph.nodes if node.name == "loss_scale"]
    gradient = next(node for node in updates[0].args[1] if is_tensor_of_many(node))
    with graph.inserting_before(updates[0]):
        spread = graph.call_function(aten.expand.default, (scale, list(gradient.meta["val"].shape)))
        product = graph.call_function(aten.mul.Tensor, (gradient, spread))
    spread.meta["val"] = product.meta["val"] = gradient.meta["val"]
    assert products_with_the_scale(graph) == [product]
