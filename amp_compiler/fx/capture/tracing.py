"""What stands around a model while it is traced: casts kept apart, no autocast, no noise."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amp_compiler.fx.capture.autocast_state import autocast_off
from amp_compiler.fx.torch_private.tracing import inference_mode_as_no_grad

_CASTS = frozenset(
    getattr(torch.Tensor, name) for name in ("float", "half", "bfloat16", "double", "to", "type", "type_as")
)
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]  # of `x.data`, as a mode sees it


class KeepCastsApart(TorchFunctionMode):
    """Gives every explicit cast an operand of its own while a model is traced.

    On an FP32 tensor `x.float()` returns `x` itself, so a tracer would take every later use of `x` for a use of the
    cast. With an alias in between, only what the user cast is cast. `x.data` is `x.detach()`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Alias the tensor that a cast is called on; a move to the device where it is already is no cast at all."""
        kwargs = kwargs or {}
        if func == _DATA:  # which no tracer takes note of
            return args[0].detach()
        if func in _CASTS and args and isinstance(args[0], torch.Tensor):
            if func is torch.Tensor.to and _only_moves(args[0], *args[1:], **kwargs):
                return args[0]
            args = (torch.ops.aten.alias.default(args[0]), *args[1:])
        return func(*args, **kwargs)


def _only_moves(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    if len(args) > 1 or not set(kwargs) <= {"device", "non_blocking"}:
        return False
    places = [*args, *([kwargs["device"]] if "device" in kwargs else [])]
    if len(places) != 1 or not isinstance(places[0], (str, torch.device)):
        return False
    place = torch.device(places[0])
    return place.type == tensor.device.type and place.index in (None, tensor.device.index)


@contextmanager
def tracing_context() -> Iterator[None]:
    """No ambient autocast, casts kept apart, and the warnings that tracing gives to every model muted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with autocast_off(), inference_mode_as_no_grad(), KeepCastsApart():
            yield


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """The logger of that name tells nothing within.

    Args:
        name: of the logger.
    """
    target = logging.getLogger(name)
    refuse = lambda record: False  # noqa: E731  # another level would empty the caches of all loggers, a millisecond
    target.addFilter(refuse)
    try:
        yield
    finally:
        target.removeFilter(refuse)
