"""What was put around a model before it came here: taken off where that changes nothing, named where it would."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from amp_compiler.errors import AmpError
from amp_compiler.fx.capture.hooks import MODULE_HOOKS
from amp_compiler.fx.stand_in import StandIn

_COMPILED = "_orig_mod"  # where `torch.compile` keeps what it compiles
_OF_FABRIC = "_forward_module"  # where Lightning's Fabric keeps it, which then enters torch.autocast around it


def unwrapped_model(model: Any, hint: str) -> Any:
    """A model without what `torch.compile`, `amp.compile`, Fabric and a `DataParallel` of one device put around it.

    Args:
        model: an `nn.Module`, or a dict, list or tuple of them; anything else is returned as it is.
        hint: what to do about a model that is spread over devices or processes.

    Raises:
        AmpError: where what was put around it has hooks or a forward of its own; for a model in `DataParallel` over
            devices or `DistributedDataParallel`, as a graph of it would lose what those add; for one of `torch.jit`.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> unwrapped_model(torch.compile(model), hint="") is model
        True
    """
    if isinstance(model, dict):
        return {key: unwrapped_model(one, hint) for key, one in model.items()}
    if type(model) in (list, tuple):
        return type(model)(unwrapped_model(one, hint) for one in model)
    while isinstance(model, nn.Module):
        inner = _inside(model)
        if not isinstance(inner, nn.Module):
            break
        if added := _added(model):
            raise AmpError(
                f"the model is in a {type(model).__name__}, which has {added} of its own that would be lost",
                hint=f"put that on the {type(inner).__name__} inside and pass it, or into a module around it",
            )
        model = inner
    if isinstance(model, torch.jit.ScriptModule):
        raise AmpError(
            "the model is scripted or traced (torch.jit), which a graph cannot look into",
            hint="pass the module that it was made of",
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise AmpError(
            f"the model is in a {type(model).__name__}, whose copies and messages a captured graph would lose",
            hint=hint,
        )
    return model


def _inside(model: nn.Module) -> Any:
    if isinstance(model, StandIn):
        return model._amp_original
    if isinstance(model, nn.DataParallel):
        return model.module if len(model.device_ids) <= 1 else None
    return getattr(model, _OF_FABRIC if type(model).__name__ == "_FabricModule" else _COMPILED, None)


def _added(wrapper: nn.Module) -> str:
    """What was added to a wrapper itself, in words; empty where nothing was."""
    if any(vars(wrapper).get(table) for table in MODULE_HOOKS):
        return "hooks"
    return "a forward" if isinstance(wrapper, StandIn) and "forward" in vars(wrapper) else ""
