"""`StepGraph`: the graph that a training step runs, forward, backward and update, as a value for reading."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepNode:
    """One node of a step's graph.

    Args:
        name: the node.
        op: canonical op name.
        module: qualified name of the module that it was made for; empty where there is none.
        phase: `forward`, `backward` or `update`.
        planned: the node of the plan that it was made for; empty where there is none.
        source: `file:line` of the user's model.
        outputs: (value, type) of each result that is read.
        inputs: names of the values read; those of casts among them.
    """

    name: str
    op: str
    module: str
    phase: str
    planned: str = ""
    source: str = ""
    outputs: tuple[tuple[str, str], ...] = ()
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCast:
    """One cast between floating-point types.

    Args:
        name: of the value that it makes.
        value: what is cast.
        src: its type, as `fp32`, `fp16`, `bf16`.
        dst: the type that it is cast to.
        bytes: memory traffic of it: elements times (size of src + size of dst).
        phase: `forward`, `backward` or `update`.
    """

    name: str
    value: str
    src: str
    dst: str
    bytes: int
    phase: str


@dataclass(frozen=True)
class StepGraph:
    """What a training step runs, in the order of execution.

    Args:
        nodes: all but casts, and but what takes one result out of several.
        casts: casts between floating-point types.
        inputs: (value, type) of each tensor of the batch.
        stored: (value, type) of each weight, buffer and state that is read.
        outputs: names of the values that it returns.
    """

    nodes: tuple[StepNode, ...]
    casts: tuple[StepCast, ...]
    inputs: tuple[tuple[str, str], ...] = ()
    stored: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def cast_bytes(self) -> int:
        """Bytes that all casts of one step move."""
        return sum(cast.bytes for cast in self.casts)
