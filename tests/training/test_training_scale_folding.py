"""The loss scale enters a step once and leaves it without a trace: no product with it, no bit changed by it."""

from __future__ import annotations

import torch
from toys import classes, eager_step
from training_optimizers import X, Y, models

from amp_compiler.fx.graph import canonical_op, node_tensor

aten = torch.ops.aten


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
