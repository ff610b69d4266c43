"""`OpenEnds`: inputs and outputs of the low type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from amp_compiler.fx.graph import CAST, node_tensor, results_of, torch_dtype
from amp_compiler.fx.meta import Key
from amp_compiler.ir.dtypes import DType
from amp_compiler.passes.base import InPlacePass, PassResult


@dataclass(frozen=True)
class OpenEnds(InPlacePass):
    """Give inputs that are read in the low type alone, and outputs that are made in it, that type.

    Before (low: fp16)::

        in x: fp32[4, 8]
        to_dtype: fp16[4, 8] = aten.to.dtype(x, torch.float16)  # cast
        relu: fp16[4, 8] = aten.relu.default(to_dtype)
        to_dtype_1: fp32[4, 8] = aten.to.dtype(relu, torch.float32)  # cast
        return to_dtype_1

    After::

        in x: fp16[4, 8]
        relu: fp16[4, 8] = aten.relu.default(x)
        return relu

    Left alone: an input that something reads in FP32, an output that is made in FP32, casts of the model's own, stored
    data.

    Args:
        low: the 16-bit type.
    """

    low: DType
    name: ClassVar[str] = "open_ends"
    exact: ClassVar[bool] = False  # who calls it gives and takes other types
    skippable: ClassVar[bool] = True
    idempotent: ClassVar[bool] = True

    def run(self, subject: fx.GraphModule) -> PassResult[fx.GraphModule]:
        """Rewrite in place."""
        graph, wanted = subject.graph, torch_dtype(self.low)
        output, results = graph.output_node(), results_of(graph)
        opened = [_opened(item, wanted) for item in results]
        modified = any(new is not old for new, old in zip(opened, results, strict=True))
        if modified:
            output.args = (tuple(opened),)
            graph.eliminate_dead_code()
        for source in graph.find_nodes(op="placeholder"):
            users = list(source.users)
            if Key.STORED in source.meta or not users:
                continue
            if all(_is_cast(user) and user.args[1] is wanted for user in users):
                source.meta["val"] = users[0].meta["val"]
                for user in users:
                    user.replace_all_uses_with(source)
                    graph.erase_node(user)
                modified = True
        if modified:
            subject.recompile()
        return PassResult(subject, modified)


def _opened(item: Any, wanted: torch.dtype) -> Any:
    """A result, or what stands before the cast that gave it its captured type."""
    if not isinstance(item, fx.Node) or not _is_cast(item):
        return item
    source: Any = item.args[0]
    value = node_tensor(source)
    return source if value is not None and value.dtype is wanted else item


def _is_cast(node: fx.Node) -> bool:
    return node.target is CAST and Key.PLACED in node.meta
