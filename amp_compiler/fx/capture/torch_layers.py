"""Torch's own layers behind a graph break: Dynamo leaves their code as it is, unless a frame around it takes it in."""

from __future__ import annotations

from types import CodeType

from torch import nn

_FOLDER = nn.__file__.rpartition("/")[0]
# The layers that hold products. Others have nothing to plan, or numbers that change at every call, as BatchNorm has.
_HOLD_PRODUCTS = ("activation", "adaptive", "conv", "linear", "rnn", "sparse", "transformer")
_FILES = frozenset(f"{_FOLDER}/modules/{name}.py" for name in _HOLD_PRODUCTS)


def is_layer(code: CodeType) -> bool:
    """Whether code is the forward of a torch layer that Dynamo has to compile by itself, for its products.

    Of itself it compiles nothing in torch's files but what it inlines: behind a break in the forward of an
    `nn.Sequential` nothing of that would be planned.

    Args:
        code: of a function that is about to run.
    """
    return code.co_filename in _FILES
