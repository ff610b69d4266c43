"""Modules and tensors that are spread over devices or processes already: a graph would lose their messages."""

import sys
from collections.abc import Iterator

from torch import nn

from amp_compiler.errors import HookError

_SHARDED = ("FSDPModule", "FullyShardedDataParallel")
_REPLICATED = "torch.distributed._composable.replicate", "DDP"  # what `replicate` puts among the bases of a module
_SHARD_LATER = (
    "compile first and shard what you get, as in fully_shard(amp.compile(module)), block by block where the blocks are"
    " sharded; under tensor parallelism train it without amp_compiler"
)


def refuse_spread(model: nn.Module, hint: str = _SHARD_LATER, of_step: bool = False) -> None:
    """Refuse a model of which something is spread over devices or processes already, wherever it is in it.

    Args:
        model: the module.
        hint: what to do about it.
        of_step: whether it is a loss, which holds the model under a name of its own. Of a loss copies are refused too,
            whose gradients a step would not share.

    Raises:
        HookError: names the module, the parameter or the buffer.
    """
    for kind, name, spread in (*_spread_modules(model, of_step), *_spread_tensors(model)):
        shown = name.partition(".")[2] if of_step else name
        called = f"{kind} '{shown}'" if shown else "the model"
        raise HookError(f"{called} is {spread}, whose messages a captured graph would lose", hint=hint)


def _spread_modules(model: nn.Module, of_step: bool) -> Iterator[tuple[str, str, str]]:
    loaded = sys.modules.get("torch.distributed.fsdp")  # a model that is sharded has it loaded
    sharded = tuple(getattr(loaded, name) for name in _SHARDED if hasattr(loaded, name))
    for name, module in model.named_modules():
        if isinstance(module, sharded):
            yield "module", name, "sharded over processes (FSDP)"
        if not of_step:
            continue
        if isinstance(module, nn.parallel.DistributedDataParallel):
            yield "module", name, "a DistributedDataParallel"
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            yield "module", name, "a DataParallel"
        if any((base.__module__, base.__name__) == _REPLICATED for base in type(module).__mro__):
            yield "module", name, "replicated over processes (replicate)"


def _spread_tensors(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None:
        named = (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
        yield from (
            (what, name, "a DTensor, spread over processes already")
            for what, tensors in named
            for name, one in tensors
            if isinstance(one.data, kind)
        )
