"""`torch.nn.SyncBatchNorm` in a capture: a batch norm without torch's messages, marked with the group of its ranks."""

import contextlib
import re

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from amp_compiler.errors import CaptureError
from amp_compiler.fx.capture.frontend import raise_at_once
from amp_compiler.fx.graph import module_of, user_source
from amp_compiler.fx.meta import Key
from amp_compiler.fx.torch_private.runtime import exchanged

GROUPS = "_amp_groups"  # in the `__dict__` of what is captured: gives the group of each `SyncBatchNorm` in it
_BATCH_NORM = torch.ops.aten.batch_norm.default
_BY_ALONE = re.compile(rf'{re.escape(__file__)}", line \d+, in normalized\b')  # in the trace of a node


def joins_ranks(model: nn.Module) -> list[str]:
    """The names of the modules whose statistics are those of several ranks, as they are in training."""
    return [name for name, one in model.named_modules() if isinstance(one, nn.SyncBatchNorm) and one.training]


def norms_apart(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Within it, a `SyncBatchNorm` in training is a plain batch norm, where the model knows the groups of its own.

    Args:
        model: what is captured.
    """
    if model.__dict__.get(GROUPS) is None:
        return contextlib.nullcontext()
    theirs = nn.SyncBatchNorm.forward

    def forward(self: nn.SyncBatchNorm, input: Tensor) -> Tensor:
        return _alone(self, input) if self.training else theirs(self, input)

    return exchanged(nn.SyncBatchNorm, "forward", forward)


def _alone(norm: nn.SyncBatchNorm, data: Tensor) -> Tensor:
    """What it computes of one rank's rows, in training; a cumulative average without a number read from a tensor.

    Raises:
        CaptureError: there is one number of each channel; torch's tracing of a batch norm divides by zero then.
    """
    norm._check_input_dim(data)
    norm._check_non_zero_input_channels(data)
    if data.numel() // data.shape[1] < 2:
        what = "a SyncBatchNorm gets one number of each channel on this rank, or none"
        raise_at_once(what, "give each rank two rows")
    mean, variance = norm.running_mean, norm.running_var
    if not norm.track_running_stats:
        mean = variance = None
    elif norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)

    def normalized(mean: Tensor | None, variance: Tensor | None, momentum: float) -> Tensor:
        return F.batch_norm(data, mean, variance, norm.weight, norm.bias, True, momentum, norm.eps)

    if mean is None or variance is None or norm.momentum is not None:
        return normalized(mean, variance, 0.0 if norm.momentum is None else norm.momentum)
    share = 1.0 / norm.num_batches_tracked  # type: ignore[operator]
    new = torch.zeros_like(mean), torch.zeros_like(variance)
    output = normalized(*new, 1.0)
    for kept, now in zip((mean, variance), new, strict=True):
        kept.copy_(kept * (1 - share) + now * share)
    return output


def mark_norms(graph_module: fx.GraphModule, model: nn.Module) -> None:
    """Mark the batch norms that stand for a `SyncBatchNorm`, as `norms_apart` has made them, with its group.

    Args:
        graph_module: as captured, with graphs of its own for regions.
        model: what was captured.

    Raises:
        CaptureError: which one a batch norm stands for is not known.
    """
    modules = model.named_modules(remove_duplicate=False)
    norms = {name: one for name, one in modules if isinstance(one, nn.SyncBatchNorm)}
    for inner in graph_module.modules():
        if not isinstance(inner, fx.GraphModule):
            continue
        for node in inner.graph.find_nodes(op="call_function", target=_BATCH_NORM):
            if not _BY_ALONE.search(trace := node.meta.get("stack_trace") or ""):
                continue
            norm = norms.get(module_of(node)[0])
            if norm is None:
                raise CaptureError(
                    "it is not known of which SyncBatchNorm of the model a call is",
                    where=user_source(trace),
                    hint="call it as a module of the model, norm(x), and not norm.forward(x)",
                )
            node.meta[Key.GROUP] = model.__dict__[GROUPS](norm)


def marked_norms(graph_module: fx.GraphModule) -> int:
    """How many batch norms of a graph, and of those that it calls, are marked with a group of ranks."""
    graphs = [one.graph for one in graph_module.modules() if isinstance(one, fx.GraphModule)]
    return sum(Key.GROUP in node.meta for graph in graphs for node in graph.nodes)


def check_marks(before: int, graph_module: fx.GraphModule) -> None:
    """Refuse a graph in which batch norms have lost their mark on the way.

    Args:
        before: how many there were.
        graph_module: the rewritten graph.

    Raises:
        CaptureError: there are fewer.
    """
    if marked_norms(graph_module) != before:
        raise CaptureError(
            "a SyncBatchNorm stands in a region of autocast in another 16-bit type, where its ranks get lost",
            hint="take it out of that region, or let the region name the type of the step",
        )
