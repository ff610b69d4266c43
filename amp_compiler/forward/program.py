"""From a captured graph to its plan, to the rewritten graph, to what runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from torch import fx

from amp_compiler.backends import find_backend
from amp_compiler.errors import LoweringError
from amp_compiler.forward.settings import Settings
from amp_compiler.fx.captured import Captured, Source
from amp_compiler.fx.graph import copy_graph, sparse_node, torch_dtype
from amp_compiler.fx.lower import lower
from amp_compiler.fx.torch_private.breaks import reads_values
from amp_compiler.fx.torch_private.inductor import rounds_each_cast
from amp_compiler.ir.dtypes import DType
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops import native
from amp_compiler.passes.pipeline import Stages
from amp_compiler.passes.plan.make_plan import make_plan
from amp_compiler.passes.precision.type_backward import emulates

logger = logging.getLogger("amp_compiler")
EAGER: Final = "eager"  # the backend that runs any graph


def plan_captured(
    captured: Captured,
    settings: Settings,
    low: DType,
    stages: Stages | None = None,
    root: str = "",
    device: str = "",
    name: str = "",
) -> PrecisionPlan:
    """Bring a captured graph into normal form, in place, and plan it.

    Args:
        captured: as `fx.capture.export` makes it.
        settings: rules and pipelines.
        low: the 16-bit type.
        stages: takes the text behind each pass.
        root: name of the model in what was captured.
        device: type of the device that is planned for, where that is not the one that the tensors are on.
        name: class of the model.
    """
    normalize(captured.graph_module, settings, stages, root, low)
    graph = lower(captured)
    graph.device, graph.model = device or graph.device, name
    plan = make_plan(graph, settings.rules, low, stages=stages, pipeline=settings.pipelines["PLAN"])
    stored = [entry for entry in captured.inputs if entry.source in (Source.PARAMETER, Source.BUFFER)]
    names = {entry.name: entry.target.removeprefix(f"{root}.") for entry in stored}
    return replace(plan, model=replace(plan.model, names=names))


def normalize(
    graph_module: fx.GraphModule,
    settings: Settings,
    stages: Stages | None = None,
    root: str = "",
    low: DType | None = None,
) -> None:
    """Run the pipeline CAPTURE on a captured graph, in place; the arguments are those of `plan_captured`.

    Without `low` nothing is planned.
    """
    if stages is not None:
        stages.note("capture", stages.texts.of(graph_module))
    settings.pipelines["CAPTURE"].run(graph_module, {"root": root, "low": low and torch_dtype(low)}, stages)


def rewrite(
    graph_module: fx.GraphModule,
    plan: PrecisionPlan,
    settings: Settings,
    stages: Stages,
    pipeline: Literal["FORWARD", "INFERENCE"] = "FORWARD",
    **options: Any,
) -> bool:
    """Run a pipeline on the normal-form graph that a plan was made for, in place.

    Args:
        graph_module: the graph.
        plan: its plan.
        settings: rules, pipelines and backend.
        stages: takes the text behind each pass.
        pipeline: which; `INFERENCE` leaves out what a plan says of gradients.
        **options: of its passes, by the names of their fields, such as `protected` of `ProtectBuffers`.

    Returns:
        Whether FP32 arithmetic stands for 16-bit one, by a rule or for want of hardware, so that every down-cast must
        really round.
    """
    known = {"plan": plan, "ops": settings.ops, "stage": native.FORWARD, "differentiable": pipeline == "FORWARD"}
    passes = settings.pipelines[pipeline]
    if not settings.runs_on.compiled and "multiply_convolutions" in passes.names:  # which a compiler alone runs faster
        passes = passes.skip("multiply_convolutions")
    passes.run(graph_module, {**known, **options}, stages)
    return plan.device == "cpu" and (
        stages.changed("legalize") or stages.changed("widen_math") or emulates(graph_module.graph)
    )


def build_run(
    graph_module: fx.GraphModule, examples: Sequence[Any], settings: Settings, round_exactly: bool, stages: Stages
) -> Callable[..., Any]:
    """A finished graph or subgraph as a function of its flat inputs; a compiler is given it as SUBGRAPH makes it.

    Args:
        graph_module: the graph, which stays as it is for reading.
        examples: example inputs.
        settings: backend and pipelines.
        round_exactly: whether every down-cast in the graph must really round.
        stages: takes the text behind each pass.

    Raises:
        LoweringError: the backend cannot compile it.
    """
    backend = settings.runs_on
    if not backend.compiled:
        return settings.builder(graph_module, examples, round_exactly)
    sparse = sparse_node(graph_module.graph)
    if sparse or (round_exactly and not rounds_each_cast()):
        why = f"'{sparse}' is a sparse tensor, for which Inductor has no code"
        why = why if sparse else "before torch 2.13 Inductor leaves out casts that must round"
        logger.info("a graph runs node by node, not compiled: %s", why)
        return find_backend(EAGER).build(graph_module, examples, True)
    compiled = copy_graph(graph_module)
    stages.begin_subgraph(stages.texts.of(compiled))
    settings.pipelines["SUBGRAPH"].run(compiled, {}, stages)
    try:
        return settings.builder(compiled, examples, round_exactly)
    except LoweringError as cause:
        if not reads_values(cause):
            raise
        logger.info("a graph runs node by node, not compiled: an operator reads the values of a tensor as numbers")
        return find_backend(EAGER).build(graph_module, examples, True)
