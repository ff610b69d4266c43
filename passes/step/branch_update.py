"""`BranchUpdate`: updates of weights whose gradients are made, beside the rest of the backward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import results_of
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private import new_graph_module
from amp_compiler.ops.branch import join_branch
from amp_compiler.ops.update.operators import COMMIT
from amp_compiler.passes.base import FunctionalPass, PassResult
from amp_compiler.passes.device.tried import tell
from amp_compiler.passes.step.backward_cut import Cut, CutStepParts, arguments_for, branchable
from amp_compiler.passes.step.cut_step import BEFORE

BESIDE, END = "beside_backward", "backward_end"
_MIB = 2**20
TryBeside = Callable[[Any, tuple[Any, ...], Any, tuple[Any, ...]], str]


@dataclass(frozen=True)
class BranchUpdate(FunctionalPass[fx.GraphModule]):
    """Cut the backward where most gradients are made, and update their weights while it ends.

    The end of a backward waits for the chip's arithmetic, an update for its memory. On a second branch of a CUDA graph
    one runs beside the other::

        before_check: forward, and the backward as far as the cut       a graph
        behind_check: numbers that all updates read                      a graph
        beside_backward: the updates of weights whose gradients are made, on the branch
        backward_end: what is left of the backward                       a graph
        adam_update: the other weights
        join_branch

    The cut is the place behind a product that leaves most to run at the same time, by a model: the bytes of the early
    updates, or those that the later products leave unused, whichever are fewer. Views and loops whose results would
    only be handed over are made again behind it.

    Before::

        before_check: (bf16[4], bf16[4], fp32[]) = call_module("before_check", w, w_low, v, v_low, x)
        …
        adam_update = amp_compiler.adam_update.default([w, v], [grad_w, grad_v], …)
        return grad_w, grad_v

    After::

        before_check: (bf16[4], bf16[8], fp32[]) = call_module("before_check", w_low, v, v_low, x)
        …
        beside_backward: () = call_module("beside_backward", v, grad_v, …)
        backward_end: (bf16[4]) = call_module("backward_end", mm, x)
        adam_update = amp_compiler.adam_update.default([w], [grad_w], …)
        join_branch: () = join_branch(v, grad_v, …)
        return grad_w, grad_v

    It is done in the mode `max-autotune` alone, and only where a trial on the device says that the two take less time
    beside each other than one behind the other; else a mark says why.

    Left alone: steps that must know all gradients before the first update (a check for what is not finite, clipping,
    gradients of several batches or ranks), in which code of an optimizer is traced, or a weight shares memory with
    another tensor; weights that the end of the backward reads, and those of optimizers that keep count of all updates
    together (SGD) or that round at random; a cut at which statistics of norms are handed over that torch rounds to 16
    bits, and a compiler does not.

    Args:
        try_beside: gives, for an update operator, its arguments, a product and its operands (fake tensors all), why
            they are not to run beside each other, in words joined by hyphens, and nothing where they are. `None` where
            nothing is done.
        least: what is to run beside the backward at least, in MiB of what the updates move.
    """

    try_beside: TryBeside | None = None
    least: float = 128
    name: ClassVar[str] = "branch_update"
    exact: ClassVar[bool] = True
    skippable: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Make the new graph; the given one stays as it is."""
        if self.try_beside is None:
            return PassResult(subject, False)
        step = branchable(subject)
        cut = None if step is None else step.best_cut(self.least * _MIB)
        if step is None or cut is None:
            return PassResult(subject, False)
        reason = self.try_beside(*step.to_try(cut))
        return PassResult(_told(subject, reason) if reason else _Branched(step, cut).made(), True)


def _told(subject: fx.GraphModule, reason: str) -> fx.GraphModule:
    """The same step, with a mark that says why it has no branch."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(subject.graph, made))
    (call,) = graph.find_nodes(op="call_module", target=BEFORE)
    tell(call, f"update-beside-the-backward-{reason}")
    return new_graph_module(subject, graph)


class _Branched:
    """A step whose backward is cut, and whose updates are two."""

    def __init__(self, step: CutStepParts, cut: Cut) -> None:
        self.step, self.cut = step, cut
        self.root, self.graph = torch.nn.Module(), fx.Graph()
        self.made_of: dict[fx.Node, fx.Node] = {}  # by node of the outer graph
        self.value: dict[fx.Node, fx.Node] = {}  # by node of the piece

    def made(self) -> fx.GraphModule:
        """The new step."""
        step, cut = self.step, self.cut
        for name, piece in step.step.named_children():
            if name != BEFORE:
                self.root.add_module(name, piece)
        last = [*step.updates, *step.step.graph.find_nodes(op="call_function", target=COMMIT)]
        behind = set(cut.behind)
        for node in step.step.graph.nodes:
            if node is step.call:
                self.value.update((inner, self.made_of[outer]) for outer, inner in step.given.items())
                self._piece(BEFORE, [one for one in step.nodes if one not in behind], self._handed())
            elif node in step.call.users:
                result = step.made[node]
                if result not in behind:
                    self.made_of[node] = self.value[result]
            elif node not in last and node.op != "output":
                self._copy(node)
        inputs = self._beside()
        self._piece(END, [*cut.again, *cut.behind], {result for _, result in step.items if result in behind})
        self.made_of.update((item, self.value[result]) for item, result in step.items)
        for node in step.updates:
            self._late(node)
        joined = self.graph.call_function(join_branch, tuple(inputs))
        joined.meta = {"val": (), Key.PHASE: "update"}
        for node in last[len(step.updates) :]:
            self._copy(node)
        results = tuple(results_of(step.step.graph))
        self.graph.output(fx.node.map_arg(results, self.made_of.__getitem__))
        return new_graph_module(self.root, self.graph)

    def _copy(self, node: fx.Node) -> None:
        self.made_of[node] = self.graph.node_copy(node, self.made_of.__getitem__)

    def _handed(self) -> set[fx.Node]:
        """What the first piece makes for the second one and for others."""
        given = {result for _, result in self.step.items}
        return self.step.handed(self.cut) | (given - set(self.cut.behind))

    def _piece(self, name: str, nodes: Sequence[fx.Node], results: Collection[fx.Node]) -> None:
        """Some nodes of the piece as one of its own; what it reads is given to it."""
        chosen = set(nodes)
        inputs = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in chosen))
        outputs = [node for node in nodes if node in results]
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = {"val": node.meta["val"]}
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in outputs))
        graph.eliminate_dead_code()
        self.root.add_module(name, new_graph_module(self.step.piece, graph))
        call = self.graph.call_module(name, tuple(self.value[node] for node in inputs))
        call.meta = {"val": tuple(node.meta.get("val") for node in outputs)}
        for index, output in enumerate(outputs):
            self.value[output] = self.graph.call_function(operator.getitem, (call, index))
            self.value[output].meta = dict(output.meta)

    def _beside(self) -> list[fx.Node]:
        """The early updates, as a graph of their own; gives what that is given."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        calls = {update: arguments_for(update, numbers) for update, numbers in self.cut.early.items()}
        for node in _leaves(tuple(calls.values())):
            if node not in copies:
                copies[node] = graph.placeholder(node.name)
                copies[node].meta = {"val": node.meta["val"]}
        for update, arguments in calls.items():
            early = graph.call_function(update.target, fx.node.map_arg(arguments, copies.__getitem__))  # type: ignore[arg-type]
            early.meta = dict(update.meta)
        graph.output(())
        self.root.add_module(BESIDE, new_graph_module(self.step.step, graph))
        inputs = [self.made_of[node] for node in copies]
        call = self.graph.call_module(BESIDE, tuple(inputs))
        call.meta = {"val": ()}
        return inputs

    def _late(self, update: fx.Node) -> None:
        """An update of the weights that are left, if there are any."""
        early = set(self.cut.early.get(update, ()))
        count = len(update.args[0])  # type: ignore[arg-type]
        left = [number for number in range(count) if number not in early]
        if left:
            arguments = fx.node.map_arg(arguments_for(update, left), self.made_of.__getitem__)
            late = self.graph.call_function(update.target, arguments)  # type: ignore[arg-type]
            late.meta = dict(update.meta)


def _leaves(arguments: Any) -> list[fx.Node]:
    """The nodes in the arguments of a call."""
    found: list[fx.Node] = []
    fx.node.map_arg(arguments, lambda node: found.append(node))
    return found
