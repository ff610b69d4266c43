"""What passes tell one another in `node.meta`: one key each, and what a model's own text demands of a node."""

import enum
from typing import Any, Self

import torch

from amp_compiler.ir.graph import Pin


class Key(enum.StrEnum):
    """The keys in `node.meta` that are ours, with the type of what stands under them.

    A member is the string itself, so that `node.meta["amp_phase"]` finds what `node.meta[Key.PHASE]` wrote.

    Attributes:
        kind: type of the value.
    """

    kind: type

    def __new__(cls, value: str, kind: type) -> Self:  # noqa: D102
        member = str.__new__(cls, value)
        member._value_ = value
        member.kind = kind
        return member

    __hash__ = str.__hash__  # that of an enum's member is its name's

    PIN = "amp_pin", Pin  # what the model's own text demands
    GROUP = "amp_group", tuple  # a batch norm over the rows of several ranks: (name of their group, number of ranks)
    VOLATILE = "amp_volatile", bool  # its memory is changed in place somewhere in the graph
    PLACED = "amp_cast", str  # a cast that no model wrote, with what it casts
    BACKWARD = "amp_backward", torch.dtype  # type of the gradients
    BACKWARD_RULE = "amp_backward_rule", str  # the rule that asked for it
    MATH = "amp_math", str  # it is to compute in FP32: the rule that asks for it
    BACKWARD_MATH = "amp_backward_math", str  # the same for its gradients
    PHASE = "amp_phase", str  # forward, backward or update
    PLANNED = "amp_planned", str  # name of the node of the forward that it was made for
    SEED = "amp_seed", bool  # the node that starts the backward
    LOW = "amp_low", tuple  # placeholder of a 16-bit weight: (its master's placeholder, torch type)
    MASTER = "amp_master", str  # placeholder of the FP32 master of a 16-bit parameter, which is named
    WIDE = "amp_wide", str  # placeholder that stands for the FP32 value of a 16-bit parameter, which is named
    RECOMPUTED = "amp_recomputed", bool  # a backward makes it anew, rather than keep it from the forward
    CHECKPOINT = "amp_checkpoint", int  # the region of checkpointing that computes it, which a backward runs again
    STATE = "amp_state", tuple  # placeholder of what a step keeps: (column, group, number)


CUSTOM_REGION = "amp_region"  # key in node.meta["custom"], which tracing copies to every node that a call becomes
_SOURCE = ("nn_module_stack", "stack_trace")


def source_of(node: Any) -> dict[str, Any]:
    """Module and source line of a node, as metadata for one that takes its place or serves it."""
    return {key: node.meta[key] for key in _SOURCE if key in node.meta}


def region_pin(device: Any, source: str) -> Pin:
    """The pin of a node that stands in an `autocast(enabled=False)` region of the model."""
    return Pin("fp32", f"the model's autocast('{device}', enabled=False) region{f' at {source}' if source else ''}")
