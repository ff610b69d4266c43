"""The loss scale enters a step once and leaves it without a trace: no product with it, no bit changed by it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from toys import classes
from training_optimizers import X, Y, models

import amp_compiler as amp
from amp_compiler.fx.graph import canonical_op, node_tensor, rename_placeholder

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}
# BF16 has FP32's range. FP16 is exact where no gradient is below its normal numbers at the first scale, none too large
# at the last.
SCALES = {"bf16": (None, 2.0**4, 2.0**12), "fp16": (2.0**11, 2.0**13, 2.0**15)}
aten = torch.ops.aten


def trained(scale, dtype, name, backend):
    model, _ = models()
    optimizer = OPTIMIZERS[name](model.parameters())
    step = amp.training_step(
        model, classes, optimizer, dtype=dtype, loss_scale=scale, backend=backend, clip_norm=0.25
    )  # fmt: skip
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


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("dtype", "name", "backend"),
    [
        *itertools.product(SCALES, OPTIMIZERS, ["eager"]),
        *(pytest.param(*case, "inductor", marks=pytest.mark.slow) for case in itertools.product(SCALES, OPTIMIZERS)),
    ],
)
def test_a_power_of_two_scale_changes_no_bit(dtype, name, backend):
    first, *others = [trained(scale, dtype, name, backend) for scale in SCALES[dtype]]
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
    step = amp.training_step(model, classes, torch.optim.SGD(model.parameters(), 0.1), dtype="fp16", backend="eager")
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


def graph_of(function):
    traced = make_fx(function)(torch.ones(()), torch.ones(4, 5))
    rename_placeholder(traced.graph.find_nodes(op="placeholder")[0], "loss_scale")
    return traced.graph


SPREADS = {
    "itself": lambda scale: scale,
    "expand": lambda scale: aten.expand(scale, [4, 5]),
    "view": lambda scale: aten.view(scale, [1, 1]),
    "reshape": lambda scale: aten.reshape(aten.expand(scale, [20]), [4, 5]),
    "unsqueeze": lambda scale: aten.unsqueeze(aten.unsqueeze(scale, 0), 1),
    "broadcast": lambda scale: torch.broadcast_to(scale, (4, 5)),
    "in 16 bits": lambda scale: aten._to_copy(aten.expand(scale, [4, 5]), dtype=torch.bfloat16),
    "the inverse": lambda scale: aten.expand(aten.reciprocal(scale) * 0.5, [4, 5]),
}
PRODUCTS = [
    torch.mul,
    torch.div,
    lambda gradient, scale: scale * gradient,
    lambda gradient, scale: gradient.mul_(scale),
]


@pytest.mark.parametrize(("spread", "product"), list(itertools.product(SPREADS, PRODUCTS)))
def test_a_product_with_the_scale_is_found_however_the_scale_is_spread(spread, product):
    graph = graph_of(lambda scale, gradient: product(gradient + 1, SPREADS[spread](scale)) + 2)
    assert len(products_with_the_scale(graph)) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda scale, x: aten.expand(scale / 20, [4, 5]) + x * 2,
        lambda scale, x: aten.threshold_backward(aten.expand(scale, [4, 5]), x, 0) * x,
        lambda scale, x: aten.expand(scale, [4, 5]) * 0.5,
    ],
    ids=["the seed of a mean", "a gradient that the scale seeded", "the seed times a number"],
)
def test_the_scale_as_a_seed_is_no_product_with_it(function):
    assert products_with_the_scale(graph_of(function)) == []
