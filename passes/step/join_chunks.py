"""`JoinChunks`: a loss in chunks, and its gradients in chunks, in one go."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import is_single_number, node_tensor
from amp_compiler.fx.meta import Key
from amp_compiler.ops import classifier_loss as _operators  # noqa: F401  # what it registers
from amp_compiler.passes.base import InPlacePass, PassResult

_LOSS = torch.ops.amp_compiler.classifier_loss.default
_GRADIENTS = torch.ops.amp_compiler.classifier_loss_gradients.default


@dataclass(frozen=True)
class JoinChunks(InPlacePass):
    """Take a classifier's loss from the operator that makes its gradients, which computes it anyway.

    Autograd asks for the gradients when the loss is done; its logits are gone by then, and would be made once more.
    What the gradient of the loss is, though, is known before: the loss scale, and what constants make of it.

    Before::

        loss: fp32[] = amp_compiler.classifier_loss.default(x, w, None, target, …)
        made: (fp32[], …) = amp_compiler.classifier_loss_gradients.default(loss_scale, x, w, None, target, …)
        of_x: bf16[6, 8] = getitem(made, 1)
        return loss, of_x

    After::

        made: (fp32[], …) = amp_compiler.classifier_loss_gradients.default(loss_scale, x, w, None, target, …)
        loss: fp32[] = getitem(made, 0)
        of_x: bf16[6, 8] = getitem(made, 1)
        return loss, of_x

    Left alone: a gradient that depends on the loss itself (of its exponential, say): there the logits are made twice,
    and still never stored.
    """

    name: ClassVar[str] = "join_chunks"
    exact: ClassVar[bool] = True
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        modified = False
        for made in subject.graph.find_nodes(op="call_function", target=_GRADIENTS):
            loss = next((node for node in subject.graph.find_nodes(op="call_function", target=_LOSS)
                         if node.args == made.args[1 : len(node.args) + 1]), None)  # fmt: skip
            modified |= loss is not None and _join(subject.graph, loss, made)
        if modified:
            subject.recompile()
        return PassResult(subject, modified)


def _join(graph: fx.Graph, loss: fx.Node, made: fx.Node) -> bool:
    order = {node: place for place, node in enumerate(graph.nodes)}
    late = _late(made.args[0], loss, order)
    if late is None:
        return False
    for node in (*late, made):
        loss.prepend(node)
    made.meta[Key.PHASE] = loss.meta.get(Key.PHASE, "forward")
    with graph.inserting_before(loss):
        found = graph.call_function(operator.getitem, (made, 0))
    found.meta = dict(loss.meta)
    loss.replace_all_uses_with(found)
    graph.erase_node(loss)
    return True


def _late(seed: Any, loss: fx.Node, order: dict[fx.Node, int]) -> list[fx.Node] | None:
    """The nodes behind the loss that the gradient of it is made by, in order; `None` where it cannot be made before."""
    late: set[fx.Node] = set()
    waiting = [seed]
    while waiting:
        node = waiting.pop()
        if order[node] < order[loss] or node in late:
            continue
        value = node_tensor(node)
        small = value is not None and is_single_number(value)
        if node is loss or not (small or node.meta.get(Key.PHASE) == "forward"):
            return None
        late.add(node)
        waiting += node.all_input_nodes
    return sorted(late, key=order.__getitem__)
