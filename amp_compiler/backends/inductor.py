"""The Inductor backend: the rewritten graph compiled, forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from amp_compiler.backends.torch_shim import inductor_compile
from amp_compiler.fx_tools import node_tensor
from amp_compiler.runtime import attention, cpu_update, lstm


def build(graph_module: fx.GraphModule, inputs: Sequence[Any], round_exactly: bool = False) -> Callable[..., Any]:
    """Compile the graph for inputs like these; the graph itself stays as it is, for reading.

    Raises:
        LoweringError: where Inductor cannot compile it.
    """
    private = copy.deepcopy(graph_module)
    for node in private.graph.nodes:
        # Inductor would pick oneDNN's LSTM layer, which has no workspace for its backward outside of autograd.
        if node.target is torch.ops.aten.lstm.input and lstm.can_run(*[_example(a) for a in node.args[:2]]):
            node.target = lstm.lstm
    private.recompile()
    return inductor_compile(private, inputs, round_exactly, _last_pass(private.graph))


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
