"""A rewritten forward with the exponents of what its nodes make counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from amp_compiler.errors import AmpError
from amp_compiler.forward.program import EAGER, build_program, build_run
from amp_compiler.forward.settings import Settings
from amp_compiler.forward.zeros import ZeroTrail
from amp_compiler.fx.alias import AliasGroups, written_roots
from amp_compiler.fx.graph import call_before, copy_graph, results_of
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private import TENSORS
from amp_compiler.ops.exponents import COUNT as COUNT_OPERATOR
from amp_compiler.passes.diagnose.count_exponents import counted
from amp_compiler.passes.pipeline import COUNT, TAKE, Stages

Run = Callable[..., Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Taken:
    """What a program counts with, as it was before the step.

    Args:
        inputs: of the graph, by their places.
        random: the states of the generators, the CPU's first.
        products: the names of those that it has to be given, for what only makes these was not copied; `None` where
            everything was.
    """

    inputs: dict[int, Any]
    random: tuple[Tensor, ...]
    products: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class _Reader:
    """A compiled graph that counts: the products that it is given, behind the inputs of the places that it reads."""

    products: tuple[str, ...]
    reads: tuple[int, ...]
    run: Run


@dataclass(eq=False)
class CountingProgram:
    """What counts.

    Args:
        nodes: what is counted, one for each row.
        scaled: those of them that are gradients, and so carry the loss scale.
        weights: name and type of the gradients of parameters that are counted in the rows behind those of the nodes.
        graph_module: gives the counts alone; `None` where there is nothing to count.
        compile: makes what runs a graph, from it and its inputs.
        inputs: gives its inputs for a flat batch, those at the given places.
        device: whose random numbers it draws, beside the CPU's.
        products: names of nodes whose values it can be given, so that it need not make them.
        trail: what the gradients are made of; `None` where there are none.
        gradients: what makes the gradient of each parameter, by its name.
    """

    nodes: list[fx.Node]
    graph_module: fx.GraphModule | None
    compile: Callable[[fx.GraphModule, Sequence[Any]], Run]
    inputs: Callable[[Sequence[Any], Sequence[int]], list[Any]]
    device: torch.device
    scaled: set[fx.Node] = field(default_factory=set)
    weights: tuple[tuple[str, torch.dtype], ...] = ()
    products: tuple[str, ...] = ()
    trail: ZeroTrail | None = None
    gradients: Mapping[str, fx.Node] = field(default_factory=dict)
    _runs: dict[tuple[str, ...], _Reader] = field(default_factory=dict, repr=False)  # by the products given
    _last: _Reader | None = field(default=None, repr=False)  # the last one behind a step

    def __call__(self, leaves: Sequence[Any]) -> Tensor | None:
        """The counts for one batch, int64 [nodes and weights, `BINS`]. Nothing is changed, random numbers neither.

        Args:
            leaves: the batch, flat.
        """
        return self.count(Taken(self._inputs(leaves, self._runs.get(())), self._random()))

    def take(self, leaves: Sequence[Any], kept: Callable[[Tensor], Tensor | None]) -> Taken:
        """What it needs of a batch that a step is about to train on: copies of all that the step writes.

        Args:
            leaves: the batch, flat.
            kept: gives the copy of a tensor that there is; `None` where there is none.
        """
        own, inputs = {id(leaf) for leaf in leaves}, self._inputs(leaves, self._last)
        for place, value in inputs.items():
            if isinstance(value, Tensor) and id(value) not in own:
                copy = kept(value)
                inputs[place] = value.detach().clone() if copy is None else copy
        return Taken(inputs, self._random(), None if self._last is None else self._last.products)

    def count(self, taken: Taken, products: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """The counts for what was taken; see `__call__`.

        Args:
            taken: of one batch.
            products: what the step made, by name.

        Raises:
            AmpError: the step no longer gives what it gave for batches like this one.
        """
        if self.graph_module is None:
            return None
        products = products or {}
        names = tuple(products) if taken.products is None else taken.products
        if gone := [name for name in names if name not in products]:
            raise AmpError(
                f"the step was captured anew while it was profiled, and no longer gives '{gone[0]}'",
                mend="profile it again, from this batch on",
            )
        given = [products[name] for name in names]
        if names not in self._runs:
            self._runs[names] = self._built(self.graph_module, names, taken.inputs, given)
        reader = self._runs[names]
        self._last = reader if products else self._last
        with torch.no_grad(), torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(taken.random[0])
            for device, state in zip(self._devices, taken.random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            counts = reader.run(*(taken.inputs[place] for place in reader.reads), *given)
        return torch.cat(list(counts))

    def _built(
        self, whole: fx.GraphModule, names: tuple[str, ...], inputs: Mapping[int, Any], given: list[Tensor]
    ) -> _Reader:
        graph_module = copy_graph(whole)
        own = graph_module.graph.find_nodes(op="placeholder")
        TAKE.run(graph_module, {"held": names})
        reads = tuple(place for place, node in enumerate(own) if node.users)
        for node in own:
            if not node.users:
                graph_module.graph.erase_node(node)
        graph_module.recompile()
        with torch.no_grad():
            return _Reader(names, reads, self.compile(graph_module, [*(inputs[place] for place in reads), *given]))

    def _inputs(self, leaves: Sequence[Any], reader: _Reader | None) -> dict[int, Any]:
        """Those that a reader reads, and all where there is none yet."""
        if self.graph_module is None:
            return {}
        count = len(self.graph_module.graph.find_nodes(op="placeholder"))
        places = range(count) if reader is None else reader.reads
        with TENSORS:
            return dict(zip(places, self.inputs(leaves, places), strict=True))

    @property
    def _devices(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    def _random(self) -> tuple[Tensor, ...]:
        return torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._devices)


def place_of(value: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies and as what: the same for all that stand for the same values."""
    return value.data_ptr(), value.dtype, value.shape, value.stride()


def add_counters(graph_module: fx.GraphModule, gradients: Sequence[fx.Node] = ()) -> list[fx.Node]:
    """Make a graph count, in place: it gives the counts alone.

    Args:
        graph_module: the graph.
        gradients: of weights, which are counted in the rows behind.

    Returns:
        What else is counted, one node for each row; where there is nothing at all to count, the graph stays.
    """
    graph = graph_module.graph
    COUNT.run(graph_module, {})
    nodes = counted(graph)
    counts = [results_of(graph)[-1]] if nodes else []
    if gradients:
        counts.append(call_before(graph.output_node(), COUNT_OPERATOR, [list(gradients)], "update"))
    if counts:
        graph.output_node().args = (tuple(counts),)
        graph.eliminate_dead_code()
        graph_module.recompile()
    return nodes


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
    program = build_program(model, args, kwargs, settings, keep_weights=False)
    graph_module = copy_graph(program.graph_module)
    for node in graph_module.graph.nodes:
        if node.op != "output":
            node.meta[Key.PHASE] = "forward"
    nodes = add_counters(graph_module)
    written = written_roots(graph_module.graph, AliasGroups(graph_module.graph))
    writes = [node in written for node in graph_module.graph.find_nodes(op="placeholder")]

    def inputs(leaves: Sequence[Any], places: Sequence[int]) -> list[Any]:
        """Statistics that the graph moves on, and what it changes of its arguments, are copies."""
        found = program.inputs(leaves)
        return [found[place].clone() if writes[place] else found[place] for place in places]

    def compiled(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Run:
        return build_run(graph_module, [], settings, True, Stages())

    return CountingProgram(nodes, graph_module if nodes else None, compiled, inputs, device)
