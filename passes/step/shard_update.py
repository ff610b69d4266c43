"""`ShardUpdate`: each rank gets its part of the sum of all ranks' gradients, and updates that part alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from amp_compiler.fx.graph import call_before, results_of, trace_before
from amp_compiler.passes.base import RewritePass
from amp_compiler.passes.step.reduce_gradients import Bucket, Messages, in_order


@dataclass(frozen=True)
class ShardUpdate(RewritePass):
    """Put in the place of gradients this rank's parts of their sums over the ranks (ZeRO-2; with the update, ZeRO-1).

    The elements of a weight, filled up with zeros to a multiple of the number of ranks, are cut into equal parts,
    one for each rank. A bucket of gradients is sent by a reduce-scatter as soon as its last one is made, so that no
    rank ever holds a whole sum. `FuseUpdate` updates this rank's parts of masters and moments, which are all it has,
    and `GatherWeights` gives all ranks the new 16-bit weights.

    Before (`ranks=2`)::

        in w: bf16[4]
        mul: bf16[4] = aten.mul.Tensor(w, x)
        return loss, mul

    After::

        in w: bf16[4]
        mul: bf16[4] = aten.mul.Tensor(w, x)
        view: bf16[4] = aten.view.default(mul, [4])
        reduce_scatter_tensor: bf16[2] = _c10d_functional.reduce_scatter_tensor.default(view, "sum", 2, "0")
        wait_tensor: bf16[2] = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
        return loss, wait_tensor

    Left alone: weights that something reads in FP32, whose gradients are `ReduceGradients`'; one process; the batches
    that are only gathered.

    Args:
        updated: the weight of each gradient at the end of the graph's outputs.
        group: torch's name of the group of ranks; empty for one process.
        ranks: their number.
        buckets: the gradients that are sent, the same on each rank. What this one lacks counts as zero.
    """

    updated: tuple[str, ...]
    group: str = ""
    ranks: int = 1
    buckets: tuple[Bucket, ...] = field(default=())
    exact: ClassVar[bool] = False

    def requires(self, subject: fx.GraphModule) -> str | None:
        """There is an output for each weight, and the weights that are sent are placeholders."""
        count = len(results_of(subject.graph))
        if count < len(self.updated):
            return f"the graph returns {count} values, and there are {len(self.updated)} gradients"
        known = {node.name for node in subject.graph.find_nodes(op="placeholder")}
        missing = [one.name for bucket in self.buckets for one in bucket.gradients if one.name not in known]
        return f"'{missing[0]}' is no placeholder of the graph" if missing else super().requires(subject)

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place; the parts stand first, in the order that `in_order` says, and behind them what is whole."""
        if not self.buckets:
            return False
        outputs, messages = results_of(graph), Messages(graph)
        first = len(outputs) - len(self.updated)
        own: dict[str, fx.Node] = dict(zip(self.updated, outputs[first:], strict=True))
        sent = [(bucket, self._sent(bucket, own, messages)) for bucket in self.buckets]
        parts: dict[str, fx.Node] = {}
        for bucket, message in sent:
            parts.update(self._parts(bucket, messages.awaited(message), messages))
        order = in_order(graph, [one for bucket in self.buckets for one in bucket.gradients])
        whole = [node for name, node in own.items() if name not in parts]
        graph.output_node().args = ((*outputs[:first], *(parts[name] for name in order), *whole),)
        return True

    def _sent(self, bucket: Bucket, own: dict[str, fx.Node], messages: Messages) -> fx.Node:
        def flat(tensors: Sequence[Tensor]) -> Tensor:
            rows = [rows_of(tensor.to(bucket.dtype), self.ranks) for tensor in tensors]
            return (torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]).reshape(-1)

        place, whole = messages.packed(bucket.gradients, own, flat)
        target = torch.ops._c10d_functional.reduce_scatter_tensor.default
        return call_before(place, target, [whole, "sum", self.ranks, self.group], "update")

    def _parts(self, bucket: Bucket, message: fx.Node, messages: Messages) -> dict[str, fx.Node]:
        """This rank's part of the sum of each gradient of a bucket, by weight, from what came."""
        names = [one.name for one in bucket.gradients]
        sizes = [part_of(messages.weights[name].meta["val"], self.ranks) for name in names]

        if len(names) > 1:
            parts = trace_before(messages.output, lambda flat: flat.split(sizes), [message], "update")
        else:
            parts = [message]
        return dict(zip(names, parts, strict=True))


def part_of(weight: Tensor, ranks: int) -> int:
    """Number of elements of a weight that each rank updates, those that fill it up counted."""
    return int(-(-weight.numel() // ranks))


def rows_of(tensor: Tensor, ranks: int) -> Tensor:
    """All elements of a tensor in row-major order, [ranks, part]: a row for each rank, filled up with zeros."""
    size, flat = part_of(tensor, ranks), tensor.reshape(-1)
    missing = size * ranks - tensor.numel()
    return (F.pad(flat, (0, missing)) if missing else flat).view(ranks, size)
