"""Modules and tensors that are spread over devices or processes already: a graph would lose their messages."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn

_SHARDED = ("FSDPModule", "FullyShardedDataParallel")
_REPLICATED = "torch.distributed._composable.replicate", "DDP"  # what `replicate` puts among the bases of a module


def spread_over(module: nn.Module) -> str:
    """What spreads this one module over devices or processes, in words; empty where nothing does.

    Args:
        module: any module; those within it are not looked at.

    Example:
        >>> spread_over(nn.Linear(4, 2))
        ''
    """
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "a DistributedDataParallel"
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        return "a DataParallel"
    if any((base.__module__, base.__name__) == _REPLICATED for base in type(module).__mro__):
        return "replicated over processes (replicate)"
    return "sharded over processes (FSDP)" if is_sharded(module) else ""


def is_sharded(module: nn.Module) -> bool:
    """Whether a module is one of FSDP, of the first or the second."""
    loaded = sys.modules.get("torch.distributed.fsdp")  # a model that is sharded has it loaded
    return isinstance(module, tuple(getattr(loaded, name) for name in _SHARDED if hasattr(loaded, name)))


def spread_tensors(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Of the parameters and buffers that are DTensors, which of the two each is, and its name."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None:
        yield from (("parameter", name) for name, one in model.named_parameters() if isinstance(one.data, kind))
        yield from (("buffer", name) for name, one in model.named_buffers() if isinstance(one, kind))
