"""`CutStep`: the step in subgraphs, so that the check and the updates run as kernels over all parameters of a group."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.alias import written_operands
from amp_compiler.fx.graph import copy_graph, results_of
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.tracing import new_graph_module
from amp_compiler.ops.cpu.update import complete_norm
from amp_compiler.ops.update.operators import ADD_ROWS, CHECK, COMMIT, OPERATORS, decomposition
from amp_compiler.ops.update.product import Product
from amp_compiler.passes.base import FunctionalPass, PassResult
from amp_compiler.passes.step.place_operands import open_call, operand_nodes

BEFORE, BEHIND, LAST = "before_check", "behind_check", "behind_updates"
_OPENED = (CHECK, ADD_ROWS, COMMIT, *OPERATORS.values())


@dataclass(frozen=True)
class CutStep(FunctionalPass[fx.GraphModule]):
    """Cut a step where its kernels stand. What lies between them is two graphs, each for a compiler.

    A compiler turns every parameter's update into a loop of its own. The kernels go over all parameters of a group in
    one launch::

        before_check: forward, backward, sums of gradients       a graph
        Product, grad_check                                      kernels
        behind_check: clipping, scale, traced code               a graph
        adam_update, sgd_update                                   kernels
        messages with new weights, see `GatherWeights`            as they are, each behind its update
        behind_updates: FP8 weights, see `PlaceOperands`          a graph, which reads what was stored
        commit: buffers, unless the step is skipped              a kernel

    Before::

        mul: fp32[4] = aten.mul.Tensor(w, x)
        grad_check: (fp32[], fp32[], u8[1]) = amp_compiler.grad_check.default([mul], inverse)
        norm: fp32[] = getitem(grad_check, 0)
        double: fp32[] = aten.mul.Tensor(norm, 2)
        return double, norm

    After::

        before_check: (fp32[4]) = call_module("before_check", w, x)
        mul: fp32[4] = getitem(before_check, 0)
        grad_check: (fp32[], fp32[], u8[1]) = amp_compiler.grad_check.default([mul], inverse)
        norm: fp32[] = getitem(grad_check, 0)
        behind_check: (fp32[],) = call_module("behind_check", norm)
        double: fp32[] = getitem(behind_check, 0)
        return double, norm
        graph before_check …; graph behind_check …

    Left alone: with `kernels=()` nothing but FP8 weights is cut off; the operators are opened into the torch calls that
    they stand for, for a compiler to fuse, and so are those in the subgraphs that no kernel takes.

    Args:
        kernels: the operators that a kernel runs.
    """

    kernels: tuple[Any, ...]
    exact: ClassVar[bool] = False

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Make the new graph; the given one stays as it is."""
        checks = [node for node in subject.graph.nodes if node.target is CHECK]
        is_cut = bool(self.kernels) and len(checks) == 1
        if not is_cut and not operand_nodes(subject.graph):
            opened = open_operators(subject)
            return PassResult(opened, opened is not subject)
        return PassResult(_Cut(subject, self.kernels if is_cut else (), checks if is_cut else []).built(), True)


class _Cut:
    """The step graph sorted into what stands before the check, behind it, and the kernels."""

    def __init__(self, step: fx.GraphModule, kernels: tuple[Any, ...], checks: list[fx.Node]) -> None:
        self.step, self.kernels, self.checks = step, kernels, checks
        self.root, self.graph = torch.nn.Module(), fx.Graph()
        self.made_of: dict[fx.Node, fx.Node] = {}

    def built(self) -> fx.GraphModule:
        """The step, cut."""
        nodes = [node for node in self.step.graph.nodes if node.op not in ("placeholder", "output")]
        behind: set[fx.Node] = {*self.checks}
        for node in nodes:
            if any(source in behind for source in node.all_input_nodes):
                behind.add(node)
        last = [node for node in nodes if node.target in self.kernels and node not in self.checks]
        updates = [node for node in last if node.target is not COMMIT]
        operands = operand_nodes(self.step.graph)
        readers = _readers(nodes, updates) - operands
        # What writes a `Product`, or another form of one.
        kinds = Product, Product.zeros
        products = [node for node in nodes if node.target in kinds or node.op == "call_method"]
        items = [node for check in self.checks for node in check.users if node.target is operator.getitem]
        own = {*self.checks, *products, *items, *last, *readers, *operands}
        for node in self.step.graph.find_nodes(op="placeholder"):
            self.made_of[node] = self.graph.node_copy(node)
        self._subgraph(BEFORE, [node for node in nodes if node not in own and node not in behind])
        for node in (*products, *self.checks, *items):
            self._copy(node)
        if self.checks:
            self._subgraph(BEHIND, [node for node in nodes if node not in own and node in behind])
        for node in [node for node in nodes if node in updates or node in readers]:
            self._copy(node)
        if operands:
            self._subgraph(LAST, [node for node in nodes if node in operands])
        for node in [node for node in last if node.target is COMMIT]:
            self._copy(node)
        self._complete_norm(items, updates, bool(products))
        self.graph.output(fx.node.map_arg(tuple(results_of(self.step.graph)), self.made_of.__getitem__))
        return new_graph_module(self.root, self.graph)

    def _copy(self, node: fx.Node) -> None:
        self.made_of[node] = self.graph.node_copy(node, self.made_of.__getitem__)

    def _complete_norm(self, items: list[fx.Node], updates: list[fx.Node], deferred: bool) -> None:
        """Where the updates make gradients themselves, only they know the squares of those: add them to the norm."""
        for item in items if deferred else ():
            if item.args[1] == 0:
                norm = self.made_of[item]
                squares = [self.made_of[update] for update in updates]
                self.made_of[item] = self.graph.call_function(complete_norm, (norm, *squares))
                self.made_of[item].meta = dict(item.meta)

    def _subgraph(self, name: str, nodes: list[fx.Node]) -> None:
        """Make nodes a graph of its own: its inputs are the values they read, its outputs those that others read."""
        chosen = set(nodes)
        inputs = list(dict.fromkeys(s for node in nodes for s in node.all_input_nodes if s not in chosen))
        outputs = [node for node in nodes if any(user not in chosen for user in node.users)]
        graph = fx.Graph()
        copies = {node: _input(graph, node) for node in inputs}
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        graph.eliminate_dead_code()
        self.root.add_module(name, open_operators(new_graph_module(self.step, graph)))
        call = self.graph.call_module(name, tuple(self.made_of[node] for node in inputs))
        call.meta = {"val": tuple(node.meta.get("val") for node in outputs)}
        for index, output in enumerate(outputs):
            self.made_of[output] = self.graph.call_function(operator.getitem, (call, index))
            self.made_of[output].meta = dict(output.meta)


def _readers(nodes: Sequence[fx.Node], kernels: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that read what a kernel in front of them, or another of them, wrote; and what is made of that."""
    readers: set[fx.Node] = set()
    written: set[fx.Node] = set()
    for node in nodes:
        if node in kernels:
            written.update(written_operands(node))
        elif any(source in written or source in readers for source in node.all_input_nodes):
            readers.add(node)
            written.update(written_operands(node))
    return readers


def _input(graph: fx.Graph, node: fx.Node) -> fx.Node:
    placeholder = graph.placeholder(node.name)
    placeholder.meta = {"val": node.meta["val"]}
    return placeholder


def open_operators(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The graph with our operators opened into the torch calls that they stand for; itself where it has none.

    Args:
        graph_module: a step graph or a subgraph of one; it stays as it is.
    """
    if not any(node.target in _OPENED for node in graph_module.graph.nodes):
        return graph_module
    opened = copy_graph(graph_module)
    for node in [node for node in opened.graph.nodes if node.target in _OPENED]:
        open_call(node, decomposition(node.target), node.meta.get(Key.PHASE, "update"))
    opened.recompile()
    return opened
