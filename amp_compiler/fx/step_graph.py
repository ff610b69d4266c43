"""A step's FX graph as a `StepGraph`, for people."""

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from amp_compiler.fx.graph import canonical_op, hint, is_float, module_of, neutral_dtype, node_tensor, user_source
from amp_compiler.fx.meta import Key
from amp_compiler.ir.step_graph import StepCast, StepGraph, StepNode

_CAST = torch.ops.aten._to_copy.default
_BATCH = "batch"  # what the names of a loss module's own arguments begin with


def step_graph_of(graph_module: fx.GraphModule) -> StepGraph:
    """The graph of a training step as a value.

    Args:
        graph_module: with `meta["amp_phase"]` on its calls, as `step.graph_module` has it.
    """
    inputs: list[tuple[str, str]] = []
    stored: list[tuple[str, str]] = []
    nodes, casts = [], []
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and node.users:
            typed = (node.name, _type_of(node.meta.get("val")))
            (inputs if node.name.startswith(_BATCH) else stored).append(typed)
        elif node.op == "call_function" and node.target is not operator.getitem:
            if _is_cast(node):
                casts.append(_cast(node))
            else:
                nodes.append(_node(node))
    outputs = tuple(node.name for node in graph_module.graph.output_node().all_input_nodes)
    return StepGraph(tuple(nodes), tuple(casts), tuple(inputs), tuple(stored), outputs)


def _is_cast(node: fx.Node) -> bool:
    """Whether a node makes another floating-point type of a tensor, and nothing else."""
    if node.target is not _CAST or not isinstance(node.args[0], fx.Node):
        return False
    source, target = node_tensor(node.args[0]), node_tensor(node)
    if source is None or target is None or source.device != target.device:
        return False
    return source.dtype != target.dtype and is_float(source.dtype) and is_float(target.dtype)


def _cast(node: fx.Node) -> StepCast:
    (value,) = node.all_input_nodes
    source, target = value.meta["val"], node.meta["val"]
    moved = math.prod(map(hint, target.shape)) * (source.dtype.itemsize + target.dtype.itemsize)
    return StepCast(node.name, value.name, _type_of(source), _type_of(target), moved, str(node.meta.get(Key.PHASE, "")))


def _node(node: fx.Node) -> StepNode:
    return StepNode(
        node.name,
        canonical_op(node.target),
        module_of(node)[0],
        str(node.meta.get(Key.PHASE, "")),
        str(node.meta.get(Key.PLANNED, "")),
        user_source(node.meta.get("stack_trace")),
        tuple(_results(node)),
        tuple(one.name for one in node.all_input_nodes),
    )


def _results(node: fx.Node) -> Iterator[tuple[str, str]]:
    """What a node makes; of several, those that are read."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield node.name, _type_of(value)
    for user in node.users:
        if user.target is operator.getitem:
            yield user.name, _type_of(user.meta.get("val"))


def _type_of(value: Any) -> str:
    return neutral_dtype(value.dtype).short if isinstance(value, torch.Tensor) else ""
