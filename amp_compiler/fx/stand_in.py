"""Modules that stand for others."""

from collections.abc import Callable
from typing import Any

from torch import nn

from amp_compiler.fx.capture.errors import SPOKEN_OF


class StandIn(nn.Module):
    """Base of a module that stands for another one, which is in its attribute `_amp_original`."""

    _amp_original: Any


class FunctionModule(nn.Module):
    """A function as a module. What it computes with is not the module's: it comes as arguments, or is closed over."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.__dict__[SPOKEN_OF] = getattr(function, "__qualname__", repr(function))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self.function(*args, **kwargs)
