"""What a capture gives: a flat FX graph in ATen training IR, and where each of its inputs comes from."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import fx


class Source(enum.Enum):
    """Where a placeholder's tensor comes from at run time."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    USER = "user"
    NUMBER = "number"


@dataclass(frozen=True, slots=True)
class Input:
    """One placeholder of a captured graph.

    Args:
        name: the placeholder.
        source: where its tensor comes from.
        target: qualified name of the parameter, buffer or constant; empty for a user input.
        index: position among the flattened user arguments; -1 for the rest, and for numbers.
    """

    name: str
    source: Source
    target: str = ""
    index: int = -1


@dataclass
class Captured:
    """A captured forward.

    Args:
        graph_module: flat placeholders in, a flat tuple out; ATen training IR.
        inputs: one entry per placeholder, in order.
        constants: tensors that the model's code made at capture, by name.
    """

    graph_module: fx.GraphModule
    inputs: tuple[Input, ...]
    constants: dict[str, torch.Tensor]
