"""A training step's forward and backward once more, with the exponents of what its nodes make counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from amp_compiler.forward.program import build_run
from amp_compiler.forward.settings import device_of
from amp_compiler.fx.generators import generators_kept
from amp_compiler.fx.graph import results_of
from amp_compiler.fx.meta import Key
from amp_compiler.passes.diagnose.count_exponents import counted
from amp_compiler.passes.pipeline import COUNT, Stages
from amp_compiler.passes.step.fold_loss_scale import SCALE
from amp_compiler.training.build import StepOptions, StepState, begin_step, run_step_passes
from amp_compiler.training.program import LossModule, Resolver

_LAST_BEFORE_UPDATE = "sum_gradients"


@dataclass(eq=False)
class CountingProgram:
    """What counts.

    Args:
        graph_module: forward and backward, with counters; it gives the counts alone.
        nodes: what is counted, one for each row.
        scaled: those of them that are gradients, and so carry the loss scale.
        run: the compiled graph; `None` where there is nothing to count.
        resolve: one per placeholder.
        devices: whose random numbers it draws, beside the CPU's.
    """

    graph_module: fx.GraphModule
    nodes: list[fx.Node]
    scaled: set[fx.Node]
    run: Callable[..., Sequence[Any]] | None
    resolve: list[Resolver]
    devices: list[torch.device]

    def __call__(self, leaves: Sequence[Any]) -> Tensor | None:
        """The counts for one batch, int64 [number of nodes, `BINS`]. Nothing is changed, random numbers neither.

        Args:
            leaves: the batch, flat.
        """
        if self.run is None:
            return None
        with torch.no_grad(), torch.random.fork_rng(devices=self.devices):
            (counts,) = self.run(*(one.get(leaves) for one in self.resolve))
        return counts  # type: ignore[no-any-return]


def build_counting(
    model: LossModule, batch: tuple[Any, ...], options: StepOptions, state: StepState
) -> CountingProgram:
    """Build the program that counts for one batch; arguments and errors are those of `build_step`."""
    stages = Stages()
    with generators_kept(model.__dict__["loss_fn"], model, batch):
        options = replace(options, settings=replace(options.settings, dynamic_shapes=None))
        begun, options = begin_step(model, batch, options, stages)
        settings = options.settings
        first = settings.pipelines["STEP"].stop_after(_LAST_BEFORE_UPDATE)
        joint, weights = run_step_passes(model, begun, options, state, first)
        joint = COUNT.run(joint, {}, stages)
        nodes = counted(joint.graph)
        scaled = _scaled(joint.graph)
        if not nodes:
            return CountingProgram(joint, [], set(), None, [], [])
        joint.graph.output_node().args = ((results_of(joint.graph)[-1],),)
        joint.graph.eliminate_dead_code()
        joint.recompile()
        for node in joint.graph.find_nodes(op="placeholder"):
            if node.name == SCALE:
                node.meta[Key.STATE] = ("scale", "scale", 0)
        resolve = weights.resolvers(joint, state.kept)
        examples = [one.get(begun.leaves) for one in resolve]
        with torch.no_grad():
            run = build_run(joint, examples, settings, begun.emulated, stages)
    device = device_of(begun.leaves)
    return CountingProgram(joint, nodes, scaled, run, resolve, [device] if device.type == "cuda" else [])


def _scaled(graph: fx.Graph) -> set[fx.Node]:
    """What is made of the seed of the backward; the rest of a backward is made of activations alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        is_seed = bool(node.meta.get(Key.SEED)) or (node.op == "placeholder" and node.name == SCALE)
        if is_seed or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
