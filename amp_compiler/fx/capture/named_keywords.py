"""`torch.export` with dynamic sizes of a model whose forward takes `**keywords`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from inspect import Parameter
from typing import Any

from torch import nn


@contextlib.contextmanager
def keywords_named(model: nn.Module, kwargs: Mapping[str, Any], dynamic_shapes: Any) -> Iterator[Any]:
    """Within it the signature of a model's forward names the keywords of a call that it would take as `**keywords`.

    torch 2.13's export looks for the sizes of these under the name of the parameter at first, and by their own names in
    the end, and so raises for any dynamic size at all.

    Args:
        model: the module.
        kwargs: the keyword arguments of the call.
        dynamic_shapes: as for `torch.export.export`.

    Yields:
        The same for the signature that names them.
    """
    forward = model.forward
    parameters = inspect.signature(forward).parameters
    gathered = next((one.name for one in parameters.values() if one.kind is Parameter.VAR_KEYWORD), None)
    named = [name for name in kwargs if name not in parameters or name == gathered]
    if gathered is None or not named or dynamic_shapes is None:
        yield dynamic_shapes
        return

    @functools.wraps(forward)
    def called(*args: Any, **keywords: Any) -> Any:
        return forward(*args, **keywords)

    kept = [one for one in parameters.values() if one.name != gathered]
    added = [Parameter(name, Parameter.KEYWORD_ONLY) for name in named]
    called.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    absent = object()
    before = vars(model).get("forward", absent)
    vars(model)["forward"] = called
    try:
        yield _named_shapes(dynamic_shapes, gathered, named)
    finally:
        if before is absent:
            del vars(model)["forward"]
        else:
            vars(model)["forward"] = before


def _named_shapes(dynamic_shapes: Any, gathered: str, named: list[str]) -> Any:
    """Those of the gathered keywords under their own names."""
    nested = dynamic_shapes.get(gathered) if isinstance(dynamic_shapes, dict) else None
    if not isinstance(nested, dict) or nested.keys() != set(named):  # a keyword may have the same name
        return dynamic_shapes
    others = {name: shapes for name, shapes in dynamic_shapes.items() if name != gathered}
    return others | nested
