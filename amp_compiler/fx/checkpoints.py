"""Gradient checkpointing (`torch.utils.checkpoint`): what it computes again in the backward, in a graph and outside."""

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils import checkpoint as torch_checkpoint

from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.dynamo import handle_checkpoints

Checkpoint = Callable[..., Any]
_aten = torch.ops.aten
_CASTS = frozenset({_aten.to.dtype, _aten._to_copy.default})
_MARK = str(Key.CHECKPOINT)  # in node.meta["custom"] too, which tracing copies to every node that a call becomes
_THREAD = threading.local()  # `handler`: what a call of this thread does with what is checkpointed


def mark_checkpoint(region: fx.GraphModule, number: int) -> None:
    """Mark what a region computes: its nodes in a trace have the mark as well.

    Args:
        region: its graph.
        number: which one it is.
    """
    for node in region.graph.nodes:
        if node.op not in ("placeholder", "output"):
            node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: number}


def checkpoint_of(node: fx.Node) -> int | None:
    """The number of the region of checkpointing that computes a node; `None` outside of one."""
    custom = node.meta.get("custom")
    return node.meta.get(Key.CHECKPOINT, custom.get(_MARK) if isinstance(custom, dict) else None)


def checkpoints_in(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """The regions of checkpointing of those nodes of a forward that stand in one, by node.

    What a pass has put between nodes of a region belongs to it, and so do casts that it alone reads.

    Args:
        nodes: the forward, in order.
    """
    region_of = {node: number for node in nodes if (number := checkpoint_of(node)) is not None}
    if not region_of:
        return region_of
    within = set(nodes)
    for node in reversed(nodes):
        regions = {region_of.get(user) for user in node.users if user in within}
        if node.op != "call_function" or node in region_of or len(regions) != 1:
            continue
        (region,) = regions
        inside = node.target in _CASTS or any(region_of.get(one) == region for one in node.all_input_nodes)
        if region is not None and inside:
            region_of[node] = region
    return region_of


def recomputed_in(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """What of its regions of checkpointing a backward in the same graph is to compute again, by node.

    That is all but what draws random numbers or writes to memory, whose results are kept.

    Args:
        nodes: the forward, in order.
    """
    regions = checkpoints_in(nodes)
    kept: set[fx.Node] = set()
    for node in regions:
        target: Any = node.target
        is_op = isinstance(target, torch._ops.OpOverload)
        once = is_op and (torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable)
        sent = is_op and target.namespace == "_c10d_functional"
        if once or sent or (target is operator.getitem and node.args[0] in kept):
            kept.add(node)
    return {node: region for node, region in regions.items() if node not in kept}


class _Checkpointed(nn.Module):
    """A region of checkpointing as a module."""

    def __init__(self, region: fx.GraphModule) -> None:
        super().__init__()
        self.region = region

    def forward(self, *inputs: Any) -> Any:
        """Run it, as plain torch does."""
        before, _THREAD.handler = getattr(_THREAD, "handler", None), None
        try:
            return torch_checkpoint.checkpoint(self.region, *inputs, use_reentrant=False)
        finally:
            _THREAD.handler = before


def with_checkpoints(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same graph, whose regions of checkpointing autograd runs again in the backward.

    Args:
        graph_module: stays as it is.
    """
    regions = checkpoints_in(list(graph_module.graph.nodes))
    if not regions:
        return graph_module
    parts: dict[fx.Node, int] = {}
    number, before = 0, None
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            number += regions.get(node) != before
            before = regions.get(node)
        parts[node] = number
    split = split_module(graph_module, graph_module, parts.__getitem__, keep_original_order=True)
    for part in {parts[node] for node in regions}:
        name = f"submod_{part}"
        setattr(split, name, _Checkpointed(getattr(split, name)))
    return split


@contextlib.contextmanager
def compiled_checkpoints(compile_one: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within it, in this thread, what is checkpointed outside of a graph is compiled by itself.

    Dynamo takes checkpointing into its graphs, but for a function that it has to break. That one would run as it is in
    the backward, where nothing captures.

    Args:
        compile_one: makes of what is checkpointed what is called in its place.
    """
    _install()
    before, _THREAD.handler = getattr(_THREAD, "handler", None), compile_one
    try:
        yield
    finally:
        _THREAD.handler = before


@functools.cache
def _install() -> None:
    def handling(checkpoint: Checkpoint) -> Checkpoint:
        def handled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            handler = getattr(_THREAD, "handler", None)
            return checkpoint(function if handler is None else handler(function), *args, **kwargs)

        return handled

    handle_checkpoints(handling)
