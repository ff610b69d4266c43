"""Models that no graph can take, and what in a graph would be wrong: they are refused, with the hint."""

from __future__ import annotations

import torch
from torch import fx, nn

from amp_compiler.errors import CaptureError, HookError
from amp_compiler.fx.capture.spread import is_sharded, spread_tensors
from amp_compiler.fx.graph import user_source
from amp_compiler.fx.torch_private.tracing import transform_of


def refuse_sharded(model: nn.Module) -> None:
    """Refuse a model that FSDP or tensor parallelism has spread over processes."""
    for name, module in model.named_modules():
        if is_sharded(module):
            raise HookError(
                f"{_described(name)} is sharded over processes (FSDP): a graph would lose the messages between them",
                hint="compile first and shard what you get, as in fully_shard(amp.compile(module)), block by block"
                " where the blocks are sharded",
            )
    for kind, name in spread_tensors(model):
        raise HookError(
            f"{kind} '{name}' is a DTensor, spread over processes already: a graph would lose the messages",
            hint="pass a model whose parameters and buffers are whole, and shard what you get, as in"
            " fully_shard(amp.compile(module)); under tensor parallelism train it without amp_compiler",
        )


def refuse_scripted(model: nn.Module) -> None:
    """Refuse a model with parts of `torch.jit`."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{_described(name)} is scripted (torch.jit), which a graph cannot look into",
                hint="put the module that it was made of in its place",
            )


def refuse_transforms(graph: fx.Graph) -> None:
    """Refuse a graph in which forward differentiates."""
    for node in graph.nodes:
        if transform_of(node):
            raise CaptureError(
                "forward differentiates with torch.func or torch.autograd.forward_ad, which a captured graph cannot"
                f" hold ({transform_of(node)})",
                where=user_source(node.meta.get("stack_trace")),
                hint="do it outside of the model, or in a part that is not captured",
            )


def _described(name: str) -> str:
    return f"module '{name}'" if name else "the model"
