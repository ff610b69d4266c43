"""What a capture gives: a flat FX graph in ATen training IR, and where each of its inputs comes from."""

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx, nn

from amp_compiler.errors import CaptureError


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


def captured_from_graph_module(graph_module: fx.GraphModule) -> Captured:
    """The captured form of an FX graph in ATen IR whose placeholders are all inputs (`get_attr` tensors are lifted).

    Raises:
        CaptureError: where the graph holds calls that are not ATen ops, or lacks the `val` of its nodes.
    """
    for node in graph_module.graph.nodes:
        if node.op in ("call_module", "call_method"):
            raise CaptureError(
                f"node '{node.name}' is a {node.op}, not an ATen op",
                hint="pass the nn.Module itself, or torch.export.export(...).graph_module",
            )
        if node.op == "placeholder" and "val" not in node.meta:
            raise CaptureError(
                f"placeholder '{node.name}' carries no example value in its meta",
                hint="pass the graph of torch.export.export(...), which does",
            )
    inputs = tuple(
        Input(node.name, Source.USER, index=index)
        for index, node in enumerate(graph_module.graph.find_nodes(op="placeholder"))
    )
    return Captured(graph_module, inputs, {})


def tensor_getter(model: nn.Module, captured: Captured, entry: Input) -> Callable[[], torch.Tensor]:
    """A quick way to today's tensor of a parameter, buffer or constant, which follows `module.weight = ...`.

    Raises:
        CaptureError: where the model no longer has it.
    """
    if entry.target in captured.constants:
        constant = captured.constants[entry.target]
        return lambda: constant
    path, _, leaf = entry.target.rpartition(".")
    try:
        owner = model.get_submodule(path)
    except AttributeError as cause:
        raise CaptureError(
            f"the model has no module '{path}'", where=entry.target, hint="pass the model that was captured"
        ) from cause
    table = owner._parameters if entry.source is Source.PARAMETER else owner._buffers
    if leaf in table:
        return lambda: table[leaf]  # type: ignore[return-value]
    return lambda: getattr(owner, leaf)  # parametrized or plain attributes
