"""How a compiled step is executed: forward and backward by the compiler, check and updates by their own kernels.

A compiler turns every parameter's update into a loop of its own. The kernels go over all parameters of a group in one
launch, so the step graph is cut where they stand::

    forward, backward, sums of gradients   compiled
    grad_check                             kernel
    clipping, scale, buffers, traced code  compiled where there is much of it, else run as it stands
    adam_update, sgd_update                kernels
    buffers (on a CPU)                     written together, unless the step is skipped

On a CPU a gradient that is a product of two matrices, or the rows of a lookup, is not among what the first piece makes:
the kernels make it as they use it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from amp_compiler.backends.backend import Backend
from amp_compiler.fx.graph import results_of
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.layout import is_dense
from amp_compiler.ops.update import operators as fused_update
from amp_compiler.passes.step.defer_gradients import ProductGradient, product_gradients
from amp_compiler.passes.step.fuse_update import OPERATORS
from amp_compiler.passes.step.group_commits import commits, run_commits

Kernels = Mapping[Any, Callable[..., Any]]
_CHECK = torch.ops.amp_compiler.grad_check.default
_FEW = 64  # nodes behind the check that are not worth compiling: most of them work on single numbers


def compile_step(
    step: fx.GraphModule, examples: Sequence[Any], backend: Backend, round_exactly: bool
) -> Callable[..., Sequence[Any]]:
    """The step graph as a function of its placeholders' tensors.

    Args:
        step: as `FuseUpdate` makes it; it stays as it is.
        examples: one tensor or number per placeholder.
        backend: one that does not compile runs the graph itself.
        round_exactly: as for the backends.

    Raises:
        LoweringError: where the graph cannot be compiled.
    """
    build = backend.build
    with torch.no_grad():
        if not backend.compiled:
            return build(step, examples, round_exactly)
        kernels = _kernels(step, examples)
        if not kernels:
            return build(lower_updates(step), examples, round_exactly)
        return _Cut(step, kernels).assemble(examples, lambda piece, inputs: build(piece, inputs, round_exactly))


def _kernels(step: fx.GraphModule, examples: Sequence[Any]) -> Kernels:
    """What runs each update operator where the parameters are; empty where the compiler has to do it.

    Kernels walk over memory: a weight that is a slice of something larger is left to the compiler.
    """
    updates = [node for node in step.graph.nodes if node.target in OPERATORS.values()]
    real = dict(zip(step.graph.find_nodes(op="placeholder"), examples, strict=True))
    if not all(is_dense(real[weight]) for node in updates for weight in node.args[0]):  # type: ignore[index, union-attr]
        return {}
    devices = {leaf.meta["val"].device.type for node in updates for leaf in node.all_input_nodes}
    if devices == {"cuda"}:
        return {operator: operator for operator in (_CHECK, *OPERATORS.values())}
    gradients = [gradient for node in updates for gradient in node.args[1]]  # type: ignore[union-attr]
    typed = all(gradient.meta["val"].dtype in cpu_update.TYPES for gradient in gradients)  # type: ignore[union-attr]
    if devices == {"cpu"} and typed and cpu_update.available():
        names = {target._schema.name.partition("::")[2]: target for target in (_CHECK, *OPERATORS.values())}
        return {names[name]: function for name, function in cpu_update.FUNCTIONS.items()}
    return {}


class _Cut:
    """The step graph sorted into what stands before the check, behind it, and the kernels."""

    def __init__(self, step: fx.GraphModule, kernels: Kernels) -> None:
        self.step, self.kernels = step, kernels
        self.nodes = [node for node in step.graph.nodes if node.op in ("call_function", "get_attr")]
        self.check = next(node for node in self.nodes if node.target is _CHECK)
        self.items = [node for node in self.check.users if node.target is operator.getitem]
        behind: set[fx.Node] = {self.check}
        for node in self.nodes:
            if any(source in behind for source in node.all_input_nodes):
                behind.add(node)
        own = {self.check, *self.items}
        self.updates = [node for node in self.nodes if node.target in kernels and node not in own]
        on_cpu = kernels[_CHECK] is cpu_update.grad_check
        self.products: list[ProductGradient] = []
        if on_cpu:
            self.products = product_gradients(step.graph, self.check, self.updates, cpu_update.most_inner())
        own.update(node for product in self.products for node in product.nodes)
        self.commits = [one for one in commits(step.graph) if behind.issuperset(one.nodes)] if on_cpu else []
        own.update(node for one in self.commits for node in one.nodes)
        rest = [node for node in self.nodes if node not in own and node.target not in kernels]
        self.before = [node for node in rest if node not in behind]
        self.after = [node for node in rest if node in behind]

    def assemble(
        self, examples: Sequence[Any], build: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
    ) -> Callable[..., Any]:
        """A function that runs piece after piece."""
        graph, root = fx.Graph(), torch.nn.Module()
        made: dict[fx.Node, fx.Node] = {}
        real: dict[fx.Node, Any] = {}
        for node, example in zip(self.step.graph.find_nodes(op="placeholder"), examples, strict=True):
            made[node], real[node] = graph.placeholder(node.name), example

        def call(name: str, run: Callable[..., Any], inputs: list[fx.Node], outputs: list[fx.Node]) -> None:
            root.add_module(name, _Piece(run))
            result = graph.call_module(name, tuple(made[node] for node in inputs))
            for index, output in enumerate(outputs):
                made[output] = graph.call_function(operator.getitem, (result, index))

        def launch(node: fx.Node) -> fx.Node:
            return graph.call_function(self.kernels[node.target], fx.node.map_arg(node.args, made.__getitem__))

        before, inputs, outputs = _piece(self.step, self.before)
        call("before_check", build(before, [real[node] for node in inputs]), inputs, outputs)
        for one in self.products:
            made[one.gradient] = one.emit(graph, made)
        made[self.check] = launch(self.check)
        for item in self.items:
            made[item] = graph.node_copy(item, made.__getitem__)
        after, inputs, outputs = _piece(self.step, self.after)
        if any(node.target in OPERATORS.values() for node in self.after):
            after = lower_updates(after)
        much = len(after.graph.nodes) > _FEW
        run = build(after, [node.meta["val"] for node in inputs]) if much else after.forward
        call("behind_check", run, inputs, outputs)
        squares = [launch(node) for node in self.updates]
        for skip in dict.fromkeys(one.skip for one in self.commits):
            together = [one for one in self.commits if one.skip is skip]
            targets, values = ([made[getattr(one, name)] for one in together] for name in ("target", "value"))
            graph.call_function(run_commits, (made[skip], targets, values))
        if self.products:
            for item in self.items:
                if item.args[1] == 0:
                    made[item] = graph.call_function(cpu_update.complete_norm, (made[item], *squares))
        graph.output(fx.node.map_arg(tuple(results_of(self.step.graph)), made.__getitem__))
        return fx.GraphModule(root, graph).forward  # type: ignore[no-any-return]


class _Piece(torch.nn.Module):
    """A compiled piece, as something that a graph can call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def __call__(self, *inputs: Any) -> Any:  # without the way through hooks, which takes longer than a small kernel
        return self.run(*inputs)


def _piece(step: fx.GraphModule, nodes: list[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """Nodes as a graph of their own: its inputs are the values that they read, its outputs those that others read."""
    chosen = set(nodes)
    inputs = list(dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in chosen))
    outputs = [node for node in nodes if any(user not in chosen for user in node.users)]
    graph = fx.Graph()
    made = {node: _input(graph, node) for node in inputs}
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in outputs))
    graph.eliminate_dead_code()
    return fx.GraphModule(step, graph), inputs, outputs


def _input(graph: fx.Graph, node: fx.Node) -> fx.Node:
    placeholder = graph.placeholder(node.name)
    placeholder.meta = {"val": node.meta["val"]}
    return placeholder


def lower_updates(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph with every update node opened into the torch calls that it stands for, for a compiler to fuse.

    Args:
        graph_module: a step graph; it stays as it is.
    """
    names = {_CHECK, *OPERATORS.values()}

    class Opened(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target in names:
                return fused_update.decomposition(target)(*args, **kwargs)
            return super().call_function(target, args, kwargs)

    examples = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    return make_fx(lambda *inputs: Opened(graph_module).run(*inputs), _allow_non_fake_inputs=True)(*examples)
