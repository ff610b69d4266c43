"""FP32 arithmetic between 16-bit inputs and outputs: casts around one node that a compiler fuses with it."""

import operator
from collections.abc import Collection

import torch
from torch import fx

from amp_compiler.fx.alias import takes_statistics, written_operands
from amp_compiler.fx.graph import CAST, node_tensor, replace_operand, replace_other_uses, tensor_operands
from amp_compiler.fx.meta import Key, source_of


def widen(node: fx.Node, low: torch.dtype, upcasts: dict[fx.Node, fx.Node], skip: Collection[str] = ()) -> bool:
    """Let a node read its 16-bit operands widened to FP32 and hand on its results rounded, in place.

    Running statistics that a norm updates are written back.

    The graph's fake tensors are left stale: call `refresh` when all nodes are done.

    Args:
        node: the node; it writes to none of these operands but for running statistics.
        low: the 16-bit type.
        upcasts: by value, the cast of it that stands in the graph already and may be read; filled up here.
        skip: slots whose operands stay as they are.

    Returns:
        Whether an operand was widened.
    """
    graph = node.graph
    operands = [
        (path, operand, tensor)
        for slot, path, operand in tensor_operands(node)
        if not {slot, slot.partition(".")[0]} & set(skip)
        and (tensor := node_tensor(operand)) is not None
        and tensor.dtype == low
    ]
    for path, operand, tensor in operands:
        if operand not in upcasts or operand.meta.get(Key.VOLATILE):  # what changes in place is widened anew
            with graph.inserting_before(node):
                upcasts[operand] = _cast(graph, operand, torch.float32)
                # Refreshed at the end; only its being a tensor matters until then.
                upcasts[operand].meta["val"] = tensor
        replace_operand(node, path, upcasts[operand])
    if not operands:
        return False
    for _, operand, _ in operands:
        write_back(node, upcasts[operand], operand)
    results = [node] if node_tensor(node) is not None else [u for u in node.users if u.target is operator.getitem]
    for result in results:
        low_tensor = node_tensor(result)
        if low_tensor is None or low_tensor.dtype != low:
            continue
        with graph.inserting_after(result):
            rounded = _cast(graph, result, low)
        rounded.meta["val"] = low_tensor
        replace_other_uses(result, rounded)
    return True


def write_back(node: fx.Node, cast: fx.Node, source: fx.Node) -> None:
    """Where a node is a norm that updates the cast of its running statistics, write that to the statistics."""
    if takes_statistics(node) and cast in written_operands(node):
        with node.graph.inserting_after(node):
            written = node.graph.call_function(torch.ops.aten.copy_.default, (source, cast))
        written.meta = {**source_of(node), "val": source.meta["val"]}


def _cast(graph: fx.Graph, source: fx.Node, dtype: torch.dtype) -> fx.Node:
    node = graph.call_function(CAST, (source, dtype))
    node.meta = source_of(source)
    return node
