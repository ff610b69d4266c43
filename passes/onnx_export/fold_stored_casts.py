"""`FoldStoredCasts`: stored data that are cast where they are read are stored in that type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import CAST, neutral_dtype
from amp_compiler.fx.meta import Key
from amp_compiler.passes.base import InPlacePass, PassResult


@dataclass(frozen=True)
class FoldStoredCasts(InPlacePass):
    """Give a placeholder of stored data the type that the plan casts it to. Who writes the file rounds the data.

    Where something reads the data as they were too, a second placeholder stands beside the first.

    Before::

        in w: fp32[8, 8]  # stored=head.weight
        in x: fp16[4, 8]
        to_dtype: fp16[8, 8] = aten.to.dtype(w, torch.float16)  # cast
        linear: fp16[4, 8] = aten.linear.default(x, to_dtype)

    After::

        in w: fp16[8, 8]  # stored=head.weight
        in x: fp16[4, 8]
        linear: fp16[4, 8] = aten.linear.default(x, w)

    Left alone: casts of inputs, and casts that the model wrote itself.
    """

    name: ClassVar[str] = "fold_stored_casts"
    exact: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        graph = subject.graph
        modified = False
        for source in graph.find_nodes(op="placeholder"):
            casts = _casts(source)
            groups: dict[torch.dtype, list[fx.Node]] = {}
            for cast in casts:
                groups.setdefault(cast.args[1], []).append(cast)  # type: ignore[arg-type]
            alone = len(groups) == 1 and len(casts) == len(source.users)
            for dtype, nodes in groups.items():
                place = source if alone else _beside(source, dtype)
                place.meta["val"] = nodes[0].meta["val"]
                for node in nodes:
                    node.replace_all_uses_with(place)
                    graph.erase_node(node)
                modified = True
        if modified:
            subject.recompile()
        return PassResult(subject, modified)

    def ensures(self, subject: fx.GraphModule, remembered: Any) -> str | None:
        """No cast of the plan's may be left behind stored data."""
        left = [cast for source in subject.graph.find_nodes(op="placeholder") for cast in _casts(source)]
        return f"'{left[0].name}' casts stored data" if left else None


def _casts(source: fx.Node) -> list[fx.Node]:
    """The casts that the plan has put behind stored data."""
    if Key.STORED not in source.meta:
        return []
    return [user for user in source.users if user.target is CAST and Key.PLACED in user.meta]


def _beside(source: fx.Node, dtype: torch.dtype) -> fx.Node:
    """A further placeholder of the same data."""
    with source.graph.inserting_after(source):
        placeholder: fx.Node = source.graph.placeholder(f"{source.name}_{neutral_dtype(dtype).short}")
    placeholder.meta = dict(source.meta)
    return placeholder
