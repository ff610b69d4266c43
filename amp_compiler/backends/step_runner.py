"""Runs a step that `CutStep` has cut: what lies between its kernels by a compiler, the kernels where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from amp_compiler.fx.graph import copy_graph, node_tensor
from amp_compiler.fx.torch_private.tracing import forward_of
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.ops.native import NATIVE_OPS, UPDATE
from amp_compiler.ops.update.operators import CHECK, OPERATORS
from amp_compiler.passes.step.cut_step import BEFORE

Kernels = Mapping[Any, Callable[..., Any]]
Build = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
_FEW = 64  # nodes behind the check that are not worth compiling on a CPU: most of them work on single numbers


def kernels_for(step: fx.GraphModule) -> Kernels:
    """What runs the check, the commit and the updates of a step where its parameters are, as `ops.native` says.

    Empty where a compiler has to do all of it, because a kernel does not take its call.

    Args:
        step: as `FuseUpdate` makes it.
    """
    updates = [node for node in step.graph.nodes if node.target in OPERATORS.values()]
    checks = step.graph.find_nodes(op="call_function", target=CHECK)
    devices = {leaf.meta["val"].device.type for node in updates or checks for leaf in node.all_input_nodes}
    if not updates and devices == {"cpu"}:  # gradients are only gathered: a compiler checks them in the loops that add
        return {}
    rows = {row.op: row for row in NATIVE_OPS if row.stage == UPDATE and {row.device} == devices and row.ready()}
    taken = all(
        rows[node.target].fits(*fx.node.map_arg(node.args, lambda leaf: leaf.meta["val"]))
        for node in (*updates, *checks)
        if node.target in rows
    )
    return {op: row.implementation for op, row in rows.items()} if taken else {}


def most_inner(kernels: Kernels) -> int:
    """Up to how many inner elements the kernels make a gradient that is a product fast; 0 where they take none."""
    return cpu_update.most_inner() if kernels.get(CHECK) is cpu_update.grad_check else 0


def run_cut_step(
    cut: fx.GraphModule, examples: Sequence[Any], build: Build, kernels: Kernels
) -> Callable[..., Sequence[Any]]:
    """The cut step as a function of its placeholders' tensors.

    Args:
        cut: as `CutStep` makes it; it stays as it is.
        examples: one tensor or number per placeholder.
        build: makes a function of a graph and example inputs.
        kernels: as `kernels_for` gave them.

    Raises:
        LoweringError: a subgraph cannot be compiled.
    """
    if not hasattr(cut, BEFORE):
        return build(cut, examples)
    whole, subgraphs = copy_graph(cut), torch.nn.Module()
    real = dict(zip(whole.graph.find_nodes(op="placeholder"), examples, strict=True))
    for node in whole.graph.nodes:
        if node.op == "call_module":
            subgraph: Any = getattr(cut, node.target)
            inputs = [real.get(one, one.meta["val"]) for one in node.args]
            launches = any(one.device.type != "cpu" for one in inputs if isinstance(one, torch.Tensor))
            compiled = node.target == BEFORE or len(subgraph.graph.nodes) > _FEW or launches
            subgraphs.add_module(node.target, _Subgraph(build(subgraph, inputs) if compiled else forward_of(subgraph)))
        elif node.op == "call_function":
            node.target = kernels.get(node.target, node.target)
    return fx.GraphModule(subgraphs, whole.graph).forward  # type: ignore[no-any-return]


def is_on_cpu(step: fx.GraphModule) -> bool:
    """Whether all tensors that a step is given are on a CPU."""
    values = [node_tensor(node) for node in step.graph.find_nodes(op="placeholder")]
    return all(value.device.type == "cpu" for value in values if value is not None)


class _Subgraph(torch.nn.Module):
    """A compiled subgraph, as something that a graph can call."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def __call__(self, *inputs: Any) -> Any:  # without the way through hooks, which takes longer than a small kernel
        return self.run(*inputs)
