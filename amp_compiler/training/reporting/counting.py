"""A training step's forward and backward once more, with the exponents of what its nodes make counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.utils._pytree as pytree
from torch import fx

from amp_compiler.forward.capture import inputs_for
from amp_compiler.forward.counting import CountingProgram, Run, add_counters
from amp_compiler.forward.program import build_run
from amp_compiler.forward.settings import device_of
from amp_compiler.forward.zeros import ZeroTrail
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.graph import results_of
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.tracing import building
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.step.fold_loss_scale import SCALE
from amp_compiler.training.build import StepOptions, begin_gradients


def build_counting(batch: tuple[Any, ...], options: StepOptions, *, with_weights: bool = False) -> CountingProgram:
    """Build the program that counts for one batch; errors are those of `build_step`.

    Args:
        batch: arguments of the loss function behind the model.
        options: what to build.
        with_weights: count the gradients of weights as well, which a step gives by itself.
    """
    stages = Stages()
    with generators_kept():
        options = options.under(dynamic_shapes=None)
        joint, weights, begun = begin_gradients(batch, options, stages)
        scaled = _scaled(joint.graph)
        every = results_of(joint.graph)[-len(weights.updated) :]
        gradients = every if with_weights else []
        trail = ZeroTrail.of(joint.graph, scaled)
        named = tuple(zip(weights.names(), (node.meta["val"].dtype for node in gradients), strict=False))
        nodes, products = add_counters(joint, begun.plan, gradients, scaled)
        resolve = weights.resolvers(joint, options.setup.state)
    first = pytree.tree_leaves((batch, {}))
    device = device_of([*begun.leaves, *options.setup.module.parameters()])

    def inputs(leaves: Sequence[Any]) -> list[Any]:
        own_leaves = inputs_for(begun.leaves, leaves, first)
        return [one(own_leaves) for one in resolve]

    def compiled(graph_module: fx.GraphModule, values: Sequence[Any]) -> Run:
        with building():
            return build_run(graph_module, values, options.settings, begun.emulated, stages)

    return CountingProgram(
        nodes,
        joint if nodes or gradients else None,
        compiled,
        inputs,
        device,
        scaled,
        named,
        trail,
        {name: node for name, node in zip(weights.names(), every, strict=True) if isinstance(node, fx.Node)},
        products,
    )


def _scaled(graph: fx.Graph) -> set[fx.Node]:
    """What is made of the seed of the backward; the rest of a backward is made of activations alone."""
    scaled: set[fx.Node] = set()
    for node in graph.nodes:
        is_seed = bool(node.meta.get(Key.SEED)) or (node.op == "placeholder" and node.name == SCALE)
        if is_seed or not scaled.isdisjoint(node.all_input_nodes):
            scaled.add(node)
    return scaled
