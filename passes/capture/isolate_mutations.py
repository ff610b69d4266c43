"""`IsolateMutations`: memory that stays changed in place gets an owner of its own, and is marked."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from amp_compiler.fx.alias import AliasGroups, alias_sources, written_roots
from amp_compiler.fx.graph import node_tensor, replace_other_uses
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import RewritePass

aten = torch.ops.aten


@dataclass(frozen=True)
class IsolateMutations(RewritePass):
    """Put a `clone` between the op that made a memory which is changed in place and the rest; mark what shares it.

    The op (a GEMM, say) is then free to run in the low type, and only the copy keeps its captured type: no plan moves a
    node that is marked as volatile.

    Before::

        linear: fp32[2, 8] = aten.linear.default(x, w)
        select: fp32[8] = aten.select.int(linear, 0, 0)
        zero_: fp32[8] = aten.zero_.default(select)
        return linear

    After::

        linear: fp32[2, 8] = aten.linear.default(x, w)
        clone: fp32[2, 8] = aten.clone.default(linear)  # volatile
        select: fp32[8] = aten.select.int(clone, 0, 0)  # volatile
        zero_: fp32[8] = aten.zero_.default(select)  # volatile
        return clone

    Left alone: a graph that changes nothing in place; memory of one name; a copy that the model made itself.
    """

    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def rewrite(self, graph: fx.Graph) -> bool:
        """Rewrite in place."""
        return _isolate(graph) | _mark_volatile(graph)


def _isolate(graph: fx.Graph) -> bool:
    groups = AliasGroups(graph)
    written, modified = written_roots(graph, groups), False
    for root, members in groups.members(graph).items():
        base = members[0]
        if root not in written or base.op != "call_function" or len(members) < 2:
            continue
        tensor = node_tensor(base)
        if base.target is aten.clone.default:
            continue  # it is a copy of its own already
        if tensor is None or alias_sources(base) or not tensor.is_floating_point() or not base.all_input_nodes:
            continue
        with graph.inserting_after(base):
            copy = graph.call_function(aten.clone.default, (base,))
        copy.meta = {key: value for key, value in base.meta.items() if key != "val"}
        with unset_fake_temporarily(), torch.no_grad(), getattr(tensor, "fake_mode", nullcontext()):
            copy.meta["val"] = aten.clone.default(tensor)
        replace_other_uses(base, copy)
        modified = True
    return modified


def _mark_volatile(graph: fx.Graph) -> bool:
    groups = AliasGroups(graph)
    written, modified = written_roots(graph, groups), False
    for node in graph.nodes:
        if groups.root(node) in written and not node.meta.get(Key.VOLATILE):
            node.meta[Key.VOLATILE] = modified = True
    return modified
