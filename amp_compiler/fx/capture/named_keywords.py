"""`torch.export` with dynamic sizes of a model whose forward takes `**keywords`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping
from inspect import Parameter
from typing import Any

from torch import nn


def keywords_named(model: nn.Module, kwargs: Mapping[str, Any], dynamic_shapes: Any) -> tuple[nn.Module, Any]:
    """A model whose forward names the keywords of a call that it would take as `**keywords`.

    torch 2.13's export looks for the sizes of these under the name of the parameter at first, and by their own names in
    the end, and so raises for any dynamic size at all.

    Args:
        model: the module.
        kwargs: the keyword arguments of the call.
        dynamic_shapes: as for `torch.export.export`.

    Returns:
        The module, or one of all that is in it, and the same shapes for the signature that names them.
    """
    forward = model.forward
    parameters = inspect.signature(forward).parameters
    gathered = next((one.name for one in parameters.values() if one.kind is Parameter.VAR_KEYWORD), None)
    named = [name for name in kwargs if name not in parameters or name == gathered]
    if gathered is None or not named or dynamic_shapes is None:
        return model, dynamic_shapes

    @functools.wraps(forward)
    def called(*args: Any, **keywords: Any) -> Any:
        return forward(*args, **keywords)

    kept = [one for one in parameters.values() if one.name != gathered]
    added = [Parameter(name, Parameter.KEYWORD_ONLY) for name in named]
    called.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    naming = copy.copy(model)
    vars(naming)["forward"] = called
    nested = dynamic_shapes.get(gathered) if isinstance(dynamic_shapes, dict) else None
    if not isinstance(nested, dict) or nested.keys() != set(named):  # a keyword may have the same name
        return naming, dynamic_shapes
    others = {name: shapes for name, shapes in dynamic_shapes.items() if name != gathered}
    return naming, others | nested
