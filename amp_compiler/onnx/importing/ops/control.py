"""If, Loop and Scan: the bodies are graph modules, run by Python on plain numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amp_compiler.errors import CaptureError
from amp_compiler.onnx.importing.ops.values import Host, as_host, number, to_tensor

MOST_STEPS = 4096
"""Steps that a loop may unroll to while a graph is captured."""


def _true(condition: Any) -> bool:
    return bool(condition if isinstance(condition, Tensor) else number(condition))


def _tensor(value: Any, like: Any) -> Any:
    return to_tensor(value, like if isinstance(like, Tensor) else None) if isinstance(value, Host) else value


def run_if(condition: Any, then_body: nn.Module, else_body: nn.Module, captured: Any, others: Any) -> tuple[Any, ...]:
    """One of two branches.

    Args:
        condition: a boolean of one element.
        then_body: called with `captured` where it holds.
        else_body: called with `others` where it does not.
        captured: outer values that `then_body` uses.
        others: outer values that `else_body` uses.
    """
    return tuple(then_body(*captured)) if _true(condition) else tuple(else_body(*others))


def run_loop(
    trips: Any, condition: Any, body: nn.Module, states: Any, captured: Any, scans: int, like: Any
) -> tuple[Any, ...]:
    """ONNX's Loop, unrolled: `body(step, condition, *states, *captured)` until a count or its condition ends it.

    Args:
        trips: most steps as a host value, or `None`.
        condition: the first condition, or `None`.
        body: returns the next condition, the next states and the values to stack.
        states: first values of the carried states.
        captured: outer values that the body uses.
        scans: number of values to stack.
        like: any tensor, for its device.

    Raises:
        CaptureError: for more than `MOST_STEPS` steps while a graph is captured.
    """
    limit = None if trips is None else number(trips)
    current, going = tuple(_tensor(state, like) for state in states), condition is None or _true(condition)
    stacks: list[list[Any]] = [[] for _ in range(scans)]
    step = 0
    while going and (limit is None or step < limit):
        if step >= MOST_STEPS and torch.compiler.is_compiling():
            raise CaptureError(f"a Loop runs more than {MOST_STEPS} steps", hint="call the module uncompiled")
        going_on, *results = body(as_host(step), as_host(True), *current, *captured)
        current = tuple(_tensor(one, like) for one in results[: len(current)])
        for stack, one in zip(stacks, results[len(current) :], strict=True):
            stack.append(_tensor(one, like))
        going, step = _true(going_on), step + 1
    return (*current, *(torch.stack(stack) if stack else torch.empty(0) for stack in stacks))


def run_scan(
    body: nn.Module, states: Any, scanned: Any, captured: Any, axes: Any, directions: Any, out_axes: Any,
    out_directions: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """ONNX's Scan, unrolled over the length of its scanned inputs.

    Args:
        body: `body(*states, *slices, *captured)` returns the next states and the slices of the outputs.
        states: first values of the carried states.
        scanned: tensors to take slices of.
        captured: outer values that the body uses.
        axes: axis of each scanned input.
        directions: 1 where an input is scanned backwards.
        out_axes: axis of each stacked output.
        out_directions: 1 where an output is stacked backwards.
    """
    steps = scanned[0].shape[axes[0]]
    current = tuple(states)
    stacks: list[list[Any]] = []
    for step in range(steps):
        slices = [
            tensor.select(axis, steps - 1 - step if backwards else step)
            for tensor, axis, backwards in zip(scanned, axes, directions, strict=True)
        ]
        results = [_tensor(one, slices[0]) for one in body(*current, *slices, *captured)]
        current, outputs = tuple(results[: len(current)]), results[len(current) :]
        stacks = stacks or [[] for _ in outputs]
        for stack, one in zip(stacks, outputs, strict=True):
            stack.append(one)
    stacked = [
        torch.stack(stack[::-1] if backwards else stack, axis)
        for stack, axis, backwards in zip(stacks, out_axes, out_directions, strict=True)
    ]
    return (*current, *stacked)
