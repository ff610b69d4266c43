"""A rewritten forward with the exponents of what its nodes make counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from amp_compiler.forward.capture import capture_model, inputs_for
from amp_compiler.forward.products import CountedProduct, counted_products
from amp_compiler.forward.program import EAGER, build_run, plan_captured, rewrite
from amp_compiler.forward.settings import Settings
from amp_compiler.forward.zeros import ZeroTrail
from amp_compiler.fx.alias import AliasGroups, written_roots
from amp_compiler.fx.graph import call_before, results_of, torch_dtype
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.tracing import TENSORS
from amp_compiler.ir.plan import PrecisionPlan
from amp_compiler.ops.exponents import COUNT as COUNT_OPERATOR
from amp_compiler.passes.diagnose.count_exponents import counted
from amp_compiler.passes.pipeline import COUNT, Stages

Run = Callable[..., Sequence[Any]]


@dataclass(eq=False)
class CountingProgram:
    """What counts.

    Args:
        nodes: what is counted, one for each row.
        scaled: those of them that are gradients, and so carry the loss scale.
        weights: name and type of the gradients of parameters that are counted in the rows behind those of the nodes.
        graph_module: gives the counts alone; `None` where there is nothing to count.
        compile: makes what runs a graph, from it and its inputs.
        inputs: gives its inputs for a flat batch.
        device: whose random numbers it draws, beside the CPU's.
        trail: what the gradients are made of; `None` where there are none.
        gradients: what makes the gradient of each parameter, by its name.
        products: what may be computed of FP8 operands.
    """

    nodes: list[fx.Node]
    graph_module: fx.GraphModule | None
    compile: Callable[[fx.GraphModule, Sequence[Any]], Run]
    inputs: Callable[[Sequence[Any]], list[Any]]
    device: torch.device
    scaled: set[fx.Node] = field(default_factory=set)
    weights: tuple[tuple[str, torch.dtype], ...] = ()
    trail: ZeroTrail | None = None
    gradients: Mapping[str, fx.Node] = field(default_factory=dict)
    products: Sequence[CountedProduct] = ()
    _run: Run | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        graph = fx.Graph() if self.graph_module is None else self.graph_module.graph
        written = written_roots(graph, AliasGroups(graph))
        # Statistics that the graph moves on, and what it changes of a batch: it works on copies of these.
        self._writes = [node in written for node in graph.find_nodes(op="placeholder")]

    def __call__(self, leaves: Sequence[Any]) -> Tensor | None:
        """The counts for one batch, int64 [nodes and weights, `BINS`]. Nothing is changed, random numbers neither.

        Args:
            leaves: the batch, flat.
        """
        if self.graph_module is None:
            return None
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            with TENSORS:
                pairs = zip(self.inputs(leaves), self._writes, strict=True)
                inputs = [one.clone() if is_written else one for one, is_written in pairs]
            if self._run is None:
                self._run = self.compile(self.graph_module, inputs)
            return torch.cat(list(self._run(*inputs)))


def add_counters(
    graph_module: fx.GraphModule,
    plan: PrecisionPlan | None,
    gradients: Sequence[fx.Node] = (),
    scaled: Set[fx.Node] = frozenset(),
) -> tuple[list[fx.Node], list[CountedProduct]]:
    """Make a graph count, in place: it gives the counts alone.

    Args:
        graph_module: the graph.
        plan: of the forward; `None` in plain FP32.
        gradients: of weights, which are counted in the rows behind.
        scaled: the nodes that the seed of the backward is part of.

    Returns:
        What else is counted, one node for each row; where there is nothing at all to count, the graph stays. And what
        may be computed of FP8 operands.
    """
    graph = graph_module.graph
    COUNT.run(graph_module, {})
    nodes = counted(graph)
    products = [] if plan is None else counted_products(graph, plan, {*nodes}, scaled)
    counts = [results_of(graph)[-1]] if nodes else []
    if gradients:
        counts.append(call_before(graph.output_node(), COUNT_OPERATOR, [list(gradients)], "update"))
    if counts:
        graph.output_node().args = (tuple(counts),)
        graph.eliminate_dead_code()
        graph_module.recompile()
    return nodes, products


def build_counting(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings, device: torch.device
) -> CountingProgram:
    """Build what counts in a model's forward; it runs node by node.

    Args:
        model: the module, in the mode in which it is to run.
        args: positional arguments.
        kwargs: keyword arguments.
        settings: the options.
        device: where it runs.

    Raises:
        CaptureError: the module cannot be taken as one graph.
    """
    settings = replace(settings, dynamic_shapes=None, backend=EAGER)
    low, first = settings.low(device), pytree.tree_leaves((args, kwargs))
    with torch.no_grad():
        captured, examples = capture_model(model, args, kwargs, torch_dtype(low))
    plan, graph_module = plan_captured(captured, settings, low), captured.graph_module
    rewrite(graph_module, plan, settings, Stages())
    for node in graph_module.graph.nodes:
        if node.op != "output":
            node.meta[Key.PHASE] = "forward"
    nodes, products = add_counters(graph_module, plan)

    def compiled(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Run:
        return build_run(graph_module, [], settings, True, Stages())

    def inputs(leaves: Sequence[Any]) -> list[Any]:
        return inputs_for(examples, leaves, first)

    return CountingProgram(nodes, graph_module if nodes else None, compiled, inputs, device, products=products)
