"""A training step's graph for sizes or ranks that this machine does not have: built, and never run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from amp_compiler.forward.settings import AUTO
from amp_compiler.fx.capture.generators import generators_kept
from amp_compiler.fx.garbage import without_full_collections
from amp_compiler.passes.pipeline import Stages
from amp_compiler.ranks.reduction import Reduction
from amp_compiler.ranks.traffic import Traffic, traffic_of
from amp_compiler.training.build import StepOptions, StepState, begin_step, run_step_passes
from amp_compiler.training.loss_module import LossModule


@dataclass(frozen=True)
class DryStep:
    """A step that was built as far as its graph.

    Args:
        graph_module: the whole step, as all passes of STEP leave it.
        stages: the text behind each pass.
        traffic: what a rank sends and holds; `None` for one process.
    """

    graph_module: fx.GraphModule
    stages: Stages
    traffic: Traffic | None


@without_full_collections()
def build_dry(model: LossModule, batch: tuple[Any, ...], options: StepOptions, state: StepState) -> DryStep:
    """Build a step's graph and nothing that runs it.

    Nothing is sent: all ranks are taken to have gradients of the same weights.

    Args:
        model: the loss as a module.
        batch: arguments of the loss function behind the model.
        options: what to build.
        state: the tensors that it would work on.

    Raises:
        CaptureError: the loss cannot be captured as one graph, or depends on no parameter of the optimizers.
        PassError: a pass of the user's broke the contract.
    """
    if options.reduction is not None:
        options = replace(
            options,
            reduction=replace(options.reduction, agree=Reduction.agree, agree_on_parts=Reduction.agree_on_parts),
        )
    if options.settings.dynamic_shapes == AUTO:  # as at a first call
        options = replace(options, settings=replace(options.settings, dynamic_shapes=None))
    stages = Stages()
    with generators_kept():
        begun, options = begin_step(model, batch, options, stages)
        step, weights = run_step_passes(model, begun, options, state, options.settings.pipelines["STEP"])
    ranks = 1 if options.reduction is None else options.reduction.ranks
    return DryStep(step, stages, traffic_of(step.graph, ranks, weights.updated) if ranks > 1 else None)
