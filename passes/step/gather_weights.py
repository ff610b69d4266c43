"""`GatherWeights`: all ranks get the 16-bit weights of which each has updated a part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, fx

from amp_compiler.fx.graph import call_before, trace_before
from amp_compiler.ops.update.operators import OPERATORS
from amp_compiler.passes.base import RewritePass
from amp_compiler.passes.step.shard_update import part_of
from amp_compiler.passes.step.trace_update import TracedUpdate
from amp_compiler.passes.step.update_group import UpdateGroup


@dataclass(frozen=True)
class GatherWeights(RewritePass):
    """Behind the update of this rank's parts of masters, round them to 16 bits and give all ranks the whole weights.

    A group's weights leave as soon as it is updated, and are awaited behind the last update, so that they travel while
    the others are updated.

    Before (`ranks=2`)::

        in w: bf16[4]
        in master_0_0: fp32[2]
        sgd_update = amp_compiler.sgd_update.default([master_0_0], [wait_tensor], [], [], hyper_0_0, coef, nonfinite, …)

    After::

        sgd_update = amp_compiler.sgd_update.default([master_0_0], [wait_tensor], [], [], hyper_0_0, coef, nonfinite, …)
        _to_copy: bf16[2] = aten._to_copy.default(master_0_0, dtype=torch.bfloat16)
        all_gather_into_tensor: bf16[4] = _c10d_functional.all_gather_into_tensor.default(_to_copy, 2, "0")
        wait_tensor_1: bf16[4] = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
        view: bf16[4] = aten.view.default(wait_tensor_1, [4])
        copy_: bf16[4] = aten.copy_.default(w, view)

    Left alone: groups whose masters each rank has whole, see `ShardUpdate`.

    Args:
        groups: as for `FuseUpdate`.
        group: torch's name of the group of ranks; empty for one process.
        gather: as for `GatherGradients`; with `"add"` there is no update.
    """

    groups: tuple[UpdateGroup | TracedUpdate, ...] = field(default=())
    group: str = ""
    gather: str = ""
    exact: ClassVar[bool] = False

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        split = [one for one in self.groups if isinstance(one, UpdateGroup) and one.ranks > 1]
        if not split or self.gather == "add":
            return False
        weights = {node.name: node for node in graph.find_nodes(op="placeholder")}
        whole = [one for one in self.groups if isinstance(one, UpdateGroup)]
        updates = [node for node in graph.nodes if node.target in OPERATORS.values()]
        sent = [
            self._sent(one, node, [weights[name] for name in one.masters])
            for one, node in zip(whole, updates, strict=True)
            if one.ranks > 1
        ]
        for one, message in zip(split, sent, strict=True):
            self._written(one, message, [weights[name] for name in one.masters])
        return True

    def _sent(self, group: UpdateGroup, update: fx.Node, weights: list[fx.Node]) -> fx.Node:
        dtype = weights[0].meta["val"].dtype

        def flat(*masters: Tensor) -> Tensor:
            low_weights = [master.to(dtype) for master in masters]
            return torch.cat(low_weights) if len(low_weights) > 1 else low_weights[0]

        (packed,) = trace_before(update.next, flat, list(update.args[0]), "update")  # type: ignore[arg-type]
        target = torch.ops._c10d_functional.all_gather_into_tensor.default
        return call_before(packed.next, target, [packed, group.ranks, self.group], "update")

    def _written(self, group: UpdateGroup, message: fx.Node, weights: list[fx.Node]) -> None:
        output, wait = weights[0].graph.output_node(), torch.ops._c10d_functional.wait_tensor.default
        flat = call_before(output, wait, [message], "update")
        values = [node.meta["val"] for node in weights]
        sizes = [part_of(value, group.ranks) for value in values]
        even = [
            value.is_contiguous() and value.numel() == size * group.ranks
            for value, size in zip(values, sizes, strict=True)
        ]

        def parts(whole: Tensor) -> list[Tensor]:
            rows = whole.view(group.ranks, -1).split(sizes, dim=1)
            return [
                row if is_even else row.reshape(-1)[: value.numel()].view(value.shape)
                for row, value, is_even in zip(rows, values, even, strict=True)
            ]

        parts_of_weights = trace_before(output, parts, [flat], "update")
        for weight, value, size, is_even in zip(weights, parts_of_weights, sizes, even, strict=True):
            target = weight
            if is_even:  # at once to its place, without a copy that is contiguous
                target = call_before(output, torch.ops.aten.view.default, [weight, [group.ranks, size]], "update")
            call_before(output, torch.ops.aten.copy_.default, [target, value], "update")
