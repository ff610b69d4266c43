"""The Inductor backend: the rewritten graph compiled, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from amp_compiler.fx.graph import node_tensor
from amp_compiler.fx.torch_private import inductor_compile
from amp_compiler.ops import attention, lstm
from amp_compiler.ops.cpu import update as cpu_update
from amp_compiler.passes.device.channels_last import keep_channels_last
from amp_compiler.passes.device.pool_offsets import use_offsets

_PRODUCTS = (torch.ops.aten.linear.default, torch.ops.aten.matmul.default)
_CONTIGUOUS = torch.ops.aten.contiguous.default


def build(graph_module: fx.GraphModule, inputs: Sequence[Any], round_exactly: bool = False) -> Callable[..., Any]:
    """Compile the graph for inputs like these; the graph itself stays as it is, for reading.

    Raises:
        LoweringError: where Inductor cannot compile it.
    """
    private = copy.deepcopy(graph_module)
    _fold_batches(private.graph)
    use_offsets(private.graph)
    keep_channels_last(private.graph)
    for node in private.graph.nodes:
        # Inductor would pick oneDNN's LSTM layer, which has no workspace for its backward outside of autograd.
        if node.target is torch.ops.aten.lstm.input and lstm.can_run(*[_example(a) for a in node.args[:2]]):
            node.target = lstm.lstm
    private.recompile()
    return inductor_compile(private, inputs, round_exactly, _last_pass(private.graph))


def _fold_batches(graph: fx.Graph) -> None:
    """Let every product with a matrix be one of two matrices.

    Where the other operand is not contiguous, such as the output of a recurrent layer with the batch first, torch makes
    a batched product of it that no gradient goes through, and copies the matrix for each element of the batch.
    """
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in _PRODUCTS:
            continue
        left, right = (node_tensor(operand) for operand in node.args[:2])  # type: ignore[arg-type]
        if left is not None and right is not None and left.dim() > 2 and right.dim() == 2:
            with graph.inserting_before(node):
                node.args = (graph.call_function(_CONTIGUOUS, (node.args[0],)), *node.args[1:])


def _last_pass(graph: fx.Graph) -> tuple[str, Callable[[fx.Graph], None]] | None:
    """What is to be done behind Inductor's own passes, with an identity that changes whenever it would do otherwise."""
    found = [node for node in graph.nodes if "scaled_dot_product" in str(node.target) and node.op == "call_function"]
    operands = [node_tensor(source) for node in found for source in node.all_input_nodes]
    if not any(tensor is not None and tensor.device.type == "cpu" for tensor in operands):
        return None  # and nothing is compiled for it
    return f"{attention.IDENTITY}, {cpu_update.most_inner() > 0}", attention.use_native_backward


def _example(argument: Any) -> Any:
    if isinstance(argument, (list, tuple)):
        return [_example(item) for item in argument]
    return argument.meta["val"]
