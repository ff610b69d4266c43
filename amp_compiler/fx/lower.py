"""An ATen graph lowered to a `PrecisionGraph`."""

import operator

import torch
from torch import fx

from amp_compiler.fx.captured import Captured, Source
from amp_compiler.fx.graph import (
    canonical_op,
    flat_arguments,
    hint,
    module_of,
    neutral_attribute,
    neutral_dtype,
    node_tensor,
    results_of,
    tensor_operands,
    user_source,
)
from amp_compiler.fx.meta import Key
from amp_compiler.ir.graph import LOSS_FUNCTION, Node, Operand, Pin, PrecisionGraph, Value, ValueKind

# Functions of torch.nn.functional that ATen has no op for, and whose parts rules may have to know.
_WRITTEN_OUT = frozenset({"local_response_norm", "multilabel_soft_margin_loss"})
_KINDS = {
    Source.PARAMETER: ValueKind.PARAMETER,
    Source.BUFFER: ValueKind.BUFFER,
    Source.CONSTANT: ValueKind.CONSTANT,
    Source.USER: ValueKind.INPUT,
    Source.NUMBER: ValueKind.INPUT,
}


def lower(captured: Captured) -> PrecisionGraph:
    """Lower a captured graph in normal form.

    Args:
        captured: as `fx.capture.export` makes it, after the pipeline CAPTURE.

    Returns:
        The neutral graph. Value names are the names of the FX nodes that make them.
    """
    kinds = {entry.name: _KINDS[entry.source] for entry in captured.inputs}
    fx_graph = captured.graph_module.graph
    graph = PrecisionGraph(_device(fx_graph))
    for node in fx_graph.nodes:
        if node.op == "placeholder":
            tensor = node_tensor(node)
            if tensor is not None:
                graph.add_value(_value(node.name, node, tensor, kinds.get(node.name, ValueKind.INPUT)))
        elif node.op == "get_attr":
            tensor = node_tensor(node)
            if tensor is not None:
                kind = ValueKind.PARAMETER if isinstance(tensor, torch.nn.Parameter) else ValueKind.CONSTANT
                graph.add_value(_value(node.name, node, tensor, kind))
        elif node.op == "call_function" and node.target is not operator.getitem and _is_tensor_op(node):
            _add_node(graph, node)
        elif node.op == "output":
            results = (item for item in results_of(node.graph) if isinstance(item, fx.Node))
            graph.outputs = [item.name for item in results if node_tensor(item) is not None]
    graph.verify()
    return graph


def _device(graph: fx.Graph) -> str:
    kinds = {tensor.device.type for node in graph.nodes if (tensor := node_tensor(node)) is not None}
    accelerators = sorted(kinds - {"cpu", "meta"})
    return accelerators[0] if accelerators else "cpu"


def _is_tensor_op(node: fx.Node) -> bool:
    # Size queries and arithmetic on sizes have no element type: they are no part of the neutral graph.
    return bool(made_tensors(node)) or (bool(tensor_operands(node)) and canonical_op(node.target) != "aten.sym_size")


def made_tensors(node: fx.Node) -> list[torch.Tensor]:
    """The examples of all tensors that a node makes."""
    value = node.meta.get("val")
    items = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _value(name: str, node: fx.Node, tensor: torch.Tensor, kind: ValueKind = ValueKind.RESULT) -> Value:
    numel = 1
    for size in tensor.shape:
        numel *= hint(size)
    return Value(
        name,
        neutral_dtype(tensor.dtype),
        tuple(size if isinstance(size, int) else str(size) for size in tensor.shape),
        numel,
        kind,
        bool(node.meta.get(Key.VOLATILE)),
    )


def _add_node(graph: PrecisionGraph, node: fx.Node) -> None:
    operands = tensor_operands(node)
    paths = {path for _, path, _ in operands}
    attributes = {
        slot: neutral_attribute(argument) for slot, path, argument in flat_arguments(node) if path not in paths
    }
    # A training step has named the modules: what it left in none stands in the loss function.
    module, module_type = (LOSS_FUNCTION, "") if node.meta.get("nn_module_stack") == {} else module_of(node)
    outputs = _outputs(node)
    graph.add_node(
        Node(
            node.name,
            _op(node),
            tuple(Operand(source.name, slot) for slot, _, source in operands),
            tuple(value.name for value in outputs),
            attributes,
            module,
            module_type,
            user_source(node.meta.get("stack_trace")),
            pin=_pin(node),
            part=_part(node),
        ),
        outputs,
    )


def _part(node: fx.Node) -> str:
    """The function of torch that has written the node out, as Dynamo notes it, or torch.export: `function.NAME`."""
    stack = node.meta.get("source_fn_stack")
    noted = getattr(stack[-1][1], "__name__", "") if stack else node.meta.get("torch_fn", ("", ""))[1]
    name = str(noted).removeprefix("function.")
    return name if name in _WRITTEN_OUT else ""


def _op(node: fx.Node) -> str:
    """The canonical op; torch runs the inner product of two vectors as `dot`, of which autocast says something else."""
    name = canonical_op(node.target)
    ranks = {tensor.dim() for _, _, one in tensor_operands(node) if (tensor := node_tensor(one)) is not None}
    return "aten.dot" if name == "aten.inner" and ranks == {1} else name


def _outputs(node: fx.Node) -> list[Value]:
    single = node_tensor(node)
    if single is not None:
        return [_value(node.name, node, single)]
    value = node.meta.get("val")
    if not isinstance(value, (list, tuple)):
        return []
    names = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    values = []
    for index, item in enumerate(value):
        if isinstance(item, torch.Tensor):
            name = names[index].name if index in names else f"{node.name}.{index}"
            values.append(_value(name, names.get(index, node), item))
        elif index in names:  # a list of tensors among the results, as of histogramdd
            values += _outputs(names[index])
    return values


def _pin(node: fx.Node) -> Pin | None:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return Pin("keep", f"higher-order op {node.target.name()}: its body is not rewritten")
    if node.meta.get(Key.VOLATILE):
        return Pin("keep", "its memory is changed in place while other values share it")
    return node.meta.get(Key.PIN)
